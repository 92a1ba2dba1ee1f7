"""Colours of the drawings, the same in the picture and on the page.

Any two stay apart under red-, green- and blue-blindness, and stand out on white and on near-black.
"""

from __future__ import annotations

from prefixflow.schedule.memory import Phase
from prefixflow.schedule.ops import Kind

COLOURS = {
    (Phase.PREFIX_FORWARD, Kind.FORWARD): "#1f66ad",
    (Phase.SUFFIX, Kind.FORWARD): "#93d8b2",
    (Phase.SUFFIX, Kind.BACKWARD): "#17926a",
    (Phase.PREFIX_BACKWARD, Kind.BACKWARD): "#d9601a",
}
LEGEND = {
    (Phase.PREFIX_FORWARD, Kind.FORWARD): "A: prefix forward, K/V cached",
    (Phase.SUFFIX, Kind.FORWARD): "B: suffix forward",
    (Phase.SUFFIX, Kind.BACKWARD): "B: suffix backward, adds gK/gV",
    (Phase.PREFIX_BACKWARD, Kind.BACKWARD): "C: delayed prefix backward",
}

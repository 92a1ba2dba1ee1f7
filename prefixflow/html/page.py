"""Fill the page: words by Python, so that it says something without its script; drawings by the script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from prefixflow.html.payload import PlannedStep, payload
from prefixflow.palette import COLOURS
from prefixflow.trajectories.files import atomic_write

SCRIPTS = ("base.js", "chart.js", "forest.js", "balance.js", "timeline.js", "memory.js", "main.js")


@dataclass(frozen=True, slots=True)
class PageText:
    """The words of the page; all of it is escaped, so names from files may be anything.

    source: the file; setting: model and layout; headline: what the plan is worth, in a sentence or two; speedup: dense
    over reuse in predicted time; numbers: what `prefixflow plan` prints, by name.
    """

    source: str
    setting: str
    headline: str
    speedup: float
    numbers: Mapping[str, str]


def write_page(path: str | Path, text: PageText, step: PlannedStep) -> None:
    """Write the page to `path`, whole or not at all; raises ValueError where that cannot be written."""
    with atomic_write(path) as file:
        file.write(_page(text, step).encode())


def _page(text: PageText, step: PlannedStep) -> str:
    numbers = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in text.numbers.items())
    return Template(_asset("page.html")).substitute(
        source=escape(text.source),
        setting=escape(text.setting),
        headline=escape(text.headline),
        numbers="\n".join(numbers),
        reuse_percent=f"{100 / max(text.speedup, 1.0):.2f}",
        share=f"{100 / text.speedup:.0f} %",
        dense_percent=f"{100 * min(text.speedup, 1.0):.2f}",
        style=_phase_colours() + _asset("page.css"),
        script="\n".join(map(_asset, SCRIPTS)),
        payload=script_json(payload(step)),
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")


def _phase_colours() -> str:
    """The palette as custom properties: --AF, --BF, --BB, --CB (phase, then kind)."""
    rules = "".join(f"--{phase.value}{kind.value}:{colour};" for (phase, kind), colour in COLOURS.items())
    return f":root{{{rules}}}\n"


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever the strings hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")

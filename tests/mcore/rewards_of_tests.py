"""Reward functions for tests, named on command lines."""

from __future__ import annotations

from typing import Any


def share_of_small_tokens(sample: Any) -> float:
    return float((sample.response_tokens < sample.fields["limit"]).mean())


def fails_once(sample: Any) -> float:
    """Fails for one prompt, which only one of several data-parallel ranks samples."""
    if sample.prompt_id == "p1":
        raise RuntimeError("no reward today")
    return 1.0


def overflows(sample: Any) -> float:
    return 1e308 * (-1) ** int(sample.response_tokens.sum())

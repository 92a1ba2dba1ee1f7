"""Predicted against measured peak memory, by pipeline stage and phase, in cells that were fixed before the model was fitted."""

from __future__ import annotations

from dataclasses import dataclass

from prefixflow.testing.generate import Style, stepwise_chains, trees, two_level_groups
from prefixflow.trajectories import Trajectory

TOLERANCE = 0.10
STYLE = Style(vocab_size=500)


def _group(prefix: int, suffix: int, size: int = 8, groups: int = 1) -> tuple[Trajectory, ...]:
    return two_level_groups(groups, size, prefix, suffix, seed=1, style=STYLE)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is run: a batch and a command line. slow: not in the ordinary suite."""

    name: str
    trajectories: tuple[Trajectory, ...]
    command: str
    slow: bool = False


CELLS = (
    Cell("group", _group(240, 48), "--model tiny --max-tokens 256"),
    Cell("dense, selective", _group(112, 32), "--model tiny --max-tokens 300 --prefix-reuse off --recompute selective"),
    Cell("head, full", _group(300, 90), "--model small --max-tokens 320 --recompute full", slow=True),
    Cell(
        "tree, bfloat16",
        trees(1, 4, 2, (20, 40), seed=2, style=STYLE),
        "--model tiny --max-tokens 128 --dtype bfloat16",
    ),
    Cell("stages", _group(400, 80, 4, 2), "--model small --max-tokens 256 --pp 2", slow=True),
    Cell(
        "tensor and sequence parallel, full",
        stepwise_chains(2, 5, (60, 90), (20, 40), seed=3, style=STYLE),
        "--model tiny --max-tokens 128 --tp 2 --sequence-parallel --recompute full",
    ),
    Cell("context parallel", _group(251, 37), "--model tiny --max-tokens 256 --cp 2"),
    Cell("experts", _group(120, 40, 4, 4), "--model tiny-moe --max-tokens 160 --ep 2", slow=True),
    Cell("offload", _group(300, 60), "--model small --max-tokens 320 --prefix-memory offload", slow=True),
    Cell(
        "stages, recompute",
        _group(240, 40, 4, 3),
        "--model tiny --max-tokens 128 --pp 2 --prefix-memory recompute",
    ),
    Cell("cache budget", _group(240, 40, 6, 3), "--model tiny --max-tokens 128 --pp 2 --kv-budget-gib 0.001"),
)

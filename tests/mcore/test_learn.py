"""The policy of `examples/learn` really learns, and the same with reuse and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples/learn/run.sh"


def learn(out: Path, *more: str) -> list[dict[str, Any]]:
    """Metrics of a run of the script."""
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([SCRIPT, str(out), *more], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert (out / "metrics.png").is_file()
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_reward_rises(seed: str, tmp_path: Path) -> None:
    rewards = [step["reward_mean"] for step in learn(tmp_path, "--seed", seed)]
    assert sum(rewards[-10:]) / 10 - sum(rewards[:10]) / 10 >= 0.2


@pytest.mark.slow
def test_dense_and_reuse_earn_the_same(tmp_path: Path) -> None:
    reuse, dense = (
        learn(tmp_path / way, "--prefix-reuse", way, "--train-iters", "25", "--seed", "1") for way in ("on", "off")
    )
    assert [step["reward_mean"] for step in reuse] == [step["reward_mean"] for step in dense]
    assert len({step["reward_mean"] for step in reuse}) > 10
    assert max(step["reuse_ratio"] for step in dense) == 1.0 < 5.0 < min(step["reuse_ratio"] for step in reuse)

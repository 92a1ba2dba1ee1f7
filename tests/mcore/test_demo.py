"""The demo: its prompts and rewards by themselves, and a quick run with the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo_prompts

    return demo_prompts


def test_a_task_is_the_same_each_time_and_unlike_the_next(prompts) -> None:
    first, again, other = prompts.make_task(1), prompts.make_task(1), prompts.make_task(2)
    assert first == again
    assert first.chatml() != other.chatml()
    line = f"{first.opening} {first.facts[0]}, works as a {first.facts[1]} and has a {first.facts[2]}."
    assert line in first.user
    assert first.chatml().endswith(f"assistant\n{first.opening}")


def test_rewards_are_graded(prompts) -> None:
    task = prompts.Task("t", "", "", "Ada lives in", ("Oslo", "pilot", "dog"))
    assert task.reward("Ada lives in Oslo, works as a pilot and has a dog.") == 1.0
    assert task.reward("Ada lives in Oslo and is a pilot.") == pytest.approx(2 / 3)
    # Another city, and two pets: 0.2 for the one, nothing for the others.
    assert task.reward("Ada lives in Prague with a dog and a cat.") == pytest.approx(0.2 / 3)
    assert task.reward("Ada lives in the Oslovian hills with hotdogs.") == 0.0


GOOD = {
    "max_rel_grad_err": 1e-6,
    "worst_parameter": "some.weight",
    "shared_segments": 2,
    "cache_reads": 60,
    "computed_tokens": 500,
    "planned_tokens": 500,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"max_rel_grad_err": 2e-4}, ["some.weight differs by 0.0002"]),
        ({"max_rel_grad_err": float("nan")}, ["some.weight differs by nan"]),
        ({"cache_reads": 0}, ["no prefix was shared"]),
        ({"shared_segments": 0}, ["no prefix was shared"]),
        ({"computed_tokens": 501}, ["501 tokens were computed, the plan says 500"]),
    ],
)
def test_what_makes_the_demo_fail(monkeypatch: pytest.MonkeyPatch, changes: dict[str, float], words: list[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    reasons = demo.failures(GOOD | changes)
    assert len(reasons) == len(words)
    for reason, expected in zip(reasons, words, strict=True):
        assert expected in reason


@pytest.mark.slow
def test_the_quick_demo_ends_well(smollm2_dir: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "demo.py"), "--quick", "--json", "--threads", "1"]
    done = subprocess.run(
        [*command, "--model", str(smollm2_dir)], capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "largest gradient difference",
        "tokens computed",
        "time dense",
        "time with reuse",
        "speedup",
        "bound",
        "fraction of bound",
    ):
        assert name in done.stdout
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["ok"]
    assert result["max_rel_grad_err"] < 1e-4
    assert result["sampler_logprob_err"] < 1e-3
    assert result["computed_tokens"] == result["planned_tokens"] < result["logical_tokens"] / 3
    assert result["cache_reads"] > 0
    assert result["speedup"] > 1.5

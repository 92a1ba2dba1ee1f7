"""Prompt files, reward functions, and files that arrive while training runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixflow.trajectories import Trajectory, TrajectoryError, write_trajectories
from prefixflow.trajectories.files import why_unwritable
from prefixflow.trajectories.inbox import Inbox
from prefixflow.trajectories.prompts import read_prompts
from prefixflow.trajectories.rewards import RewardFunction, Sample


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_prompts_of_both_kinds_of_files(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", {"id": "p", "tokens": [1, 2], "answer": "yes"})
    trained = {"group": "q", "tokens": [3, 4, 5, 6], "loss_mask": [0, 0, 1, 0], "advantages": 1.0}
    lines(tmp_path / "b.jsonl", {"id": "q/0", **trained}, {"id": "q/1", **trained, "tokens": [3, 4, 7, 8]})
    first, second = read_prompts(tmp_path)
    assert (first.id, first.tokens.tolist(), first.fields["answer"]) == ("p", [1, 2], "yes")
    assert (second.id, second.tokens.tolist()) == ("q", [3, 4])


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"tokens": [1]}, "names the prompt"),
        ({"id": "p"}, "a list of token ids"),
        ({"id": "p", "tokens": []}, "at least one token"),
        ({"id": "p", "tokens": [1, 9]}, "vocabulary size 8"),
        ({"id": "p", "tokens": [1, 2, 3, 4]}, "at most 3 tokens"),
        ({"id": "twice", "tokens": [2]}, "two different ones of 'twice'"),
    ],
)
def test_lines_that_are_no_prompts(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"id": "twice", "tokens": [1]}, record)
    with pytest.raises(TrajectoryError, match=f"line 2.*{words}"):
        read_prompts(path, vocab_size=8, max_prompt_tokens=3)


def test_reward_functions(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "import numpy as np\n"
        "def length(sample): return np.float32(len(sample.response_tokens))\n"
        "def nothing(sample): return None\n"
        "number = 3\n"
    )
    sample = Sample("p", np.ones(2, np.int64), np.ones(3, np.int64), True, {})
    assert RewardFunction(f"{file}:length")(sample) == 3.0
    with pytest.raises(ValueError, match=r"my_rewards.py:nothing: expected a finite number .* 'p', got null"):
        RewardFunction(f"{file}:nothing")(sample)
    for name, words in [
        ("length", "expected module:function"),
        (f"{file}:number", "expected a function 'number'"),
        (f"{tmp_path}/none.py:f", "no such file"),
        ("no_such_module_here:f", "cannot be imported"),
    ]:
        with pytest.raises(ValueError, match=words):
            RewardFunction(name)


def test_every_file_is_used_once_across_restarts(tmp_path: Path) -> None:
    def put(name: str, token: int) -> None:
        write_trajectories(tmp_path / name, [Trajectory("a", "a", [token], [0], 0.0)])

    inbox = Inbox(tmp_path)
    assert inbox.open_next() is None
    put("2.jsonl", 2)
    put("1.jsonl", 1)
    (tmp_path / ".3.jsonl.tmp").write_text("half a li")
    assert inbox.open_next() == tmp_path / "1.jsonl"
    inbox.finish_batch()
    resumed = Inbox(tmp_path)
    resumed.restore(json.loads(json.dumps(inbox.state())))
    assert (resumed.reopen(), resumed.num_done) == (tmp_path / "1.jsonl", 1)
    assert resumed.open_next() == tmp_path / "2.jsonl"
    assert resumed.open_next() is None
    # Touched is not new; other content under the same name is.
    os.utime(tmp_path / "1.jsonl", (1, 1))
    assert resumed.open_next() is None
    put("1.jsonl", 3)
    assert not inbox.is_current(tmp_path / "1.jsonl")
    assert resumed.open_next() == tmp_path / "1.jsonl"
    assert resumed.open_next() is None


@pytest.mark.parametrize("code", ["def f(sample:", "never_defined", "import sys; sys.exit(3)"])
def test_a_reward_file_that_cannot_be_run(tmp_path: Path, code: str) -> None:
    (tmp_path / f"broken{len(code)}.py").write_text(code)
    with pytest.raises(
        ValueError, match=rf"--reward-function .*broken{len(code)}.py cannot be imported \(\w*(Error|Exit)"
    ):
        RewardFunction(f"{tmp_path}/broken{len(code)}.py:f")


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert why_unwritable(tmp_path / "a" / "b") is None
    assert why_unwritable(tmp_path / "file" / "a") == f"{tmp_path}/file is no folder"
    monkeypatch.setattr("os.access", lambda place, mode: False)
    assert why_unwritable(tmp_path / "a" / "b") == f"{tmp_path} may not be written to"

"""Trajectory files: spellings, every malformed line, routes beside the file, and the round trip."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prefixflow.testing.generate import Style, mixed_workload
from prefixflow.trajectories import (
    RouteShape,
    Trajectory,
    TrajectoryError,
    read_trajectories,
    routes_path,
    trajectory_files,
    write_trajectories,
)

GOOD = {
    "id": "t-0",
    "group": "g",
    "tokens": [5, 70, 900],
    "loss_mask": [0, 0, 1],
    "advantages": 0.7,
}


def line(**changes) -> str:
    record = {**GOOD, **changes}
    return json.dumps({name: value for name, value in record.items() if value is not ...})


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines: str | bytes, name: str = "a.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join(x if isinstance(x, bytes) else f"{x}\n".encode() for x in lines))
        return path

    return write_lines


def refusal(path, **options) -> str:
    with pytest.raises(TrajectoryError) as caught:
        read_trajectories(path, **options)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def assert_equal(left: Trajectory, right: Trajectory) -> None:
    for name in Trajectory.__slots__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), name
        else:
            assert a == b, name


def test_a_plain_line_with_blank_ones_around_it(write):
    path = write("", line(extra={"any": 1}), "   ", line(id="t-1", reward=1), "")
    first, second = read_trajectories(path, vocab_size=901, max_positions=2)
    assert first.tokens.tolist() == [5, 70, 900]
    assert first.advantages.tolist() == [0.7] * 3
    assert (first.reward, first.temperature, first.old_logprobs) == (None, 1.0, None)
    assert second.reward == 1.0


def test_null_is_absent_for_optional_fields(write):
    path = write(line(old_logprobs=None, reward=None, temperature=None))
    item = read_trajectories(path)[0]
    assert (item.old_logprobs, item.reward, item.temperature) == (None, None, 1.0)


def test_verl_spellings(write):
    record = {
        "id": "t-0",
        "uid": "prompt-4",
        "input_ids": [5, 70, 900],
        "response_mask": [0, 0, 1],
        "advantages": [0, 1, 2],
        "old_log_probs": [0, -1, -10],
        "ref_log_prob": [0, -2, -20],
        "rollout_log_probs": [0, -3, -30],
        "routed_experts": [[[1, 2]], [[3, -1]], [[0, 1]]],
    }
    path = write(json.dumps(record))
    item: Any = read_trajectories(path, routes=True)[0]
    assert item.group == "prompt-4"
    assert item.tokens.tolist() == [5, 70, 900]
    assert item.loss_mask.tolist() == [False, False, True]
    assert item.old_logprobs.tolist() == [0, -1, -10]
    assert item.ref_logprobs.tolist() == [0, -2, -20]
    assert item.rollout_logprobs.tolist() == [0, -3, -30]
    assert item.routes.tolist() == [[[1, 2]], [[3, -1]]]
    assert read_trajectories(path)[0].routes is None


MALFORMED = [
    ("", "{", "", "no JSON"),
    ("", "[1, 2]", "", "a list of 2"),
    ("", "7", "", "got 7"),
    ("", "null", "", "got null"),
    ("", b'{"id": "\xff"}\n', "", "not UTF-8 at byte 8"),
    ("", "[" * 100_000, "", "no JSON"),
    ("id", line(id=...), "id", "required"),
    ("group", line(group=...), "group", "required"),
    ("tokens", line(tokens=...), "tokens", "required"),
    ("loss_mask", line(loss_mask=...), "loss_mask", "required"),
    ("advantages", line(advantages=...), "advantages", "required"),
    ("id", line(id=3), "id", "a string that is not empty, got 3"),
    ("group", line(group=["a"]), "group", "a list of 1"),
    ("group", line(group=None), "group", "null"),
    ("tokens", line(tokens="5 70"), "tokens", "a list of integers"),
    ("tokens", line(tokens=[5, "70", 900]), "tokens", "'70' at entry 1"),
    ("tokens", line(tokens=[5, 1.5, 900]), "tokens", "1.5 at entry 1"),
    ("tokens", line(tokens=[5, -1, 900]), "tokens", "-1 at token 1"),
    ("tokens", line(tokens=[]), "tokens", "at least one token"),
    ("mask length", line(loss_mask=[0, 1]), "loss_mask", "3 of them, got 2 entries"),
    ("mask start", line(loss_mask=[1, 0, 0]), "loss_mask", "1 at token 0"),
    ("mask value", line(loss_mask=[0, 3, 0]), "loss_mask", "3 at token 1"),
    ("lengths", line(advantages=[1, 2]), "advantages", "3 of them, got 2 entries"),
    ("lengths", line(old_logprobs=[0, -1]), "old_logprobs", "2 entries"),
    ("lengths", line(ref_logprobs=[0] * 4), "ref_logprobs", "4 entries"),
    ("nan", line(advantages=float("nan")), "advantages", "nan"),
    ("nan", line(advantages=[0, float("nan"), 1]), "advantages", "nan at token 1"),
    ("inf", line(advantages=[0, 1, float("inf")]), "advantages", "inf at token 2"),
    ("overflow", line(advantages=...)[:-1] + ', "advantages": 1e999}', "advantages", "inf"),
    ("nan", line(rollout_logprobs=[0, float("nan"), 1]), "rollout_logprobs", "nan at token 1"),
    ("null", line(old_logprobs=[None, -1, -1]), "old_logprobs", "null at entry 0"),
    ("temperature", line(temperature=0), "temperature", "a positive number"),
    ("temperature", line(temperature="1"), "temperature", "'1'"),
    ("reward", line(reward=float("inf")), "reward", "inf"),
    ("misspelt", line(token=[1]), "token", 'nearest is "tokens"'),
    ("misspelt", line(advantage=1), "advantage", 'nearest is "advantages"'),
    ("misspelt", line(old_logprob=[1]), "old_logprob", 'nearest is "old_logprobs"'),
    ("both", line(input_ids=[1, 2, 3]), "tokens", '"tokens" and "input_ids"'),
    ("both", line(uid="u"), "group", '"group" and "uid"'),
    ("uid only", line(id=..., group=..., uid="u"), "id", "verl's uid names the prompt"),
    ("repeated", line()[:-1] + ', "tokens": [1, 2, 3]}', "tokens", "the field once"),
    ("alias", line(tokens=..., input_ids=[1, -2, 3]), "input_ids", "-2 at token 1"),
]


@pytest.mark.parametrize(("_what", "bad", "field", "got"), MALFORMED)
def test_malformed_lines_name_file_line_and_field(write, _what, bad, field, got):
    path = write(line(id="good"), "", bad)
    message = refusal(path)
    assert message.startswith(f"{path}, line 3")
    assert (f'field "{field}"' in message) == bool(field)
    assert got in message
    assert "expected" in message


def test_limits_name_the_line(write):
    path = write(line(), line(id="t-1", tokens=[5, 70, 901]))
    assert f'{path}, line 2, field "tokens"' in refusal(path, vocab_size=901)
    path = write(line(tokens=[5, 70], loss_mask=[0, 1]), line(id="t-1"))
    message = refusal(path, max_positions=1)
    assert f"{path}, line 2" in message
    assert "2 positions" in message


def test_names_that_only_resemble_short_fields_pass(write):
    path = write(line(idx=3, ids=[1], uuid="x", step=4, prompt="p", log={}))
    assert len(read_trajectories(path)) == 1


def test_a_repeated_id_names_both_lines(write):
    path = write(line(), line(id="t-1"), line())
    message = refusal(path)
    assert message.startswith(f'{path}, line 3, field "id"')
    assert f"{path}, line 1" in message


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_an_empty_file(write, content):
    assert "an empty file" in refusal(write(content))


def test_no_such_file_and_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_trajectories(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="got none"):
        read_trajectories(tmp_path)


def test_a_byte_order_mark_and_line_separators_inside_strings(write):
    text = line(group="a@b").replace("@", "\u2028")
    path = write(b"\xef\xbb\xbf" + text.encode())
    assert read_trajectories(path)[0].group == "a\u2028b"


def test_a_folder_is_read_in_the_order_of_names_with_unique_ids(write, tmp_path):
    write(line(id="b-0"), name="b.jsonl")
    write(line(id="a-0"), line(id="a-1"), name="a.jsonl")
    write("no trajectory", name="notes.txt")
    assert [file.name for file in trajectory_files(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert [item.id for item in read_trajectories(tmp_path)] == ["a-0", "a-1", "b-0"]
    for name in "kcmgdz":
        write(line(id=name), name=f"{name}.jsonl")
    assert [file.stem for file in trajectory_files(tmp_path)] == list("abcdgkmz")
    write(line(id="a-1"), name="b.jsonl")
    message = refusal(tmp_path)
    assert f"{tmp_path / 'b.jsonl'}, line 1" in message
    assert f"{tmp_path / 'a.jsonl'}, line 2" in message


@pytest.mark.parametrize("per_token", [False, True])
def test_round_trip_is_exact(tmp_path, per_token):
    style = Style(per_token_advantages=per_token, logprobs=per_token)
    written = mixed_workload(style=style)
    path = tmp_path / "a.jsonl"
    write_trajectories(path, iter(written))
    read = read_trajectories(path)
    assert len(read) == len(written)
    for left, right in zip(written, read, strict=True):
        assert_equal(left, right)
    assert list(tmp_path.iterdir()) == [path]


def test_round_trip_keeps_signed_zeros_temperature_and_awkward_names(tmp_path):
    item = Trajectory(
        id='a/"b"\n\u00e9',
        group="g",
        tokens=[1, 2],
        loss_mask=[0, 1],
        advantages=[0.0, -0.0],
        reward=0.1 + 0.2,
        temperature=0.7,
    )
    write_trajectories(tmp_path / "a.jsonl", [item])
    assert_equal(item, read_trajectories(tmp_path / "a.jsonl")[0])


def with_routes(name: str, num_tokens: int, rows: int, dtype=np.int16) -> Trajectory:
    count = rows * 3 * 2
    return Trajectory(
        id=name,
        group="g",
        tokens=list(range(num_tokens)),
        loss_mask=[0] * num_tokens,
        advantages=1.0,
        routes=np.arange(count, dtype=dtype).reshape(rows, 3, 2) * 100 - 1,
    )


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_routes_round_trip(tmp_path, dtype):
    written = [
        with_routes("a/1", 5, 5, dtype),
        with_routes("b", 4, 3, dtype),
        with_routes("c", 1, 0),
    ]
    path = tmp_path / "a.jsonl"
    write_trajectories(path, written)
    assert routes_path(path).name == "a.routes.safetensors"
    for left, right in zip(written, read_trajectories(path, routes=True), strict=True):
        assert_equal(left, right)
    assert all(item.routes is None for item in read_trajectories(path))


def test_routes_that_are_missing_or_misshapen(write):
    path = write(line(), line(id="t-1"))
    assert "no file beside it" in refusal(path, routes=True)
    good = np.zeros((3, 2, 2), np.int16)
    save_file({"t-0": good}, routes_path(path))
    message = refusal(path, routes=True)
    assert f'{path}, line 2, field "routes"' in message
    assert "'t-1'" in message
    save_file({"t-0": good, "t-1": np.zeros((4, 2, 2), np.int16)}, routes_path(path))
    assert "int16 [4, 2, 2]" in refusal(path, routes=True)
    save_file({"t-0": good, "t-1": np.zeros((3, 2, 1), np.int16)}, routes_path(path))
    assert "[2, 2], got [2, 1]" in refusal(path, routes=True)
    save_file({"t-0": good.astype(np.uint8)}, routes_path(path))
    assert "uint8" in refusal(path, routes=True)
    routes_path(path).write_bytes(b"junk")
    assert "safetensors" in refusal(path, routes=True)
    assert len(read_trajectories(path)) == 2


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (RouteShape(2, 2, 8), None),
        (RouteShape(3, 2, 8), "3 MoE layers and top-2, got .* 2]"),
        (RouteShape(2, 2, 7), "below the model's 7 experts, got 7 at input token 1"),
    ],
)
def test_routes_fit_the_model_or_name_file_and_id(write, shape, words):
    path = write(line())
    routes = np.array([[[0, 1], [2, 3]], [[7, 1], [-1, -1]]], np.int16)
    save_file({"t-0": routes}, routes_path(path))
    if words is None:
        assert read_trajectories(path, routes=True, route_shape=shape)[0].routes is not None
        return
    message = refusal(path, routes=True, route_shape=shape)
    assert re.search(words, message)
    assert f"tensor 't-0' of {routes_path(path)}" in message


def test_an_expert_cannot_be_chosen_twice(write):
    path = write(line(routes=[[[0, 1]], [[3, 3]]]))
    assert "one twice at input token 1" in refusal(path, routes=True, route_shape=RouteShape(1, 2, 8))


def test_routes_in_the_line_and_beside_it(write):
    path = write(line(routes=[[[1]], [[2]]]))
    save_file({"t-0": np.zeros((3, 2, 2), np.int16)}, routes_path(path))
    assert "got both" in refusal(path, routes=True)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.jsonl"
    old = mixed_workload()[:3]
    write_trajectories(path, old)
    with pytest.raises(TrajectoryError, match=r"line 2.*'g0-0'"):
        write_trajectories(path, [old[0], old[0]])
    with pytest.raises(TrajectoryError, match="at least one"):
        write_trajectories(path, [])
    with pytest.raises(TrajectoryError, match="on all trajectories or on none"):
        write_trajectories(path, [with_routes("a", 3, 3), old[0]])
    assert len(read_trajectories(path)) == 3
    assert list(tmp_path.iterdir()) == [path]


def test_only_plain_files_in_folders_that_exist_are_written(tmp_path):
    items = mixed_workload()[:1]
    with pytest.raises(ValueError, match="folder does not exist"):
        write_trajectories(tmp_path / "absent" / "a.jsonl", items)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="something else of that name"):
        write_trajectories(tmp_path / "pipe", items)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "target.jsonl")
    write_trajectories(tmp_path / "link.jsonl", items)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len(read_trajectories(tmp_path / "target.jsonl")) == 1


def test_reading_costs_about_a_microsecond_per_token_at_most(tmp_path):
    rng = np.random.default_rng(0)
    num_tokens = 4000
    items = [
        Trajectory(
            id=str(number),
            group="g",
            tokens=rng.integers(50_000, size=num_tokens),
            loss_mask=np.arange(num_tokens) > 3000,
            advantages=1.0,
        )
        for number in range(100)
    ]
    write_trajectories(tmp_path / "a.jsonl", items)
    start = time.process_time()
    read_trajectories(tmp_path / "a.jsonl", vocab_size=50_000)
    assert time.process_time() - start < 1e-6 * num_tokens * len(items)

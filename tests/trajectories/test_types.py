"""What a Trajectory guarantees, and every way to be refused by its constructor."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from prefixflow.trajectories import Trajectory, TrajectoryError, check_limits, check_trajectories


def make(**changes) -> Any:
    fields: dict[str, Any] = {
        "id": "t-0",
        "group": "g",
        "tokens": [5, 70, 900],
        "loss_mask": [0, 0, 1],
        "advantages": [0.5, -20.0, 3000.0],
    }
    return Trajectory(**{**fields, **changes})


def test_lists_become_read_only_arrays():
    item = make(old_logprobs=[0, -1, -2.5], reward=1, temperature=2)
    assert item.tokens.dtype == np.int64
    assert item.loss_mask.dtype == bool
    assert item.loss_mask.tolist() == [False, False, True]
    assert item.advantages.dtype == item.old_logprobs.dtype == np.float64
    assert (item.reward, item.temperature) == (1.0, 2.0)
    for array in (item.tokens, item.loss_mask, item.advantages, item.old_logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(FrozenInstanceError):
        item.id = "other"


def test_counts():
    item = make()
    assert (len(item), item.num_positions, item.num_trained) == (3, 2, 1)


def test_a_callers_array_stays_its_own():
    tokens = np.array([1, 2, 3])
    item = make(tokens=tokens)
    tokens[0] = 77
    assert item.tokens[0] == 1


def test_a_read_only_array_is_not_copied():
    tokens = np.array([1, 2, 3])
    tokens.flags.writeable = False
    assert np.shares_memory(make(tokens=tokens).tokens, tokens)


@pytest.mark.parametrize("value", [0.7, np.float32(0.5), np.array(0.5), 3])
def test_one_advantage_is_broadcast(value):
    assert make(advantages=value).advantages.tolist() == [float(value)] * 3


def test_one_token_and_nothing_trained_are_kept():
    item = make(tokens=[3], loss_mask=[0], advantages=1.0)
    assert (item.num_positions, item.num_trained) == (0, 0)


def test_pickle_and_replace():
    item = pickle.loads(pickle.dumps(make(advantages=0.7)))
    assert replace(item, group="other").tokens.tolist() == [5, 70, 900]
    assert item.advantages.tolist() == [0.7] * 3


@pytest.mark.parametrize("num_rows", [2, 3])
def test_routes_have_a_row_for_each_input_token(num_rows):
    routes = np.arange(num_rows * 4, dtype=np.int16).reshape(num_rows, 2, 2) - 1
    item = make(routes=routes)
    assert item.routes.dtype == np.int16
    np.testing.assert_array_equal(item.routes, routes[:2])


REFUSED = [
    ("id", 7, "7"),
    ("id", "", "''"),
    ("group", None, "null"),
    ("tokens", [], "none"),
    ("tokens", "abc", "'abc'"),
    ("tokens", [5, -3, 1], "-3 at token 1"),
    ("tokens", [5, 1.0, 2], "1.0 at entry 1"),
    ("tokens", [5, True, 2], "true at entry 1"),
    ("tokens", [5, None, 2], "null at entry 1"),
    ("tokens", [5, [1], 2], "a list of 1 at entry 1"),
    ("tokens", [5, 2**64, 2], "larger number"),
    ("tokens", np.ones((3, 1), np.int64), "int64 [3, 1]"),
    ("tokens", np.ones(3), "float64 [3]"),
    ("loss_mask", [1, 0, 0], "1 at token 0"),
    ("loss_mask", [0, 2, 1], "2 at token 1"),
    ("loss_mask", [0, 0.5, 1], "0.5 at token 1"),
    ("loss_mask", [0, "1", 1], "'1' at entry 1"),
    ("loss_mask", [0, 1], "2 entries"),
    ("loss_mask", 1, "got 1"),
    ("advantages", [1.0, 2.0], "2 entries"),
    ("advantages", [1.0, float("nan"), 0.0], "nan at token 1"),
    ("advantages", [1.0, 0.0, float("-inf")], "-inf at token 2"),
    ("advantages", float("nan"), "nan"),
    ("advantages", float("inf"), "inf"),
    ("advantages", True, "true"),
    ("advantages", "0.7", "'0.7'"),
    ("advantages", None, "null"),
    ("advantages", 10**400, "beyond 64 bits"),
    ("advantages", [1, 10**400, 0], "larger number"),
    ("old_logprobs", [0.0, -1.0], "2 entries"),
    ("ref_logprobs", [0.0, float("nan"), 0.0], "nan at token 1"),
    ("rollout_logprobs", -1.0, "-1.0"),
    ("reward", "good", "'good'"),
    ("reward", float("nan"), "nan"),
    ("temperature", 0, "0.0"),
    ("temperature", -1.0, "-1.0"),
    ("temperature", float("inf"), "inf"),
    ("routes", np.zeros((4, 2, 2), np.int16), "int16 [4, 2, 2]"),
    ("routes", np.zeros((2, 2), np.int16), "int16 [2, 2]"),
    ("routes", np.zeros((2, 2, 0), np.int16), "int16 [2, 2, 0]"),
    ("routes", np.zeros((2, 2, 2), np.int8), "int8"),
    ("routes", np.zeros((2, 2, 2), np.uint16), "uint16"),
    ("routes", np.zeros((2, 2, 2), np.float32), "float32"),
    ("routes", np.full((2, 2, 2), -2, np.int16), "-2"),
    ("routes", [[[1]], [[1], [2]]], "unequal lengths"),
]


@pytest.mark.parametrize(("field", "value", "got"), REFUSED)
def test_refused(field, value, got):
    with pytest.raises(TrajectoryError) as caught:
        make(**{field: value})
    assert caught.value.field == field
    message = str(caught.value)
    assert f'field "{field}"' in message
    assert got in message
    assert "expected" in message
    if field != "id":
        assert message.startswith("trajectory 't-0'")


def test_limits_are_inclusive_where_they_should_be():
    item = make()
    check_limits(item, vocab_size=901, max_positions=2)
    with pytest.raises(TrajectoryError, match=r"vocabulary size 900, got 900 at token 2"):
        check_limits(item, vocab_size=900)
    with pytest.raises(TrajectoryError, match=r"at most 1 positions .* got 2 positions"):
        check_limits(item, max_positions=1)


def test_a_batch_has_unique_ids_and_is_not_empty():
    check_trajectories([make(), make(id="t-1")], vocab_size=1000)
    with pytest.raises(TrajectoryError, match=r"number 2, .*'t-0' for number 0 as well"):
        check_trajectories([make(), make(id="t-1"), make()])
    with pytest.raises(TrajectoryError, match="at least one"):
        check_trajectories([])
    with pytest.raises(TrajectoryError, match=r"trajectory 't-1'.*vocabulary"):
        check_trajectories([make(tokens=[1, 2, 3]), make(id="t-1")], vocab_size=900)


def test_errors_survive_a_process_border():
    with pytest.raises(TrajectoryError) as caught:
        make(tokens=[])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

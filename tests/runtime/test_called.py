"""The called objective: what a loss function is given, when, and what becomes of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixflow.plan.batch import microbatch_arrays
from prefixflow.plan.plan import PlanConfig, build_plan
from prefixflow.runtime.called import CalledObjective
from prefixflow.schedule.ops import Kind
from prefixflow.schedule.search import rank_table
from tests.plan.groups import trajectory

# Two groups over two loss calls; 'd' is not run.
BATCH = [
    trajectory([1, 2, 3, 4], name="a", trained=[2, 3]),
    trajectory([5, 6, 7], name="b", group="other", trained=[2]),
    trajectory([1, 2, 3, 9], name="c", trained=[3]),
    trajectory([5], name="d", group="other", trained=[]),
    trajectory([5, 6, 8], name="e", group="other", trained=[1, 2]),
]
JOINT = [7, 7, 4, 4, 7]
LOGPROBS = {(0, 2): -1.0, (0, 3): -2.0, (1, 2): -4.0, (2, 3): -8.0, (4, 1): -16.0, (4, 2): -32.0}


def called(function: Callable[..., Any], **options: Any) -> CalledObjective:
    return CalledObjective(
        BATCH,
        range(len(BATCH)),
        JOINT,
        function,
        vocab_size=10,
        dtype=torch.float64,
        device=torch.device("cpu"),
        **options,
    )


def run(objective: CalledObjective, *, training: bool = True) -> dict[tuple[int, int], tuple[float, float | None]]:
    """Follow the plan's table: gradients of log-probability and entropy of each entry, which has a row of its own here."""
    plan = build_plan(BATCH, PlanConfig(4), joint=JOINT)
    gradients: dict[tuple[int, int], tuple[float, float | None]] = {}
    for op in rank_table(plan, 0, training=training).rows[0]:
        arrays = microbatch_arrays(plan.forest, plan.ranks[0][op.microbatch], BATCH)
        pairs = list(zip(arrays.entry_trajectory.tolist(), arrays.entry_token.tolist(), strict=True))
        index = objective.entry_index(arrays.entry_trajectory, arrays.entry_token)
        if op.kind is Kind.FORWARD:
            logprobs = torch.tensor([LOGPROBS[pair] for pair in pairs], dtype=torch.float64)
            objective.record(index, logprobs, -10 * logprobs if objective.needs_entropy else None)
        else:
            got = objective.row_gradients(index, torch.arange(len(pairs)), len(pairs))
            entropy = [None] * len(pairs) if got.entropy is None else got.entropy.tolist()
            gradients.update(zip(pairs, zip(got.logprobs.tolist(), entropy, strict=True), strict=True))
    objective.finish()
    return gradients


def test_each_call_gets_its_sequences_in_full_length_once() -> None:
    seen: dict[int, list[list[float]]] = {}

    def function(number: int, logprobs: list[Tensor], entropies: list[Tensor] | None) -> Tensor:
        assert number not in seen
        assert entropies is None
        assert all(x.is_leaf and x.requires_grad for x in logprobs)
        seen[number] = [x.tolist() for x in logprobs]
        return torch.cat(logprobs).sum() ** 2

    gradients = run(called(function))
    # In the order of the batch; 0 where nothing is scored.
    assert seen == {7: [[0, 0, -1, -2], [0, 0, -4], [0, -16, -32]], 4: [[0, 0, 0, -8], [0]]}
    # The gradient of a squared sum is twice the sum, which all of a call have a part in.
    assert gradients == {pair: (2.0 * (-8 if pair[0] == 2 else -55), None) for pair in LOGPROBS}


def test_gradients_reach_the_tokens_that_they_are_of() -> None:
    def function(number: int, logprobs: list[Tensor], entropies: list[Tensor]) -> Tensor:
        assert [x.tolist() for x in entropies] == [(-10 * x).tolist() for x in logprobs]
        return torch.cat(
            [torch.arange(len(x)) * (3 * x + 5 * y) for x, y in zip(logprobs, entropies, strict=True)]
        ).sum()

    gradients = run(called(function, needs_entropy=True))
    assert gradients == {(i, token): (3.0 * token, 5.0 * token) for i, token in LOGPROBS}


def test_what_a_loss_does_not_read_has_no_gradient() -> None:
    """Call 4 reads nothing; call 7 reads the log-probabilities of its first sequence. No entropy has a gradient."""
    objective = called(
        lambda number, x, entropies: x[0].sum() if number == 7 else torch.tensor(1.0), needs_entropy=True
    )
    gradients = run(objective)
    assert gradients == {pair: (1.0 if pair[0] == 0 else 0.0, None) for pair in LOGPROBS}


def test_parameters_of_the_loss_get_their_gradient() -> None:
    """A baseline or a normaliser that is learned with the loss."""
    own = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    gradients = run(called(lambda _, x, entropies: own * torch.cat(x).sum()))
    assert gradients == dict.fromkeys(LOGPROBS, (2.0, None))
    assert own.grad == sum(LOGPROBS.values())


def test_a_pass_that_only_scores_calls_at_its_end_without_gradients() -> None:
    calls: list[int] = []

    def function(number: int, logprobs: list[Tensor], entropies: list[Tensor] | None) -> None:
        assert not torch.is_grad_enabled()
        assert not any(x.requires_grad for x in logprobs)
        assert sum(float(x.sum()) for x in logprobs) == {7: -55.0, 4: -8.0}[number]
        calls.append(number)

    run(called(function, training=False), training=False)
    assert calls == [4, 7]


def test_a_call_that_no_backward_asks_for_is_made_at_the_end() -> None:
    """Nothing of it is run, but a framework counts on the loss of each of its microbatches."""
    made: list[tuple[int, list[list[float]]]] = []

    def function(number: int, logprobs: list[Tensor], entropies: list[Tensor] | None) -> Tensor:
        made.append((number, [x.tolist() for x in logprobs]))
        return torch.tensor(0.0)

    options: dict[str, Any] = {"vocab_size": 10, "dtype": torch.float64, "device": torch.device("cpu")}
    objective = CalledObjective(BATCH, [3], JOINT, function, **options)
    objective.finish()
    objective.finish()
    assert made == [(4, [[0.0]])]


def test_an_error_in_a_loss_names_the_call() -> None:
    def function(*_: Any) -> Tensor:
        raise KeyError("advantages")

    with pytest.raises(KeyError, match="advantages") as raised:
        run(called(function))
    assert raised.value.__notes__ == ["PrefixFlow: in loss call 4, of 2 sequences."]


@pytest.mark.parametrize(
    ("result", "got"),
    [(torch.zeros(2), r"a tensor of shape \[2\]"), ((torch.zeros(()), {}), "a tuple"), (None, "a NoneType")],
)
def test_a_loss_that_is_no_number_is_refused(result: Any, got: str) -> None:
    with pytest.raises(ValueError, match=f"loss call 4: expected a loss that is a tensor of one number, got {got}"):
        run(called(lambda *_: result))

"""Row log-probabilities against autograd through the whole logits, in float64."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from prefixflow.runtime.logprobs import RowLogprobs, VocabShard, row_logprobs

VOCAB, PADDED_VOCAB, HIDDEN, ROWS = 37, 48, 11, 13
TOLERANCE = 1e-12
WORLD_SECONDS = 120


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    weight: Tensor  # padded rows hold huge values: they would win every softmax
    labels: Tensor
    temperature: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor


def make_problem(dtype: torch.dtype = torch.float64) -> Problem:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Logits from 1e-2 to 1e2 and coefficients over six orders of magnitude.
    hidden = normal(ROWS, HIDDEN) * torch.logspace(-2, 1.5, ROWS, dtype=torch.float64)[:, None]
    weight = normal(PADDED_VOCAB, HIDDEN)
    weight[VOCAB:] = 1e3
    labels = torch.randint(VOCAB, (ROWS,), generator=generator)
    labels[0], labels[1] = 0, VOCAB - 1
    return Problem(
        hidden.to(dtype),
        weight.to(dtype),
        labels,
        torch.linspace(0.3, 3.0, ROWS, dtype=torch.float64),
        normal(ROWS) * torch.logspace(-3, 3, ROWS, dtype=torch.float64),
        normal(ROWS) * torch.logspace(2, -2, ROWS, dtype=torch.float64),
    )


@dataclass(frozen=True)
class Answer:
    logprobs: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def reference(problem: Problem, *, temperature: float | Tensor, with_entropy: bool) -> Answer:
    hidden = problem.hidden.double().requires_grad_()
    weight = problem.weight.double().requires_grad_()
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]
    logits = (hidden @ weight[:VOCAB].t()) / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    logprobs = log_p[torch.arange(ROWS), problem.labels]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = (problem.grad_logprobs * logprobs).sum()
    if with_entropy:
        loss = loss + (problem.grad_entropy * entropy).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    return Answer(logprobs.detach(), entropy.detach(), *grads)


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 4, 13, 100])
def test_matches_autograd(chunk_rows: int, per_row: bool, with_entropy: bool, keep: bool) -> None:
    problem = make_problem()
    temperature = problem.temperature if per_row else 0.7
    rows = RowLogprobs.forward(
        problem.hidden,
        problem.labels,
        VocabShard(problem.weight, num_valid=VOCAB),
        temperature=temperature,
        chunk_rows=chunk_rows,
        with_entropy=with_entropy,
        keep=keep,
    )
    expected = reference(problem, temperature=temperature, with_entropy=with_entropy)
    assert rows.logprobs.dtype == torch.float64
    torch.testing.assert_close(rows.logprobs, expected.logprobs, rtol=TOLERANCE, atol=TOLERANCE)
    if with_entropy:
        assert rows.entropy is not None
        torch.testing.assert_close(rows.entropy, expected.entropy, rtol=TOLERANCE, atol=TOLERANCE)
    else:
        assert rows.entropy is None
    grad_entropy = problem.grad_entropy if with_entropy else None
    grad_hidden, grad_weight = rows.backward(problem.grad_logprobs, grad_entropy)
    # Row by row: the rows differ by orders of magnitude.
    error = (grad_hidden - expected.grad_hidden).norm(dim=1)
    assert bool((error <= 1e-11 * expected.grad_hidden.norm(dim=1) + 1e-15).all())
    assert relative_error(grad_weight, expected.grad_weight) < TOLERANCE
    assert not grad_weight[VOCAB:].any()


def test_default_temperature_and_no_padding() -> None:
    problem = make_problem()
    shard = VocabShard(problem.weight[:VOCAB])
    logprobs, entropy = row_logprobs(problem.hidden, problem.labels, shard, with_entropy=True)
    expected = reference(problem, temperature=1.0, with_entropy=True)
    torch.testing.assert_close(logprobs, expected.logprobs, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(entropy, expected.entropy, rtol=TOLERANCE, atol=TOLERANCE)


def test_backward_adds_to_the_given_gradient_and_leaves_its_inputs_alone() -> None:
    problem = make_problem()
    shard = VocabShard(problem.weight, num_valid=VOCAB)
    inputs = (problem.hidden, problem.weight, problem.grad_logprobs, problem.grad_entropy)
    before = [value.clone() for value in inputs]
    given = torch.full_like(problem.weight, 5.0)
    rows = RowLogprobs.forward(problem.hidden, problem.labels, shard, with_entropy=True, keep=True, chunk_rows=3)
    _, grad_weight = rows.backward(problem.grad_logprobs, problem.grad_entropy, grad_weight_out=given)
    expected = reference(problem, temperature=1.0, with_entropy=True)
    assert grad_weight is given
    assert relative_error(given - 5.0, expected.grad_weight) < 1e-11
    assert bool((given[VOCAB:] == 5.0).all())
    for value, copy in zip(inputs, before, strict=True):
        assert torch.equal(value, copy)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-3)])
def test_lower_precision_is_computed_in_float32(dtype: torch.dtype, limit: float, keep: bool) -> None:
    problem = make_problem(dtype)
    rows = RowLogprobs.forward(problem.hidden, problem.labels, VocabShard(problem.weight, num_valid=VOCAB), keep=keep)
    expected = reference(problem, temperature=1.0, with_entropy=False)
    grad_hidden, grad_weight = rows.backward(problem.grad_logprobs)
    assert rows.logprobs.dtype == grad_weight.dtype == torch.float32
    assert grad_hidden.dtype == dtype
    # The rounded inputs are the same on both sides: only grad_hidden is rounded to `dtype`.
    assert relative_error(rows.logprobs, expected.logprobs) < 2e-6
    assert relative_error(grad_weight, expected.grad_weight) < 2e-6
    assert relative_error(grad_hidden, expected.grad_hidden) < limit


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1e4], [-1e4]])
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    rows = RowLogprobs.forward(hidden, torch.tensor([0, 0]), VocabShard(weight), with_entropy=True)
    assert rows.logprobs.tolist() == [0.0, -2e4]
    assert rows.entropy is not None
    assert rows.entropy.tolist() == [0.0, 0.0]
    grad_hidden, _ = rows.backward(torch.ones(2), torch.ones(2))
    assert grad_hidden.flatten().tolist() == [0.0, 2.0]


@pytest.mark.parametrize("keep", [False, True])
def test_no_rows(keep: bool) -> None:
    problem = make_problem()
    rows = RowLogprobs.forward(problem.hidden[:0], problem.labels[:0], VocabShard(problem.weight), keep=keep)
    grad_hidden, grad_weight = rows.backward(problem.grad_logprobs[:0])
    assert rows.logprobs.shape == (0,)
    assert grad_hidden.shape == (0, HIDDEN)
    assert grad_weight.shape == problem.weight.shape
    assert not grad_weight.any()


def test_backward_is_called_once() -> None:
    problem = make_problem()
    rows = RowLogprobs.forward(problem.hidden, problem.labels, VocabShard(problem.weight))
    rows.backward(problem.grad_logprobs)
    with pytest.raises(RuntimeError, match="twice"):
        rows.backward(problem.grad_logprobs)


def test_bad_inputs_are_sentences() -> None:
    problem = make_problem()
    hidden, labels, weight = problem.hidden, problem.labels, problem.weight
    shard = VocabShard(weight, num_valid=VOCAB)
    with pytest.raises(ValueError, match="token ids from 0 up to the vocabulary size 37"):
        RowLogprobs.forward(hidden, labels.clone().fill_(VOCAB), shard)
    with pytest.raises(ValueError, match="-1 to"):
        RowLogprobs.forward(hidden, labels - labels.min() - 1, shard)
    with pytest.raises(ValueError, match="hidden rows"):
        RowLogprobs.forward(hidden.float(), labels, shard)
    with pytest.raises(ValueError, match="one for each hidden row"):
        RowLogprobs.forward(hidden, labels[1:], shard)
    with pytest.raises(ValueError, match="temperature"):
        RowLogprobs.forward(hidden, labels, shard, temperature=0.0)
    with pytest.raises(ValueError, match="temperature"):
        RowLogprobs.forward(hidden, labels, shard, temperature=problem.temperature - 1.0)
    with pytest.raises(ValueError, match="chunk_rows"):
        RowLogprobs.forward(hidden, labels, shard, chunk_rows=0)
    rows = RowLogprobs.forward(hidden, labels, shard)
    with pytest.raises(ValueError, match="with_entropy"):
        rows.backward(problem.grad_logprobs, problem.grad_entropy)
    with pytest.raises(ValueError, match="grad_logprobs"):
        rows.backward(problem.grad_logprobs[1:])
    with pytest.raises(ValueError, match="grad_weight_out"):
        rows.backward(problem.grad_logprobs, grad_weight_out=weight.float())


def _split_vocabulary(rank: int, boundaries: list[int], store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(boundaries) - 1)
    try:
        problem = make_problem()
        start, stop = boundaries[rank : rank + 2]
        shard = VocabShard(problem.weight[start:stop], vocab_start=start, num_valid=VOCAB, group=dist.group.WORLD)
        expected = reference(problem, temperature=problem.temperature, with_entropy=True)
        for keep in (False, True):
            rows = RowLogprobs.forward(
                problem.hidden,
                problem.labels,
                shard,
                temperature=problem.temperature,
                chunk_rows=5,
                with_entropy=True,
                keep=keep,
            )
            assert relative_error(rows.logprobs, expected.logprobs) < TOLERANCE
            assert rows.entropy is not None
            assert relative_error(rows.entropy, expected.entropy) < TOLERANCE
            grad_hidden, grad_weight = rows.backward(problem.grad_logprobs, problem.grad_entropy)
            assert relative_error(grad_hidden, expected.grad_hidden) < TOLERANCE
            error = (grad_weight - expected.grad_weight[start:stop]).norm()
            assert float(error) < TOLERANCE * float(expected.grad_weight.norm())
        empty = RowLogprobs.forward(problem.hidden[:0], problem.labels[:0], shard)
        assert empty.backward(problem.grad_logprobs[:0])[0].shape == (0, HIDDEN)
    finally:
        dist.destroy_process_group()


# The second split gives its last rank nothing but padding.
@pytest.mark.timeout(WORLD_SECONDS)
@pytest.mark.parametrize("boundaries", [[0, 24, 48], [0, 40, 48]])
def test_vocabulary_split_over_two_ranks(boundaries: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(_split_vocabulary, args=(boundaries, store), nprocs=len(boundaries) - 1)

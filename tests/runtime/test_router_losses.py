"""Gradients of the routers' losses against autograd, where every trajectory runs whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixflow.forest import build_forest
from prefixflow.forest.forest import Forest
from prefixflow.plan.microbatch import pack_microbatches
from prefixflow.runtime.router_losses import AddedGradient, RouterLossConfig, RouterLosses, segment_counts
from prefixflow.trajectories import Trajectory

NUM_EXPERTS, TOPK, HIDDEN, NUM_LAYERS = 6, 2, 5, 2
CONFIG = RouterLossConfig(NUM_EXPERTS, TOPK, load_balancing=0.1, z=0.01)


@dataclass
class Problem:
    """A tree of depth 3 with a strict prefix and an identical trajectory, one of another group, and one of one token.

    weights [layers, E, hidden]: routers, leaves of the graph; hidden [segments' positions, hidden]: their input.
    """

    forest: Forest
    weights: Tensor
    hidden: dict[int, Tensor]


def make_problem() -> Problem:
    rng = np.random.default_rng(0)
    a, b, c, d, e, f = (rng.integers(0, 50, n) for n in (5, 4, 3, 6, 2, 7))
    paths = [(a, b, c), (a, b, d), (a, b, d), (a, b), (a, e), (f,), (f[:1],)]
    trajectories = [
        Trajectory(id=str(i), group="g" if i < 5 else "h", tokens=np.concatenate(p), loss_mask=np.zeros(sum(map(len, p))),
                   advantages=np.zeros(sum(map(len, p))))
        for i, p in enumerate(paths)
    ]  # fmt: skip
    forest = build_forest(trajectories)
    assert forest.depth == 3
    torch.manual_seed(0)
    weights = torch.randn(NUM_LAYERS, NUM_EXPERTS, HIDDEN, dtype=torch.float64, requires_grad=True)
    hidden = {s.id: torch.randn(len(s), HIDDEN, dtype=torch.float64) for s in forest.segments}
    return Problem(forest, weights, hidden)


def chosen_experts(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(TOPK).indices, True)


def expected(problem: Problem) -> tuple[float, float, Tensor]:
    """Both losses and their gradient, by the formula on whole trajectories."""
    forest, balance, z = problem.forest, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for g, length in enumerate(forest.lengths):
        segments = [s.id for s in forest.segments if g in s.members]
        for weight in problem.weights if segments else ():
            logits = torch.cat([problem.hidden[s] for s in segments]) @ weight.T
            assert len(logits) == length
            scores = logits.softmax(-1)
            counts = chosen_experts(scores).sum(0)
            balance = balance + NUM_EXPERTS / (TOPK * length**2) * (scores.sum(0) * counts).sum()
            z = z + logits.logsumexp(-1).square().mean()
    balance, z = CONFIG.load_balancing * balance / len(forest.lengths), CONFIG.z * z / len(forest.lengths)
    (gradient,) = torch.autograd.grad(balance + z, problem.weights)
    return balance.item(), z.item(), gradient


def delayed(problem: Problem, max_tokens: int) -> tuple[RouterLosses, Tensor]:
    """The same through microbatches: all forwards first, then the backwards, children first."""
    forest = problem.forest
    microbatches = pack_microbatches(forest, range(forest.num_trees), max_tokens=max_tokens)
    losses = RouterLosses(CONFIG, forest, NUM_LAYERS, torch.device("cpu"))
    roots = {}
    for m in microbatches:
        lengths = [len(span) for span in m.spans]
        segment_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mean_weight = [sum(1 / forest.lengths[g] for g in forest.segments[s].members) for s in m.segments]

        def balance(scores, layer, segments=m.segments, segment_of=segment_of):
            gradient = losses.score_gradients(segments)[:, layer][segment_of]
            losses.load_balancing_value += (scores * gradient).sum()
            return gradient

        def z(squares, mean_weight=mean_weight, segment_of=segment_of):
            gradient = losses.z_gradients(torch.tensor(mean_weight, dtype=torch.float64)[segment_of])
            losses.z_value += (squares * gradient).sum()
            return gradient

        hidden, counts = torch.cat([problem.hidden[s] for s in m.segments]), []
        total = torch.zeros((), dtype=torch.float64)
        for layer, weight in enumerate(problem.weights):
            logits = hidden @ weight.T
            logits = AddedGradient.apply(logits, logits.logsumexp(-1).square(), z)
            scores = logits.softmax(-1)
            counts.append(segment_counts(chosen_experts(scores), segment_of, len(m.segments)))
            carried = AddedGradient.apply(logits, scores, lambda v, layer=layer, balance=balance: balance(v, layer))
            total = total + 0 * carried.sum()
        losses.record(m.segments, torch.stack(counts, 1))
        roots[m.id] = total
    problem.weights.grad = None
    for m in reversed(microbatches):
        roots[m.id].backward()
    assert problem.weights.grad is not None
    return losses, problem.weights.grad


@pytest.mark.parametrize("max_tokens", [7, 100])
def test_gradients_equal_autograd_on_whole_trajectories(max_tokens):
    problem = make_problem()
    balance, z, gradient = expected(problem)
    losses, got = delayed(problem, max_tokens)
    assert float((got - gradient).norm() / gradient.norm()) < 1e-14
    assert float(losses.load_balancing_value) == pytest.approx(balance, rel=1e-13)
    assert float(losses.z_value) == pytest.approx(z, rel=1e-13)


@pytest.mark.parametrize("lost", ["counts of descendants", "counts of ancestors", "weights of other members"])
def test_a_part_left_out_shows(lost, monkeypatch):
    """Each part of the sum is larger than any tolerance, so the test above can fail."""
    weights, member_weight = RouterLosses._pair_weights, RouterLosses._member_weight

    def mutant(self, segments, related):
        made = weights(self, segments, related)
        order = np.subtract.outer(np.array(segments), np.array(related))
        made[(order < 0) if lost == "counts of descendants" else (order > 0)] = 0
        return made

    if lost == "weights of other members":
        one = lambda self, s: member_weight(self, s) / len(self.forest.segments[s].members)  # noqa: E731
        monkeypatch.setattr(RouterLosses, "_member_weight", one)
    else:
        monkeypatch.setattr(RouterLosses, "_pair_weights", mutant)
    problem = make_problem()
    gradient = expected(problem)[2]
    assert float((delayed(problem, 7)[1] - gradient).norm() / gradient.norm()) > 1e-2


def test_counts_before_all_forwards_are_an_error():
    problem = make_problem()
    losses = RouterLosses(CONFIG, problem.forest, NUM_LAYERS, torch.device("cpu"))
    losses.record([0], torch.zeros(1, NUM_LAYERS, NUM_EXPERTS))
    with pytest.raises(AssertionError, match="no counts of segments"):
        losses.score_gradients([0])
    with pytest.raises(AssertionError, match="segment 0 was counted twice"):
        losses.record([0], torch.zeros(1, NUM_LAYERS, NUM_EXPERTS))


def test_padding_is_not_counted():
    chosen = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.bool)
    assert segment_counts(chosen, torch.tensor([1, 0, 2]), 2).tolist() == [[0, 1], [1, 0]]

"""Auxiliary losses of routers, exactly those of a trainer that runs every trajectory whole.

Words. E experts, top-k K, N trajectories in the step (those that are not run too), N_g positions of trajectory g.
A *score* is a router's probability of an expert at a position, over all experts; count_i^g is how many positions of g
have expert i among their K highest scores. With one trajectory as the logical microbatch, and means over trajectories,

    load balancing   L_g = coeff * E / (K N_g^2) * sum over i of count_i^g (sum over positions of g of score_i)
    z                Z_g = coeff / N_g * sum over positions of g of logsumexp(logits)^2

1. A position that several trajectories share has one score, in the loss of each: its gradient is the sum

       d / d score_i = sum over g through the position of  c_g count_i^g,    c_g = coeff * E / (K N_g^2 N)

   and that of its logsumexp^2 is the sum of coeff / (N_g N).
2. A count belongs to a whole path. F of each microbatch leaves the counts of its own segments here; the gradient of a
   segment then needs those of its ancestors and of its descendants, whose F come later. It is read in backward only.
   Two segments share the trajectories of the lower one, so with w_s the sum of c_g over the members of s

       gradient of s = w_s (counts of s and its ancestors) + sum over descendants u of w_u (counts of u)

3. Counts are constants, and so are top-k choices: gradients flow through scores and logits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prefixflow.forest.forest import Forest


@dataclass(frozen=True, slots=True)
class RouterLossConfig:
    """Coefficients of the losses (0: off) and what they are normalised with.

    load_balancing: that of `aux_loss` and `seq_aux_loss` together; with one trajectory a microbatch they are the same.
    """

    num_experts: int
    topk: int
    load_balancing: float = 0.0
    z: float = 0.0

    @property
    def has_terms(self) -> bool:
        return self.load_balancing != 0.0 or self.z != 0.0


class RouterLosses:
    """Counts, gradients and values of the losses of one model chunk's routers in one step.

    num_layers: those with experts in the chunk.
    load_balancing_value, z_value: the losses as they are added to the step's, with coefficients and divided by the number of
        trajectories, of this chunk's layers and this rank's positions. Complete after the last backward.
    """

    def __init__(self, config: RouterLossConfig, forest: Forest, num_layers: int, device: torch.device) -> None:
        self.config = config
        self.num_layers = num_layers
        self.forest = forest
        self.num_trajectories = len(forest.lengths)
        self.load_balancing_value = torch.zeros((), dtype=torch.float64, device=device)
        self.z_value = torch.zeros((), dtype=torch.float64, device=device)
        self._device = device
        self._subtree_stops = _subtree_stops(forest)
        self._counts: dict[int, Tensor] = {}

    def record(self, segments: Sequence[int], counts: Tensor) -> None:
        """Keep the counts of `segments` [segments, layers, E]; each segment is recorded once a step."""
        for segment, own in zip(segments, counts, strict=True):
            assert segment not in self._counts, f"segment {segment} was counted twice"
            self._counts[segment] = own

    def score_gradients(self, segments: Sequence[int]) -> Tensor:
        """Gradient of the load-balancing loss at every score of a position of each segment, [segments, layers, E].

        Read it in backward: the F of all segments on the trajectories of `segments` must have been recorded.
        """
        related = sorted({u for s in segments for u in self._related(s)})
        missing = [u for u in related if u not in self._counts]
        assert not missing, f"a backward ran before a forward on the same path: no counts of segments {missing}"
        if not segments:
            return torch.zeros(0, self.num_layers, self.config.num_experts, dtype=torch.float64, device=self._device)
        counts = torch.stack([self._counts[u] for u in related]).double()
        weights = torch.from_numpy(self._pair_weights(segments, related)).to(self._device)
        return torch.einsum("su,ule->sle", weights, counts)

    def z_gradients(self, mean_weight: Tensor) -> Tensor:
        """Gradient of the z-loss at logsumexp^2 [T]; mean_weight [T]: sum of 1 / N_g over the position's trajectories."""
        return self.config.z / self.num_trajectories * mean_weight

    def _pair_weights(self, segments: Sequence[int], related: Sequence[int]) -> np.ndarray:
        """[segments, related]: the sum of c_g over the trajectories through both."""
        place = {u: i for i, u in enumerate(related)}
        weights = np.zeros((len(segments), len(related)))
        for row, s in enumerate(segments):
            for u in self._related(s):
                weights[row, place[u]] = self._member_weight(max(s, u))
        return weights

    def _related(self, segment: int) -> Iterable[int]:
        """The segment, its ancestors and its descendants: those that share a trajectory with it."""
        return (*self.forest.path(segment), *range(segment + 1, self._subtree_stops[segment]))

    def _member_weight(self, segment: int) -> float:
        """Sum of c_g over the members."""
        c = self.config
        scale = c.load_balancing * c.num_experts / (c.topk * self.num_trajectories)
        return sum(scale / self.forest.lengths[g] ** 2 for g in self.forest.segments[segment].members)


class AddedGradient(torch.autograd.Function):
    """Identity on `carrier`, whose backward hands `values` the gradient that `source(values)` forms at that time.

    It adds the derivative of a scalar that is never computed: the loss is known after the last forward only, and
    `carrier` is merely what the backward passes through. `source` must not depend on what runs in between.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, values: Tensor, source: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(values)
        ctx.source = source
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_carrier: Tensor) -> tuple[Tensor, Tensor, None]:
        (values,) = ctx.saved_tensors
        return grad_carrier, ctx.source(values), None


def segment_counts(chosen: Tensor, segment_of: Tensor, num_segments: int) -> Tensor:
    """Positions of each segment that chose each expert, [num_segments, E] float32.

    chosen [T, E] bool; segment_of [T] in 0..num_segments, where num_segments means padding, which is not counted.
    """
    counts = chosen.new_zeros(num_segments + 1, chosen.shape[1], dtype=torch.float32)
    return counts.index_add_(0, segment_of, chosen.float())[:num_segments]


def _subtree_stops(forest: Forest) -> list[int]:
    """One past the last id of each segment's subtree, which is a run of ids."""
    stops = [segment.id + 1 for segment in forest.segments]
    for segment in reversed(forest.segments):
        if segment.parent is not None:
            stops[segment.parent] = max(stops[segment.parent], stops[segment.id])
    return stops

"""A loss that somebody else's function computes: called once for each of its microbatches, a *loss call* (`prefixflow.plan.joint`).

The function is a black box on log-probabilities. F records them; when the first B needs the gradient of a call, all its
trajectories have been scored, and the function is called on leaves in its own layout, once. What autograd leaves in them are the
coefficients that the rows' backwards take: the chain rule, with the model's backward done later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from prefixflow.runtime.objective import ScoredEntries
from prefixflow.trajectories.types import Trajectory

LossFunction = Callable[[int, list[Tensor], list[Tensor] | None], Tensor]
"""(number of the call, log-probabilities, entropies) to the loss, a scalar, scaled as its gradient is to be."""


class CalledObjective(ScoredEntries):
    """Calls a loss function once for each loss call, in the order in which their gradients are needed.

    chosen: indices of the trajectories of this rank, run or not (a single token is not run): a call gets all of them.
    joint: number of the loss call of every trajectory of the batch. A call gets its trajectories in the order of the batch.
    call: gets, for each trajectory of n tokens, its log-probabilities [n], entry t of token t given those before it, and 0
        where the token is not trained; likewise entropies where `needs_entropy`, else None. In training they are leaves that
        require gradients; what does not depend on them has none. What it raises is raised, naming the call.
    training: False calls without gradients, at the end of the pass.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        chosen: Sequence[int],
        joint: Sequence[int],
        call: LossFunction,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        needs_entropy: bool = False,
        training: bool = True,
    ) -> None:
        super().__init__(
            trajectories, chosen, vocab_size=vocab_size, dtype=dtype, device=device, needs_entropy=needs_entropy
        )
        self._call = call
        self._training = training
        self._trained = [torch.from_numpy(np.flatnonzero(trajectories[i].loss_mask)).to(device) for i in chosen]
        self._lengths = [len(trajectories[i]) for i in chosen]
        self._calls = np.asarray([joint[i] for i in chosen], np.int64)
        # Whether entropies have a gradient, of the calls that have been made.
        self._made: dict[int, bool] = {}

    def finish(self) -> None:
        """Make the calls whose gradient no backward has asked for: all of them in a pass that only scores."""
        for number in sorted(set(self._calls.tolist()) - self._made.keys()):
            self._make(number)

    def _form(self, owners: np.ndarray) -> bool:
        assert self._training, "a pass that only scores has no gradients"
        numbers = np.unique(self._calls[owners]).tolist()
        for number in numbers:
            if number not in self._made:
                self._make(number)
        return any(self._made[number] for number in numbers)

    def _make(self, number: int) -> None:
        members = np.flatnonzero(self._calls == number).tolist()
        with torch.set_grad_enabled(self._training):
            logprobs = [self._leaf(self.logprobs, k) for k in members]
            entropies = None if self.entropy is None else [self._leaf(self.entropy, k) for k in members]
            try:
                loss = self._call(number, logprobs, entropies)
            except Exception as error:
                error.add_note(f"PrefixFlow: in loss call {number}, of {len(members)} sequences.")
                raise
        self._made[number] = False
        if not self._training:
            return
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"loss call {number}: expected a loss that is a tensor of one number, got {got}.")
        if loss.requires_grad:
            self._differentiate(number, members, loss, logprobs, entropies)

    def _differentiate(
        self, number: int, members: Sequence[int], loss: Tensor, logprobs: list[Tensor], entropies: list[Tensor] | None
    ) -> None:
        # Not only of the leaves: parameters of the loss itself accumulate theirs, as in any backward.
        loss.backward()
        for k, leaf in zip(members, logprobs, strict=True):
            self._keep(self._grad_logprobs, k, leaf.grad)
        if entropies is None or self._grad_entropy is None:
            return
        self._made[number] = any(leaf.grad is not None for leaf in entropies)
        for k, leaf in zip(members, entropies, strict=True):
            self._keep(self._grad_entropy, k, leaf.grad)

    def _leaf(self, values: Tensor, k: int) -> Tensor:
        """Entries of the k-th chosen trajectory, spread over its tokens, [n]."""
        own = self._entries_of(k)
        assert self._recorded[own].all(), "a loss was called before all of its trajectories were scored"
        leaf = values.new_zeros(self._lengths[k])
        leaf[self._trained[k]] = values[own]
        return leaf.requires_grad_(self._training)

    def _keep(self, gradients: Tensor, k: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            gradients[self._entries_of(k)] = gradient[self._trained[k]].to(gradients.dtype)

    def _entries_of(self, k: int) -> slice:
        return slice(int(self.entries.starts[k]), int(self.entries.starts[k + 1]))

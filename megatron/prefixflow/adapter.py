"""What a framework that brings its own Megatron model says about its microbatches.

Planning needs the tokens of every sequence of a step; the loss stays the framework's own. An adapter translates between
the two: which sequences a microbatch holds, and what the framework's loss function makes of their log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SequenceInput:
    """One sequence of `n` tokens, unpadded.

    tokens: int [n].
    scored: bool [n], True where the loss reads the log-probability of the token given those before it; entry 0 is
        False. None: every token but the first.
    temperature: divides the logits in every log-probability.
    routes: signed integers [n-1 or n, moe layers, top-k] that the experts are to be taken by; None routes natively.
    """

    tokens: np.ndarray
    scored: np.ndarray | None = None
    temperature: float = 1.0
    routes: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SequenceScores:
    """What the model says about one sequence of `n` tokens, on the last pipeline stage.

    logprobs: [n], entry t of token t given tokens 0..t-1; 0 where it is not scored. entropy: [n] likewise, of the
        distribution that token t was drawn from; None where the adapter did not ask for it.

    In training they are leaves that require gradients; what the loss leaves in them is all that the backward takes.
    """

    logprobs: Tensor
    entropy: Tensor | None = None


class MicrobatchAdapter(Protocol):
    """Reads a framework's microbatches and calls its loss.

    needs_entropy: whether the loss reads entropies.

    An adapter may also have `loss_calls(microbatch) -> Sequence[Any]`, parts of a microbatch with losses of their own, which then
    stand for microbatches below; and `keep_routes(routes)`, called after a pass with the routes that were taken,
    routes[chunk][sequence] int16 [n-1, MoE layers of the model chunk, top-k].
    """

    needs_entropy: bool

    def sequences(self, microbatch: Any) -> Sequence[SequenceInput]:
        """The sequences of one microbatch, in its order; on every rank of a model the same."""
        ...

    def loss(self, microbatch: Any, scores: Sequence[SequenceScores], *, non_loss_data: bool = False) -> Any:
        """What the loss function of Megatron's schedules returns: (loss, data) or (loss, number of tokens, data).

        Called once a microbatch, on the last pipeline stage, in any order; scores are those of `sequences`. With
        `non_loss_data` (of `collect_non_loss_data`) it returns anything.
        """
        ...

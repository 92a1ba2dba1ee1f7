"""What a framework that brings its own Megatron model says about its microbatches.

Planning needs the tokens of every sequence of a step; the loss stays the framework's own. An adapter translates between
the two: which sequences a microbatch holds, and what the framework's loss function makes of their log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from prefixflow.trajectories.types import Trajectory, TrajectoryError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class SequenceInput:
    """One sequence of `n` tokens, unpadded. Per-token fields may be numpy arrays, torch tensors or lists; the constructor converts,
    checks and freezes them.

    tokens: int [n].
    scored: bool [n], True where the loss reads the log-probability of the token given those before it; entry 0 is
        False. None: every token but the first.
    temperature: divides the logits in every log-probability.
    routes: signed integers [n-1 or n, moe layers, top-k] that the experts are to be taken by; None routes natively.

    Raises TrajectoryError (a ValueError) that names the field.
    """

    tokens: np.ndarray
    scored: np.ndarray | None = None
    temperature: float = 1.0
    routes: np.ndarray | None = None

    if TYPE_CHECKING:
        # What the constructor takes is wider than what the fields hold.
        def __init__(
            self,
            tokens: ArrayLike | Tensor,
            scored: ArrayLike | Tensor | None = None,
            temperature: float | Tensor = 1.0,
            routes: ArrayLike | Tensor | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        tokens, scored, routes = map(_on_host, (self.tokens, self.scored, self.routes))
        temperature = self.temperature.item() if isinstance(self.temperature, Tensor) else self.temperature
        everything = np.arange(np.size(tokens)) > 0
        try:
            checked = Trajectory(
                id="sequence",
                group="sequence",
                tokens=tokens,
                loss_mask=everything if scored is None else scored,
                advantages=0.0,
                temperature=temperature,
                routes=routes,
            )
        except TrajectoryError as error:
            name = "scored" if error.field == "loss_mask" else error.field
            raise error.at("", f"SequenceInput.{name}") from error
        object.__setattr__(self, "tokens", checked.tokens)
        object.__setattr__(self, "scored", None if scored is None else checked.loss_mask)
        object.__setattr__(self, "temperature", checked.temperature)
        object.__setattr__(self, "routes", checked.routes)


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


def _on_host(values: Any) -> Any:
    """Tensors as numpy arrays, which have no bfloat16."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return (values.double() if values.is_floating_point() else values).numpy()

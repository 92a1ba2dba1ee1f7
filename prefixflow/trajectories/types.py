"""The trajectory: one sampled sequence with its loss mask, advantages and optional
log-probabilities and routes.

Invariants, true of every `Trajectory` that exists (the constructor checks them):

1. `tokens` holds at least one id and no negative one.
2. Every per-token array has one entry for each entry of `tokens`; entry t is about token t as
   predicted from the tokens before it, so `loss_mask[0]` is False: nothing predicts the first
   token.
3. Advantages, log-probabilities, reward and temperature are finite; the temperature is positive.
4. `routes` has one row for each *input* token, that is one fewer than tokens.
5. All arrays are read-only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

LOGPROB_FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


class TrajectoryError(ValueError):
    """A trajectory that cannot be used: which field, expected what, got what, and the way out.

    `where` says which trajectory or which line of which file; `at` gives the same error another
    place.
    """

    def __init__(self, field: str, expected: str, got: str, way_out: str = "", where: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        self.way_out = way_out
        self.where = where
        place = ", ".join(part for part in (where, f'field "{field}"' if field else "") if part)
        sentence = f"{place}: expected {expected}, got {got}"
        super().__init__(f"{sentence}. {way_out}" if way_out else f"{sentence}.")

    def at(self, where: str, field: str | None = None) -> TrajectoryError:
        """The same error at `where`, with `field` as the file spells it."""
        name = self.field if field is None else field
        return TrajectoryError(name, self.expected, self.got, self.way_out, where)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.expected, self.got, self.way_out, self.where)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One trajectory of `n = len(tokens)` tokens.

    The constructor converts, checks and freezes its arguments. Per-token fields may be lists or
    numpy arrays; `advantages` also one number, which is broadcast.

    id: names the trajectory, unique within a batch.
    group: names the prompt or task; advantages and sharing are per group.
    tokens: int64 [n], token ids.
    loss_mask: bool [n], True where the token is trained.
    advantages: float64 [n].
    old_logprobs, ref_logprobs, rollout_logprobs: float64 [n] or None. Absent `old_logprobs` means
        the policy at the start of the step.
    reward: the trajectory's reward or None.
    temperature: divides the logits in every log-probability of this trajectory.
    routes: signed integers [n-1, moe layers, top-k] or None; row t routes input token t, -1 is
        unknown, and with it the other experts of that token in that layer. A row for the last token, which is
        never an input, is accepted and dropped.

    Raises TrajectoryError (a ValueError) that names the field.
    """

    id: str
    group: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    advantages: np.ndarray
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    rollout_logprobs: np.ndarray | None = None
    reward: float | None = None
    temperature: float = 1.0
    routes: np.ndarray | None = None

    if TYPE_CHECKING:
        # What the constructor takes is wider than what the fields hold.
        def __init__(
            self,
            id: str,
            group: str,
            tokens: ArrayLike,
            loss_mask: ArrayLike,
            advantages: ArrayLike,
            old_logprobs: ArrayLike | None = None,
            ref_logprobs: ArrayLike | None = None,
            rollout_logprobs: ArrayLike | None = None,
            reward: float | None = None,
            temperature: float = 1.0,
            routes: ArrayLike | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        try:
            self._normalise()
        except TrajectoryError as error:
            raise error.at(f"trajectory {self.id!r}") from None

    def _normalise(self) -> None:
        for name in ("id", "group"):
            _check_name(name, getattr(self, name))
        tokens = _token_array(self.tokens)
        normalised: dict[str, Any] = {
            "tokens": tokens,
            "loss_mask": _mask_array(self.loss_mask, tokens.size),
            "advantages": _advantage_array(self.advantages, tokens.size),
            "temperature": _temperature(self.temperature),
        }
        for name in LOGPROB_FIELDS:
            if getattr(self, name) is not None:
                normalised[name] = _float_array(name, getattr(self, name), tokens.size)
        if self.reward is not None:
            normalised["reward"] = finite_number("reward", self.reward)
        if self.routes is not None:
            normalised["routes"] = _route_array(self.routes, tokens.size)
        for name, value in normalised.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return self.tokens.size

    @property
    def num_positions(self) -> int:
        """Positions that a dense trainer runs: the last token predicts nothing and is not run."""
        return self.tokens.size - 1

    @property
    def num_trained(self) -> int:
        """Tokens that own a loss."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What a model's routes look like: `topk` distinct ones of `num_experts` in each of `num_layers` MoE layers."""

    num_layers: int
    topk: int
    num_experts: int


def check_routes(trajectory: Trajectory, shape: RouteShape) -> None:
    """Raise TrajectoryError where the routes of `trajectory` (there must be some) are none of such a model."""
    routes, where = trajectory.routes, f"trajectory {trajectory.id!r}"
    assert routes is not None, where
    way_out = "Replay the routes of the model that is trained."
    if routes.shape[1:] != (shape.num_layers, shape.topk):
        expected = f"routes of {shape.num_layers} MoE layers and top-{shape.topk}"
        raise TrajectoryError("routes", expected, f"[moe layers, top-k] {list(routes.shape[1:])}", way_out, where)
    outside = (routes >= shape.num_experts).any(axis=(1, 2))
    if outside.any():
        at = int(outside.argmax())
        expected = f"expert ids below the model's {shape.num_experts} experts"
        raise TrajectoryError("routes", expected, f"{routes[at].max()} at input token {at}", way_out, where)
    ordered = np.sort(routes)
    doubled = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(axis=(1, 2))
    if doubled.any():
        at = int(doubled.argmax())
        raise TrajectoryError("routes", "distinct experts in a layer", f"one twice at input token {at}", "", where)


def check_limits(trajectory: Trajectory, *, vocab_size: int | None = None, max_positions: int | None = None) -> None:
    """Raise TrajectoryError where the trajectory does not fit the model; None means no limit.

    vocab_size: every token id is below it.
    max_positions: a trajectory has at most so many positions (tokens - 1).
    """
    if vocab_size is not None:
        outside = trajectory.tokens >= vocab_size
        if outside.any():
            at = int(outside.argmax())
            raise TrajectoryError(
                "tokens",
                f"token ids below the vocabulary size {vocab_size}",
                f"{trajectory.tokens[at]} at token {at}",
                "Use the tokenizer of the model, or a model with a larger vocabulary.",
                f"trajectory {trajectory.id!r}",
            )
    if max_positions is not None and trajectory.num_positions > max_positions:
        raise TrajectoryError(
            "tokens",
            f"at most {max_positions} positions (tokens - 1)",
            f"{trajectory.num_positions} positions",
            "Drop long trajectories (prefixflow import --max-length) or raise the model's limit.",
            f"trajectory {trajectory.id!r}",
        )


def check_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    vocab_size: int | None = None,
    max_positions: int | None = None,
) -> None:
    """Raise TrajectoryError unless there are trajectories, with unique ids, within the limits.

    What concerns one trajectory alone is checked by its constructor already.
    """
    if not trajectories:
        raise TrajectoryError("", "at least one trajectory", "none", where="trajectories")
    index_of: dict[str, int] = {}
    for index, trajectory in enumerate(trajectories):
        first = index_of.setdefault(trajectory.id, index)
        if first != index:
            raise TrajectoryError(
                "id",
                "an id of its own for every trajectory",
                f"{trajectory.id!r} for number {first} as well",
                where=f"trajectory number {index}",
            )
        check_limits(trajectory, vocab_size=vocab_size, max_positions=max_positions)


def describe(value: Any) -> str:
    """A wrong value in an error message: the value itself when it is small, else its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        # Integers beyond 64 bits may have more digits than Python agrees to print.
        return "an integer beyond 64 bits" if _is_huge(value) else repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"a string of {len(value)} characters"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


def finite_number(field: str, value: Any) -> float:
    """`value` as a float; TrajectoryError unless it is a finite number (a boolean is none)."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or _is_huge(value) or not math.isfinite(value):
        raise TrajectoryError(field, "a finite number", describe(value))
    return float(value)


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > 63


def _check_name(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise TrajectoryError(field, "a string that is not empty", describe(value))


def _temperature(value: Any) -> float:
    temperature = finite_number("temperature", value)
    if temperature <= 0:
        raise TrajectoryError(
            "temperature",
            "a positive number",
            repr(temperature),
            "Greedy samples are scored at 1.0.",
        )
    return temperature


def _token_array(values: Any) -> np.ndarray:
    tokens = _array("tokens", values, np.dtype(np.int64), "integers", {int}, "iu")
    if tokens.size == 0:
        raise TrajectoryError("tokens", "at least one token", "none")
    if tokens.min() < 0:
        at = int((tokens < 0).argmax())
        raise TrajectoryError("tokens", "token ids of 0 or more", f"{tokens[at]} at token {at}")
    return tokens


def _mask_array(values: Any, num_tokens: int) -> np.ndarray:
    numbers = _array("loss_mask", values, np.dtype(np.float64), "zeros and ones", {int, float, bool}, "iufb")
    if numbers.size != num_tokens:
        raise TrajectoryError(
            "loss_mask",
            f"one entry per token, {num_tokens} of them",
            f"{numbers.size} entries",
            "A mask over the response alone needs a 0 in front for each prompt token.",
        )
    wrong = (numbers != 0) & (numbers != 1)
    if wrong.any():
        at = int(wrong.argmax())
        raise TrajectoryError("loss_mask", "zeros and ones", f"{numbers[at]:g} at token {at}")
    if numbers[0] != 0:
        raise TrajectoryError(
            "loss_mask",
            "0 for the first token, which nothing predicts",
            "1 at token 0",
            "Entry t is about token t: put a begin-of-text token first, or shift the mask.",
        )
    return _frozen(numbers != 0)


def _advantage_array(values: Any, num_tokens: int) -> np.ndarray:
    is_array = isinstance(values, np.ndarray) and values.ndim > 0
    if is_array or isinstance(values, (list, tuple)):
        return _float_array("advantages", values, num_tokens)
    if isinstance(values, np.ndarray):
        values = values.item()
    if values is None or isinstance(values, (str, dict)):
        raise TrajectoryError("advantages", "a number or a list of numbers", describe(values))
    # A broadcast view takes no memory and is read-only.
    return np.broadcast_to(np.float64(finite_number("advantages", values)), (num_tokens,))


def _float_array(field: str, values: Any, num_tokens: int) -> np.ndarray:
    array = _array(field, values, np.dtype(np.float64), "numbers", {int, float}, "iuf")
    _check_length(field, array, num_tokens)
    finite = np.isfinite(array)
    if not finite.all():
        at = int((~finite).argmax())
        raise TrajectoryError(field, "finite numbers", f"{array[at]} at token {at}")
    return array


def _route_array(values: Any, num_tokens: int) -> np.ndarray:
    expected = f"signed integers of 16 bits or more, [{num_tokens} or {num_tokens - 1}, moe layers, top-k]"
    routes = values
    if isinstance(values, (list, tuple)):
        try:
            routes = np.array(values)
        except ValueError:
            raise TrajectoryError("routes", expected, "lists of unequal lengths") from None
    if not isinstance(routes, np.ndarray):
        raise TrajectoryError("routes", expected, describe(values))
    got = f"{routes.dtype} {list(routes.shape)}"
    if routes.ndim != 3 or routes.shape[0] not in (num_tokens, num_tokens - 1):
        raise TrajectoryError("routes", expected, got)
    if routes.dtype.kind != "i" or routes.dtype.itemsize < 2 or 0 in routes.shape[1:]:
        raise TrajectoryError("routes", expected, got)
    if routes.size and routes.min() < -1:
        raise TrajectoryError("routes", "expert ids, or -1 where unknown", str(routes.min()))
    return _owned(routes[: num_tokens - 1], routes.dtype)


def _check_length(field: str, array: np.ndarray, num_tokens: int) -> None:
    if array.size != num_tokens:
        raise TrajectoryError(field, f"one entry per token, {num_tokens} of them", f"{array.size} entries")


def _array(field: str, values: Any, dtype: np.dtype, what: str, types: set[type], kinds: str) -> np.ndarray:
    """`values` as a read-only array [n] of `dtype`.

    what: names the entries in errors; types: what a list may hold; kinds: dtype kinds of an array.
    """
    if isinstance(values, (list, tuple)):
        # Numpy alone would take true for 1 and "7" for 7.
        found = set(map(type, values))
        if not found <= types:
            at = next(i for i, value in enumerate(values) if type(value) not in types)
            raise TrajectoryError(field, f"a list of {what}", f"{describe(values[at])} at entry {at}")
        try:
            return _frozen(np.array(values, dtype=dtype))
        except OverflowError:
            raise TrajectoryError(field, f"{what} of at most 64 bits", "a larger number") from None
    if not isinstance(values, np.ndarray):
        raise TrajectoryError(field, f"a list of {what}", describe(values))
    if values.ndim != 1 or values.dtype.kind not in kinds:
        raise TrajectoryError(field, f"an array [n] of {what}", f"{values.dtype} {list(values.shape)}")
    return _owned(values, dtype)


def _owned(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` as `dtype`, read-only; copied where its owner could still write to it."""
    if array.dtype == dtype and not array.flags.writeable:
        return array
    return _frozen(np.array(array, dtype=dtype))


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array

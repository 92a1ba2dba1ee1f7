"""What a framework's own forward step does, found out by running it with a stand-in for the model.

Strategy:

1. Megatron's schedules call `forward_step_func(data_iterator, model)`, which fetches a microbatch, calls the model and returns
   what the model returned with a loss function of it. `record` does the same with a stand-in, which keeps the arguments of
   the call and returns a `Placeholder`.
2. A call with labels returns the loss of each position, [b, s]: minus the log-probability of its label. So tokens and labels are
   enough to say which sequences were meant (`Reading`), and log-probabilities are enough to say what the model would have
   returned (`TokenLosses`).
3. Megatron-LM hands tokens to the first pipeline stage and labels to the last one: `merged` puts the parts of the stages together.

Invariants:

1. A position is scored only where its label is the token that follows it; the label of the last position that is read is a
   sequence's last token. Elsewhere, and outside the `loss_mask` that the model was given, the loss is 0, and a loss function that takes
   a gradient from there is an error.
2. Whatever cannot be put in this form is refused by a sentence that says where it was found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron.prefixflow.adapter import SequenceInput
from megatron.prefixflow.items import Untouched, own_items
from prefixflow.trajectories.types import TrajectoryError

_FORWARD = inspect.signature(GPTModel.forward)
_READ = ("input_ids", "position_ids", "attention_mask", "labels", "packed_seq_params", "loss_mask")
_WITHOUT_EFFECT = ("padding_mask",)
"""Says which tokens routers leave out; padding is not run here."""

ADAPTER = "give forward_backward an adapter (megatron.prefixflow.MicrobatchAdapter)"


class Placeholder(torch.Tensor):
    """Stands for the model's output in a forward step, which may look at its shape and type and hand it on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _METADATA:
            name = getattr(func, "__name__", str(func))
            raise ValueError(
                f"The forward step uses the model's output before it returns it ({name}), but with prefix reuse the output is "
                f"there only when the loss function is called. Move this into the loss function, or {ADAPTER}."
            )
        return super().__torch_function__(func, types, args, kwargs or {})


_METADATA = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda")
        ),
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.__repr__,
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One forward step: how it called the model, and the loss function that it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_func: Callable[..., Any] | None

    def arguments(self, where: str) -> dict[str, Any]:
        """Those of `GPTModel.forward` that are not None; ValueError where one of them has no place here."""
        try:
            bound = _FORWARD.bind(None, *self.args, **self.kwargs)
        except TypeError as error:
            raise ValueError(
                f"{where}: the model is called in another way than GPTModel.forward ({error}); {ADAPTER}."
            ) from error
        given = {name: value for name, value in bound.arguments.items() if name != "self" and value is not None}
        for name in given:
            if name not in (*_READ, *_WITHOUT_EFFECT):
                raise ValueError(
                    f"{where}: the model is called with {name}, which prefix reuse does not have; leave it out, or {ADAPTER}."
                )
        return given


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], Placeholder]] = []

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Placeholder:
        tokens = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), torch.zeros(1, 1))
        output = torch.zeros((), device=tokens.device).expand(tokens.shape).as_subclass(Placeholder)
        self.calls.append((args, kwargs, output))
        return output


class _StandIn:
    """Answers like the model, wrappers included, but records calls."""

    def __init__(self, model: Any, recorder: _Recorder) -> None:
        self._model = model
        self._recorder = recorder

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Frameworks unwrap a model by what `isinstance` says of it.
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        return _StandIn(value, self._recorder) if name == "module" else value

    def __call__(self, *args: Any, **kwargs: Any) -> Placeholder:
        return self._recorder.call(args, kwargs)

    forward = __call__


def record(
    forward_step_func: Callable[..., Any], data_iterator: Any, model: Any, num_microbatches: int
) -> tuple[Recording, ...]:
    """The forward steps of the microbatches of one model chunk.

    ValueError where one does not hand on the model's output, or refills tensors that an earlier one has handed out.
    """
    recordings: list[Recording] = []
    untouched: list[Untouched] = []
    data_iterator = own_items(data_iterator)
    for number in range(num_microbatches):
        recorder = _Recorder()
        output, loss_func = forward_step_func(data_iterator, _StandIn(model, recorder))
        where = f"Microbatch {number}"
        if len(recorder.calls) != 1:
            raise ValueError(
                f"{where}: the forward step called the model {len(recorder.calls)} times, expected once; {ADAPTER}."
            )
        ((args, kwargs, placeholder),) = recorder.calls
        if output is not placeholder:
            raise ValueError(
                f"{where}: the forward step returns a {type(output).__name__} in place of the model's output. Return the output "
                f"as it is and change it in the loss function, or {ADAPTER}."
            )
        recordings.append(Recording(args, kwargs, loss_func))
        untouched.append(Untouched({"the model": (args, kwargs), "the loss function": loss_func}))
    for number, of_step in enumerate(untouched):
        if (holder := of_step.changed()) is not None:
            raise ValueError(
                f"Microbatch {number}: a tensor that the forward step gave to {holder} was written to by a later forward step, but all "
                f"microbatches are read before the first one runs. Use new tensors for each microbatch, or {ADAPTER}."
            )
    return tuple(recordings)


def replay(recordings: Iterator[Recording], model: Any) -> tuple[Any, Callable[..., Any] | None]:
    """A forward step for Megatron's own schedules, whose data are recordings."""
    recording = next(recordings)
    return model(*recording.args, **recording.kwargs), recording.loss_func


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one pipeline stage knows of a microbatch, in host memory; None where it was told nothing.

    tokens, labels: int [b, s]. loss_mask: bool [b, s]. starts, lengths: int [sequences], of packed sequences in the only row.
    num_causal: int [b], so many leading positions of each row see what comes before them and nothing else.
    num_counted: int [b], so many leading positions are numbered 0, 1, 2 ...
    """

    tokens: np.ndarray | None = None
    labels: np.ndarray | None = None
    loss_mask: np.ndarray | None = None
    starts: np.ndarray | None = None
    lengths: np.ndarray | None = None
    num_causal: np.ndarray | None = None
    num_counted: np.ndarray | None = None

    @classmethod
    def of(cls, recording: Recording, where: str) -> Part:
        given = recording.arguments(where)
        packed = given.get("packed_seq_params")
        if packed is not None and packed.qkv_format not in ("thd", "sbhd", None):
            raise ValueError(
                f"{where}: packed_seq_params has the format {packed.qkv_format!r}, expected 'thd'; {ADAPTER}."
            )
        starts = lengths = None
        if packed is not None and packed.qkv_format == "thd":
            starts, lengths = _packed_bounds(packed, where)
        part = cls(_integers(given.get("input_ids")), _integers(given.get("labels")), None, starts, lengths)
        if (mask := given.get("loss_mask")) is not None:
            part = replace(part, loss_mask=_integers(mask != 0).astype(bool))
        if starts is not None:
            # Packed attention is causal in each sequence whatever the mask, and rotary positions restart whatever the ids.
            return part
        if (mask := given.get("attention_mask")) is not None:
            part = replace(part, num_causal=_num_causal(mask, where))
        if (positions := given.get("position_ids")) is not None:
            positions = torch.atleast_2d(positions)
            counted = positions == torch.arange(positions.shape[-1], device=positions.device)
            part = replace(part, num_counted=_num_leading(counted))
        return part


def merged(parts: Iterable[Part]) -> Part:
    """What several stages know of one microbatch."""
    known: dict[str, Any] = {}
    for part in parts:
        for field in fields(Part):
            value = getattr(part, field.name)
            if value is not None:
                known.setdefault(field.name, value)
    return Part(**known)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The sequences of one microbatch.

    shape: (b, s) of the model's output. places: flat places in it of all positions of all sequences, in order.
    scored: bool [b * s], places of scored positions.
    """

    sequences: tuple[SequenceInput, ...]
    shape: tuple[int, int]
    places: np.ndarray
    scored: np.ndarray

    @property
    def num_tokens(self) -> int:
        """What the framework runs, padding included."""
        return self.shape[0] * self.shape[1]


def read(part: Part, where: str, *, training: bool) -> Reading:
    """Sequences of a microbatch all of whose parts are known; ValueError where there is something that reuse does not have.

    training: what the loss reads shows in its gradient later. Otherwise labels that are not the next token are refused here.
    """
    if part.tokens is None or part.labels is None:
        missing = "input_ids" if part.tokens is None else "labels"
        raise ValueError(
            f"{where}: the model is called without {missing} on every pipeline stage, expected input_ids and labels. Pass labels, "
            f"so that the model returns the loss of each position, or {ADAPTER}."
        )
    if part.tokens.shape != part.labels.shape:
        raise ValueError(
            f"{where}: input_ids have the shape {list(part.tokens.shape)} and labels {list(part.labels.shape)}, expected one shape."
        )
    if part.labels.ndim != 2:
        raise ValueError(
            f"{where}: input_ids and labels have the shape {list(part.labels.shape)}, expected [batch, sequence]. Add a dimension of 1 "
            "in front for a single row."
        )
    rows, width = part.labels.shape
    if part.loss_mask is not None and part.loss_mask.shape not in ((rows, width), (rows * width,)):
        raise ValueError(
            f"{where}: loss_mask has the shape {list(part.loss_mask.shape)}, expected that of the labels, {[rows, width]}: entry t says "
            "whether the loss reads label t."
        )
    if part.starts is None:
        starts, lengths = np.arange(rows) * width, np.full(rows, width)
    else:
        assert part.lengths is not None
        starts, lengths = part.starts, part.lengths
        if rows != 1 or (starts + lengths > width).any():
            raise ValueError(
                f"{where}: packed sequences end at {int((starts + lengths).max(initial=0))}, but the tokens have the shape "
                f"[{rows}, {width}], expected one row that holds them all."
            )
    wanted = part.labels.reshape(-1) >= 0
    if part.loss_mask is not None:
        wanted &= part.loss_mask.reshape(-1)
    scored = np.zeros(rows * width, bool)
    sequences, places = [], []
    for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        span = slice(start, start + length)
        row = _Row(part.tokens.reshape(-1)[span], part.labels.reshape(-1)[span], wanted[span])
        if not training and part.loss_mask is None and not row.labels_follow:
            raise ValueError(
                f"{where}, sequence {number}: labels are not the tokens that follow, and no loss_mask says which of them are read. "
                f"Pass loss_mask to the model, or {ADAPTER}."
            )
        _check_row(part, number, row.num_positions, where)
        try:
            sequences.append(row.sequence())
        except TrajectoryError as error:
            raise error.at(f"{where}, sequence {number}", "input_ids") from error
        scored[span] = row.scored
        places.append(np.arange(start, start + row.num_positions))
    return Reading(tuple(sequences), (rows, width), np.concatenate([np.zeros(0, np.int64), *places]), scored)


class _Row:
    """One sequence: tokens, labels and what may be read of them, each [s]."""

    def __init__(self, tokens: np.ndarray, labels: np.ndarray, wanted: np.ndarray) -> None:
        self.tokens = tokens
        self.labels = labels
        follows = np.ones(len(tokens), bool)
        follows[:-1] = labels[:-1] == tokens[1:]
        # The last label that is read ends the sequence, whatever token stands there: nothing that is read sees it.
        follows[wanted.nonzero()[0][-1:]] = True
        self.labels_follow = bool((follows | ~wanted).all())
        self.scored = wanted & follows

    @property
    def num_positions(self) -> int:
        """Up to the last that is scored: nothing sees what comes later."""
        return int(self.scored.nonzero()[0].max(initial=-1)) + 1

    def sequence(self) -> SequenceInput:
        n = self.num_positions
        if n == 0:
            return SequenceInput(self.tokens[:1] if len(self.tokens) else np.zeros(1, np.int64), np.zeros(1, bool))
        scored = np.concatenate([[False], self.scored[:n]])
        return SequenceInput(np.append(self.tokens[:n], self.labels[n - 1]), scored)


def _check_row(part: Part, row: int, num_positions: int, where: str) -> None:
    if part.num_causal is not None and part.num_causal[min(row, len(part.num_causal) - 1)] < num_positions:
        raise ValueError(
            f"{where}, row {row}: the attention mask is not causal over the {num_positions} positions that are read, expected "
            f"True above the diagonal and False elsewhere. Pad on the right and pack with packed_seq_params, or {ADAPTER}."
        )
    if part.num_counted is not None and part.num_counted[min(row, len(part.num_counted) - 1)] < num_positions:
        raise ValueError(
            f"{where}, row {row}: position_ids are not 0, 1, 2 ... over the {num_positions} positions that are read. Pad on the "
            f"right and pack with packed_seq_params, or {ADAPTER}."
        )


class TokenLosses:
    """Makes the model's output for labels out of log-probabilities.

    reading: of the microbatch. where: names it in errors.
    """

    def __init__(self, reading: Reading, where: str, device: torch.device) -> None:
        self._reading = reading
        self._where = where
        self._places = torch.from_numpy(reading.places).to(device)
        self._unscored = torch.from_numpy(~reading.scored).to(device)

    def __call__(self, logprobs: Sequence[Tensor]) -> Tensor:
        """Losses [b, s] from the log-probabilities of each sequence, [n] with those of token t in entry t."""
        values = torch.cat([torch.zeros(0, device=self._places.device), *(entries[1:] for entries in logprobs)])
        rows, width = self._reading.shape
        losses = values.new_zeros(rows * width).index_copy(0, self._places, -values).view(rows, width)
        if losses.requires_grad:
            losses.register_hook(self._check)
        return losses

    def _check(self, gradient: Tensor) -> None:
        read = (gradient.reshape(-1) != 0) & ~gradient.reshape(-1).isnan() & self._unscored
        if read.any():
            row, position = divmod(int(read.nonzero()[0]), self._reading.shape[1])
            raise ValueError(
                f"{self._where}: the loss reads row {row}, position {position}, whose label is not the token that follows, or which "
                "the loss_mask given to the model leaves out. Pass the mask that the loss goes by to the model as loss_mask=, so that "
                f"rows end where it does; where a label in the middle of a row is another token, {ADAPTER}."
            )


def _integers(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().cpu().numpy().astype(np.int64)


def _num_leading(holds: Tensor) -> np.ndarray:
    """Number of leading True of each row, int [b], of bool [b, s]."""
    return holds.long().cumprod(-1).sum(-1).cpu().numpy()


def _num_causal(mask: Tensor, where: str) -> np.ndarray:
    """Of a mask [1 or b, 1, s, s] that is True where attention is off."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        raise ValueError(
            f"{where}: attention_mask is {mask.dtype} of shape {list(mask.shape)}, expected bool [b, 1, s, s], True where attention is "
            f"off, or None; {ADAPTER}."
        )
    causal = torch.ones_like(mask[0, 0]).triu(1)
    wrong = mask[:, 0] ^ causal
    return _num_leading(~(wrong.tril().any(2) | wrong.triu().any(1)))


def _packed_bounds(packed: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """First places and lengths of packed sequences."""
    lengths = np.diff(_integers(packed.cu_seqlens_q))
    bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    keys = packed.cu_seqlens_kv
    if keys is not None and not np.array_equal(np.diff(_integers(keys)), lengths):
        raise ValueError(f"{where}: cu_seqlens_kv differ from cu_seqlens_q, expected self-attention; {ADAPTER}.")
    if (lengths < 0).any():
        raise ValueError(
            f"{where}: cu_seqlens_q fall from one entry to the next, expected the first places of sequences in order."
        )
    starts = _integers(bounds)[:-1]
    if (starts[1:] < (starts + lengths)[:-1]).any():
        raise ValueError(
            f"{where}: cu_seqlens_q_padded leave less room than cu_seqlens_q say; expected padding after each sequence."
        )
    return starts, lengths

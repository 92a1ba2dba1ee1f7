"""The two ways in which a framework's microbatches reach `drop_in.forward_backward`, seen alike.

An adapter reads them and calls the loss; without one they are found out by recording the framework's own forward step. Either
way a step is a list of loss calls, and the framework's own schedule can still be run on the very same microbatches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.prefixflow.adapter import MicrobatchAdapter, SequenceInput, SequenceScores
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.items import own_items
from megatron.prefixflow.recording import (
    ADAPTER,
    Part,
    Reading,
    Recording,
    TokenLosses,
    merged,
    read,
    record,
    replay,
)

LossFunction = Callable[..., Any]
KeepRoutes = Callable[[Sequence[Sequence[np.ndarray]]], None]


@dataclass(frozen=True, slots=True, eq=False)
class LossCall:
    """One call of the framework's loss function.

    sequences: whose log-probabilities it takes. forward(logprobs, entropies): what Megatron's forward step returns on the last
    pipeline stage, the model's output and the loss function that takes it.
    """

    sequences: tuple[SequenceInput, ...]
    forward: Callable[[Sequence[Tensor], Sequence[Tensor] | None], tuple[Tensor, LossFunction | None]]


class Door(Protocol):
    """The microbatches of one step.

    needs_entropy: whether a loss reads entropies. num_tokens: of the largest microbatch, as the framework runs it.
    loss_calls: on every rank of a model the same sequences; `forward` works on the last stage.
    keep_routes: takes the routes of a pass, by model chunk of this rank and sequence; None does not want them.
    """

    needs_entropy: bool
    num_tokens: int
    loss_calls: tuple[LossCall, ...]
    keep_routes: KeepRoutes | None

    def again(self) -> tuple[Callable[..., Any], Any]:
        """Forward step and data iterators that hand Megatron's schedules these microbatches; may be asked several times."""
        ...


@dataclass(frozen=True, slots=True)
class Chunks:
    """Model chunks as the caller gave them, each with its data iterator.

    is_list: whether Megatron's schedule wants lists.
    """

    models: tuple[Any, ...]
    iterators: tuple[Any, ...]
    is_list: bool

    @classmethod
    def of(cls, model: Any, data_iterator: Any) -> Chunks:
        """ValueError unless there is one iterator for each chunk."""
        is_list = isinstance(model, list)
        models = tuple(model) if is_list else (model,)
        iterators = tuple(data_iterator) if isinstance(data_iterator, list) else (data_iterator,)
        if len(iterators) != len(models):
            raise ValueError(
                f"forward_backward: {len(models)} model chunks and {len(iterators)} data iterators, expected a list with one for each."
            )
        return cls(models, iterators, is_list and len(models) > 1)

    def given(self, iterators: Sequence[Any]) -> Any:
        return list(iterators) if self.is_list else iterators[0]


class AdapterDoor:
    """Microbatches are the items of the first chunk's iterator."""

    def __init__(
        self, adapter: MicrobatchAdapter, forward_step_func: Callable[..., Any], chunks: Chunks, num_microbatches: int
    ) -> None:
        if any(iterator is None for iterator in chunks.iterators):
            raise ValueError(
                "forward_backward: a data iterator is None, but an adapter reads the microbatches on every rank of a model. Give "
                "all of them the data."
            )
        self.needs_entropy = adapter.needs_entropy
        self.keep_routes = getattr(adapter, "keep_routes", None)
        self._adapter = adapter
        self._forward_step_func = forward_step_func
        self._chunks = chunks
        self._items = [
            [next(iterator) for _ in range(num_microbatches)] for iterator in map(own_items, chunks.iterators)
        ]
        # Of an adapter that can do with less than a microbatch at once.
        parts_of = getattr(adapter, "loss_calls", lambda microbatch: (microbatch,))
        calls, sizes = [], [0]
        for microbatch in self._items[0]:
            own = [self._loss_call(part) for part in parts_of(microbatch)]
            sizes.append(sum(len(s.tokens) for call in own for s in call.sequences))
            calls += own
        self.loss_calls = tuple(calls)
        self.num_tokens = max(sizes)

    def again(self) -> tuple[Callable[..., Any], Any]:
        return self._forward_step_func, self._chunks.given([map(_own_copy, items) for items in self._items])

    def _loss_call(self, part: Any) -> LossCall:
        return LossCall(tuple(self._adapter.sequences(part)), partial(self._forward, part))

    def _forward(
        self, part: Any, logprobs: Sequence[Tensor], entropies: Sequence[Tensor] | None
    ) -> tuple[Tensor, LossFunction]:
        entropy_of = entropies if entropies is not None else [None] * len(logprobs)
        scores = tuple(SequenceScores(*pair) for pair in zip(logprobs, entropy_of, strict=True))

        def loss_func(_: Tensor, **kwargs: Any) -> Any:
            return self._adapter.loss(part, scores, **kwargs)

        return torch.zeros((), device=logprobs[0].device if logprobs else None), loss_func


class RecordingDoor:
    """Microbatches are what the framework's forward step does with a stand-in for the model; collective over the pipeline."""

    def __init__(
        self,
        forward_step_func: Callable[..., Any],
        chunks: Chunks,
        num_microbatches: int,
        groups: Groups,
        device: torch.device,
        *,
        training: bool,
    ) -> None:
        if groups.context.size() > 1:
            raise ValueError(
                f"forward_backward: with context parallelism each rank's forward step sees a part of each sequence; {ADAPTER}."
            )
        self.needs_entropy = False
        self.keep_routes: KeepRoutes | None = None
        self._chunks = chunks
        self._device = device
        self._recordings: list[tuple[Recording, ...]] = []
        parts = _known_to_all(partial(self._record, forward_step_func, num_microbatches), groups.pipeline)
        readings = [read(part, f"Microbatch {number}", training=training) for number, part in enumerate(parts)]
        self.loss_calls = tuple(self._loss_call(number, reading) for number, reading in enumerate(readings))
        self.num_tokens = max((reading.num_tokens for reading in readings), default=0)

    def again(self) -> tuple[Callable[..., Any], Any]:
        return replay, self._chunks.given([iter(recordings) for recordings in self._recordings])

    def _record(self, forward_step_func: Callable[..., Any], num_microbatches: int) -> list[Part]:
        """What the chunks of this rank are told about each microbatch."""
        self._recordings = [
            record(forward_step_func, iterator, model, num_microbatches)
            for iterator, model in zip(self._chunks.iterators, self._chunks.models, strict=True)
        ]
        return [
            merged(Part.of(recording, f"Microbatch {number}") for recording in of_chunks)
            for number, of_chunks in enumerate(zip(*self._recordings, strict=True))
        ]

    def _loss_call(self, number: int, reading: Reading) -> LossCall:
        # The last chunk of the last stage has the loss.
        return LossCall(reading.sequences, partial(self._forward, number, self._recordings[-1][number], reading))

    def _forward(
        self,
        number: int,
        recording: Recording,
        reading: Reading,
        logprobs: Sequence[Tensor],
        entropies: Sequence[Tensor] | None,
    ) -> tuple[Tensor, LossFunction | None]:
        losses = TokenLosses(reading, f"Microbatch {number}", self._device)
        return losses(logprobs), recording.loss_func


def _known_to_all(own: Callable[[], list[Part]], pipeline: dist.ProcessGroup) -> list[Part]:
    """What the stages know of each microbatch, put together; what one of them refuses, all refuse."""
    if pipeline.size() == 1:
        return own()
    told: list[Any] = [None] * pipeline.size()
    try:
        mine: list[Part] | str = own()
    except ValueError as error:
        mine = str(error)
    dist.all_gather_object(told, mine, group=pipeline)
    for stage, answer in enumerate(told):
        if isinstance(answer, str):
            raise ValueError(f"Pipeline rank {stage}: {answer}")
    return [merged(of_stages) for of_stages in zip(*told, strict=True)]


def open_door(
    adapter: MicrobatchAdapter | None,
    forward_step_func: Callable[..., Any],
    chunks: Chunks,
    num_microbatches: int,
    groups: Groups,
    device: torch.device,
    *,
    training: bool,
) -> Door:
    """Read the microbatches of a step; ValueError where one holds what prefix reuse does not have."""
    if adapter is not None:
        return AdapterDoor(adapter, forward_step_func, chunks, num_microbatches)
    return RecordingDoor(forward_step_func, chunks, num_microbatches, groups, device, training=training)


def _own_copy(item: Any) -> Any:
    """A microbatch that a forward step may take apart."""
    return copy.copy(item) if isinstance(item, MutableMapping) else item

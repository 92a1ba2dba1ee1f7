"""Comparison of a pass with a dense pass over the same trajectories on the same ranks: gradients by parameter.

Steps: (1) one pass runs, and its gradients are copied to the host; (2) gradients and buffers are put back as they were, so that
the passes start alike; (3) the other pass runs, and `compare_gradients` compares what it left with the copy.

Invariants:

1. A copy lives in host memory: it takes as many bytes as the gradients that this rank holds, and no device memory beyond one
   parameter at a time.
2. Errors are those of the whole model and the same on all ranks, so all of them come to the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.prefixflow.experts import is_expert
from megatron.prefixflow.gradients import square_sum
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.shards import global_parameters

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative gradient error of a parameter."""
TOLERANCE_MOE = {torch.float64: 1e-6, torch.float32: 1e-5}
"""With experts: Megatron's router rounds scores to float32 (docs/numerics.md)."""
TOLERANCE_TOTAL = 0.1
"""In bfloat16, of all gradients at once (docs/numerics.md)."""


Named = Sequence[tuple[str, Tensor | None]]
"""Gradients by name in the whole model, always in the same order on a rank; None stands for zero."""


def local_gradients(chunks: Sequence[Any]) -> Named:
    """Gradients as they are on this rank, not yet reduced: `main_grad` where DDP made one, else `grad`.

    chunks: bare `GPTModel`s.
    """
    return [(name, _gradient(parameter)) for chunk in chunks for name, parameter in global_parameters(chunk)]


@torch.no_grad()
def summed_gradients(chunks: Sequence[Any], groups: Groups) -> Iterator[tuple[str, Tensor | None]]:
    """Local gradients, not yet reduced over data-parallel ranks, that two passes over the same trajectories can be compared by.

    Ranks that share sequences (tensor-parallel ones under sequence parallelism, context-parallel ones) each have the gradients of the
    positions that they ran, and another pass may deal positions otherwise: so these are summed. Collective.

    chunks: bare `GPTModel`s.
    """
    for chunk in chunks:
        for name, parameter in global_parameters(chunk):
            gradient = _gradient(parameter)
            for group in _sharing(chunk.config, parameter, groups):
                gradient = torch.zeros_like(parameter) if gradient is None else gradient.clone()
                dist.all_reduce(gradient, group=group)
            yield name, gradient


def _sharing(config: Any, parameter: torch.nn.Parameter, groups: Groups) -> Iterator[dist.ProcessGroup]:
    """Groups whose ranks each have a part of a gradient."""
    if is_expert(parameter):
        # These hold copies of one expert; which of them runs a position depends on the rank that has it.
        wanted = [groups.expert_data] if groups.context.size() > 1 else []
    else:
        wanted = [groups.context]
        if config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
            wanted.append(groups.tensor)
    yield from (group for group in wanted if group.size() > 1)


def copied(gradients: Iterable[tuple[str, Tensor | None]]) -> Named:
    """A copy on the host."""
    return [(name, _to_host(gradient)) for name, gradient in gradients]


def _gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _to_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


class Snapshot:
    """Gradients and buffers of model chunks at one time, on the host.

    Buffers count because routers count in them (`local_tokens_per_expert`) and keep their biases there.

    chunks: bare `GPTModel`s. with_gradients: False leaves gradients alone, also in `restore`.
    gradients (attribute): what `compare_gradients` takes.
    """

    def __init__(self, chunks: Sequence[Any], *, with_gradients: bool = True) -> None:
        self._parameters = [p for c in chunks for _, p in global_parameters(c)] if with_gradients else []
        self.gradients: Named = copied(local_gradients(chunks)) if with_gradients else []
        self._buffers = [(b, b.detach().to("cpu", copy=True)) for chunk in chunks for b in chunk.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place where there is a tensor to write to."""
        for parameter, (_, saved) in zip(self._parameters, self.gradients, strict=True):
            present = _gradient(parameter)
            if present is None:
                parameter.grad = None if saved is None else saved.to(parameter.device, copy=True)
            elif saved is None:
                parameter.grad = None
            else:
                present.copy_(saved)
        for buffer, saved in self._buffers:
            buffer.copy_(saved)


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """How far gradients are from expected ones, in the whole model.

    by_name: ||g - g_ref|| / max(||g_ref||, 1e-6 * global norm / sqrt(number of parameters)) of each parameter, in forward
        order; inf where it is not a number. total: ||g - g_ref|| / ||g_ref|| of all gradients at once.
    """

    by_name: Mapping[str, float]
    total: float

    @property
    def worst(self) -> str:
        """Name of the parameter with the largest error; empty in a model without parameters."""
        return max(self.by_name, key=self.by_name.__getitem__, default="")

    @property
    def largest(self) -> float:
        return max(self.by_name.values(), default=0.0)

    def judged(self, dtype: torch.dtype) -> float:
        """The error that `problem` goes by: of the worst parameter, in bfloat16 of all at once."""
        return self.largest if dtype in TOLERANCE else self.total

    def problem(self, dtype: torch.dtype, *, has_experts: bool) -> str | None:
        """What is wrong, for a sentence that goes on; None where the errors are within the limits of `dtype`."""
        limit = gradient_limit(dtype, has_experts=has_experts)
        if dtype not in TOLERANCE:
            if self.total <= limit:
                return None
            return (
                f"the gradients differ by {self.total:.3g} of their norm, limit {limit:g}; most in {self.worst}, by "
                f"{self.largest:.3g} of its own"
            )
        beyond = [name for name, error in self.by_name.items() if not error <= limit]
        if not beyond:
            return None
        return (
            f"the gradient of {self.worst} differs by {self.largest:.3g} of its norm, limit {limit:g}; the first parameter in "
            f"forward order that differs is {beyond[0]}"
        )


def gradient_limit(dtype: torch.dtype, *, has_experts: bool) -> float:
    """What `GradientErrors.judged` may be at most."""
    return (TOLERANCE_MOE if has_experts else TOLERANCE).get(dtype, TOLERANCE_TOTAL)


@torch.no_grad()
def compare_gradients(
    ours: Iterable[tuple[str, Tensor | None]], expected: Named, group: dist.ProcessGroup | None = None
) -> GradientErrors:
    """Compare gradients of this and all other ranks of `group` (the world); collective.

    Shards of a parameter count once, copies of it alike: so copies must be equally many for all its shards.

    expected: in the order of `ours`, wherever it is kept.
    """
    names, sums = [], []
    for (name, gradient), (expected_name, reference) in zip(ours, expected, strict=True):
        assert name == expected_name, f"gradient of {name} against that of {expected_name}"
        names.append(name)
        sums.append(_squares(gradient, reference))
    mine = list(zip(names, torch.stack(sums).tolist() if sums else [], strict=True))
    everyone: list[list[tuple[str, list[float]]]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    totals: dict[str, tuple[float, float]] = {}
    for name, (difference, norm) in (pair for part in everyone for pair in part):
        before = totals.get(name, (0.0, 0.0))
        totals[name] = before[0] + difference, before[1] + norm
    return _errors(totals)


def _squares(gradient: Tensor | None, reference: Tensor | None) -> Tensor:
    """Square sums, float64 [2], of the difference and of the reference."""
    if gradient is None and reference is None:
        return torch.zeros(2, dtype=torch.float64)
    like = reference if gradient is None else gradient
    assert like is not None
    got = torch.zeros_like(like) if gradient is None else gradient
    wanted = torch.zeros_like(like) if reference is None else reference.to(like.device)
    if like.dtype not in (torch.float64, torch.float32):
        got, wanted = got.float(), wanted.float()
    return torch.stack([square_sum(got - wanted), square_sum(wanted)]).cpu()


def _errors(squares: Mapping[str, tuple[float, float]]) -> GradientErrors:
    """squares: of the difference and of the reference, by name."""
    names = sorted(squares, key=forward_place)
    norm = math.sqrt(sum(reference for _, reference in squares.values()))
    floor = 1e-6 * norm / math.sqrt(max(len(squares), 1))
    distance = math.sqrt(sum(difference for difference, _ in squares.values()))
    by_name = {name: _relative(math.sqrt(squares[name][0]), max(math.sqrt(squares[name][1]), floor)) for name in names}
    return GradientErrors(by_name, _relative(distance, norm))


def _relative(difference: float, scale: float) -> float:
    error = difference / scale if scale else difference
    return math.inf if math.isnan(error) else error


def forward_place(name: str) -> tuple[int, int, str]:
    """Order of parameters in a forward: embedding, layers by number, final norm, LM head."""
    parts = name.split(".")
    if name.startswith("embedding"):
        return (0, 0, name)
    if "layers" in parts:
        return (1, int(parts[parts.index("layers") + 1]), name)
    return (2 if "final" in name else 3, 0, name)

"""Live tensor bytes, measured by watching allocations, on any device.

A process's resident set says little about a small model on the CPU, where torch's allocator gives pages back when it
likes. `LiveBytes` counts the storages that operations create while it is active, and forgets each when it dies. It slows
every operation down: measure time in another run. Copies in the host arena are out of its sight (`prefixflow.runtime.host`).

What a storage belongs to is said by whoever makes it (`allocating`); the K/V cache, whose tensors may share memory with a
graph, is asked for its own counts (`held`). The rest are activations, temporaries of operations among them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from prefixflow.schedule.memory import Holder

_holder: ContextVar[Holder] = ContextVar("holder", default=Holder.ACTIVATIONS)


@contextlib.contextmanager
def allocating(holder: Holder) -> Iterator[None]:
    """What is allocated inside belongs to `holder`."""
    token = _holder.set(holder)
    try:
        yield
    finally:
        _holder.reset(token)


class MemoryBudgetError(RuntimeError):
    """Tensors would take more than they may."""


class LiveBytes(TorchDispatchMode):
    """Context in which `now` and `peak` are the bytes of tensors created inside it and still alive.

    at_peak: what they belonged to when `peak` was reached. held: counts of what knows its own bytes, by holder; they are taken
    out of the activations. budget_bytes: MemoryBudgetError by the operation that exceeds it; None for no limit.

    Also counted inside autograd functions and backward, which run on the calling thread on the CPU. Memory that a kernel
    takes and returns inside one operation is not seen. Source of the idea: `torch.distributed._tools.mem_tracker`.
    """

    def __init__(
        self, *, held: Mapping[Holder, Callable[[], int]] | None = None, budget_bytes: int | None = None
    ) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.at_peak: dict[Holder, int] = {}
        self._held = held or {}
        self._budget_bytes = budget_bytes
        self._by_holder: Counter[Holder] = Counter()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        self.peak = 0
        self._look()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {s._cdata for s in _storages((args, kwargs or {}))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            # A view, or an operation in place, of something made before this context is no allocation.
            if storage._cdata not in before and storage._cdata not in self._live:
                self._add(storage)
        self._look()
        if self._budget_bytes is not None and self.now > self._budget_bytes:
            raise MemoryBudgetError(
                f"{function}: live tensors take {self.now:,} bytes, {self.now - self._budget_bytes:,} more than the budget of "
                f"{self._budget_bytes:,}. Lower --max-tokens-per-microbatch, or take --prefix-memory offload or recompute."
            )
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes, holder = storage._cdata, storage.nbytes(), _holder.get()
        # The storage's own address is given out again when it has died.
        self._live[key] = weakref.ref(storage, partial(self._forget, key, num_bytes, holder))
        self.now += num_bytes
        self._by_holder[holder] += num_bytes

    def _forget(self, key: int, num_bytes: int, holder: Holder, _: object) -> None:
        del self._live[key]
        self.now -= num_bytes
        self._by_holder[holder] -= num_bytes

    def _look(self) -> None:
        if self.now <= self.peak:
            return
        self.peak = self.now
        held = {holder: count() for holder, count in self._held.items()}
        self.at_peak = {**self._by_holder, **held}
        self.at_peak[Holder.ACTIVATIONS] = self.now - sum(
            size for holder, size in self.at_peak.items() if holder is not Holder.ACTIVATIONS
        )


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_iter(tree) if isinstance(x, torch.Tensor)]

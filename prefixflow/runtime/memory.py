"""Live tensor bytes, measured by watching allocations, on any device.

A process's resident set says little about a small model on the CPU, where torch's allocator gives pages back when it
likes. `LiveBytes` counts the storages that operations create while it is active, and forgets each when it dies. It slows
every operation down: measure time in another run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Context in which `now` and `peak` are the bytes of tensors created inside it and still alive.

    Also counted inside autograd functions and backward, which run on the calling thread on the CPU. Memory that a kernel
    takes and returns inside one operation is not seen. Source of the idea: `torch.distributed._tools.mem_tracker`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        """Bytes alive; forgets the storages that have died."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values())

    def reset_peak(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {s._cdata for s in _storages((args, kwargs or {}))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            # A view, or an operation in place, of something made before this context is no allocation.
            if storage._cdata not in before:
                reference = StorageWeakRef(storage)
                self._live[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_iter(tree) if isinstance(x, torch.Tensor)]

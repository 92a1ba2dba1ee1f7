"""The saved tensors of a microbatch's graph in host memory, from its forward to its backward.

Strategy. Autograd hands over what a forward saves as it is saved, and asks for it as the backward reaches it: a storage
goes to the `HostArena` at the first and comes back at the second, so that the backward of an offloaded microbatch, too, has
a few of its tensors on the device at a time. It takes storages in about the reverse of the order in which they were saved:
on a GPU the next few are on their way while it works (`fetch` starts the first).

Invariants
1. A storage that several operations saved, or of which they saved views, goes out once and comes back once. It leaves the
   device when the last of them has let go of it.
2. Parameters never move.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from prefixflow.runtime.host import HostArena, HostTensor

STORAGES_AHEAD = 8
"""On their way back while a GPU works on those before: about what the attention or the MLP of one layer has saved."""


class _Parked:
    """One storage: `place` in the order of saving, in the arena until it is asked for, then `fetched` [num_bytes]."""

    def __init__(self, place: int, arena: HostArena, storage: Tensor) -> None:
        self.place = place
        self.fetched: Tensor | None = None
        self._arena = arena
        self._handle: HostTensor | None = arena.put(storage)

    def prefetch(self) -> None:
        if self._handle is not None:
            self._arena.prefetch(self._handle)

    def fetch(self) -> Tensor:
        if self._handle is not None:
            self.fetched, self._handle = self._arena.take(self._handle), None
        assert self.fetched is not None
        return self.fetched

    def __del__(self) -> None:
        # What saved it was dropped without a backward.
        if self._handle is not None:
            self._arena.discard(self._handle)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor: a view of a parked storage."""

    storage: _Parked
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """What the graph of one microbatch saves. Run its forward inside `saving()`; the backward needs nothing.

    staying: `data_ptr` of the storages that do not move, those of parameters.
    storages_ahead: how many are fetched before the backward asks for them.
    """

    def __init__(self, arena: HostArena, staying: Collection[int], *, storages_ahead: int = 0) -> None:
        self.storages_ahead = storages_ahead
        self._arena = arena
        self._staying = staying
        self._parked: list[weakref.ref[_Parked]] = []
        # By storage, while it lives: the version of its values, and where they are parked.
        self._places: dict[StorageWeakRef, tuple[int, weakref.ref[_Parked]]] = {}

    def saving(self) -> AbstractContextManager[None]:
        """Context of the forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def fetch(self) -> None:
        """Start to bring back what the backward asks for first."""
        self._prefetch_before(len(self._parked))

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in self._staying:
            return tensor
        # As a key it keeps the storage's address from being given to another one.
        key = StorageWeakRef(storage)
        version, known = self._places.get(key, (-1, None))
        parked = known() if known is not None and version == tensor._version else None
        if parked is None:
            parked = _Parked(len(self._parked), self._arena, _bytes_of(tensor))
            self._parked.append(weakref.ref(parked))
            self._places[key] = (tensor._version, weakref.ref(parked))
        return _Saved(parked, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        storage = saved.storage.fetch().untyped_storage()
        self._prefetch_before(saved.storage.place)
        with _disable_current_modes():
            view = torch.empty(0, dtype=saved.dtype, device=storage.device)
            return view.set_(storage, saved.offset, saved.size, saved.stride)

    def _prefetch_before(self, place: int) -> None:
        for reference in self._parked[max(0, place - self.storages_ahead) : place]:
            parked = reference()
            if parked is not None:
                parked.prefetch()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, [num_bytes] uint8."""
    with _disable_current_modes():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

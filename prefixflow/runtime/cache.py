"""K/V of shared segments and their gradients gK/gV, between the operations of one training step.

A *block* is one segment's keys and values in one layer. A microbatch that later microbatches read
writes its blocks in its forward; readers read them in forward and again in backward, and add to the
block's gradients; the writer's own backward takes the gradients and passes them on. Nothing here is
ordered: everything is keyed by (layer, block).

Under a budget a plan says which parts of a block leave the device (`prefixflow.schedule.residency`). K/V and gK/gV of a
block are two *entries*, each with all of its layers in one state:

    HERE       on the device
    EVICTED    on the host, until it is fetched
    ARRIVING   fetched: the copies back have begun, the first use waits for them
    STREAMED   on the host from the first write or sum to the end; whoever works on a layer has that layer
    DROPPED    K/V only: forgotten, until a recomputation has written every layer anew

Invariants
1. A block is written once and never after it was freed, a dropped one once more; what is stored is detached and owns its
   memory, so that the byte counts are exact. (A writer whose graph is kept may share that memory:
   freeing or evicting the block then frees nothing until its graph goes.)
2. Gradients are summed in float32, or in float64 for a float64 model, whatever the model's dtype.
3. No gradient is lost without a word: freeing a block whose gradient nobody took is an error.
4. What is not on the device is not used: whoever reads, adds to or takes an evicted entry, or reads a dropped one, runs
   before the plan has brought it back, and that is an error.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prefixflow.runtime.host import HostArena, HostTensor
from prefixflow.schedule.residency import Part

_NAMES = {Part.KEYS_VALUES: "K/V", Part.GRADIENTS: "gK/gV"}


class CacheError(RuntimeError):
    """An operation on the K/V cache that a correct schedule never makes."""


class DeviceBytes:
    """K/V and gK/gV on the device, of one cache or of all caches of one rank: now, and the most since `begin_step`."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def begin_step(self) -> None:
        self.peak_bytes = self.num_bytes


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """What the caches of one rank did in one pass; peak_bytes: most K/V and gK/gV on the device."""

    peak_bytes: int = 0
    num_evictions: int = 0
    num_fetches: int = 0
    num_recomputes: int = 0
    num_streams: int = 0

    @classmethod
    def of(cls, caches: Sequence[KVCache], device: DeviceBytes) -> CacheTotals:
        return cls(
            peak_bytes=device.peak_bytes,
            num_evictions=sum(cache.num_evictions for cache in caches),
            num_fetches=sum(cache.num_fetches for cache in caches),
            num_recomputes=sum(cache.num_recomputes for cache in caches),
            num_streams=sum(cache.num_streams for cache in caches),
        )


class _State(enum.Enum):
    HERE = enum.auto()
    EVICTED = enum.auto()
    ARRIVING = enum.auto()
    STREAMED = enum.auto()
    DROPPED = enum.auto()


@dataclass(slots=True)
class _Entry:
    """K/V or gK/gV of a block by layer: `here` on the device, `away` in host memory; `missing`: dropped layers.

    last_layer, step: where a streamed entry was last worked on, and in which direction operations go through its layers.
    """

    state: _State = _State.HERE
    here: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    away: dict[int, tuple[HostTensor, HostTensor]] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    last_layer: int | None = None
    step: int = 1

    def next_layer(self, layer: int) -> int:
        """The layer that comes after `layer`, to judge by the one before it."""
        if self.last_layer not in (None, layer):
            self.step = 1 if layer > self.last_layer else -1
        self.last_layer = layer
        return layer + self.step

    @property
    def layers(self) -> list[int]:
        return sorted(self.here.keys() | self.away.keys())

    @property
    def device_bytes(self) -> int:
        return sum(map(_num_bytes, self.here.values()))

    @property
    def handles(self) -> list[HostTensor]:
        return list(itertools.chain(*self.away.values()))

    @property
    def host_bytes(self) -> int:
        return sum(handle.num_bytes for handle in self.handles)


class KVCache:
    """Keys and values by (layer, block), with the gradients that readers add to them.

    Shapes: keys and values [T, n_kv, d] with T the block's number of tokens. Not thread-safe.

    arena: host memory; device: the account of what is on the device. Caches of one rank share both; the defaults are its own.
    kv_bytes, gradient_bytes, their peaks and peak_bytes, of both together, are of the device; host_bytes of this cache's part of
    the arena. prefetches: whether the next layer of a streamed entry is on its way while one is worked on: not where both
    memories are the same, since a copy holds up the work there. num_evictions, num_fetches and num_streams count entries, num_recomputes dropped blocks written anew.
    """

    def __init__(
        self, arena: HostArena | None = None, device: DeviceBytes | None = None, *, prefetches: bool = False
    ) -> None:
        self.arena = arena or HostArena()
        self.prefetches = prefetches
        self._device = device or DeviceBytes()
        self._entries: dict[tuple[int, Part], _Entry] = {}
        self._freed: set[int] = set()
        self.num_writes = 0
        self.num_reads = 0
        self.num_gradient_adds = 0
        self.num_evictions = self.num_fetches = self.num_recomputes = self.num_streams = 0
        self.kv_bytes = 0
        self.gradient_bytes = 0
        self.host_bytes = 0
        self.peak_kv_bytes = 0
        self.peak_gradient_bytes = 0
        self.peak_bytes = 0
        self.peak_host_bytes = 0

    @property
    def live_blocks(self) -> tuple[int, ...]:
        """Blocks whose keys and values or gradients are wanted, wherever they are, ascending."""
        return tuple(sorted({block for block, _ in self._entries}))

    @property
    def dropped_blocks(self) -> frozenset[int]:
        """Blocks whose keys and values must be written anew before they are read."""
        return frozenset(block for (block, _), entry in self._entries.items() if entry.state is _State.DROPPED)

    def write(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        """Store k and v ([T, n_kv, d]) detached; a tensor that shares its memory is copied.

        Raises CacheError for a block that was freed or a layer that is already written.
        """
        if block in self._freed:
            raise CacheError(
                f"write of block {block}, layer {layer}: the block was freed earlier in this step; "
                "a recomputation must run with operation BACKWARD so that it stores nothing"
            )
        entry = self._entries.get((block, Part.KEYS_VALUES), _Entry())
        if layer in entry.layers or entry.state not in (_State.HERE, _State.STREAMED):
            raise CacheError(
                f"write of block {block}, layer {layer}: it is already written; a block is written "
                "once a step, and a recomputation must run with operation BACKWARD so that it "
                "stores nothing"
            )
        self._store(layer, block, k, v)

    def rewrite(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        """Store k and v ([T, n_kv, d]) of a dropped block again; CacheError for a block that is not dropped."""
        entry = self._entries.get((block, Part.KEYS_VALUES), _Entry())
        if layer not in entry.missing:
            raise CacheError(
                f"rewrite of block {block}, layer {layer}: expected a dropped block that lacks this layer, but "
                f"{f'its dropped layers are {sorted(entry.missing)}' if entry.missing else 'it is not dropped'}; only the "
                "recomputation of a dropped block's writer writes again"
            )
        self._store(layer, block, k, v)
        entry.missing.remove(layer)
        if not entry.missing:
            entry.state = _State.HERE
            self.num_recomputes += 1

    def read(self, layer: int, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of `blocks` joined along tokens in that order; no copy for one block on the device."""
        parts = [
            self._copied(layer, block)
            if self._is_streamed(block, Part.KEYS_VALUES)
            else self._stored(layer, block, "read")
            for block in blocks
        ]
        self.num_reads += 1
        if len(parts) == 1:
            return parts[0]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def add_gradient(self, layer: int, blocks: tuple[int, ...], dk: Tensor, dv: Tensor) -> None:
        """Add dk and dv ([sum of T, n_kv, d], in the order of `blocks`) to each block's gradients.

        The two tensors are the cache's from here on: the caller must not write to them again.
        """
        sizes = [self._num_tokens(layer, block) for block in blocks]
        if sum(sizes) != dk.shape[0] or dk.shape != dv.shape:
            raise CacheError(
                f"add_gradient to blocks {blocks}, layer {layer}: expected {sum(sizes)} tokens, "
                f"got dk {tuple(dk.shape)} and dv {tuple(dv.shape)}"
            )
        for block, part_k, part_v in zip(blocks, dk.split(sizes), dv.split(sizes), strict=True):
            self._add(layer, block, part_k, part_v)
        self.num_gradient_adds += 1

    def take_gradient(self, layer: int, block: int) -> tuple[Tensor, Tensor] | None:
        """Remove and return (gK, gV) of a block, None where no reader has added any."""
        entry = self._gradients(layer, block, "take_gradient")
        if entry is None:
            return None
        taken = self._take(layer, entry)
        if not entry.layers and entry.state is _State.HERE:
            del self._entries[block, Part.GRADIENTS]
        return taken

    def release(self, block: int) -> None:
        """Drop keys and values after their last read; gradients stay until the writer's backward has taken them."""
        entry = self._landed(block, Part.KEYS_VALUES)
        if entry is None or entry.state not in (_State.HERE, _State.STREAMED):
            raise CacheError(f"release of block {block}: {self._absence(block)}")
        self._count(Part.KEYS_VALUES, -entry.device_bytes)
        self._count_host(-entry.host_bytes)
        for handle in entry.handles:
            self.arena.discard(handle)
        del self._entries[block, Part.KEYS_VALUES]
        self._freed.add(block)

    def evict(self, block: int, part: Part) -> None:
        """Move an entry from the device to the host.

        Gradients that no reader has added to yet may be evicted: there is nothing to move, but they must be fetched too.
        """
        entry = self._landed(block, part)
        if entry is None and part is Part.GRADIENTS:
            entry = self._entries[block, part] = _Entry()
        if entry is None or entry.state is not _State.HERE:
            raise CacheError(f"evict of the {_NAMES[part]} of block {block}: {self._absence(block, part)}")
        self._count(part, -entry.device_bytes)
        entry.away = {
            layer: (self.arena.put(first), self.arena.put(second)) for layer, (first, second) in entry.here.items()
        }
        entry.here = {}
        entry.state = _State.EVICTED
        self._count_host(entry.host_bytes)
        self.num_evictions += 1

    def fetch(self, block: int, part: Part) -> None:
        """Bring an evicted entry back to the device: the copies begin now, and its first use waits for them."""
        entry = self._entries.get((block, part))
        if entry is None or entry.state is not _State.EVICTED:
            raise CacheError(
                f"fetch of the {_NAMES[part]} of block {block}: expected them on the host, where they are not; "
                "only what was evicted comes back, once"
            )
        for handle in entry.handles:
            self.arena.prefetch(handle)
        entry.state = _State.ARRIVING
        self._count(part, entry.host_bytes)
        self.num_fetches += 1

    def stream(self, block: int, part: Part) -> None:
        """Keep an entry on the host from its first write or sum to its end; CacheError where it has begun."""
        if (block, part) in self._entries:
            raise CacheError(
                f"stream of the {_NAMES[part]} of block {block}: expected an entry that has nothing yet, but it has begun; "
                "streaming starts before the operation that makes an entry"
            )
        self._entries[block, part] = _Entry(_State.STREAMED)
        self.num_streams += 1

    def drop(self, block: int) -> None:
        """Forget the keys and values of a block on the device; `rewrite` in all its layers brings them back."""
        entry = self._landed(block, Part.KEYS_VALUES)
        if entry is None or entry.state is not _State.HERE:
            raise CacheError(f"drop of the K/V of block {block}: {self._absence(block)}")
        self._count(Part.KEYS_VALUES, -entry.device_bytes)
        self._entries[block, Part.KEYS_VALUES] = _Entry(_State.DROPPED, missing=set(entry.here))

    def close(self, block: int) -> None:
        """The writer's backward is done: nothing of the block may be left, or gK/gV were lost."""
        gradients = self._entries.get((block, Part.GRADIENTS))
        if gradients is not None and gradients.state is _State.STREAMED and not gradients.away:
            del self._entries[block, Part.GRADIENTS]
        elif gradients is not None and gradients.state is _State.EVICTED:
            raise CacheError(f"close of block {block}: {self._absence(block, Part.GRADIENTS)}")
        if block in self.live_blocks:
            layers = gradients.layers if gradients is not None else []
            raise CacheError(
                f"close of block {block}: expected its readers done and its gradients taken, but "
                + (f"gradients of layers {layers} are left" if layers else "its K/V were not released")
                + "; a backward did not reach the K/V of every layer of the microbatch that wrote it"
            )

    def assert_empty(self) -> None:
        """Raise naming what is left: called at the end of a step."""
        if not self._entries:
            return
        left = sorted(self._entries.items(), key=lambda item: item[0][0])
        waiting = ", ".join(f"{b} (layers {entry.layers})" for (b, part), entry in left if part is Part.GRADIENTS)
        away = ", ".join(f"{_NAMES[part]} of block {b}" for (b, part), entry in left if entry.state is not _State.HERE)
        raise CacheError(
            f"end of step: the K/V cache still holds blocks {list(self.live_blocks)} "
            f"({self.kv_bytes} bytes, {self.host_bytes} on the host); gradients nobody took: {waiting or 'none'}; "
            f"not on the device: {away or 'none'}; every block must be freed after its last use"
        )

    def begin_step(self) -> None:
        """Restart counters and peaks, and let segment ids be used again; all must be freed."""
        self.assert_empty()
        self._freed.clear()
        self.num_writes = self.num_reads = self.num_gradient_adds = 0
        self.num_evictions = self.num_fetches = self.num_recomputes = self.num_streams = 0
        self.peak_kv_bytes = self.peak_gradient_bytes = self.peak_bytes = self.peak_host_bytes = 0

    def _is_streamed(self, block: int, part: Part) -> bool:
        entry = self._entries.get((block, part))
        return entry is not None and entry.state is _State.STREAMED

    def _landed(self, block: int, part: Part) -> _Entry | None:
        """The entry, where there is one; one that arrives is waited for."""
        entry = self._entries.get((block, part))
        if entry is not None and entry.state is _State.ARRIVING:
            self._count_host(-entry.host_bytes)
            entry.here = {layer: (self.arena.take(a), self.arena.take(b)) for layer, (a, b) in entry.away.items()}
            entry.away = {}
            entry.state = _State.HERE
        return entry

    def _stored(self, layer: int, block: int, operation: str) -> tuple[Tensor, Tensor]:
        """K/V on the device."""
        entry = self._landed(block, Part.KEYS_VALUES)
        stored = None if entry is None else entry.here.get(layer)
        if stored is None:
            raise CacheError(f"{operation} of block {block}, layer {layer}: {self._absence(block)}")
        return stored

    def _copied(self, layer: int, block: int) -> tuple[Tensor, Tensor]:
        """K/V of a streamed block; the copy is the caller's, and counted as long as it lives."""
        entry = self._entries[block, Part.KEYS_VALUES]
        handles = entry.away.get(layer)
        if handles is None:
            raise CacheError(f"read of block {block}, layer {layer}: {self._absence(block)}")
        copied = self.arena.copy(handles[0]), self.arena.copy(handles[1])
        self._prefetch_after(layer, entry)
        for tensor in copied:
            num_bytes = tensor.nbytes * (1 + self.prefetches)
            self._count(Part.KEYS_VALUES, num_bytes)
            weakref.finalize(tensor, self._count, Part.KEYS_VALUES, -num_bytes)
        return copied

    def _num_tokens(self, layer: int, block: int) -> int:
        if self._is_streamed(block, Part.KEYS_VALUES):
            handles = self._entries[block, Part.KEYS_VALUES].away.get(layer)
            if handles is not None:
                return handles[0].stored.shape[0]
        return self._stored(layer, block, "add_gradient")[0].shape[0]

    def _gradients(self, layer: int, block: int, operation: str) -> _Entry | None:
        """The entry of gK/gV, None where there is none yet; it must not be away."""
        entry = self._landed(block, Part.GRADIENTS)
        if entry is not None and entry.state is _State.EVICTED:
            raise CacheError(f"{operation} of block {block}, layer {layer}: {self._absence(block, Part.GRADIENTS)}")
        return entry

    def _absence(self, block: int, part: Part = Part.KEYS_VALUES) -> str:
        entry = self._entries.get((block, part))
        if entry is None:
            if block in self._freed:
                return "the block was freed earlier in this step; its last use must come before that"
            return f"the block was never written; live blocks are {list(self.live_blocks)}"
        if entry.state is _State.EVICTED:
            return f"its {_NAMES[part]} are on the host; the memory plan must fetch them before"
        if entry.state is _State.DROPPED:
            return "its K/V were dropped; the memory plan must recompute the microbatch that wrote them before"
        streamed = f"its {_NAMES[part]} are streamed, and " if entry.state is _State.STREAMED else ""
        return f"{streamed}only layers {entry.layers} are written"

    def _store(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        if k.shape != v.shape or k.dim() != 3:
            raise CacheError(
                f"write of block {block}, layer {layer}: expected k and v of one shape "
                f"[T, n_kv, d], got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        self._keep(layer, block, Part.KEYS_VALUES, k, v)
        self.num_writes += 1

    def _add(self, layer: int, block: int, dk: Tensor, dv: Tensor) -> None:
        entry = self._gradients(layer, block, "add_gradient")
        if entry is not None and layer in entry.here:
            gk, gv = entry.here[layer]
            gk.add_(dk)
            gv.add_(dv)
            return
        dtype = accumulation_dtype(dk.dtype)
        before = None if entry is None else self._take(layer, entry)
        gk, gv = (dk.to(dtype), dv.to(dtype)) if before is None else (before[0].add_(dk), before[1].add_(dv))
        self._keep(layer, block, Part.GRADIENTS, gk, gv)

    def _keep(self, layer: int, block: int, part: Part, first: Tensor, second: Tensor) -> None:
        """Put one layer of an entry where its state says; a new entry is on the device."""
        entry = self._entries.setdefault((block, part), _Entry())
        if entry.state is _State.STREAMED:
            self._pass_through(part, _num_bytes((first, second)))
            entry.away[layer] = self.arena.put(first), self.arena.put(second)
            self._count_host(sum(handle.num_bytes for handle in entry.away[layer]))
            return
        entry.here[layer] = owned(first.detach()), owned(second.detach())
        self._count(part, _num_bytes(entry.here[layer]))

    def _take(self, layer: int, entry: _Entry) -> tuple[Tensor, Tensor] | None:
        """Remove one layer of gradients from their entry."""
        taken = entry.here.pop(layer, None)
        if taken is not None:
            self._count(Part.GRADIENTS, -_num_bytes(taken))
        elif layer in entry.away:
            first, second = entry.away.pop(layer)
            self._count_host(-first.num_bytes - second.num_bytes)
            taken = self.arena.take(first), self.arena.take(second)
            self._pass_through(Part.GRADIENTS, _num_bytes(taken))
            self._prefetch_after(layer, entry)
        return taken

    def _prefetch_after(self, layer: int, entry: _Entry) -> None:
        for handle in entry.away.get(entry.next_layer(layer), ()) if self.prefetches else ():
            self.arena.prefetch(handle)

    def _pass_through(self, part: Part, num_bytes: int) -> None:
        """Count what is on the device for the length of a call, and the next layer where it is on its way."""
        num_bytes *= 1 + self.prefetches
        self._count(part, num_bytes)
        self._count(part, -num_bytes)

    def _count(self, part: Part, num_bytes: int) -> None:
        if part is Part.KEYS_VALUES:
            self.kv_bytes += num_bytes
        else:
            self.gradient_bytes += num_bytes
        self.peak_kv_bytes = max(self.peak_kv_bytes, self.kv_bytes)
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, self.gradient_bytes)
        self.peak_bytes = max(self.peak_bytes, self.kv_bytes + self.gradient_bytes)
        self._device.add(num_bytes)

    def _count_host(self, num_bytes: int) -> None:
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 below: the precision of sums over slices and readers."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def owns_memory(tensor: Tensor) -> bool:
    """True when the tensor is contiguous and its storage holds nothing else."""
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == num_bytes


def owned(tensor: Tensor) -> Tensor:
    """The tensor, copied where its memory holds more: keeping a view of it would keep that alive."""
    return tensor if owns_memory(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _num_bytes(tensors: tuple[Tensor, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

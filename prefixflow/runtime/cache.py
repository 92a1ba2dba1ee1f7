"""K/V of shared segments and their gradients gK/gV, between the operations of one training step.

A *block* is one segment's keys and values in one layer. A microbatch that later microbatches read
writes its blocks in its forward; readers read them in forward and again in backward, and add to the
block's gradients; the writer's own backward takes the gradients and passes them on. Nothing here is
ordered: everything is keyed by (layer, block).

Under a budget a plan says which parts of a block leave the device for a while (`prefixflow.schedule.residency`): K/V and
gK/gV of a block each go to the host and come back, and K/V may be forgotten and written anew by a recomputation. A part
may also be *streamed*: it lives on the host, and an operation has the layer that it works on.

Invariants
1. A block is written once and never after it was freed, a dropped one once more; what is stored is detached and owns its
   memory, so that the byte counts are exact. (A writer whose graph is kept may share that memory:
   freeing or evicting the block then frees nothing until its graph goes.)
2. Gradients are summed in float32, or in float64 for a float64 model, whatever the model's dtype.
3. No gradient is lost without a word: freeing a block whose gradient nobody took is an error.
4. What is not on the device is not used: whoever reads, adds to or takes an evicted part, or reads a dropped block, has
   run before the plan brought it back, and that is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


class KVCache:
    """Keys and values by (layer, block), with the gradients that readers add to them.

    Shapes: keys and values [T, n_kv, d] with T the block's number of tokens. Not thread-safe.

    arena: where evicted parts go; device: counts what is not there. Caches of one rank share both; by default they are its own.
    kv_bytes, gradient_bytes and their peaks are of the device. host_bytes: of what this cache has evicted.
    num_evictions, num_fetches: parts moved, of all layers at once; num_streams: parts that live on the host; num_recomputes:
    dropped blocks written anew.
    """

    def __init__(self, arena: HostArena | None = None, device: DeviceBytes | None = None) -> None:
        self.arena = arena or HostArena()
        self._device = device or DeviceBytes()
        self._keys_values: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._gradients: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._on_host: dict[tuple[int, Part], dict[int, tuple[HostTensor, HostTensor]]] = {}
        self._arriving: dict[tuple[int, Part], dict[int, tuple[HostTensor, HostTensor]]] = {}
        self._streamed: dict[tuple[int, Part], dict[int, tuple[HostTensor, HostTensor]]] = {}
        self._dropped: dict[int, frozenset[int]] = {}
        self._freed: set[int] = set()
        self.num_evictions = self.num_fetches = self.num_recomputes = self.num_streams = 0
        self.host_bytes = self.peak_host_bytes = 0
        self.num_writes = 0
        self.num_reads = 0
        self.num_gradient_adds = 0
        self.kv_bytes = 0
        self.gradient_bytes = 0
        self.peak_kv_bytes = 0
        self.peak_gradient_bytes = 0
        self.peak_bytes = 0

    @property
    def live_blocks(self) -> tuple[int, ...]:
        """Blocks that hold keys and values or gradients, on the device or on the host, ascending."""
        away = {block for block, _ in self._on_host.keys() | self._arriving.keys() | self._streamed.keys()}
        return tuple(sorted(self._keys_values.keys() | self._gradients.keys() | away))

    def write(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        """Store k and v ([T, n_kv, d]) detached; a tensor that shares its memory is copied.

        Raises CacheError for a block that was freed or a layer that is already written.
        """
        if block in self._freed:
            raise CacheError(
                f"write of block {block}, layer {layer}: the block was freed earlier in this step; "
                "a recomputation must run with operation BACKWARD so that it stores nothing"
            )
        self._land(block, Part.KEYS_VALUES)
        is_there = layer in self._keys_values.get(block, {}) or layer in self._streamed.get(
            (block, Part.KEYS_VALUES), {}
        )
        if is_there or self._is_away(block):
            raise CacheError(
                f"write of block {block}, layer {layer}: it is already written; a block is written "
                "once a step, and a recomputation must run with operation BACKWARD so that it "
                "stores nothing"
            )
        self._store(layer, block, k, v)

    def rewrite(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        """Store k and v ([T, n_kv, d]) of a dropped block again; CacheError for a block that is not dropped."""
        missing = self._dropped.get(block, frozenset()) - self._keys_values.get(block, {}).keys()
        if layer not in missing:
            raise CacheError(
                f"rewrite of block {block}, layer {layer}: expected a dropped block that lacks this layer, but "
                f"{'its dropped layers are ' + str(sorted(missing)) if missing else 'it is not dropped'}; only the "
                "recomputation of a dropped block's writer writes again"
            )
        self._store(layer, block, k, v)
        if missing == {layer}:
            del self._dropped[block]
            self.num_recomputes += 1

    def _store(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        if k.shape != v.shape or k.dim() != 3:
            raise CacheError(
                f"write of block {block}, layer {layer}: expected k and v of one shape "
                f"[T, n_kv, d], got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        self.num_writes += 1
        if (block, Part.KEYS_VALUES) in self._streamed:
            self._send(layer, block, Part.KEYS_VALUES, k, v)
            return
        stored = (_owned(k), _owned(v))
        self._keys_values.setdefault(block, {})[layer] = stored
        self._count(kv_bytes=_num_bytes(stored))

    def read(self, layer: int, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of `blocks` joined along tokens in that order; no copy for one block on the device."""
        parts = [self._on_device(layer, block) for block in blocks]
        streamed = [
            part for block, part in zip(blocks, parts, strict=True) if (block, Part.KEYS_VALUES) in self._streamed
        ]
        self._visit(Part.KEYS_VALUES, sum(map(_num_bytes, streamed)))
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
        if (block, Part.GRADIENTS) in self._streamed:
            return self._take_streamed(layer, block)
        self._check_gradients_here("take_gradient", layer, block)
        self._land(block, Part.GRADIENTS)
        layers = self._gradients.get(block, {})
        taken = layers.pop(layer, None)
        if taken is not None:
            self._count(gradient_bytes=-_num_bytes(taken))
            if not layers:
                del self._gradients[block]
        return taken

    def release(self, block: int) -> None:
        """Drop keys and values after their last read; gradients stay until the writer's backward has taken them."""
        streamed = self._streamed.pop((block, Part.KEYS_VALUES), None)
        if streamed is not None:
            for handle in itertools.chain(*streamed.values()):
                self.arena.discard(handle)
            self._count_host(-_num_host_bytes(streamed))
            self._freed.add(block)
            return
        self._land(block, Part.KEYS_VALUES)
        if block not in self._keys_values or block in self._dropped:
            raise CacheError(f"release of block {block}: {self._absence(block)}")
        self._count(kv_bytes=-sum(map(_num_bytes, self._keys_values.pop(block).values())))
        self._freed.add(block)

    def evict(self, block: int, part: Part) -> None:
        """Move a part of a block, in all its layers, from the device to the host.

        Gradients that no reader has added to yet may be evicted: there is nothing to move, but they must be fetched too.
        """
        if (block, part) in self._on_host or (block, part) in self._streamed:
            raise CacheError(f"evict of the {_NAMES[part]} of block {block}: {self._absence(block, part)}")
        self._land(block, part)
        if part is Part.KEYS_VALUES:
            self._check_whole("evict", block)
            layers = self._keys_values.pop(block)
        else:
            layers = self._gradients.pop(block, {})
        num_bytes = sum(map(_num_bytes, layers.values()))
        self._on_host[block, part] = {
            layer: (self.arena.put(first), self.arena.put(second)) for layer, (first, second) in layers.items()
        }
        self._count_part(part, -num_bytes)
        self._count_host(num_bytes)
        self.num_evictions += 1

    def fetch(self, block: int, part: Part) -> None:
        """Bring an evicted part of a block back to the device: the copy begins now, and its first use waits for it."""
        if (block, part) not in self._on_host:
            raise CacheError(
                f"fetch of the {_NAMES[part]} of block {block}: expected them on the host, where they are not; "
                "only what was evicted comes back, once"
            )
        layers = self._on_host.pop((block, part))
        for handle in itertools.chain(*layers.values()):
            self.arena.prefetch(handle)
        self._arriving[block, part] = layers
        self._count_part(part, _num_host_bytes(layers))
        self.num_fetches += 1

    def drop(self, block: int) -> None:
        """Forget the keys and values of a block on the device; `rewrite` in all its layers brings them back."""
        self._land(block, Part.KEYS_VALUES)
        self._check_whole("drop", block)
        layers = self._keys_values.pop(block)
        self._count(kv_bytes=-sum(map(_num_bytes, layers.values())))
        self._dropped[block] = frozenset(layers)

    def stream(self, block: int, part: Part) -> None:
        """Keep a part of a block on the host from its first write or sum to its end, layer by layer."""
        layers = (self._keys_values if part is Part.KEYS_VALUES else self._gradients).get(block)
        is_dropped = part is Part.KEYS_VALUES and block in self._dropped
        if (
            layers
            or is_dropped
            or (block, part) in self._streamed.keys() | self._on_host.keys() | self._arriving.keys()
        ):
            raise CacheError(
                f"stream of the {_NAMES[part]} of block {block}: expected a part that has nothing yet, but it has some; "
                "streaming begins before the operation that makes a part"
            )
        self._streamed[block, part] = {}
        self.num_streams += 1

    @property
    def dropped_blocks(self) -> frozenset[int]:
        """Blocks whose keys and values must be written anew before they are read."""
        return frozenset(self._dropped)

    def close(self, block: int) -> None:
        """The writer's backward is done: nothing of the block may be left, or gK/gV were lost."""
        for part in Part:
            self._land(block, part)
        if (block, Part.GRADIENTS) in self._on_host:
            raise CacheError(f"close of block {block}: {self._absence(block, Part.GRADIENTS)}")
        layers = sorted(self._streamed.pop((block, Part.GRADIENTS), self._gradients.get(block, {})))
        has_kv = block in self._keys_values or self._is_away(block) or (block, Part.KEYS_VALUES) in self._streamed
        if layers or has_kv:
            raise CacheError(
                f"close of block {block}: expected its readers done and its gradients taken, but "
                + (f"gradients of layers {layers} are left" if layers else "its K/V were not released")
                + "; a backward did not reach the K/V of every layer of the microbatch that wrote it"
            )

    def assert_empty(self) -> None:
        """Raise naming what is left: called at the end of a step."""
        if not self.live_blocks and not self._dropped:
            return
        waiting = ", ".join(f"{b} (layers {sorted(layers)})" for b, layers in sorted(self._gradients.items()))
        on_host = ", ".join(f"{_NAMES[part]} of block {block}" for block, part in [*self._on_host, *self._streamed])
        raise CacheError(
            f"end of step: the K/V cache still holds blocks {list(self.live_blocks)} "
            f"({self.kv_bytes} bytes, {self.host_bytes} on the host); gradients nobody took: {waiting or 'none'}; "
            f"on the host: {on_host or 'nothing'}; dropped: {sorted(self._dropped) or 'none'}; "
            "every block must be freed after its last use"
        )

    def begin_step(self) -> None:
        """Restart counters and peaks, and let segment ids be used again; all must be freed."""
        self.assert_empty()
        self._freed.clear()
        self.num_writes = self.num_reads = self.num_gradient_adds = 0
        self.num_evictions = self.num_fetches = self.num_recomputes = self.num_streams = 0
        self.peak_kv_bytes = self.peak_gradient_bytes = self.peak_bytes = self.peak_host_bytes = 0

    def _stored(self, layer: int, block: int, operation: str) -> tuple[Tensor, Tensor]:
        self._land(block, Part.KEYS_VALUES)
        stored = self._keys_values.get(block, {}).get(layer)
        if stored is None:
            raise CacheError(f"{operation} of block {block}, layer {layer}: {self._absence(block)}")
        return stored

    def _on_device(self, layer: int, block: int) -> tuple[Tensor, Tensor]:
        """K/V to work with; of a streamed block a copy, which is the caller's."""
        handles = self._streamed.get((block, Part.KEYS_VALUES), {}).get(layer)
        if handles is None:
            return self._stored(layer, block, "read")
        return self.arena.copy(handles[0]), self.arena.copy(handles[1])

    def _num_tokens(self, layer: int, block: int) -> int:
        handles = self._streamed.get((block, Part.KEYS_VALUES), {}).get(layer)
        return (handles[0].stored if handles else self._stored(layer, block, "add_gradient")[0]).shape[0]

    def _send(self, layer: int, block: int, part: Part, first: Tensor, second: Tensor) -> None:
        """Put one layer of a streamed part on the host."""
        handles = self.arena.put(first), self.arena.put(second)
        self._streamed[block, part][layer] = handles
        self._visit(part, _num_bytes((first, second)))
        self._count_host(_num_host_bytes({layer: handles}))

    def _take_streamed(self, layer: int, block: int) -> tuple[Tensor, Tensor] | None:
        """Remove one layer of streamed gradients from the host."""
        handles = self._streamed[block, Part.GRADIENTS].pop(layer, None)
        if handles is None:
            return None
        self._count_host(-_num_host_bytes({layer: handles}))
        taken = self.arena.take(handles[0]), self.arena.take(handles[1])
        self._visit(Part.GRADIENTS, _num_bytes(taken))
        return taken

    def _land(self, block: int, part: Part) -> None:
        """Put what a fetch has begun to bring back in its place."""
        handles = self._arriving.pop((block, part), None)
        if not handles:
            return
        self._count_host(-_num_host_bytes(handles))
        (self._keys_values if part is Part.KEYS_VALUES else self._gradients)[block] = {
            layer: (self.arena.take(first), self.arena.take(second)) for layer, (first, second) in handles.items()
        }

    def _is_away(self, block: int) -> bool:
        """True where the K/V of the block were written, but are on the host or dropped."""
        return block in self._dropped or (block, Part.KEYS_VALUES) in self._on_host

    def _check_whole(self, operation: str, block: int) -> None:
        if (block, Part.KEYS_VALUES) in self._streamed or block not in self._keys_values or block in self._dropped:
            raise CacheError(f"{operation} of the K/V of block {block}: {self._absence(block)}")

    def _check_gradients_here(self, operation: str, layer: int, block: int) -> None:
        if (block, Part.GRADIENTS) in self._on_host:
            raise CacheError(f"{operation} of block {block}, layer {layer}: {self._absence(block, Part.GRADIENTS)}")

    def _absence(self, block: int, part: Part = Part.KEYS_VALUES) -> str:
        if (block, part) in self._on_host:
            return f"its {_NAMES[part]} are on the host; the memory plan must fetch them before"
        if (block, part) in self._streamed:
            layers = sorted(self._streamed[block, part])
            return f"its {_NAMES[part]} are streamed, so they stay on the host; layers {layers} are written"
        if block in self._dropped:
            return "its K/V were dropped; the memory plan must recompute the microbatch that wrote them before"
        if block in self._freed:
            return "the block was freed earlier in this step; its last use must come before that"
        if block in self._keys_values:
            return f"only layers {sorted(self._keys_values[block])} are written"
        return f"the block was never written; live blocks are {list(self.live_blocks)}"

    def _add(self, layer: int, block: int, dk: Tensor, dv: Tensor) -> None:
        if (block, Part.GRADIENTS) in self._streamed:
            self._add_streamed(layer, block, dk, dv)
            return
        self._check_gradients_here("add_gradient", layer, block)
        self._land(block, Part.GRADIENTS)
        layers = self._gradients.setdefault(block, {})
        if layer in layers:
            gk, gv = layers[layer]
            gk.add_(dk)
            gv.add_(dv)
            return
        dtype = accumulation_dtype(dk.dtype)
        layers[layer] = (_owned(dk.to(dtype)), _owned(dv.to(dtype)))
        self._count(gradient_bytes=_num_bytes(layers[layer]))

    def _add_streamed(self, layer: int, block: int, dk: Tensor, dv: Tensor) -> None:
        dtype = accumulation_dtype(dk.dtype)
        taken = self._take_streamed(layer, block)
        if taken is None:
            self._send(layer, block, Part.GRADIENTS, dk.to(dtype), dv.to(dtype))
        else:
            self._send(layer, block, Part.GRADIENTS, taken[0].add_(dk), taken[1].add_(dv))

    def _count_part(self, part: Part, num_bytes: int) -> None:
        if part is Part.KEYS_VALUES:
            self._count(kv_bytes=num_bytes)
        else:
            self._count(gradient_bytes=num_bytes)

    def _visit(self, part: Part, num_bytes: int) -> None:
        """Count what is on the device for the length of a call."""
        self._count_part(part, num_bytes)
        self._count_part(part, -num_bytes)

    def _count_host(self, num_bytes: int) -> None:
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def _count(self, kv_bytes: int = 0, gradient_bytes: int = 0) -> None:
        self.kv_bytes += kv_bytes
        self.gradient_bytes += gradient_bytes
        self.peak_kv_bytes = max(self.peak_kv_bytes, self.kv_bytes)
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, self.gradient_bytes)
        self.peak_bytes = max(self.peak_bytes, self.kv_bytes + self.gradient_bytes)
        self._device.add(kv_bytes + gradient_bytes)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 below: the precision of sums over slices and readers."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def owns_memory(tensor: Tensor) -> bool:
    """True when the tensor is contiguous and its storage holds nothing else."""
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == num_bytes


def _owned(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if owns_memory(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _num_bytes(tensors: tuple[Tensor, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _num_host_bytes(layers: Mapping[int, tuple[HostTensor, HostTensor]]) -> int:
    return sum(handle.num_bytes for handle in itertools.chain(*layers.values()))

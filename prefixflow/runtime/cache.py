"""K/V of shared segments and their gradients gK/gV, between the operations of one training step.

A *block* is one segment's keys and values in one layer. A microbatch that later microbatches read
writes its blocks in its forward; readers read them in forward and again in backward, and add to the
block's gradients; the writer's own backward takes the gradients and passes them on. Nothing here is
ordered: everything is keyed by (layer, block).

Invariants
1. A block is written once and never after it was freed; what is stored is detached and owns its
   memory, so that the byte counts are exact. (A writer whose graph is kept may share that memory:
   freeing the block then frees nothing until its graph goes.)
2. Gradients are summed in float32, or in float64 for a float64 model, whatever the model's dtype.
3. No gradient is lost without a word: freeing a block whose gradient nobody took is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor


class CacheError(RuntimeError):
    """An operation on the K/V cache that a correct schedule never makes."""


class KVCache:
    """Keys and values by (layer, block), with the gradients that readers add to them.

    Shapes: keys and values [T, n_kv, d] with T the block's number of tokens. Not thread-safe.
    """

    def __init__(self) -> None:
        self._keys_values: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._gradients: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._freed: set[int] = set()
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
        """Blocks that hold keys and values or gradients, ascending."""
        return tuple(sorted(self._keys_values.keys() | self._gradients.keys()))

    def write(self, layer: int, block: int, k: Tensor, v: Tensor) -> None:
        """Store k and v ([T, n_kv, d]) detached; a tensor that shares its memory is copied.

        Raises CacheError for a block that was freed or a layer that is already written.
        """
        if block in self._freed:
            raise CacheError(
                f"write of block {block}, layer {layer}: the block was freed earlier in this step; "
                "a recomputation must run with operation BACKWARD so that it stores nothing"
            )
        layers = self._keys_values.setdefault(block, {})
        if layer in layers:
            raise CacheError(
                f"write of block {block}, layer {layer}: it is already written; a block is written "
                "once a step, and a recomputation must run with operation BACKWARD so that it "
                "stores nothing"
            )
        if k.shape != v.shape or k.dim() != 3:
            raise CacheError(
                f"write of block {block}, layer {layer}: expected k and v of one shape "
                f"[T, n_kv, d], got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        layers[layer] = (_owned(k), _owned(v))
        self.num_writes += 1
        self._count(kv_bytes=_num_bytes(layers[layer]))

    def read(self, layer: int, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of `blocks` joined along tokens in that order; no copy for one block."""
        parts = [self._stored(layer, block, "read") for block in blocks]
        self.num_reads += 1
        if len(parts) == 1:
            return parts[0]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def add_gradient(self, layer: int, blocks: tuple[int, ...], dk: Tensor, dv: Tensor) -> None:
        """Add dk and dv ([sum of T, n_kv, d], in the order of `blocks`) to each block's gradients.

        The two tensors are the cache's from here on: the caller must not write to them again.
        """
        sizes = [self._stored(layer, block, "add_gradient")[0].shape[0] for block in blocks]
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
        layers = self._gradients.get(block, {})
        taken = layers.pop(layer, None)
        if taken is not None:
            self._count(gradient_bytes=-_num_bytes(taken))
            if not layers:
                del self._gradients[block]
        return taken

    def release(self, block: int) -> None:
        """Drop keys and values after their last read; gradients stay until the writer's backward has taken them."""
        if block not in self._keys_values:
            raise CacheError(f"release of block {block}: {self._absence(block)}")
        self._count(kv_bytes=-sum(map(_num_bytes, self._keys_values.pop(block).values())))
        self._freed.add(block)

    def close(self, block: int) -> None:
        """The writer's backward is done: nothing of the block may be left, or gK/gV were lost."""
        if block in self._keys_values or block in self._gradients:
            layers = sorted(self._gradients.get(block, {}))
            raise CacheError(
                f"close of block {block}: expected its readers done and its gradients taken, but "
                + (f"gradients of layers {layers} are left" if layers else "its K/V were not released")
                + "; a backward did not reach the K/V of every layer of the microbatch that wrote it"
            )

    def assert_empty(self) -> None:
        """Raise naming what is left: called at the end of a step."""
        if not self.live_blocks:
            return
        waiting = ", ".join(f"{b} (layers {sorted(layers)})" for b, layers in sorted(self._gradients.items()))
        raise CacheError(
            f"end of step: the K/V cache still holds blocks {list(self.live_blocks)} "
            f"({self.kv_bytes} bytes); gradients nobody took: {waiting or 'none'}; "
            "every block must be freed after its last use"
        )

    def begin_step(self) -> None:
        """Restart counters and peaks, and let segment ids be used again; all must be freed."""
        self.assert_empty()
        self._freed.clear()
        self.num_writes = self.num_reads = self.num_gradient_adds = 0
        self.peak_kv_bytes = self.peak_gradient_bytes = self.peak_bytes = 0

    def _stored(self, layer: int, block: int, operation: str) -> tuple[Tensor, Tensor]:
        stored = self._keys_values.get(block, {}).get(layer)
        if stored is None:
            raise CacheError(f"{operation} of block {block}, layer {layer}: {self._absence(block)}")
        return stored

    def _absence(self, block: int) -> str:
        if block in self._freed:
            return "the block was freed earlier in this step; its last use must come before that"
        if block in self._keys_values:
            return f"only layers {sorted(self._keys_values[block])} are written"
        return f"the block was never written; live blocks are {list(self.live_blocks)}"

    def _add(self, layer: int, block: int, dk: Tensor, dv: Tensor) -> None:
        layers = self._gradients.setdefault(block, {})
        if layer in layers:
            gk, gv = layers[layer]
            gk.add_(dk)
            gv.add_(dv)
            return
        dtype = accumulation_dtype(dk.dtype)
        layers[layer] = (_owned(dk.to(dtype)), _owned(dv.to(dtype)))
        self._count(gradient_bytes=_num_bytes(layers[layer]))

    def _count(self, kv_bytes: int = 0, gradient_bytes: int = 0) -> None:
        self.kv_bytes += kv_bytes
        self.gradient_bytes += gradient_bytes
        self.peak_kv_bytes = max(self.peak_kv_bytes, self.kv_bytes)
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, self.gradient_bytes)
        self.peak_bytes = max(self.peak_bytes, self.kv_bytes + self.gradient_bytes)


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

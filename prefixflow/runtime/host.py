"""Host memory for tensors that the device does not need for a while: K/V, their gradients, activations.

On a GPU the copies run in pinned memory on a stream of their own: `put` returns at once, and what it read may be freed by
the caller at once; `prefetch` starts the way back early, `take` makes the current stream wait for it. On the CPU, where both
sides are the same memory, the arena only keeps the account: its copies are made out of sight of dispatch modes, so that
`prefixflow.runtime.memory` counts what the device would hold and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(slots=True, eq=False)
class HostTensor:
    """A tensor in the arena; `arriving` is its copy on the device once it has been asked for."""

    stored: Tensor
    device: torch.device
    arriving: Tensor | None = None
    arrived: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return self.stored.numel() * self.stored.element_size()


class HostArena:
    """Keeps tensors in host memory, each under the handle that `put` returned, until `take` or `discard`.

    num_bytes: held now; peak_bytes: the most held since `begin_step`; num_bytes_moved: both ways since then. A tensor
    on its way back counts until it is taken.
    """

    def __init__(self) -> None:
        self._held: set[HostTensor] = set()
        self._stream: torch.cuda.Stream | None = None
        self.num_bytes = 0
        self.peak_bytes = 0
        self.num_bytes_moved = 0

    def put(self, tensor: Tensor) -> HostTensor:
        """Copy `tensor` to the host; a contiguous tensor of its shape and dtype comes back from `take`."""
        tensor = tensor.detach()
        handle = HostTensor(self._to_host(tensor), tensor.device)
        self._held.add(handle)
        self.num_bytes += handle.num_bytes
        self.num_bytes_moved += handle.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return handle

    def prefetch(self, handle: HostTensor) -> None:
        """Start to copy back, once; the device holds the copy from here on."""
        self._check(handle, "prefetch")
        if handle.arriving is not None:
            return
        self.num_bytes_moved += handle.num_bytes
        if handle.device.type != "cuda":
            handle.arriving = handle.stored.clone()
            return
        stream = self._side_stream(handle.device)
        with torch.cuda.stream(stream):
            handle.arriving = handle.stored.to(handle.device, non_blocking=True)
            handle.arrived = stream.record_event()

    def take(self, handle: HostTensor) -> Tensor:
        """The tensor on its device again; the arena forgets it."""
        arrived = self.copy(handle)
        self.discard(handle)
        return arrived

    def copy(self, handle: HostTensor) -> Tensor:
        """The tensor on its device, the caller's own; the arena keeps its copy."""
        self.prefetch(handle)
        arriving = handle.arriving
        assert arriving is not None
        if handle.arrived is not None:
            current = torch.cuda.current_stream(handle.device)
            current.wait_event(handle.arrived)
            arriving.record_stream(current)
        handle.arriving = handle.arrived = None
        return arriving

    def discard(self, handle: HostTensor) -> None:
        """Forget a tensor without bringing it back."""
        self._check(handle, "discard")
        self._held.remove(handle)
        self.num_bytes -= handle.num_bytes
        handle.arriving = None

    def begin_step(self) -> None:
        """Restart the peak; everything put in the step before must have been taken."""
        self.assert_empty()
        self.peak_bytes = self.num_bytes_moved = 0

    def assert_empty(self) -> None:
        assert not self._held, f"{len(self._held)} tensors ({self.num_bytes} bytes) were left in host memory"

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cuda":
            with _disable_current_modes():
                return tensor.clone(memory_format=torch.contiguous_format)
        stored = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = self._side_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            stored.copy_(tensor, non_blocking=True)
        # Its memory must not be given out again before the copy has read it.
        tensor.record_stream(stream)
        return stored

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        # One stream for both ways, so that a tensor goes out before it comes back.
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _check(self, handle: HostTensor, operation: str) -> None:
        assert handle in self._held, f"{operation} of a tensor that was taken or discarded"

"""Run unmodified Megatron-Core on machines without a GPU, over gloo.

What: Megatron-Core (tried: 0.16.1, torch 2.13) asks `torch.cuda` for the current device, streams,
events and random state, creates tensors with `device="cuda"`, and asserts CUDA tensor types in its
optimizer. `install_cpu_device_layer` answers all of that for the CPU. Model, parallel groups, DDP,
optimizers, schedules and recomputation then run as they are.

When: only where `torch.cuda.is_available()` is false, and only when called; importing this module
changes nothing. With a GPU the call returns False and leaves torch alone, so it may stand in every
entry point. Call it before process groups or models are built.

How: single functions of torch and Megatron are replaced. A `TorchFunctionMode` would need fewer
lines, but is consulted by every torch call (one small `add` on the CPU takes about twice as
long under it); functions that create tensors are few, and pay for one keyword look-up.
Not covered: `Tensor.to("cuda")` (Megatron-Core uses it for optimizer CPU offload only), CUDA
graphs, memory pools, and FSDP.

Each part can go when Megatron-Core offers its own answer:

| part | until Megatron-Core |
| --- | --- |
| `_patch_devices` | takes its device from the tensors or the groups it works on |
| `_patch_factories` | has no `device="cuda"` literal outside inference and FSDP |
| `_patch_tensors` | compares dtypes instead of `Tensor.type()` names in `optimizer` |
| `_patch_streams`, `_patch_nvtx` | guards streams, events and nvtx by `torch.cuda.is_available()` |
| `_patch_random` | keeps CPU generator states in `tensor_parallel.random` |
| `_patch_memory` | never: our own measurements read it too |
| `_patch_collectives` | hands lists to `all_to_all_single` when its tensors are on the CPU |
| `_patch_moe` | defines `te_general_gemm` without Transformer Engine |
| `_disable_compilation` | lets its jit fusions be switched off after import |
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")

# Factories that take `device=`. Megatron-Core 0.16.1 uses a part of them with "cuda"; the others
# are here so that code around it (loss functions, data loaders) may do the same.
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)

_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}

_installed = False


def torch_device() -> torch.device:
    """Device of this process: its current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return _CPU


def install_cpu_device_layer() -> bool:
    """Let Megatron-Core run on the CPU (see the module's docstring); repeated calls do nothing.

    Returns True if the layer is in place, False if there is a GPU and nothing was changed.
    """
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        _installed = True
        _disable_compilation()
        _patch_devices()
        _patch_factories()
        _patch_tensors()
        _patch_streams()
        _patch_nvtx()
        _patch_memory()
        _patch_collectives()
        _patch_random()
        _patch_moe()
    return True


class _Stream:
    """Stands for `torch.cuda.Stream`: the CPU runs everything in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event if event is not None else _Event()
        event.record()
        return event

    def wait_event(self, event: _Event) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event:
    """Stands for `torch.cuda.Event`; its times are those of the wall clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time_s = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self._time_s = time.perf_counter()

    def wait(self, stream: _Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _Event) -> float:
        """Milliseconds between the two records."""
        return (end_event._time_s - self._time_s) * 1e3


def _no_op() -> Callable[..., None]:
    """A new function that does nothing: dynamo tells torch's functions apart by identity."""
    return lambda *args, **kwargs: None


def _replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _disable_compilation() -> None:
    """Megatron's jit fusions (`torch.compile`) would be compiled for the CPU in every process."""
    torch.compiler.set_stance("force_eager")


def _patch_devices() -> None:
    _replace(
        torch.cuda,
        current_device=lambda: _CPU,
        set_device=_no_op(),
        synchronize=_no_op(),
    )


def _patch_factories() -> None:
    # torch keeps the set of its factories, by identity, for `with torch.device(...)` (Transformers
    # builds models on the meta device so). It is built at first use: it must see the originals.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory, with the CPU for a CUDA device and without pinned memory there."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # A bare index means the accelerator of that number.
    return isinstance(device, int) or str(device).startswith("cuda")


def _patch_tensors() -> None:
    """`.cuda()` is the identity, and `Tensor.type()` answers CUDA names for floating types."""
    native_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return _CUDA_TYPE_NAMES.get(self.dtype) or native_type(self)
        return native_type(self, dtype, *args, **kwargs)

    def identity(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    _replace(torch.Tensor, type=tensor_type, cuda=identity, record_stream=_no_op())
    _replace(torch.nn.Module, cuda=identity)


def _patch_streams() -> None:
    default = _Stream()

    def enter_stream(stream: _Stream | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    _replace(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        current_stream=lambda device=None: default,
        default_stream=lambda device=None: default,
        set_stream=_no_op(),
        stream=enter_stream,
    )


def _patch_nvtx() -> None:
    @contextlib.contextmanager
    def nvtx_range(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    _replace(torch.cuda.nvtx, range_push=_no_op(), range_pop=_no_op(), mark=_no_op(), range=nvtx_range)


def _patch_memory() -> None:
    """Memory of the process stands for that of the device."""
    _replace(
        torch.cuda,
        empty_cache=_no_op(),
        memory_allocated=lambda device=None: _process_memory_bytes("VmRSS"),
        memory_reserved=lambda device=None: _process_memory_bytes("VmRSS"),
        max_memory_allocated=lambda device=None: _process_memory_bytes("VmHWM"),
        max_memory_reserved=lambda device=None: _process_memory_bytes("VmHWM"),
        reset_peak_memory_stats=_reset_peak_memory,
    )


def _process_memory_bytes(field: str) -> int:
    """A field of Linux's /proc/self/status in bytes; 0 where there is no such file or field."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _reset_peak_memory(device: Any = None) -> None:
    """Set Linux's peak resident size (VmHWM) back to the present size, where that is allowed."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _patch_collectives() -> None:
    """`all_to_all_single` refuses split sizes in tensors.

    Megatron's token dispatcher turns them into NumPy arrays while it copies them from the GPU to
    the host, and leaves tensors that are on the CPU as they are.
    """
    native = dist.all_to_all_single

    @functools.wraps(native)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return native(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), *args, **kwargs)

    dist.all_to_all_single = all_to_all_single


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def _patch_random() -> None:
    """The CPU's default generator is the "CUDA" generator that Megatron forks and restores.

    Megatron's own setter would append to torch's queue of calls awaiting CUDA at every recomputed
    layer, for ever.
    """

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        # `torch.manual_seed` seeds CUDA as well, through this very function.
        torch.default_generator.manual_seed(int(seed))

    for module in (torch.cuda, torch.cuda.random):
        _replace(module, get_rng_state=get_rng_state, set_rng_state=set_rng_state, manual_seed=manual_seed)

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    _replace(
        importlib.import_module("megatron.core.tensor_parallel.random"),
        _get_cuda_rng_state=get_state,
        _set_cuda_rng_state=set_state,
    )


def _patch_moe() -> None:
    """`moe_utils` reads this name without Transformer Engine too, where nothing defines it."""
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

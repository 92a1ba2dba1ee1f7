"""PrefixFlow on Megatron-Core. The names below are what a framework needs; importing this package imports none of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.prefixflow.adapter import MicrobatchAdapter, SequenceInput, SequenceScores
    from megatron.prefixflow.attach import PrefixReuseHandle, enable_prefix_reuse
    from megatron.prefixflow.device import install_cpu_device_layer
    from megatron.prefixflow.drop_in import forward_backward

_PLACES = {
    "MicrobatchAdapter": "adapter",
    "PrefixReuseHandle": "attach",
    "SequenceInput": "adapter",
    "SequenceScores": "adapter",
    "enable_prefix_reuse": "attach",
    "forward_backward": "drop_in",
    "install_cpu_device_layer": "device",
}

__all__ = [
    "MicrobatchAdapter",
    "PrefixReuseHandle",
    "SequenceInput",
    "SequenceScores",
    "enable_prefix_reuse",
    "forward_backward",
    "install_cpu_device_layer",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Names and layouts of Hugging Face weights from megatron-bridge, where that is installed and can be imported.

It needs Transformer Engine, which needs a GPU's libraries; without them `megatron_bridge_form` says that there is nothing, and
`bridge` takes mbridge. Seams (megatron-bridge 0.3.1): `get_model_bridge`, `mapping_registry().megatron_to_hf_lookup`, whose
`hf_param` is one name or a dict of them by role, and `merge_qkv_weights` and `split_qkv_weights`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_PACKAGE = "megatron.bridge"
_CONVERSION = f"{_PACKAGE}.models.conversion"
_ROLES = (("q", "k", "v"), ("gate", "up"))


class MegatronBridgeForm:
    """As `bridge.MBridgeForm`, from a mapping registry of megatron-bridge."""

    def __init__(self, registry: Any, layouts: Any, config: TransformerConfig) -> None:
        self._registry = registry
        self._layouts = layouts
        self._config = config

    def hf_names(self, name: str) -> list[str]:
        """Raises LookupError for a name without counterpart."""
        mapping = self._registry.megatron_to_hf_lookup(name)
        names = None if mapping is None else mapping.hf_param
        if isinstance(names, str):
            return [names]
        for roles in _ROLES:
            if names is not None and names.keys() == set(roles):
                return [names[role] for role in roles]
        raise LookupError(name)

    def to_megatron(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors) == 3:
            merged: Tensor = self._layouts.merge_qkv_weights(self._config, *tensors)
            return merged
        return torch.cat(list(tensors)) if len(tensors) == 2 else tensors[0]

    def to_hf(self, name: str, parameter: Tensor) -> list[Tensor]:
        num_tensors = len(self.hf_names(name))
        if num_tensors == 3 and parameter.dim() == 1:
            return list(self._layouts.split_qkv_biases(self._config, parameter))
        if num_tensors == 3:
            return list(self._layouts.split_qkv_weights(self._config, parameter))
        return list(parameter.chunk(2)) if num_tensors == 2 else [parameter]


def megatron_bridge_form(hf_config: Any, config: TransformerConfig) -> MegatronBridgeForm | None:
    """None where megatron-bridge is not installed, cannot be imported, or does not know the architecture."""
    modules = _modules()
    if modules is None:
        return None
    model_bridge, layouts = modules
    transformers = importlib.import_module("transformers")
    for name in hf_config.architectures or ():
        try:
            registry = model_bridge.get_model_bridge(getattr(transformers, name)).mapping_registry()
        except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError):
            continue
        return MegatronBridgeForm(registry, layouts, config)
    return None


@functools.cache
def _modules() -> tuple[Any, Any] | None:
    try:
        if importlib.util.find_spec(_PACKAGE) is None:
            return None
        importlib.import_module(_PACKAGE)  # It registers the architectures.
        model_bridge, layouts = (
            importlib.import_module(f"{_CONVERSION}.{n}") for n in ("model_bridge", "param_mapping")
        )
    except Exception:
        # What it needs of GPU libraries fails in many ways; whatever the way, it does not work here.
        return None
    return model_bridge, layouts

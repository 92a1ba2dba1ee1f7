"""verl 0.9.1 on a machine without a GPU: what its own Megatron engine needs to run over gloo, and nothing of ours.

* A platform "cpu" (verl knows CUDA, ROCm and NPU), set before anything of verl is imported.
* Bridges of mbridge with Megatron's local layer spec in place of Transformer Engine's, and the weight names that go with it.
* A core attention for packed sequences (`PackedAttention`): verl always packs, which Megatron's local attention refuses.

verl's sources stay as they are. With a GPU and Transformer Engine none of this is needed.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def install() -> None:
    """Make this process ready for verl. Idempotent; before process groups and before any import of verl."""
    from megatron.prefixflow.device import install_cpu_device_layer

    install_cpu_device_layer()
    from verl.plugin.platform import platform_manager

    if getattr(platform_manager._current_platform, "is_of_tests", False):
        return
    install_platform(platform_manager)
    finish_install()


def install_platform(platform_manager: Any) -> None:
    """The first part: no module of verl has asked for the platform yet."""
    from megatron.prefixflow.device import install_cpu_device_layer

    install_cpu_device_layer()
    # Read for log lines and MFU; the device layer has no answers since Megatron does not ask.
    torch.cuda.mem_get_info = lambda device=None: (0, 1)
    torch.cuda.get_device_name = lambda device=None: "CPU"
    torch.cuda.device_count = lambda: 1
    platform_manager.set_platform(_platform())


def finish_install() -> None:
    """The rest: bridges, and our engine's consent to the stand-in for core attention."""
    from megatron.prefixflow.attach_checks import accept_core_attention

    _register_bridges()
    accept_core_attention(PackedAttention)


def _platform() -> Any:
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class CPUPlatform(PlatformCUDA):
        is_of_tests = True
        device_name = "cpu"
        vendor_name = "cpu"

        def is_available(self) -> bool:
            return True

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def communication_backend_name(self) -> str:
            return "gloo"

    return CPUPlatform()


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences (thd), each by itself; under context parallelism in verl's zigzag layout.

    Takes query [T, heads, d], key and value [T, kv heads, d]; returns [T, heads * d]. Under context parallelism each rank
    holds two pieces of every sequence, the j-th from either end, and K/V are gathered whole.
    """

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> Tensor:
        lengths = packed_seq_params.cu_seqlens_q_padded.diff().tolist()
        if self.config.context_parallel_size > 1:
            outputs = self._split(query, key, value, lengths)
        else:
            pieces = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
            outputs = [_attend(q, k, v, None) for q, k, v in pieces]
        return torch.cat(outputs).flatten(1)

    def _split(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> list[Tensor]:
        from megatron.core import parallel_state as mpu
        from torch.distributed.nn.functional import all_gather

        group, rank, size = mpu.get_context_parallel_group(), mpu.get_context_parallel_rank(), dist.get_world_size()
        size = mpu.get_context_parallel_world_size()
        held = [n // size for n in lengths]
        gathered = [zip(*(x.split(held) for x in all_gather(y, group=group)), strict=True) for y in (key, value)]
        outputs = []
        for q, keys, values, n in zip(query.split(held), *gathered, lengths, strict=True):
            half = n // (2 * size)
            piece = torch.arange(half)
            positions = torch.cat([rank * half + piece, n - (rank + 1) * half + piece])
            mask = positions[:, None] >= torch.arange(n)[None, :]
            outputs.append(_attend(q, _whole(keys, half), _whole(values, half), mask))
        return outputs


def _whole(shares: tuple[Tensor, ...], half: int) -> Tensor:
    """A sequence in order out of its ranks' shares."""
    return torch.cat([*(x[:half] for x in shares), *(x[half:] for x in reversed(shares))])


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _register_bridges() -> None:
    """Bridges for a local layer spec under the names of mbridge's own (the last one registered counts)."""
    from mbridge.core import register_model
    from mbridge.models.llama import LLaMABridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    for name, upstream in (("llama", LLaMABridge), ("qwen2", Qwen2Bridge), ("qwen3_moe", Qwen3MoEBridge)):
        register_model(name)(type(f"Local{upstream.__name__}", (_LocalSpec, upstream), {}))


class _LocalSpec:
    """What differs from Transformer Engine: norms by themselves, experts one by one, no fusions. A mixin, first in line."""

    config: Any
    mpu: Any
    _MLP_MAPPING: dict[str, list[str]]

    def _build_base_config(self, **fields: Any) -> Any:
        layer = "model.layers.{layer_number}."
        self._OTHER_MAPPING = {"input_layernorm.weight": [layer + "input_layernorm.weight"]}
        self._MLP_MAPPING = {
            "pre_mlp_layernorm.weight": [layer + "post_attention_layernorm.weight"],
            **type(self)._MLP_MAPPING,
        }
        ours = {
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "moe_grouped_gemm": False,
            "persist_layer_norm": False,
            "use_cpu_initialization": True,
        }
        return super()._build_base_config(**{**fields, **ours})  # type: ignore[misc]

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        from megatron.prefixflow.spec import SequenceParallelNorm

        self.has_vp_stage = True
        layers = get_gpt_decoder_layer_specs(self.config, False, self.config.normalization)
        for layer in layers:
            parts = layer.submodules
            parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelNorm
            attention = parts.self_attention.submodules
            attention.core_attention = PackedAttention
            for name in ("q_layernorm", "k_layernorm"):
                if getattr(attention, name) not in (None, IdentityOp):
                    setattr(attention, name, SequenceParallelNorm)
        start = get_transformer_layer_offset(self.config, vp_stage=vp_stage)
        count = get_num_layers_to_build(self.config, vp_stage=vp_stage)
        return TransformerBlockSubmodules(layer_specs=layers[start : start + count], layer_norm=SequenceParallelNorm)

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        expert = _EXPERT.search(name)
        if expert is not None:
            number, layer = expert.groups()
            name = f"{name[: expert.start()]}.mlp.experts.{layer}.weight{number}"
        return super()._weight_name_mapping_mcore_to_hf(name)  # type: ignore[misc]

    def _weight_name_mapping_mcore_local_to_global(self, model: Any, consider_ep: bool = True) -> dict[str, str]:
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep)  # type: ignore[misc]
        if not consider_ep or self.mpu.ep_size == 1:
            return names
        first = self.config.num_moe_experts // self.mpu.ep_size * self.mpu.ep_rank

        def shifted(match: re.Match[str]) -> str:
            return f".mlp.experts.local_experts.{first + int(match[1])}.{match[2]}.weight"

        return {local: _EXPERT.sub(shifted, name) for local, name in names.items()}

"""Hugging Face folders to and from Megatron models: a thin adapter over mbridge.

For dense Llama-like models (`llama`, `qwen2`, `qwen3`), tied embeddings included, under any
tensor- and pipeline-parallel layout. The Megatron model is built by us, from a local layer spec
or a Transformer Engine one; mbridge only converts the configuration and the weights.

Seams to mbridge (0.15.1). Its bridges expect Transformer Engine's fused norms, transformers 4
and unpadded vocabularies, so `_LocalSpecBridge` overrides these private members:

* `__init__`                            dtype of the model; no global parallel state needed
* `_MLP_MAPPING`, `_OTHER_MAPPING`      norm weights of a local spec stand by themselves
* `_DIRECT_MAPPING`, `_adjust_mapping_for_shared_weights`
                                        tied embeddings for every model type, and on the
                                        instance: upstream writes into the class
* `_build_base_config`                  our defaults for fusions, the caller's overrides
* `_get_gptmodel_args`                  `rope_parameters` of transformers 5, tied embeddings
* `_weight_split_across_tp`, `_weight_to_hf_format`
                                        vocabulary rows padded to the model's, and cut again

The public `load_weights` and `export_weights` do the rest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.prefixflow.folders import new_folder

try:
    from mbridge.core.bridge import Bridge
    from mbridge.core.parallel_states import ParallelStates
    from mbridge.models.llama import LLaMABridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from mbridge.models.qwen3 import Qwen3Bridge
except ImportError as error:
    raise ImportError(
        f"Reading Hugging Face models needs the extra `hf` ({error}). Run `pip install prefixflow[hf]`."
    ) from error

_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"
_MAX_SHARD_SIZE = "5GB"
# Fields that fix the shapes and the function of the model, compared before weights are loaded.
_ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "add_qkv_bias",
    "qk_layernorm",
    "gated_linear_unit",
    "normalization",
    "layernorm_epsilon",
)
# The scaling of Llama 3 has these numbers fixed in Megatron's `RotaryEmbedding._apply_scaling`.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def load_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """The folder's `config.json` as transformers normalises it (defaults filled), as a dict."""
    return _auto_config(hf_dir).to_dict()


def transformer_config_from_hf(hf_dir: str | Path, **overrides: Any) -> tuple[TransformerConfig, dict[str, Any]]:
    """Megatron's configuration of the model in `hf_dir`, and the arguments of `GPTModel`.

    overrides: fields of `TransformerConfig`. `params_dtype` is float32 unless given. Parallel
        sizes come from Megatron's parallel state when that is initialised, else they are 1.

    The second value holds `vocab_size` (unpadded), `max_sequence_length`,
    `position_embedding_type`, `rotary_*`, scaling where the model has it, and
    `share_embeddings_and_output_weights`; spec, `pre_process` and the like are the caller's.

    Raises ValueError for an architecture or position scaling that Megatron would not reproduce.
    """
    dtype = overrides.get("params_dtype", torch.float32)
    bridge = _bridge(_auto_config(hf_dir), dtype, overrides)
    return bridge.config, bridge._get_gptmodel_args()


def load_hf_weights(model_chunks: Sequence[torch.nn.Module], hf_dir: str | Path) -> None:
    """Copy the weights of `hf_dir` into this rank's model chunks, in the chunks' dtype.

    A collective over the tensor-parallel group: its first rank reads and scatters. Vocabulary
    rows that only pad are set to zero. An optimizer that keeps main parameters must be built,
    or told to reload (`reload_model_params`), afterwards.

    model_chunks: `GPTModel`s, possibly wrapped (DDP, Float16Module).
    """
    chunks = [_unwrap(chunk) for chunk in model_chunks]
    bridge = _bridge_for(chunks, hf_dir)
    with torch.no_grad():
        bridge.load_weights(chunks, str(hf_dir))


def export_hf_weights(model_chunks: Sequence[torch.nn.Module], out_dir: str | Path, hf_dir: str | Path) -> None:
    """Write the model as a Hugging Face folder `out_dir`; called by every rank.

    hf_dir: the folder that the model was loaded from, or one of the same architecture: its
        configuration, tokenizer and chat template go along.

    Rank 0 gathers the whole model in host memory and writes; the folder appears under its name
    only when it is whole. Raises ValueError, on every rank, when `out_dir` is there already.
    """
    chunks = [_unwrap(chunk) for chunk in model_chunks]
    bridge = _bridge_for(chunks, hf_dir)
    out_dir = Path(out_dir).absolute()
    _refuse_existing(out_dir)
    is_writer = torch.distributed.get_rank() == 0
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, weight in bridge.export_weights(chunks):
            if is_writer:
                # A copy: what comes may be a view of a live parameter.
                weights[name] = weight.detach().to("cpu", copy=True).contiguous()
    if is_writer:
        with new_folder(out_dir) as folder:
            _write_folder(weights, folder, Path(hf_dir), bridge.dtype)
    torch.distributed.barrier()


def rope_arguments(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`GPTModel`'s rotary arguments for a transformers configuration (4 or 5) as a dict.

    Raises ValueError for a scaling that Megatron's `RotaryEmbedding` does not have.
    """
    rope = dict(hf_config.get("rope_scaling") or {})
    rope |= hf_config.get("rope_parameters") or {}
    base = rope.get("rope_theta", hf_config.get("rope_theta", 10000.0))
    percent = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": int(base) if float(base).is_integer() else base,
        "rotary_percent": percent,
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return arguments
    if kind == "linear":
        return arguments | {"seq_len_interpolation_factor": float(rope["factor"])}
    if kind == "llama3":
        got = {name: rope.get(name, value) for name, value in _LLAMA3_ROPE.items()}
        if got != _LLAMA3_ROPE:
            raise ValueError(f"Rotary scaling `llama3`: Megatron fixes {_LLAMA3_ROPE}, the model has {got}.")
        return arguments | {"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    raise ValueError(
        f"Rotary scaling {kind!r} is not supported: expected default, linear or llama3. Use a model without it."
    )


class _LocalSpecBridge(Bridge):
    """What our bridges change in mbridge's (see the top of this file). A mixin, first in line."""

    _DIRECT_MAPPING: dict[str, str]
    _MLP_MAPPING: dict[str, list[str]]
    _OTHER_MAPPING: dict[str, list[str]]

    def __init__(
        self,
        hf_config: Any,
        dtype: torch.dtype,
        parallel_states: ParallelStates,
        overrides: Mapping[str, Any],
    ) -> None:
        self._overrides = dict(overrides)
        layer = "model.layers.{layer_number}."
        self._MLP_MAPPING = {
            **self._MLP_MAPPING,
            "pre_mlp_layernorm.weight": [layer + "post_attention_layernorm.weight"],
        }
        self._OTHER_MAPPING = {
            **self._OTHER_MAPPING,
            "input_layernorm.weight": [layer + "input_layernorm.weight"],
        }
        super().__init__(hf_config, dtype=dtype, parallel_states=parallel_states)

    def _adjust_mapping_for_shared_weights(self) -> None:
        if self.hf_config.tie_word_embeddings:
            # The last pipeline stage has a copy of the embedding as its head.
            self._DIRECT_MAPPING = {
                **self._DIRECT_MAPPING,
                _HEAD: self._DIRECT_MAPPING[_EMBEDDING],
            }

    def _build_base_config(self, **fields: Any) -> TransformerConfig:
        ours = {
            "bias_dropout_fusion": False,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "overlap_p2p_comm": False,
            "perform_initialization": True,
            "sequence_parallel": False,
            "use_cpu_initialization": not torch.cuda.is_available(),
        }
        return super()._build_base_config(**{**fields, **ours, **self._overrides})

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "share_embeddings_and_output_weights": self.hf_config.tie_word_embeddings,
            **rope_arguments(self.hf_config.to_dict()),
        }

    def _weight_split_across_tp(self, name: str, weight: Tensor, param: Tensor, tp_split_size: int) -> Sequence[Tensor]:
        if name in (_EMBEDDING, _HEAD):
            num_padding_rows = param.shape[0] * tp_split_size - weight.shape[0]
            weight = torch.nn.functional.pad(weight, (0, 0, 0, num_padding_rows))
        return super()._weight_split_across_tp(name, weight, param, tp_split_size)

    def _weight_to_hf_format(self, name: str, weight: Tensor) -> tuple[list[str], list[Tensor]]:
        if name in (_EMBEDDING, _HEAD):
            weight = weight[: self.hf_config.vocab_size]
        return super()._weight_to_hf_format(name, weight)


class _Llama(_LocalSpecBridge, LLaMABridge):
    pass


class _Qwen2(_LocalSpecBridge, Qwen2Bridge):
    pass


class _Qwen3(_LocalSpecBridge, Qwen3Bridge):
    pass


_BRIDGES: dict[str, type[_LocalSpecBridge]] = {"llama": _Llama, "qwen2": _Qwen2, "qwen3": _Qwen3}


def _auto_config(hf_dir: str | Path) -> Any:
    from transformers import AutoConfig

    if not (Path(hf_dir) / "config.json").is_file():
        raise ValueError(f"{hf_dir} is not a Hugging Face folder: it has no config.json.")
    return AutoConfig.from_pretrained(hf_dir, local_files_only=True)


def _bridge(hf_config: Any, dtype: torch.dtype, overrides: Mapping[str, Any]) -> _LocalSpecBridge:
    _refuse_unsupported(hf_config)
    if getattr(hf_config, "head_dim", None) is None:
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    if parallel_state.model_parallel_is_initialized():
        states = ParallelStates.get_parallel_state()
    else:
        states = ParallelStates(vpp_size=None)
    return _BRIDGES[hf_config.model_type](hf_config, dtype, states, overrides)


def _refuse_unsupported(hf_config: Any) -> None:
    name = hf_config.model_type
    if name not in _BRIDGES:
        raise ValueError(f"Model type {name!r} is not supported: expected one of {', '.join(_BRIDGES)}.")
    expected = {
        "hidden_act": "silu",
        # Megatron has a bias on Q, K and V alone, or on every linear layer.
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }
    for field, value in expected.items():
        got = getattr(hf_config, field, value)
        if got != value:
            raise ValueError(f"Model type {name!r} with {field}={got!r} is not supported: expected {value!r}.")


def _bridge_for(chunks: Sequence[GPTModel], hf_dir: str | Path) -> _LocalSpecBridge:
    """The bridge between `chunks` and `hf_dir`, both checked to be the same architecture."""
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "Weights are exchanged in Megatron's process groups, which are not initialised: "
            "call parallel_state.initialize_model_parallel first."
        )
    dtype = next(chunks[0].parameters()).dtype
    bridge = _bridge(_auto_config(hf_dir), dtype, {})
    for chunk in chunks:
        _refuse_mismatch(chunk, bridge, hf_dir)
    return bridge


def _refuse_mismatch(chunk: GPTModel, bridge: _LocalSpecBridge, hf_dir: str | Path) -> None:
    got = {name: getattr(chunk.config, name) for name in _ARCHITECTURE}
    expected = {name: getattr(bridge.config, name) for name in _ARCHITECTURE}
    arguments = bridge._get_gptmodel_args()
    tied = "share_embeddings_and_output_weights"
    got[tied], expected[tied] = chunk.share_embeddings_and_output_weights, arguments[tied]
    differing = [name for name, value in expected.items() if got[name] != value]
    if differing:
        listed = ", ".join(f"{name} {expected[name]} (got {got[name]})" for name in differing)
        raise ValueError(
            f"The Megatron model is not the one of {hf_dir}, which has {listed}. "
            "Build it from transformer_config_from_hf."
        )
    if chunk.vocab_size < bridge.hf_config.vocab_size:
        raise ValueError(
            f"The Megatron model has {chunk.vocab_size} vocabulary rows, {hf_dir} needs at "
            f"least {bridge.hf_config.vocab_size}."
        )
    if bridge.config.num_query_groups % bridge.mpu.tp_size:
        raise ValueError(
            f"{hf_dir} has {bridge.config.num_query_groups} K/V groups, which {bridge.mpu.tp_size} "
            "tensor-parallel ranks cannot share evenly. Choose a divisor."
        )


def _unwrap(chunk: torch.nn.Module) -> GPTModel:
    model = unwrap_model(chunk)
    if not isinstance(model, GPTModel):
        raise ValueError(f"Expected a GPTModel, possibly wrapped, got {type(model).__name__}.")
    return model


def _refuse_existing(out_dir: Path) -> None:
    """Raises on every rank when rank 0 finds `out_dir` occupied, so that none is left waiting."""
    occupied = [out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir()))]
    torch.distributed.broadcast_object_list(occupied, src=0)
    if occupied[0]:
        raise ValueError(f"{out_dir} is there already. Remove it or export to another folder.")


def _write_folder(weights: dict[str, Tensor], folder: Path, hf_dir: Path, dtype: torch.dtype) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder, max_shard_size=_MAX_SHARD_SIZE)
    for file in sorted(hf_dir.iterdir()):
        is_weights = file.suffix in (".safetensors", ".bin", ".gguf")
        if file.is_file() and not is_weights and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")

"""Hugging Face folders to and from Megatron models: a thin adapter over mbridge or megatron-bridge.

For `llama`, `mistral` (without a sliding window), `qwen2`, `qwen3`, `qwen3_moe` and `mixtral`, tied embeddings included, under
any layout. The Megatron model is built by us, from a local layer spec or a Transformer Engine one. mbridge knows what
parameters are called in a Hugging Face folder and how they are laid out there; so does megatron-bridge, which is taken where it
works (`megatron_bridge`). `HFForm` is the adapter in front of both. Which rank holds what of a parameter is Megatron's own
knowledge, read by `shards`.

Seams to mbridge (0.15.1). Its bridges expect Transformer Engine's fused norms and grouped experts, transformers 4 and
unpadded vocabularies. `MBridgeForm` calls `_weight_name_mapping_mcore_to_hf`, `_weight_to_mcore_format` and
`_weight_to_hf_format`; `_LocalSpecBridge` overrides these private members:

* `__init__`                     dtype of the model; no global parallel state needed
* `_MLP_MAPPING`, `_OTHER_MAPPING`
                                 norm weights of a local spec stand by themselves; dense layers among MoE layers
* `_build_base_config`           our defaults for fusions, the caller's overrides
* `_get_gptmodel_args`           `rope_parameters` of transformers 5, tied embeddings
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.prefixflow.folders import new_folder
from megatron.prefixflow.groups import current_groups
from megatron.prefixflow.hf_files import HFTensors, HFWriter, TensorSpec, copy_hf_files, list_names
from megatron.prefixflow.megatron_bridge import megatron_bridge_form
from megatron.prefixflow.shards import VOCABULARY_PARAMETERS, load_full_parameters, whole_parameters, whole_shapes
from prefixflow.plan.shapes import check_hugging_face_config, read_json_object

try:
    from mbridge.core.bridge import Bridge
    from mbridge.core.parallel_states import ParallelStates
    from mbridge.models.llama import LLaMABridge
    from mbridge.models.mixtral import MixtralBridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from mbridge.models.qwen3 import Qwen3Bridge
    from mbridge.models.qwen3moe import Qwen3MoEBridge
except ImportError as error:
    raise ImportError(
        f"Reading Hugging Face models needs the extra `hf` ({error}). Run `pip install prefixflow[hf]`."
    ) from error

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
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_router_pre_softmax",
)
# The scaling of Llama 3 has these numbers fixed in Megatron's `RotaryEmbedding._apply_scaling`.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


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

    Every rank reads what it holds, one parameter at a time; no collective. Vocabulary rows that only pad are set to zero. An
    optimizer that keeps main parameters must be built, or told to reload (`reload_model_params`), afterwards.

    model_chunks: `GPTModel`s, possibly wrapped (DDP, Float16Module).

    Raises ValueError when the model is not that of `hf_dir`, or a tensor is missing or has another shape.
    """
    chunks = [_unwrap(chunk) for chunk in model_chunks]
    form = _form_for(chunks, hf_dir)
    full = _HFParameters(form, HFTensors(hf_dir))
    load_full_parameters(chunks, full, current_groups(with_channels=False), gated=True)


def export_hf_weights(model_chunks: Sequence[torch.nn.Module], out_dir: str | Path, hf_dir: str | Path) -> None:
    """Write the model as a Hugging Face folder `out_dir`; called by every rank.

    hf_dir: the folder that the model was loaded from, or one of the same architecture, with or without weights: its
        configuration, tokenizer and chat template go along.

    Parameters come to rank 0 one at a time, which writes them; the folder appears under its name only when it is whole.
    Raises ValueError, on every rank, when `out_dir` is there already, and for routers that no such folder can describe.
    """
    chunks = [_unwrap(chunk) for chunk in model_chunks]
    config = chunks[0].config
    if problem := unexported_router(config.moe_router_score_function, config.moe_router_enable_expert_bias):
        raise ValueError(f"{out_dir} cannot be written: {problem}")
    form = _form_for(chunks, hf_dir)
    out_dir = Path(out_dir).absolute()
    _refuse_existing(out_dir)
    groups = current_groups(with_channels=False)
    dtype = next(chunks[0].parameters()).dtype
    shapes = whole_shapes(chunks, groups)
    parameters = whole_parameters(chunks, groups, shapes, gated=True)
    if dist.get_rank() == 0:
        with new_folder(out_dir) as folder:
            writer = HFWriter(folder, form.hf_specs(shapes, dtype))
            for name, parameter in parameters:
                assert parameter is not None
                for hf_name, tensor in form.to_hf(name, parameter):
                    writer.write(hf_name, tensor)
            writer.finish()
            copy_hf_files(Path(hf_dir), folder, dtype)
    else:
        for _ in parameters:
            pass
    dist.barrier()


def unexported_router(score_function: str, has_expert_bias: bool) -> str | None:
    """What a router has that none of the architectures here has in its Hugging Face form, so that an export would lose it."""
    if has_expert_bias:
        return "routers have expert biases (--moe-router-enable-expert-bias), for which the Hugging Face form has no place."
    if score_function != "softmax":
        return f"--moe-router-score-function is {score_function}, and the Hugging Face form means softmax."
    return None


class _Form(Protocol):
    def hf_names(self, name: str) -> list[str]: ...
    def to_megatron(self, name: str, tensors: Sequence[Tensor]) -> Tensor: ...
    def to_hf(self, name: str, parameter: Tensor) -> Sequence[Tensor]: ...


class MBridgeForm:
    """Names and layouts from mbridge."""

    def __init__(self, bridge: _LocalSpecBridge) -> None:
        self._bridge = bridge
        # mbridge casts to this dtype where there is one; the caller's tensors keep theirs.
        bridge.dtype = None

    def hf_names(self, name: str) -> list[str]:
        """Raises LookupError for a name without counterpart."""
        try:
            names: list[str] = self._bridge._weight_name_mapping_mcore_to_hf(_grouped_name(name))
        except NotImplementedError:
            raise LookupError(name) from None
        return names

    def to_megatron(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        made: Tensor = self._bridge._weight_to_mcore_format(_grouped_name(name), list(tensors))
        return made

    def to_hf(self, name: str, parameter: Tensor) -> Sequence[Tensor]:
        _, tensors = self._bridge._weight_to_hf_format(_grouped_name(name), parameter)
        return list(tensors)


class HFForm:
    """What the parameters of one model are called in Hugging Face folders, and how they are laid out there.

    Names are those of the whole model, as in `shards`; experts are Megatron's sequential ones. Vocabularies may be padded.

    backend: `megatron-bridge` where that works, else `mbridge`, which also serves for single parameters that the other lacks.
    """

    def __init__(self, bridge: _LocalSpecBridge) -> None:
        self.vocab_size: int = bridge.hf_config.vocab_size
        self._kind: str = bridge.hf_config.model_type
        preferred = megatron_bridge_form(bridge.hf_config, bridge.config)
        self.backend = "mbridge" if preferred is None else "megatron-bridge"
        self._forms: list[_Form] = [MBridgeForm(bridge)] if preferred is None else [preferred, MBridgeForm(bridge)]

    @classmethod
    def of(cls, hf_dir: str | Path) -> HFForm:
        """Raises ValueError for an architecture or position scaling that Megatron would not reproduce."""
        bridge = _bridge(_auto_config(hf_dir), torch.float32, {})
        bridge._get_gptmodel_args()
        return cls(bridge)

    def hf_names(self, name: str) -> list[str]:
        """Raises ValueError for a parameter that this architecture has no name for."""
        return self._form_of(name)[1]

    def _form_of(self, name: str) -> tuple[_Form, list[str]]:
        for form in self._forms:
            try:
                return form, form.hf_names(name)
            except LookupError:
                continue
        raise ValueError(f"Parameter {name!r} has no counterpart in a Hugging Face {self._kind!r} model.")

    def to_hf(self, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors of a whole parameter; rows of a vocabulary that only pad are cut."""
        if name in VOCABULARY_PARAMETERS:
            parameter = parameter[: self.vocab_size]
        form, names = self._form_of(name)
        return zip(names, form.to_hf(name, parameter), strict=True)

    def to_megatron(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """The whole parameter, vocabulary unpadded, of the tensors called `hf_names(name)`.

        Raises ValueError when they do not fit together.
        """
        try:
            return self._form_of(name)[0].to_megatron(name, tensors)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ValueError(
                f"Tensors {list_names(self.hf_names(name))} with shapes {shapes} do not make {name!r}: {error}"
            ) from error

    def hf_specs(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Names and shapes of a folder of this model, whose parameters have `shapes`, in their order."""
        return {
            hf_name: TensorSpec(dtype, tuple(tensor.shape))
            for name, shape in shapes.items()
            for hf_name, tensor in self.to_hf(name, torch.empty(tuple(shape), dtype=dtype, device="meta"))
        }


class _HFParameters(Mapping[str, Tensor]):
    """Parameters by Megatron name, read from a Hugging Face folder when they are asked for."""

    def __init__(self, form: HFForm, files: HFTensors) -> None:
        self._form = form
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        return self._form.to_megatron(name, [self._files.read(n) for n in self._form.hf_names(name)])

    def __contains__(self, name: object) -> bool:
        # What is missing is named by the read, in the folder's own terms.
        return True

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError("the folder does not know Megatron's names")

    def __len__(self) -> int:
        raise NotImplementedError("the folder does not know Megatron's names")


def _grouped_name(name: str) -> str:
    """mbridge's name of a parameter: its experts are grouped."""
    found = _EXPERT.fullmatch(name)
    return f"{found[1]}.{found[3]}.weight{found[2]}" if found else name


def rope_arguments(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`GPTModel`'s rotary arguments for a transformers configuration (4 or 5) as a dict.

    Raises ValueError for a scaling that Megatron's `RotaryEmbedding` does not have.
    """
    rope = dict(hf_config.get("rope_scaling") or {}) | dict(hf_config.get("rope_parameters") or {})
    rope = {name: value for name, value in rope.items() if value is not None}
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
    if kind in ("linear", "llama3") and "factor" not in rope:
        raise ValueError(f"Rotary scaling {kind!r} needs a factor, and the model's configuration has none.")
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
        # Upstream writes into the class; a tied head is the embedding by name in `shards`.
        pass

    def _build_base_config(self, **fields: Any) -> TransformerConfig:
        ours = {
            "bias_dropout_fusion": False,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "moe_grouped_gemm": False,
            "persist_layer_norm": False,
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


class _Llama(_LocalSpecBridge, LLaMABridge):
    pass


class _Qwen2(_LocalSpecBridge, Qwen2Bridge):
    pass


class _Qwen3(_LocalSpecBridge, Qwen3Bridge):
    pass


def _dense_mlp(mapping: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: hf_names for name, hf_names in mapping.items() if name.startswith("mlp.linear_fc")}


def _moe_layers(hf_config: Any) -> list[int]:
    """1 for every layer with experts."""
    step, dense = hf_config.decoder_sparse_step, hf_config.mlp_only_layers or ()
    return [int(i not in dense and (i + 1) % step == 0) for i in range(hf_config.num_hidden_layers)]


class _Qwen3Moe(_LocalSpecBridge, Qwen3MoEBridge):
    _MLP_MAPPING = {**Qwen3MoEBridge._MLP_MAPPING, **_dense_mlp(Qwen3Bridge._MLP_MAPPING)}  # noqa: RUF012

    def _build_base_config(self, **fields: Any) -> TransformerConfig:
        fields["moe_router_pre_softmax"] = not self.hf_config.norm_topk_prob
        return super()._build_base_config(**fields, moe_layer_freq=_moe_layers(self.hf_config))


class _Mixtral(_LocalSpecBridge, MixtralBridge):
    def _build_base_config(self, **fields: Any) -> TransformerConfig:
        # transformers divides the chosen experts' weights by their sum, which is a softmax over them.
        fields["moe_router_pre_softmax"] = False
        return super()._build_base_config(**fields)


_BRIDGES: dict[str, type[_LocalSpecBridge]] = {
    "llama": _Llama,
    "mistral": _Llama,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3Moe,
    "mixtral": _Mixtral,
}


def _auto_config(hf_dir: str | Path) -> Any:
    from transformers import AutoConfig

    file = Path(hf_dir) / "config.json"
    if not file.is_file():
        raise ValueError(f"{hf_dir} is not a Hugging Face folder: it has no config.json.")
    check_hugging_face_config(read_json_object(file), str(file))
    try:
        return AutoConfig.from_pretrained(hf_dir, local_files_only=True)
    except Exception as error:  # transformers has no common one
        raise ValueError(f"{file}: transformers does not take it: {error}") from error


def _bridge(hf_config: Any, dtype: torch.dtype, overrides: Mapping[str, Any]) -> _LocalSpecBridge:
    _refuse_unsupported(hf_config)
    if getattr(hf_config, "head_dim", None) is None:
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    if parallel_state.model_parallel_is_initialized():
        states = ParallelStates.get_parallel_state()
    else:
        states = ParallelStates(vpp_size=None)
    try:
        return _BRIDGES[hf_config.model_type](hf_config, dtype, states, overrides)
    except (AssertionError, ArithmeticError) as error:
        raise ValueError(f"Megatron-Core refuses the {hf_config.model_type!r} model of config.json: {error}") from error


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
    if name in ("mistral", "mixtral"):
        expected["sliding_window"] = None
    for field, value in expected.items():
        got = getattr(hf_config, field, value)
        if got != value:
            raise ValueError(f"Model type {name!r} with {field}={got!r} is not supported: expected {value!r}.")


def _form_for(chunks: Sequence[GPTModel], hf_dir: str | Path) -> HFForm:
    """The form of `hf_dir`, checked to be of the same architecture as `chunks`."""
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "Weights are exchanged in Megatron's process groups, which are not initialised: "
            "call parallel_state.initialize_model_parallel first."
        )
    dtype = next(chunks[0].parameters()).dtype
    bridge = _bridge(_auto_config(hf_dir), dtype, {})
    for chunk in chunks:
        _refuse_mismatch(chunk, bridge, hf_dir)
    return HFForm(bridge)


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
    dist.broadcast_object_list(occupied, src=0)
    if occupied[0]:
        raise ValueError(f"{out_dir} is there already. Remove it or export to another folder.")

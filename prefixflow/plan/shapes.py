"""Model shapes: the integers of a decoder that planning, bounds and memory estimates need.

Pure data, free of torch. A shape is one of the built-in names, a Hugging Face `config.json`, or a
JSON object with the field names below. Sizes are of the whole model, never of one rank; byte
figures take the size of one element.

Not covered: latent attention, sliding windows, attention sinks, encoder-decoders. A file that asks
for one is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefixflow.trajectories.types import RouteShape

BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE is stretched: `llama3` scales the frequencies as Llama 3.1 does, with its low and high frequency factors 1 and 4
    and its original length 8192; `linear` divides the positions."""

    factor: float
    kind: Literal["llama3", "linear"] = "llama3"

    def __post_init__(self) -> None:
        check_number("rope scaling: factor", self.factor, whole=False)
        if self.kind not in ("llama3", "linear"):
            raise ValueError(f"rope scaling: kind is {self.kind!r}, expected 'llama3' or 'linear'.")


def check_number(name: str, value: object, *, least: int = 1, whole: bool = True) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`, or a finite one above 0."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if whole and isinstance(value, int) and value >= least:
            return
        if not whole and math.isfinite(value) and value > 0:
            return
    expected = f"a whole number of at least {least}" if whole else "a finite number above 0"
    raise ValueError(f"{name} is {value!r}, expected {expected}.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with RoPE and RMSNorm.

    `ffn_hidden_size` is the width of a dense layer's MLP and `moe_ffn_hidden_size` that of one
    expert. With experts, `moe_layer_pattern` says for every layer whether it has them (1) or is
    dense (0); empty means that every layer has.

    Raises:
        ValueError: sizes that do not fit together.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    max_positions: int
    gated: bool = True
    tied_embeddings: bool = False
    qk_layernorm: bool = False
    qkv_bias: bool = False
    num_experts: int = 0
    moe_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_ffn_hidden_size: int = 0
    moe_normalize_topk: bool = True
    moe_layer_pattern: tuple[int, ...] = ()
    rotary_base: int = 10_000
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = f"shape {self.name!r}: {field.name}", getattr(self, field.name)
            if field.type == "int":
                check_number(name, value, least=int(field.default is dataclasses.MISSING))
            elif field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, expected true or false.")
        check_number(f"shape {self.name!r}: rotary_base", self.rotary_base)
        if self.rotary_base >= 2**63:
            raise ValueError(f"shape {self.name!r}: rotary_base is {self.rotary_base}, expected less than 2^63.")
        check_number(f"shape {self.name!r}: norm_epsilon", self.norm_epsilon, whole=False)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"shape {self.name!r}: {self.num_attention_heads} attention heads do not divide "
                f"into {self.num_query_groups} K/V groups of equal size."
            )
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        if not 1 <= self.moe_topk <= self.num_experts:
            raise ValueError(
                f"shape {self.name!r}: moe_topk is {self.moe_topk}, expected 1 to num_experts ({self.num_experts})."
            )
        if self.moe_ffn_hidden_size < 1:
            raise ValueError(f"shape {self.name!r}: it has experts, so moe_ffn_hidden_size must be at least 1.")
        if self.moe_layer_pattern and len(self.moe_layer_pattern) != self.num_layers:
            raise ValueError(
                f"shape {self.name!r}: moe_layer_pattern has {len(self.moe_layer_pattern)} "
                f"entries, expected {self.num_layers}, one a layer."
            )

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def num_moe_layers(self) -> int:
        if not self.is_moe:
            return 0
        return sum(self.moe_layer_pattern) if self.moe_layer_pattern else self.num_layers

    @property
    def route_shape(self) -> RouteShape:
        """Shape of the routes that a rollout of this model records."""
        return RouteShape(self.num_moe_layers, self.moe_topk, self.num_experts)

    @property
    def num_body_parameters(self) -> int:
        """N_body: parameters of the decoder that act on one token, so of the experts only top-k.

        Neither the embedding nor the LM head; norms and the router included.
        """
        return self._num_body_parameters(self.moe_topk)

    @property
    def num_total_body_parameters(self) -> int:
        """As `num_body_parameters`, with every expert counted."""
        return self._num_body_parameters(self.num_experts)

    @property
    def num_head_parameters(self) -> int:
        """N_head: the LM head, tied or not, with the unpadded vocabulary."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """Every parameter once: embedding, decoder, and the LM head where it is not tied."""
        num_tables = 1 if self.tied_embeddings else 2
        return self.num_total_body_parameters + num_tables * self.num_head_parameters

    @property
    def num_expert_parameters(self) -> int:
        """Those of `num_parameters` that expert parallelism splits: routed experts, not shared ones and no router."""
        return self.num_moe_layers * self.num_experts * self._num_mlp_parameters(self.moe_ffn_hidden_size)

    def _num_body_parameters(self, num_experts_counted: int) -> int:
        num_dense_layers = self.num_layers - self.num_moe_layers
        num_moe = self.num_moe_layers and self._num_moe_parameters(num_experts_counted)
        layers = self.num_layers * self._num_attention_parameters()
        layers += num_dense_layers * self._num_mlp_parameters(self.ffn_hidden_size) + self.num_moe_layers * num_moe
        return layers + self.hidden_size

    def _num_attention_parameters(self) -> int:
        """Of one layer, with the layer's two norms."""
        qkv_width = (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels
        weights = self.hidden_size * (qkv_width + self.num_attention_heads * self.kv_channels)
        norms = 2 * self.hidden_size + (2 * self.kv_channels if self.qk_layernorm else 0)
        return weights + norms + (qkv_width if self.qkv_bias else 0)

    def _num_mlp_parameters(self, ffn_hidden_size: int) -> int:
        return (3 if self.gated else 2) * self.hidden_size * ffn_hidden_size

    def _num_moe_parameters(self, num_experts_counted: int) -> int:
        experts = num_experts_counted * self._num_mlp_parameters(self.moe_ffn_hidden_size)
        shared = self._num_mlp_parameters(self.moe_shared_ffn_hidden_size)
        return experts + shared + self.hidden_size * self.num_experts

    @property
    def attention_flops_per_pair(self) -> int:
        """a: of one query-key pair, all layers."""
        return 4 * self.num_attention_heads * self.kv_channels * self.num_layers

    @property
    def body_flops_per_token(self) -> int:
        """b: of the decoder's linear layers, for one token."""
        return 2 * self.num_body_parameters

    @property
    def head_flops_per_row(self) -> int:
        """h: of the LM head, for one row."""
        return 2 * self.num_head_parameters

    def kv_bytes_per_token(self, element_bytes: int = BF16_BYTES) -> int:
        """K and V of every layer."""
        return 2 * self.num_layers * self.num_query_groups * self.kv_channels * element_bytes

    def kv_gradient_bytes_per_token(self, element_bytes: int = FP32_BYTES) -> int:
        """gK and gV of every layer; they are accumulated in at least fp32."""
        return self.kv_bytes_per_token(max(element_bytes, FP32_BYTES))

    def layer_input_bytes_per_token(self, element_bytes: int = BF16_BYTES) -> int:
        """The checkpoints that full recomputation of single layers keeps."""
        return self.num_layers * self.hidden_size * element_bytes

    def activation_bytes_per_token(self, element_bytes: int = BF16_BYTES) -> int:
        """What autograd keeps without recomputation, with flash attention and a fused gate.

        Two norm inputs, two norm outputs, q, the attention output, K and V, the up projections, and
        the input of the down projection. With experts: the permuted input and the widths of the
        top-k experts.
        """
        num_dense_layers = self.num_layers - self.num_moe_layers
        attention = 4 * self.hidden_size + 2 * (self.num_attention_heads + self.num_query_groups) * self.kv_channels
        up_and_down = 3 if self.gated else 2
        dense = up_and_down * self.ffn_hidden_size
        experts = self.moe_topk * (self.hidden_size + up_and_down * self.moe_ffn_hidden_size)
        experts += up_and_down * self.moe_shared_ffn_hidden_size
        elements = self.num_layers * attention + num_dense_layers * dense + self.num_moe_layers * experts
        return elements * element_bytes

    @classmethod
    def from_name(cls, name: str) -> ModelShape:
        """A built-in shape.

        Raises:
            ValueError: no shape has that name.
        """
        if name not in BUILTIN_SHAPES:
            near = difflib.get_close_matches(name, BUILTIN_SHAPES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(BUILTIN_SHAPES)
            raise ValueError(f"model {name!r} is neither a built-in shape ({known}) nor a file.{hint}")
        return BUILTIN_SHAPES[name]

    @classmethod
    def from_json(cls, path: str | Path) -> ModelShape:
        """Read a Hugging Face `config.json`, a folder that holds one, or an object of our fields.

        Raises:
            ValueError: not JSON, a field missing or unknown, an architecture that is not covered.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
            if not file.is_file():
                raise ValueError(f"{path}: expected a folder of a Hugging Face model, got one without config.json.")
        data = read_json_object(file)
        if "num_hidden_layers" in data or "model_type" in data:
            return _shape_from_hugging_face(data, str(file))
        return _shape_from_fields(data, str(file))

    @classmethod
    def load(cls, name_or_path: str) -> ModelShape:
        """`from_json` where a file or folder of that name exists or it ends in `.json`, else
        `from_name`."""
        if name_or_path in BUILTIN_SHAPES:
            return BUILTIN_SHAPES[name_or_path]
        path = Path(name_or_path)
        if path.exists() or path.suffix == ".json":
            return cls.from_json(path)
        return cls.from_name(name_or_path)


def read_json_object(file: Path) -> dict[str, Any]:
    """Raises ValueError, with the file's name, where it is not a JSON object."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error}).") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(data).__name__}.")
    return data


def _shape_from_fields(data: dict[str, Any], where: str) -> ModelShape:
    fields = {field.name: field for field in dataclasses.fields(ModelShape)}
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where}: unknown field {key!r}.{hint} Known: {', '.join(fields)}.")
    values = {"name": Path(where).stem, **data}
    if "moe_layer_pattern" in values:
        values["moe_layer_pattern"] = tuple(_list_of(int, values["moe_layer_pattern"], f"{where}: moe_layer_pattern"))
    if values.get("rope_scaling") is not None:
        scaling = values["rope_scaling"]
        if not isinstance(scaling, dict) or not {"factor"} <= scaling.keys() <= {"factor", "kind"}:
            raise ValueError(f"{where}: rope_scaling is {scaling!r}, expected an object with a factor, and a kind.")
        values["rope_scaling"] = RopeScaling(**scaling)
    if "kv_channels" not in values and {"hidden_size", "num_attention_heads"} <= values.keys():
        for name in ("hidden_size", "num_attention_heads"):
            check_number(f"{where}: {name}", values[name])
        values["kv_channels"] = values["hidden_size"] // values["num_attention_heads"]
    values.setdefault("num_query_groups", values.get("num_attention_heads"))
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and values.get(n) is None]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}.")
    return ModelShape(**values)


def _list_of(kind: type, values: object, name: str) -> list[Any]:
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        raise ValueError(f"{name} is {values!r}, expected a list of {kind.__name__} values.")
    return values


_HUGGING_FACE_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
)


def check_hugging_face_config(data: Mapping[str, Any], where: str) -> None:
    """Raise ValueError, naming the field of `config.json`, where a size is no whole number, or a number is not above 0.

    null stands for a default; whether a field must be there depends on the architecture.
    """
    rope = {name: data[name] for name in ("rope_parameters", "rope_scaling") if data.get(name) is not None}
    for name, value in rope.items():
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {name} is {value!r}, expected an object.")
    for prefix, fields in {"": data, **{f"{name}.": value for name, value in rope.items()}}.items():
        for name in (*_HUGGING_FACE_SIZES, "rms_norm_eps", "rope_theta", "factor"):
            if fields.get(name) is not None:
                check_number(f"{where}: {prefix}{name}", fields[name], whole=name in _HUGGING_FACE_SIZES)
    for name, kind in (("mlp_only_layers", int), ("layer_types", str)):
        if data.get(name) is not None:
            _list_of(kind, data[name], f"{where}: {name}")


_HUGGING_FACE_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_QK_LAYERNORM_TYPES = ("qwen3", "qwen3_moe")


def _shape_from_hugging_face(data: dict[str, Any], where: str) -> ModelShape:
    # An explicit null is as good as no field.
    data = _without_null(data)
    _refuse_uncovered(data, where)
    kind = data["model_type"]
    try:
        heads, hidden = data["num_attention_heads"], data["hidden_size"]
        base, scaling = _rope_of(data, where)
        return ModelShape(
            name=Path(where).parent.name or kind,
            num_layers=data["num_hidden_layers"],
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=data.get("num_key_value_heads", heads),
            kv_channels=data.get("head_dim", hidden // heads),
            ffn_hidden_size=data["intermediate_size"],
            vocab_size=data["vocab_size"],
            max_positions=data["max_position_embeddings"],
            tied_embeddings=bool(data.get("tie_word_embeddings", False)),
            qk_layernorm=kind in _QK_LAYERNORM_TYPES,
            qkv_bias=kind == "qwen2",
            rotary_base=base,
            rope_scaling=scaling,
            norm_epsilon=data.get("rms_norm_eps", 1e-6),
            **(_EXPERTS_OF[kind](data) if kind in _EXPERTS_OF else {}),
        )
    except KeyError as error:
        raise ValueError(f"{where}: missing field {error.args[0]!r} of a {kind!r} config.json.") from error


def _without_null(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_uncovered(data: dict[str, Any], where: str) -> None:
    kind = data.get("model_type")
    if kind not in _HUGGING_FACE_TYPES:
        raise ValueError(
            f"{where}: model_type {kind!r} is not covered; expected one of {', '.join(_HUGGING_FACE_TYPES)}."
        )
    check_hugging_face_config(data, where)
    if data.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act is {data['hidden_act']!r}, expected 'silu'.")
    windowed = data.get("use_sliding_window", kind in ("mistral", "mixtral")) and data.get("sliding_window")
    if windowed or "sliding_attention" in (data.get("layer_types") or ()):
        raise ValueError(
            f"{where}: sliding-window attention is not covered: a suffix could not see its whole "
            "prefix. Use a model, or a config.json, with full attention."
        )
    if data.get("attention_bias") or data.get("mlp_bias"):
        raise ValueError(f"{where}: attention_bias and mlp_bias are not covered (Megatron has one flag).")


def _rope_of(data: dict[str, Any], where: str) -> tuple[int, RopeScaling | None]:
    """The base and the scaling: `rope_theta` and `rope_scaling`, or transformers 5's
    `rope_parameters`."""
    rope = _without_null(data.get("rope_parameters") or data.get("rope_scaling") or {})
    base = rope.get("rope_theta", data.get("rope_theta", 10_000))
    if base != math.floor(base):
        raise ValueError(f"{where}: rope_theta is {base}, expected a whole number (Megatron's --rotary-base).")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return int(base), None
    if kind == "linear":
        return int(base), RopeScaling(float(rope["factor"]), "linear")
    expected = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if kind != "llama3" or any(rope.get(key, value) != value for key, value in expected.items()):
        raise ValueError(
            f"{where}: rope scaling {rope} is not covered; expected rope_type 'default', 'linear', or 'llama3' with {expected}."
        )
    return int(base), RopeScaling(float(rope["factor"]))


def _qwen3_experts(data: dict[str, Any]) -> dict[str, Any]:
    num_layers, step = data["num_hidden_layers"], data.get("decoder_sparse_step", 1)
    dense = set(data.get("mlp_only_layers") or ())
    pattern = tuple(int(i not in dense and (i + 1) % step == 0) for i in range(num_layers))
    return {
        # transformers 5 writes the second name.
        "num_experts": data["num_experts"] if "num_experts" in data else data["num_local_experts"],
        "moe_topk": data["num_experts_per_tok"],
        "moe_ffn_hidden_size": data["moe_intermediate_size"],
        "moe_normalize_topk": bool(data.get("norm_topk_prob", False)),
        "moe_layer_pattern": () if all(pattern) else pattern,
    }


def _mixtral_experts(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": data["num_local_experts"],
        "moe_topk": data["num_experts_per_tok"],
        "moe_ffn_hidden_size": data["intermediate_size"],
    }


_EXPERTS_OF = {"qwen3_moe": _qwen3_experts, "mixtral": _mixtral_experts}


_TINY = ModelShape("tiny", 4, 128, 8, 4, 16, 512, 512, 65_536)
_SMALL = ModelShape("small", 4, 512, 8, 4, 64, 2048, 4096, 65_536)
_EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_topk": 2, "moe_ffn_hidden_size": 256}

TRAINABLE_SHAPES = ("tiny", "tiny-moe", "small", "small-moe")
"""The built-in shapes that `parity` and `bench` run; the others are for planning."""

BUILTIN_SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _TINY,
        dataclasses.replace(_TINY, name="tiny-moe", **_EXPERTS),
        _SMALL,
        dataclasses.replace(_SMALL, name="small-moe", **_EXPERTS),
        ModelShape("llama3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256, 8192, rotary_base=500_000),
        ModelShape(
            name="qwen3-8b",
            num_layers=36,
            hidden_size=4096,
            num_attention_heads=32,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=12_288,
            vocab_size=151_936,
            max_positions=40_960,
            qk_layernorm=True,
            rotary_base=1_000_000,
            norm_epsilon=1e-6,
        ),
        ModelShape(
            name="qwen3-30b-a3b",
            num_layers=48,
            hidden_size=2048,
            num_attention_heads=32,
            num_query_groups=4,
            kv_channels=128,
            ffn_hidden_size=6144,
            vocab_size=151_936,
            max_positions=40_960,
            qk_layernorm=True,
            num_experts=128,
            moe_topk=8,
            moe_ffn_hidden_size=768,
            rotary_base=1_000_000,
            norm_epsilon=1e-6,
        ),
        ModelShape(
            name="qwen3-235b-a22b",
            num_layers=94,
            hidden_size=4096,
            num_attention_heads=64,
            num_query_groups=4,
            kv_channels=128,
            ffn_hidden_size=12_288,
            vocab_size=151_936,
            max_positions=40_960,
            qk_layernorm=True,
            num_experts=128,
            moe_topk=8,
            moe_ffn_hidden_size=1536,
            rotary_base=1_000_000,
            norm_epsilon=1e-6,
        ),
    )
}

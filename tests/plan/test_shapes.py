"""Shapes: sizes of known models, both file formats, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from prefixflow.plan.shapes import BUILTIN_SHAPES, TRAINABLE_SHAPES, ModelShape, RopeScaling

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}


def read(tmp_path, data) -> ModelShape:
    path = tmp_path / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return ModelShape.from_json(path)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama3-8b", 8.03, 8.03),
        ("qwen3-8b", 8.19, 8.19),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("qwen3-235b-a22b", 235.1, 22.2),
    ],
)
def test_published_sizes(name, billions, active):
    """The sizes that the models' authors publish, embedding and LM head included."""
    shape = BUILTIN_SHAPES[name]
    tables = 2 * shape.num_head_parameters
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert (shape.num_body_parameters + tables) / 1e9 == pytest.approx(active, rel=5e-3)


def test_bytes_of_llama3_8b_per_token():
    shape = BUILTIN_SHAPES["llama3-8b"]
    assert shape.kv_bytes_per_token() == 128 * 1024
    assert shape.kv_gradient_bytes_per_token() == 256 * 1024
    assert shape.kv_gradient_bytes_per_token(8) == 512 * 1024
    assert shape.layer_input_bytes_per_token() == 256 * 1024
    assert shape.activation_bytes_per_token() / 2**20 == pytest.approx(4.3, abs=0.1)


def test_flops_coefficients_of_tiny():
    shape = BUILTIN_SHAPES["tiny"]
    linear = 4 * (128 * 256 + 128 * 128 + 3 * 128 * 512)
    norms = 4 * 2 * 128 + 128
    assert shape.body_flops_per_token == 2 * (linear + norms)
    assert shape.head_flops_per_row == 2 * 128 * 512
    assert shape.attention_flops_per_pair == 4 * 8 * 16 * 4


def test_only_top_k_experts_are_active():
    shape = BUILTIN_SHAPES["tiny-moe"]
    expert = 3 * 128 * 256
    assert shape.num_total_body_parameters - shape.num_body_parameters == 4 * (8 - 2) * expert
    half = dataclasses.replace(shape, moe_layer_pattern=(1, 0, 1, 0))
    assert half.num_moe_layers == 2
    dense = 3 * 128 * 512
    router = 128 * 8
    change = 2 * (dense - 2 * expert - router)
    assert half.num_body_parameters - shape.num_body_parameters == change


def test_trainable_shapes_accept_long_trajectories():
    assert all(BUILTIN_SHAPES[name].max_positions == 65_536 for name in TRAINABLE_SHAPES)
    assert BUILTIN_SHAPES["small"].kv_channels == 64


def test_hugging_face_config(tmp_path):
    shape = read(tmp_path, LLAMA)
    assert (shape.num_query_groups, shape.kv_channels, shape.tied_embeddings) == (3, 64, True)
    assert shape.rotary_base == 100_000
    assert shape.num_parameters == 134_515_008


def test_hugging_face_rope_of_both_spellings(tmp_path):
    llama3 = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = read(tmp_path, {**LLAMA, "rope_theta": 500000.0, "rope_scaling": llama3})
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new["rope_parameters"] = {**llama3, "rope_theta": 500000.0}
    assert old == read(tmp_path, new)
    assert old.rope_scaling == RopeScaling(32.0)
    assert old.rotary_base == 500_000


def test_hugging_face_experts(tmp_path):
    moe = {
        **LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "mlp_only_layers": [0],
    }
    shape = read(tmp_path, moe)
    assert shape.qk_layernorm
    assert (shape.kv_channels, shape.moe_ffn_hidden_size) == (128, 768)
    assert shape.moe_layer_pattern == (0, *(1,) * 29)
    assert not shape.moe_normalize_topk


def test_hugging_face_experts_of_mixtral(tmp_path):
    moe = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    shape = read(tmp_path, moe)
    assert (shape.num_experts, shape.moe_topk, shape.moe_ffn_hidden_size) == (8, 2, shape.ffn_hidden_size)
    # The two experts' weights are divided by their sum.
    assert shape.moe_normalize_topk


def test_own_fields_round_trip(tmp_path):
    stretched = dataclasses.replace(BUILTIN_SHAPES["tiny"], rope_scaling=RopeScaling(2.5, "linear"))
    for shape in (*BUILTIN_SHAPES.values(), stretched):
        assert read(tmp_path, dataclasses.asdict(shape)) == shape


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not covered"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "missing field 'factor'"),
        ({"rope_theta": 10000.5}, "whole number"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 2}, "do not divide into 2 K/V groups"),
    ],
)
def test_hugging_face_configs_that_are_not_covered(tmp_path, change, words):
    data = {key: value for key, value in {**LLAMA, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        read(tmp_path, data)


@pytest.mark.parametrize("value", ["64", -4, 0, 1.5, float("nan"), True, [], {}])
@pytest.mark.parametrize("field", ["hidden_size", "num_key_value_heads", "head_dim", "num_experts_per_tok"])
def test_sizes_that_are_no_numbers(tmp_path, field, value):
    with pytest.raises(ValueError, match=rf"config.json: {field} is .* expected a whole number"):
        read(tmp_path, {**LLAMA, field: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a finite number above 0"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"rope_theta": 1e30}, "less than 2"),
        ({"rope_parameters": 3}, "rope_parameters is 3, expected an object"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 0}}, "rope_parameters.factor is 0"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": None}}, "missing field 'factor'"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, {**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": "4"}, "num_layers is '4', expected a whole number"),
        ({"gated": 3}, "gated is 3, expected true or false"),
        ({"rope_scaling": {"much": 3}}, "expected an object with a factor"),
        ({"norm_epsilon": -1.0}, "norm_epsilon"),
    ],
)
def test_own_fields_that_make_no_sense(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, dataclasses.asdict(BUILTIN_SHAPES["tiny"]) | change)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "expected a JSON object"),
        ({"num_layer": 4}, "Did you mean 'num_layers'"),
        ({"num_layers": 4, "hidden_size": 64}, "missing"),
    ],
)
def test_files_that_are_no_shape(tmp_path, data, words):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, data)


def test_names_and_paths(tmp_path):
    assert ModelShape.load("tiny") is BUILTIN_SHAPES["tiny"]
    with pytest.raises(ValueError, match=r"got one without config\.json"):
        ModelShape.load(str(tmp_path))
    read(tmp_path, LLAMA)
    assert ModelShape.load(str(tmp_path)).num_layers == 30
    with pytest.raises(ValueError, match="Did you mean 'tiny-moe'"):
        ModelShape.load("tiny-mo")
    with pytest.raises(ValueError, match="cannot be read"):
        ModelShape.load(str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 8, "moe_topk": 9, "moe_ffn_hidden_size": 4},
        {"num_experts": 8, "moe_topk": 2},
        {"num_experts": 8, "moe_topk": 2, "moe_ffn_hidden_size": 4, "moe_layer_pattern": (1,)},
    ],
)
def test_experts_that_do_not_fit(change):
    with pytest.raises(ValueError, match="moe_"):
        dataclasses.replace(BUILTIN_SHAPES["tiny"], **change)

"""Hugging Face folders through Megatron and back: same logits, same weights, under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prefixflow.runtime.world import WorldError, Worlds

VOCAB_SIZE = 67  # not a multiple of anything: Megatron's rows are padded to 72
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 16384,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    # As in Llama 3: with a small base no wavelength is long enough to be scaled.
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("LlamaConfig", {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
}
# Name -> world size, tensor parallel, pipeline parallel; what is left is data parallel.
LAYOUTS = {"dp2": (2, 1, 1), "pp2": (2, 1, 2), "tp3": (3, 3, 1)}


@pytest.fixture(scope="module")
def tiny_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: _save_tiny(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def _save_tiny(name: str, folder: Path) -> Path:
    import transformers

    kind, fields = MODELS[name]
    config = getattr(transformers, kind)(**TINY, **fields)
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Norms start at 1 and biases at 0: equal weights would hide one taken for another.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def _run_layout(
    worlds: Worlds, layout: str, hf_dir: Path, dtype: torch.dtype, out_dir: Path | None = None
) -> list[torch.Tensor | None]:
    """Logits [tokens, vocab] by rank (None where the pipeline is cut), exporting to `out_dir`."""
    world_size, tp, pp = LAYOUTS[layout]
    return worlds[world_size].run(_through_megatron, tp, pp, hf_dir, dtype, out_dir)


def _through_megatron(tp: int, pp: int, hf_dir: Path, dtype: torch.dtype, out_dir: Path | None) -> torch.Tensor | None:
    with _Megatron(tp, pp):
        from megatron.prefixflow.bridge import export_hf_weights, load_hf_weights

        model = _local_model(hf_dir, tp, dtype)
        load_hf_weights([model], hf_dir)
        logits = _logits(model, _vocab_size(hf_dir)) if pp == 1 else None
        if out_dir is not None:
            export_hf_weights([model], out_dir, hf_dir)
        return logits


class _Megatron:
    """Megatron's parallel state inside a world, for one layout."""

    def __init__(self, tp: int, pp: int) -> None:
        self.tp, self.pp = tp, pp

    def __enter__(self) -> None:
        from megatron.prefixflow.device import install_cpu_device_layer

        install_cpu_device_layer()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from tests.mcore.test_device import drop_groups

        drop_groups()
        parallel_state.initialize_model_parallel(self.tp, self.pp)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)

    def __exit__(self, *exc: object) -> None:
        from megatron.core import parallel_state

        from prefixflow.runtime.world import destroy_subgroups

        if exc[0] is None:
            # Not after an error: the other ranks would wait in this barrier, or this one for them.
            torch.distributed.barrier()
            parallel_state.destroy_model_parallel()
            destroy_subgroups()


def _local_model(hf_dir: Path, tp: int, dtype: torch.dtype, **overrides: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron.prefixflow.bridge import transformer_config_from_hf

    config, arguments = transformer_config_from_hf(hf_dir, params_dtype=dtype, **overrides)
    multiple = 8 * tp
    arguments["vocab_size"] = -(-arguments["vocab_size"] // multiple) * multiple
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    model = GPTModel(
        config,
        spec,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        **arguments,
    )
    return model.to(dtype)


def _tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(0, vocab_size, (1, 70), generator=torch.Generator().manual_seed(3))


def _vocab_size(hf_dir: Path) -> int:
    return json.loads((hf_dir / "config.json").read_text())["vocab_size"]


@torch.no_grad()
def _logits(model: Any, vocab_size: int) -> torch.Tensor:
    tokens = _tokens(vocab_size)
    num_tokens = tokens.shape[1]
    is_hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)[None, None]
    logits = model(tokens, torch.arange(num_tokens)[None], is_hidden)[0]
    assert not logits[:, vocab_size:].any(), "padding rows must be zero"
    return logits[:, :vocab_size]


@torch.no_grad()
def _hf_logits(hf_dir: Path, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype)
    return model(_tokens(model.config.vocab_size)).logits[0]


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.dtype == expected.dtype
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(worlds: Worlds, tiny_dirs: dict[str, Path], tmp_path: Path, name: str, layout: str) -> None:
    hf_dir, out_dir = tiny_dirs[name], tmp_path / "exported"
    logits = _run_layout(worlds, layout, hf_dir, torch.float64, out_dir)
    expected = _hf_logits(hf_dir, torch.float64)
    for got in logits:
        if got is not None:
            # transformers takes its norms in float32, and both sides their rotary tables.
            assert _relative(got, expected) < 1e-6
    before = load_file(hf_dir / "model.safetensors")
    after = load_file(out_dir / "model.safetensors")
    assert before.keys() == after.keys()
    for key, weight in before.items():
        assert torch.equal(weight.double(), after[key]), key
    assert (out_dir / "chat_template.jinja").read_text() == "{{ messages }}"
    # The exported folder is what transformers expects, in the model's dtype. Equal weights give
    # equal logits up to the kernels' choice by memory alignment.
    assert _relative(_hf_logits(out_dir, torch.float64), expected) < 1e-14
    assert json.loads((out_dir / "config.json").read_text())["dtype"] == "float64"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported"]


def test_an_occupied_folder_is_refused_on_every_rank(
    worlds: Worlds, tiny_dirs: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(WorldError, match="is there already") as caught:
        _run_layout(worlds, "dp2", tiny_dirs["qwen2"], torch.float32, tmp_path)
    assert set(caught.value.failures) == {0, 1}
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def _load_into(hf_dir: Path, other_dir: Path) -> str:
    """What loading `other_dir` into the model of `hf_dir` says."""
    with _Megatron(1, 1):
        from megatron.prefixflow.bridge import load_hf_weights

        model = _local_model(hf_dir, 1, torch.float32)
        try:
            load_hf_weights([model], other_dir)
        except ValueError as error:
            return str(error)
        return ""


def test_another_architecture_is_refused(worlds: Worlds, tiny_dirs: dict[str, Path]) -> None:
    for message in worlds[2].run(_load_into, tiny_dirs["llama"], tiny_dirs["qwen3-tied"]):
        assert "kv_channels 16 (got 8)" in message
        assert "qk_layernorm True (got False)" in message
        assert "share_embeddings_and_output_weights True (got False)" in message


def _load_without_groups(hf_dir: Path) -> str:
    from megatron.prefixflow.bridge import load_hf_weights

    with _Megatron(1, 1):
        model = _local_model(hf_dir, 1, torch.float32)
    try:
        load_hf_weights([model], hf_dir)
    except ValueError as error:
        return str(error)
    return ""


def test_loading_needs_process_groups(worlds: Worlds, tiny_dirs: dict[str, Path]) -> None:
    for message in worlds[2].run(_load_without_groups, tiny_dirs["qwen2"]):
        assert "initialize_model_parallel" in message


def _describe(hf_dir: Path) -> dict[str, Any]:
    """Configuration read with no parallel state at all."""
    from megatron.prefixflow.bridge import load_hf_config, transformer_config_from_hf

    config, arguments = transformer_config_from_hf(
        hf_dir, params_dtype=torch.bfloat16, fp32_residual_connection=True, hidden_dropout=0.25
    )
    names = [
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "add_qkv_bias",
        "qk_layernorm",
        "add_bias_linear",
        "gated_linear_unit",
        "normalization",
        "bf16",
        "perform_initialization",
        "fp32_residual_connection",
        "hidden_dropout",
        "tensor_model_parallel_size",
    ]
    return {
        "config": {name: getattr(config, name) for name in names},
        "arguments": arguments,
        "hf": load_hf_config(hf_dir),
    }


def test_configuration(worlds: Worlds, tiny_dirs: dict[str, Path]) -> None:
    told = worlds[2].run(_describe, tiny_dirs["llama"])[0]
    assert told["config"] == {
        "num_layers": 2,
        "hidden_size": 48,
        "ffn_hidden_size": 96,
        "num_attention_heads": 6,
        "num_query_groups": 3,
        "kv_channels": 8,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "bf16": True,
        "perform_initialization": True,
        "fp32_residual_connection": True,
        "hidden_dropout": 0.25,
        "tensor_model_parallel_size": 1,
    }
    assert told["arguments"] == {
        "vocab_size": 67,
        "max_sequence_length": 16384,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "rotary_percent": 1.0,
        "rope_scaling": True,
        "rope_scaling_factor": 8.0,
    }
    assert told["hf"]["model_type"] == "llama"
    tied = worlds[2].run(_describe, tiny_dirs["qwen3-tied"])[0]
    assert tied["config"]["qk_layernorm"]
    assert tied["config"]["kv_channels"] == 16
    assert tied["arguments"]["share_embeddings_and_output_weights"]


def _refusal(hf_dir: Path) -> str:
    from megatron.prefixflow.bridge import transformer_config_from_hf

    try:
        transformer_config_from_hf(hf_dir)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "Model type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
            "scaling 'dynamic'",
        ),
        ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 2.0}}, "Megatron fixes"),
    ],
)
def test_what_megatron_would_not_reproduce_is_refused(
    worlds: Worlds,
    tiny_dirs: dict[str, Path],
    tmp_path: Path,
    change: dict[str, Any],
    words: str,
) -> None:
    config = json.loads((tiny_dirs["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert words in worlds[2].run(_refusal, tmp_path)[0]


def test_a_folder_without_a_model_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    assert "has no config.json" in worlds[2].run(_refusal, tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "dtype", "tolerance"),
    [("dp2", torch.float64, 1e-6), ("dp2", torch.float32, 1e-4), ("tp3", torch.float32, 1e-4)],
)
def test_smollm2_has_the_logits_of_transformers(
    worlds: Worlds, smollm2_dir: Path, layout: str, dtype: torch.dtype, tolerance: float
) -> None:
    expected = _hf_logits(smollm2_dir, dtype)
    for got in _run_layout(worlds, layout, smollm2_dir, dtype):
        assert got is not None
        assert _relative(got, expected) < tolerance


@pytest.mark.slow
def test_smollm2_round_trip(worlds: Worlds, smollm2_dir: Path, tmp_path: Path) -> None:
    _run_layout(worlds, "tp3", smollm2_dir, torch.float32, tmp_path / "exported")
    before = load_file(smollm2_dir / "model.safetensors")
    after = load_file(tmp_path / "exported" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[key]) for key, weight in before.items())

"""Hugging Face folders to Megatron checkpoints and back: every bit, under any layout, near one layer of memory, or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from prefixflow.runtime.world import WorldError, Worlds
from prefixflow.testing.generate import two_level_groups
from prefixflow.trajectories import read_trajectories, write_trajectories

VOCAB_SIZE = 67  # not a multiple of anything: rows are padded
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
QWEN3_MOE = {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", {**QWEN3_MOE, "num_experts_per_tok": 2, "mlp_only_layers": [2]}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral": ("MistralConfig", {"sliding_window": None, "rope_parameters": LINEAR_ROPE}),
}
LAYOUT = ("--tp", "2", "--pp", "2", "--num-virtual-stages-per-pipeline-rank", "2")
EXPERT_LAYOUT = (*LAYOUT, "--ep", "2", "--expert-tensor-parallel-size", "1", "--sequence-parallel")
LAYOUTS = {
    "qwen3-moe": EXPERT_LAYOUT,
    # Each expert on two ranks.
    "mixtral": (*LAYOUT, "--expert-tensor-parallel-size", "2", "--sequence-parallel"),
}


def make_model(name: str, folder: Path, **changes: Any) -> Path:
    import transformers

    kind, fields = MODELS[name]
    config = getattr(transformers, kind)(**{**TINY, **fields, **changes})
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Norms start at 1 and biases at 0: equal weights would hide one taken for another.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def there(hf_dir: Path, save_dir: Path, layout: tuple[str, ...] = (), dtype: str | None = None) -> None:
    from megatron.prefixflow.conversion import hf_to_megatron

    hf_to_megatron(hf_dir, save_dir, layout, dtype=dtype)


def back(load_dir: Path, out_dir: Path) -> None:
    from megatron.prefixflow.conversion import megatron_to_hf

    megatron_to_hf(load_dir, out_dir)


def through_layout(argv: list[str], loaded: Path, saved: Path, exported: Path) -> dict[str, np.ndarray]:
    """Log-probabilities of the model that is loaded in the layout of `argv`; it is saved and exported from there."""
    from megatron.prefixflow.bridge import export_hf_weights
    from megatron.prefixflow.checkpoint import load_checkpoint, save_checkpoint
    from megatron.prefixflow.job import prepare
    from megatron.prefixflow.training import Scorer

    job = prepare(argv, torch.distributed.get_world_size())
    scorer = Scorer(job)
    load_checkpoint(loaded, scorer.chunks)
    save_checkpoint(saved, 3, chunks=scorer.chunks, args=job.args.values, carried=loaded / "release" / "hf")
    export_hf_weights(scorer.chunks, exported, loaded / "release" / "hf")
    return scorer.logprobs(job.trajectories)


def refuse_any_difference(first: Path, second: Path) -> None:
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    assert (second / "tokenizer.json").is_file()


def transformers_logprobs(hf_dir: Path, file: Path) -> dict[str, np.ndarray]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    found = {}
    for t in read_trajectories(file):
        tokens = torch.from_numpy(t.tokens.copy())
        with torch.no_grad():
            every = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
        values = np.zeros(len(t))
        values[1:] = every.gather(1, tokens[1:, None])[:, 0].numpy()
        found[t.id] = np.where(t.loss_mask, values, 0.0)
    return found


def write_file(path: Path, vocab_size: int) -> Path:
    write_trajectories(
        path, [replace(t, tokens=t.tokens % vocab_size) for t in two_level_groups(1, 3, (20, 30), (5, 10), seed=1)]
    )
    return path


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_under_every_parallelism(worlds: Worlds, tmp_path: Path, name: str) -> None:
    hf_dir = make_model(name, tmp_path / "hf")
    layout = LAYOUTS.get(name, LAYOUT)
    worlds[1].run(there, hf_dir, tmp_path / "megatron", layout)
    worlds[1].run(back, tmp_path / "megatron", tmp_path / "back")
    refuse_any_difference(hf_dir, tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "megatron"]

    file = write_file(tmp_path / "t.jsonl", VOCAB_SIZE)
    # The configuration comes from the files that the checkpoint carries, which have no weights.
    argv = ["--model", str(tmp_path / "megatron" / "release" / "hf"), "--trajectories", str(file), *layout]
    argv += ["--logprobs-only", str(tmp_path / "unused.jsonl")]
    found = worlds[4].run(through_layout, argv, tmp_path / "megatron", tmp_path / "saved", tmp_path / "exported")
    expected = transformers_logprobs(hf_dir, file)
    assert found[0].keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(found[0][key], values, rtol=0, atol=1e-4, err_msg=key)
    refuse_any_difference(hf_dir, tmp_path / "exported")
    # A checkpoint that four ranks wrote, in several files, with vocabulary and experts in parts.
    worlds[1].run(back, tmp_path / "saved", tmp_path / "back from the layout")
    refuse_any_difference(hf_dir, tmp_path / "back from the layout")


def run_main(argv: list[str]) -> int:
    from megatron.prefixflow.training import main

    return main(argv)


def test_experts_are_read_from_a_hugging_face_folder(worlds: Worlds, tmp_path: Path) -> None:
    hf_dir = make_model("mixtral", tmp_path / "hf")
    file, out = write_file(tmp_path / "t.jsonl", VOCAB_SIZE), tmp_path / "scores.jsonl"
    argv = ["--model", str(hf_dir), "--trajectories", str(file), *EXPERT_LAYOUT, "--logprobs-only", str(out)]
    assert worlds[4].run(run_main, argv) == [0] * 4
    expected = transformers_logprobs(hf_dir, file)
    for line in map(json.loads, out.read_text().splitlines()):
        np.testing.assert_allclose(line["logprobs"], expected[line["id"]], rtol=0, atol=1e-4)


def exported(argv: list[str], folder: Path, hf_dir: Path) -> None:
    from megatron.prefixflow.bridge import export_hf_weights
    from megatron.prefixflow.job import prepare
    from megatron.prefixflow.training import Scorer

    export_hf_weights(Scorer(prepare(argv, 1)).chunks, folder, hf_dir)


def test_what_an_export_would_lose_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    hf_dir = make_model("qwen3-moe", tmp_path / "hf", num_hidden_layers=1, mlp_only_layers=[])
    line = ["--model", str(hf_dir), "--trajectories", str(write_file(tmp_path / "t.jsonl", VOCAB_SIZE))]
    sigmoid = ["--moe-router-score-function", "sigmoid"]
    scores = ["--logprobs-only", str(tmp_path / "scores.jsonl")]
    (message,) = worlds[1].run(failure, exported, [*line, *scores, *sigmoid], tmp_path / "exported", hf_dir)
    assert "--moe-router-score-function is sigmoid" in message
    assert not (tmp_path / "exported").exists()
    trains = ["--global-batch-size", "3", "--train-iters", "1", "--lr", "1e-3"]
    exports = ["--export-hf-every", "1", str(tmp_path / "exported")]
    biased = [*line, *sigmoid, "--moe-router-enable-expert-bias", *trains, *exports]
    assert worlds[1].run(run_main, biased) == [2], "before the run"


def failure(action: Callable[..., None], *arguments: Any) -> str:
    try:
        action(*arguments)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def spoiled(llama: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> Path:
    folder.mkdir()
    tensors = load_file(llama / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((llama / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


NORM = "model.norm.weight"
BAD_FOLDERS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], dict[str, Any], str]] = {
    "unknown": (lambda t: None, {"model_type": "gpt2"}, "Model type 'gpt2' is not supported"),
    "missing": (lambda t: t.__delitem__(NORM), {}, f"it lacks '{NORM}'"),
    "extra": (
        lambda t: t.update({"model.more": torch.ones(1)}),
        {},
        "it has 'model.more', which the model has no place",
    ),
    "shape": (lambda t: t.update({NORM: torch.ones(8)}), {}, f"'{NORM}' has shape (8,), expected (48,)"),
    "dtypes": (lambda t: t.update({NORM: t[NORM].bfloat16()}), {}, "tensors in bfloat16, float32"),
    "half": (lambda t: t.update({n: x.half() for n, x in t.items()}), {}, "The weights are float16"),
    "integers": (lambda t: t.update({NORM: t[NORM].char()}), {}, "is I8"),
    "another head": (lambda t: None, {"tie_word_embeddings": True}, "it has 'lm_head.weight'"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_of_another_model_is_refused_by_name(worlds: Worlds, llama: Path, tmp_path: Path, case: str) -> None:
    change, config, words = BAD_FOLDERS[case]
    folder = spoiled(llama, tmp_path / "hf", change, **config)
    (message,) = worlds[1].run(failure, there, folder, tmp_path / "megatron")
    assert words in message
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", bytes(4000), "is not a whole safetensors file"),
        ("model.safetensors", b"\x0e" + bytes(7) + b'{"a": {"b": 1}}', "is not a whole safetensors file"),
        ("model.safetensors.index.json", b"{}", "expected a weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}', "expected a weight_map"),
        ("model.safetensors.index.json", b"\xff", "cannot be read as JSON"),
        ("config.json", b"\xff", "cannot be read as JSON"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "48"}', "hidden_size is '48'"),
        ("config.json", b'{"model_type": "llama", "initializer_range": "x"}', "'initializer_range' expected float"),
    ],
)
def test_a_damaged_folder_is_refused(
    worlds: Worlds, llama: Path, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    folder = spoiled(llama, tmp_path / "hf", lambda t: None)
    (folder / name).write_bytes(content)
    (message,) = worlds[1].run(failure, there, folder, tmp_path / "megatron")
    assert words in message
    assert "hf/" in message


def test_a_checkpoint_of_another_model_is_refused_by_name(worlds: Worlds, llama: Path, tmp_path: Path) -> None:
    worlds[1].run(there, llama, tmp_path / "megatron", ("--tp", "2"))
    carried = tmp_path / "megatron" / "release" / "hf" / "config.json"
    fields = json.loads(carried.read_text())
    for change, words in (
        ({"intermediate_size": 64}, "'decoder.layers.mlp.linear_fc1.weight' has shape"),
        ({"model_type": "qwen2"}, "it lacks 'decoder.layers.self_attention.linear_qkv.bias'"),
        ({"tie_word_embeddings": True}, "it has 'output_layer.weight'"),
    ):
        carried.write_text(json.dumps(fields | change))
        (message,) = worlds[1].run(failure, back, tmp_path / "megatron", tmp_path / "back")
        assert words in message
    assert [p.name for p in tmp_path.iterdir()] == ["megatron"]
    with pytest.raises(WorldError, match="is there already"):
        worlds[1].run(there, llama, tmp_path / "megatron")
    (message,) = worlds[1].run(failure, there, llama, carried / "megatron")
    assert f"{carried} is no folder" in message
    carried.write_text(json.dumps(fields))
    part = next((tmp_path / "megatron" / "release").glob("*.distcp"))
    part.write_bytes(bytes(part.stat().st_size))
    (message,) = worlds[1].run(failure, back, tmp_path / "megatron", tmp_path / "back")
    assert "is damaged: tensor 'embedding.word_embeddings.weight' cannot be read" in message


def test_a_layout_that_does_not_fit_is_refused(worlds: Worlds, llama: Path, tmp_path: Path) -> None:
    (message,) = worlds[1].run(failure, there, llama, tmp_path / "megatron", ("--tp", "4"))
    assert "4" in message
    assert not list(tmp_path.iterdir())


KILLED_WHILE_READING = """
import os, sys
from megatron.prefixflow import convert, hf_files
read, seen = hf_files.HFTensors.read, []
def read_and_die(self, name):
    seen.append(name)
    if len(seen) == 7:
        os.kill(os.getpid(), int(sys.argv[1]))
    return read(self, name)
hf_files.HFTensors.read = read_and_die
sys.exit(convert.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_conversion_leaves_nothing(llama: Path, tmp_path: Path, number: signal.Signals) -> None:
    argv = ["hf-to-megatron", "--hf-checkpoint", str(llama), "--save", str(tmp_path / "megatron")]
    command = [sys.executable, "-c", KILLED_WHILE_READING, str(int(number)), *argv]
    ended = subprocess.run(command, env=os.environ | {"PYTHONWARNINGS": "ignore"}, capture_output=True, check=False)
    assert ended.returncode == (128 + number if number == signal.SIGTERM else -number), ended.stderr
    left = [p.name for p in tmp_path.iterdir()]
    if number == signal.SIGTERM:
        assert left == []
    else:
        # What cannot be cleaned up has another name.
        assert "megatron" not in left


def test_megatron_bridge_is_taken_where_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.prefixflow import megatron_bridge

    names: dict[str, Any] = {
        "qkv": {"v": "value", "q": "query", "k": "key"},
        "fc1": {"up": "u", "gate": "g"},
        "norm": "n",
    }
    registry = SimpleNamespace(
        megatron_to_hf_lookup=lambda name: SimpleNamespace(hf_param=names[name]) if name in names else None
    )
    bridges = SimpleNamespace(get_model_bridge=lambda kind: SimpleNamespace(mapping_registry=lambda: registry))
    config: Any = SimpleNamespace(architectures=["LlamaForCausalLM"])
    assert megatron_bridge.megatron_bridge_form(config, config) is None
    layouts = SimpleNamespace(merge_qkv_weights=lambda config, q, k, v: torch.stack([k, q, v]))
    monkeypatch.setattr(megatron_bridge, "_modules", lambda: (bridges, layouts))
    form = megatron_bridge.megatron_bridge_form(config, config)
    assert form is not None
    assert [form.hf_names(name) for name in names] == [["query", "key", "value"], ["g", "u"], ["n"]]
    q, k, v = torch.arange(12.0).reshape(3, 2, 2)
    assert torch.equal(form.to_megatron("qkv", [q, k, v]), torch.stack([k, q, v]))
    assert [t.tolist() for t in form.to_hf("fc1", form.to_megatron("fc1", [q, k]))] == [q.tolist(), k.tolist()]
    with pytest.raises(LookupError):
        form.hf_names("more")


def peak_growth_bytes(hf_dir: Path, folder: Path) -> tuple[int, int]:
    """By how much a conversion there and one back raise the resident memory at most."""
    there(hf_dir, folder / "warm up")
    growth = []
    for action, source, target in (
        (there, hf_dir, folder / "megatron"),
        (back, folder / "megatron", folder / "back"),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # The peak starts at what is resident now.
        before = resident_bytes("VmHWM")
        action(source, target)
        growth.append(resident_bytes("VmHWM") - before)
    return growth[0], growth[1]


def resident_bytes(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_memory_is_near_one_layer(worlds: Worlds, tmp_path: Path) -> None:
    from megatron.prefixflow.hf_files import HFTensors

    hf_dir = make_model(
        "llama", tmp_path / "hf", hidden_size=384, intermediate_size=1536, num_hidden_layers=20, num_attention_heads=6
    )
    sizes = [spec.num_bytes for spec in HFTensors(hf_dir).specs.values()]
    layer_bytes = sum(sizes) / 20
    (growth,) = worlds[1].run(peak_growth_bytes, hf_dir, tmp_path)
    assert max(growth) < 4 * layer_bytes < sum(sizes) / 4, (growth, layer_bytes)


@pytest.mark.slow
def test_smollm2_there_and_back(worlds: Worlds, smollm2_dir: Path, tmp_path: Path) -> None:
    worlds[1].run(there, smollm2_dir, tmp_path / "megatron", ("--tp", "3"))
    worlds[1].run(back, tmp_path / "megatron", tmp_path / "back")
    refuse_any_difference(smollm2_dir, tmp_path / "back")
    got = worlds[3].run(checkpoint_logits, tmp_path / "megatron", smollm2_dir)
    from tests.mcore.test_bridge import _hf_logits

    expected = _hf_logits(smollm2_dir, torch.float32)
    for logits in got:
        assert float((logits - expected).abs().max()) < 1e-4


def checkpoint_logits(folder: Path, hf_dir: Path) -> torch.Tensor:
    from megatron.prefixflow.checkpoint import load_checkpoint
    from tests.mcore.test_bridge import _local_model, _logits, _Megatron, _vocab_size

    with _Megatron(3, 1):
        model = _local_model(hf_dir, 3, torch.float32)
        load_checkpoint(folder, [model])
        return _logits(model, _vocab_size(hf_dir))

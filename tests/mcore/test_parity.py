"""The shipped path against the independent reference, over the shapes, losses, models and layouts that it supports.

One process per rank is kept for all cases, and reference runs are shared by the cases that differ in layout only.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from megatron.prefixflow import parity
from megatron.prefixflow.arguments import (
    gpt_model_kwargs,
    loss_config,
    parallel_layout,
    plan_config,
    transformer_config,
)
from megatron.prefixflow.model import build_model
from megatron.prefixflow.parity import Case, Runner
from megatron.prefixflow.planning import plan_step
from megatron.prefixflow.session import start_session
from megatron.prefixflow.step import StepRunner
from prefixflow.importer.encoders import load_encoder
from prefixflow.importer.importer import ImportOptions, Mode, import_trajectories
from prefixflow.runtime.attention.kernels import select_kernel
from prefixflow.runtime.world import Worlds
from prefixflow.trajectories import read_trajectories, write_trajectories
from tests.mcore.parity_files import near_policy, write_files

FLOAT64_LIMIT = 1e-9
FLOAT32_LIMIT = 1e-5
TIMEOUT_S = 300.0

TINY = "--model tiny --num-layers 3"
BIASED = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--vocab-size 509 --max-position-embeddings 4096 --normalization LayerNorm --rotary-percent 0.5 --add-qkv-bias
--untie-embeddings-and-output-weights"""
QWEN_LIKE = """--num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4
--kv-channels 16 --ffn-hidden-size 96 --vocab-size 509 --max-position-embeddings 4096 --normalization RMSNorm --swiglu
--disable-bias-linear --qk-layernorm --rotary-base 1000000 --make-vocab-size-divisible-by 8"""

PIPED = "--model tiny --max-tokens 32"
GSPO = "--policy-loss gspo --clip-low 0.02 --clip-high 0.03"

# (file, what to compute)
ONE_PROCESS = [
    ("mixed", f"{TINY} --max-tokens 16 --recompute full"),
    ("mixed", f"{TINY} --max-tokens 64"),
    ("mixed", f"{TINY} --max-tokens 256 --recompute selective"),
    ("mixed", f"{TINY} --max-tokens 4096 --prefix-reuse auto"),
    ("mixed", f"{TINY} --max-tokens 64 --attention-kernel einsum --recompute full"),
    ("groups", f"{TINY} --max-tokens 16 --recompute selective --recompute-modules mlp core_attn"),
    ("chains", f"{TINY} --max-tokens 16"),
    ("chains", f"{TINY} --max-tokens 64 --recompute full"),
    ("deep", f"{TINY} --max-tokens 16 --recompute full"),
    ("deep", f"{TINY} --max-tokens 4096"),
    ("edges", f"{TINY} --max-tokens 16"),
    ("edges", f"{TINY} --max-tokens 4096 --recompute full"),
    ("temperatures", f"{TINY} --max-tokens 64 --kl-coef 0.1 --entropy-coef 0.01"),
    ("mixed", f"{TINY} --max-tokens 64 --temperature 0.7"),
    # Losses
    ("mixed-near", f"{TINY} --max-tokens 64 --clip-low 0.1 --clip-high 0.15 --kl-coef 0.1 --entropy-coef 0.01"),
    ("mixed-near", f"{TINY} --max-tokens 64 --policy-loss dapo --kl-coef 0.2 --kl-estimator k1"),
    ("mixed-near", f"{TINY} --max-tokens 16 --policy-loss gspo --clip-low 0.02 --clip-high 0.03"),
    ("mixed-near", f"{TINY} --max-tokens 256 --policy-loss gspo --loss-aggregation token-mean --recompute full"),
    ("mixed-near", f"{TINY} --max-tokens 64 --policy-loss cispo --kl-coef 0.2 --kl-estimator k2"),
    ("mixed-near", f"{TINY} --max-tokens 64 --policy-loss sft --loss-aggregation seq-mean-token-sum"),
    (
        "mixed-near",
        f"{TINY} --max-tokens 64 --clip-c 1.3 --tis-cap 1.1 --loss-aggregation seq-mean-token-sum-norm",
    ),
    (
        "mixed-near",
        f"{TINY} --max-tokens 64 --loss-aggregation seq-mean-token-sum-norm --max-response-length 50",
    ),
    ("mixed-partly-old", f"{TINY} --max-tokens 64 --kl-coef 0.1"),
    ("some-zero", f"{TINY} --max-tokens 64"),
    ("some-zero", f"{TINY} --max-tokens 64 --skip-zero-advantage"),
    # Models
    ("mixed", f"{QWEN_LIKE} --max-tokens 64"),
    ("mixed", f"{BIASED} --max-tokens 64"),
    ("groups", f"{BIASED} --max-tokens 64 --squared-relu --rotary-seq-len-interpolation-factor 2"),
    ("groups", f"{TINY} --max-tokens 64 --use-rope-scaling --rotary-interleaved"),
]
SEVERAL_PROCESSES = [
    ("mixed", f"{TINY} --max-tokens 64 --tp 2"),
    ("mixed-near", f"{TINY} --max-tokens 64 --tp 2 --sequence-parallel --kl-coef 0.1 --entropy-coef 0.01"),
    ("mixed", f"{TINY} --max-tokens 16 --tp 2 --sequence-parallel --recompute full"),
    ("edges", f"{TINY} --max-tokens 17 --tp 2 --sequence-parallel"),
    ("mixed", f"{QWEN_LIKE} --max-tokens 64 --tp 2 --sequence-parallel"),
    ("groups", f"{QWEN_LIKE} --max-tokens 64 --tp 2"),
    ("mixed", f"{BIASED} --max-tokens 64 --tp 2 --sequence-parallel --recompute selective"),
    ("mixed", f"{BIASED} --max-tokens 64 --tp 2"),
    ("mixed", f"{TINY} --max-tokens 64 --dp 2"),
    ("mixed-near", f"{TINY} --max-tokens 16 --dp 2 --policy-loss gspo --clip-low 0.02 --clip-high 0.03"),
    ("some-zero", f"{TINY} --max-tokens 64 --dp 2 --skip-zero-advantage"),
    ("two-groups", f"{TINY} --max-tokens 64 --dp 3"),
    ("mixed", f"{TINY} --max-tokens 64 --dp 3 --recompute full"),
    ("mixed-near", f"{TINY} --max-tokens 64 --tp 2 --sequence-parallel --dp 2 --kl-coef 0.1"),
    ("two-groups", f"{QWEN_LIKE} --max-tokens 16 --tp 2 --sequence-parallel --dp 2 --recompute full"),
]
EMBEDDING_COUNTS = "--account-for-embedding-in-pipeline-split"
PIPELINES = [
    ("groups", f"{PIPED} --pp 2 --decoder-first-pipeline-num-layers 3"),
    ("groups", f"{PIPED} --pp 2 --vpp 2 --recompute full"),
    ("chains", f"{PIPED} --pp 4 --recompute full"),
    ("deep-near", f"{PIPED} --pp 2 --vpp 2 {GSPO}"),
    ("deep-near", f"{PIPED} --pp 2 --dp 2 --recompute full {GSPO}"),
    # Log-probabilities that the file lacks come from forward-only passes through the pipeline.
    ("mixed-partly-old", f"{PIPED} --pp 2 --kl-coef 0.1"),
    # Stages of 2 layers and 1; the embedding alone on the first stage; chunks that end at different times.
    ("chains", f"{TINY} --max-tokens 16 --pp 2 --decoder-last-pipeline-num-layers 1 --tp 2 --sequence-parallel"),
    ("mixed", f"{TINY} --max-tokens 64 --pp 4 {EMBEDDING_COUNTS} --recompute full"),
    ("mixed", f"{TINY} --max-tokens 64 --pp 2 --vpp 2 --dp 2 {EMBEDDING_COUNTS} --overlap-grad-reduce"),
    # Tied embeddings on the first and the last stage.
    ("mixed", f"{QWEN_LIKE} --max-tokens 64 --pp 2 --tp 2 --sequence-parallel --recompute full"),
]
EVERY_PIPELINE = [
    (file, f"{PIPED} {layout} --recompute {recompute}")
    for file in ("groups", "chains", "deep")
    for layout in ("--pp 2", "--pp 2 --vpp 2", "--pp 2 --tp 2", "--pp 2 --dp 2", "--pp 4")
    for recompute in ("none", "full")
]
FLOAT32 = [
    ("mixed", f"{TINY} --max-tokens 64"),
    ("mixed-near", f"{TINY} --max-tokens 16 --recompute full --kl-coef 0.1"),
    ("groups-near", f"{BIASED} --max-tokens 64 --policy-loss dapo"),
    ("mixed", f"{TINY} --max-tokens 64 --tp 2 --sequence-parallel"),
    ("mixed", f"{TINY} --max-tokens 64 --dp 2 --use-distributed-optimizer --overlap-grad-reduce"),
    ("mixed", f"{QWEN_LIKE} --max-tokens 64 --tp 2 --sequence-parallel --dp 2 --use-distributed-optimizer"),
]
BFLOAT16 = [
    # One microbatch with hundreds of occurrences of each token.
    ("few-words", f"{TINY} --max-tokens 4096 --policy-loss sft"),
    ("groups", f"{TINY} --max-tokens 16"),
    ("mixed-near", f"{TINY} --max-tokens 256 --recompute full"),
    ("groups", f"{TINY} --max-tokens 64 --tp 2 --sequence-parallel"),
    ("mixed", f"{TINY} --max-tokens 64 --dp 2 --use-distributed-optimizer"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_files(tmp_path_factory.mktemp("trajectories"))


@pytest.fixture(scope="module")
def runner(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("parity"), TIMEOUT_S, worlds=worlds) as kept:
        yield kept


def compare(runner: Runner, file: str, text: str, dtype: str, dump: Path | None = None) -> dict[str, Any]:
    argv = ("--prefix-reuse", "on", *text.split(), "--dtype", dtype)
    return runner.run(Case(file, argv, str(dump) if dump else None))


def assert_exact(result: dict[str, Any]) -> None:
    assert result["ok"], result["reasons"]
    assert result["max_rel_grad_err"] < FLOAT64_LIMIT
    assert result["max_logprob_err"] < FLOAT64_LIMIT
    assert result["loss_rel_err"] < FLOAT64_LIMIT
    assert result["grad_norm_rel_err"] < FLOAT64_LIMIT
    assert result["clipped"]
    assert result["logical_tokens"] > result["computed_tokens"] > 0
    assert result["shared_segments"] > 0


@pytest.mark.parametrize(("file", "text"), ONE_PROCESS + SEVERAL_PROCESSES + PIPELINES)
def test_float64(runner, files, file, text):
    assert_exact(compare(runner, files[file], text, "float64"))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), EVERY_PIPELINE)
def test_every_pipeline(runner, files, file, text):
    assert_exact(compare(runner, files[file], text, "float64"))


@pytest.mark.parametrize(("file", "text"), FLOAT32)
def test_float32(runner, files, file, text):
    result = compare(runner, files[file], text, "float32")
    assert result["ok"], result["reasons"]
    assert result["max_rel_grad_err"] < FLOAT32_LIMIT
    assert result["grad_norm_rel_err"] < FLOAT32_LIMIT


@pytest.mark.parametrize(("file", "text"), BFLOAT16)
def test_bfloat16(runner, files, file, text):
    result = compare(runner, files[file], text, "bfloat16")
    assert result["ok"], result["reasons"]
    assert 0 < result["reuse_err"] <= 2 * result["dense_err"]


def test_clipping_ratios_and_penalties_act(runner, files):
    """The loss cases above would prove little if no ratio were clipped and no penalty weighed anything."""
    variants = ["--clip-low 0.1 --clip-high 0.1", "--clip-low 0.9 --clip-high 9", "--kl-coef 1", "--entropy-coef 1"]
    variants += ["--tis-cap 1.01", "--clip-c 1.21", "--temperature 0.5", "--policy-loss gspo", "--policy-loss cispo"]
    norms = []
    for variant in variants:
        result = compare(runner, files["groups-near"], f"{TINY} {variant} --max-tokens 64", "float64")
        assert_exact(result)
        norms.append(result["grad_norm"])
    norms.sort()
    assert all(b - a > 1e-4 * b for a, b in itertools.pairwise(norms)), norms


@pytest.mark.parametrize("file", ["mixed", "mixed-near"])
def test_gradients_do_not_depend_on_the_token_budget(runner, files, file, tmp_path):
    grads: list[dict[str, Tensor]] = []
    numbers = set()
    for budget, recompute in ((16, "none"), (64, "full"), (256, "none"), (4096, "none")):
        folder = tmp_path / str(budget)
        text = f"{TINY} --max-tokens {budget} --recompute {recompute}"
        result = compare(runner, files[file], text, "float64", folder)
        assert_exact(result)
        numbers.add(result["microbatches"])
        grads.append(load_file(folder / "grads_reuse.safetensors"))
    assert len(numbers) >= 3
    for other in grads[1:]:
        assert max(parity.relative_errors(other, grads[0]).values()) < FLOAT64_LIMIT


def test_dump(runner, files, tmp_path):
    folder = tmp_path / "dump"
    text = f"{QWEN_LIKE} --max-tokens 64 --tp 2 --sequence-parallel"
    assert_exact(compare(runner, files["edges"], text, "float64", folder))
    tensors = {
        name: load_file(folder / f"{name}.safetensors") for name in ("weights", "grads_reference", "grads_reuse")
    }
    shapes = [{n: tuple(t.shape) for n, t in group.items()} for group in tensors.values()]
    assert shapes[0] == shapes[1] == shapes[2]
    assert shapes[0]["embedding.word_embeddings.weight"] == (509, 64)
    errors = parity.relative_errors(tensors["grads_reuse"], tensors["grads_reference"])
    assert max(errors.values()) < FLOAT64_LIMIT
    lines = [json.loads(line) for line in (folder / "logprobs.jsonl").read_text().splitlines()]
    trajectories = read_trajectories(files["edges"])
    assert [line["id"] for line in lines] == [t.id for t in trajectories]
    assert [len(line["logprobs"]) for line in lines] == [t.num_trained for t in trajectories]


def test_leaving_out_zero_advantages_computes_less(runner, files):
    text = f"{TINY} --max-tokens 64"
    whole = compare(runner, files["some-zero"], text, "float64")
    fewer = compare(runner, files["some-zero"], f"{text} --skip-zero-advantage", "float64")
    assert_exact(whole)
    assert_exact(fewer)
    assert fewer["grad_norm"] == whole["grad_norm"]
    assert fewer["computed_tokens"] < whole["computed_tokens"]


# What is not ok although no gradient differs.


def test_nothing_shared_is_a_failure_unless_reuse_is_off(runner, files):
    result = compare(runner, files["apart"], TINY, "float64")
    assert not result["ok"]
    assert "nothing was shared" in result["reasons"][0]
    assert compare(runner, files["apart"], f"{TINY} --prefix-reuse off", "float64")["ok"]


def test_dense_mode_is_exact_too(runner, files):
    result = compare(runner, files["mixed"], f"{TINY} --prefix-reuse off --max-tokens 256", "float64")
    assert result["ok"], result["reasons"]
    assert result["shared_segments"] == 0
    assert result["max_rel_grad_err"] < FLOAT64_LIMIT


def test_a_zero_gradient_is_a_failure(runner, files):
    for text in (TINY, f"{TINY} --skip-zero-advantage"):
        result = compare(runner, files["all-zero"], text, "float64")
        assert not result["ok"]
        assert any("reference gradient is zero" in reason for reason in result["reasons"])


def test_a_missing_or_nan_gradient_is_a_failure():
    import torch

    ones = {"a": torch.ones(3), "b": torch.ones(2)}
    assert parity.relative_errors(ones, ones) == {"a": 0.0, "b": 0.0}
    assert parity.relative_errors({"a": ones["a"]}, ones)["b"] == float("inf")
    assert parity.relative_errors(ones, {"a": ones["a"]})["b"] == float("inf")
    assert parity.relative_errors({**ones, "b": torch.full((2,), torch.nan)}, ones)["b"] == float("inf")
    assert parity.relative_errors({**ones, "b": torch.ones(3)}, ones)["b"] == float("inf")


# The command.


def test_command(files, tmp_path, capsys):
    cases = tmp_path / "cases.txt"
    cases.write_text("--max-tokens 16  # cut\n\n--max-tokens 64 --recompute full\n--prefix-reuse off\n")
    argv = [files["two-groups"], *TINY.split(), "--dtype", "float64", "--json", "--cases", str(cases)]
    assert parity.main(argv) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["ok"] for line in lines] == [True, True, True]
    assert [line["shared_segments"] > 0 for line in lines] == [True, True, False]
    promised = """ok world dtype max_rel_grad_err worst_parameter max_logprob_err loss_rel_err logical_tokens
    computed_tokens shared_segments microbatches lead routes_replayed routes_native route_mismatch"""
    assert set(promised.split()) <= lines[0].keys()


def test_a_refused_line_fails_and_the_others_run(files, tmp_path, capsys):
    cases = tmp_path / "cases.txt"
    cases.write_text("--tp 3\n--max-tokens 64 --verify-steps 2 --lr 1e-3\n--prefix-reuse off --max-tokens 8\n")
    argv = [files["two-groups"], *TINY.split(), "--dtype", "float64", "--json", "--dump", str(tmp_path / "dump")]
    assert parity.main([*argv, "--cases", str(cases)]) == 1
    out, err = capsys.readouterr()
    first, second, third = map(json.loads, out.splitlines())
    assert [line["ok"] for line in (first, second, third)] == [False, True, False]
    assert "refused: --num-attention-heads" in first["reasons"][0]
    assert "token budget of 8" in third["reasons"][0]
    assert "no effect here: --lr --verify-steps" in err
    assert [folder.name for folder in (tmp_path / "dump").iterdir()] == ["2"]
    assert parity.main([*argv, "--tp", "3"]) == 2, "nothing else to run"


def test_memory_is_measured_where_that_is_asked_for(runner, files):
    text = f"{TINY} --max-tokens 32"
    measured = compare(runner, files["two-groups"], f"{text} --measure-memory", "float64")
    assert measured["ok"]
    assert measured["peak_bytes_predicted"] == pytest.approx(measured["peak_bytes"], rel=0.1)
    unmeasured = compare(runner, files["two-groups"], text, "float64")
    assert unmeasured["peak_bytes"] is unmeasured["peak_bytes_predicted"] is None


def test_advantages_come_from_rewards_on_both_sides(runner, files, tmp_path):
    given = compare(runner, files["two-groups"], TINY, "float64")
    computed = compare(runner, files["two-groups"], f"{TINY} --advantage-estimator dr-grpo", "float64")
    assert given["ok"]
    assert computed["ok"], computed["reasons"]
    assert computed["grad_norm"] != given["grad_norm"]


def test_command_exits_1_when_nothing_is_shared(files, capsys):
    assert parity.main([files["apart"], *TINY.split(), "--dtype", "float64"]) == 1
    assert "nothing was shared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("mixed", "--vocab-size 300", "mixed.jsonl, line "),
        ("mixed", "--tp 3", "--tensor-model-parallel-size"),
        ("mixed", "--prefix-reuse off --max-tokens 8", "token budget"),
        ("missing", "", "missing.jsonl"),
    ],
)
def test_command_exits_2_on_bad_input(files, file, text, words, capsys):
    path = files.get(file, "missing.jsonl")
    assert parity.main([path, "--model", "tiny", *text.split()]) == 2
    assert words in capsys.readouterr().err


# Old-policy and reference passes.


def score_and_train(file: str, argv: list[str]) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray], int]:
    """Log-probabilities of this rank by the forward-only pass and by the training pass."""
    args = parity.parse_arguments(argv)
    layout = parallel_layout(args)
    groups = start_session(layout, args.seed)
    (model,) = build_model(transformer_config(args), groups, **gpt_model_kwargs(args))
    kernel = select_kernel("auto", next(model.parameters()).device)
    step = StepRunner([model], groups, kernel, vocab_size=args.vocab_size)
    trajectories = read_trajectories(file)
    plan = plan_step(trajectories, plan_config(args, layout), loss_config(args))
    scored = step.score(plan, trajectories).trajectory_logprobs()
    assert all(p.grad is None for p in model.parameters()), "scoring made gradients"
    trained = step.forward_backward(plan, trajectories, loss_config(args)).trajectory_logprobs()
    return scored, trained, step.num_computed_tokens


@pytest.mark.parametrize("layout", ["", "--tp 2 --sequence-parallel", "--dp 2"])
def test_scoring_equals_training(worlds, files, layout):
    argv = f"{TINY} --dtype float64 --max-tokens 32 --recompute full {layout}".split()
    size = parallel_layout(parity.parse_arguments(argv)).world_size
    results = worlds[size].run(score_and_train, files["mixed"], argv, timeout_s=TIMEOUT_S)
    seen = set()
    for scored, trained, num_tokens in results:
        assert scored.keys() == trained.keys()
        assert num_tokens > 0
        for index, values in scored.items():
            seen.add(index)
            np.testing.assert_allclose(values, trained[index], rtol=0, atol=1e-12)
    assert seen == {i for i, t in enumerate(read_trajectories(files["mixed"])) if len(t) > 1}


# Real trajectories.

# The reference runs every trajectory whole through Megatron's own core attention, which keeps whole score matrices: small
# slices, and only two heads for the long samples (over 2,200 bytes in XQuAD, over 6,000 in tau-bench).
FEW_HEADS = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 512 --max-position-embeddings 8192
--normalization RMSNorm --swiglu --disable-bias-linear"""

TRACE_SLICES: list[tuple[str, str, ImportOptions, int, str]] = [
    # (name, trace, how to import it, trajectories kept, what to compute)
    ("crosswords", "crosswords_tree_search", ImportOptions(max_groups=1), 40, f"{TINY} --max-tokens 256"),
    (
        "crosswords",
        "crosswords_tree_search",
        ImportOptions(max_groups=1),
        40,
        f"{TINY} --max-tokens 64 --recompute full --tp 2 --sequence-parallel",
    ),
    ("crosswords", "crosswords_tree_search", ImportOptions(max_groups=1), 40, f"{PIPED} --pp 4 {GSPO}"),
    ("game24", "game24_samples_g16", ImportOptions(max_groups=2), 32, f"{TINY} --max-tokens 512 --dp 2"),
    ("game24", "game24_samples_g16", ImportOptions(max_groups=2), 32, f"{TINY} --max-tokens 256 {GSPO}"),
    ("xquad", "xquad_articles", ImportOptions(max_groups=1), 3, f"{FEW_HEADS} --max-tokens 1024"),
    ("tau", "tau_bench_airline", ImportOptions(mode=Mode.STEPS, max_groups=1), 2, f"{FEW_HEADS} --max-tokens 2048"),
    (
        "tau",
        "tau_bench_airline",
        ImportOptions(mode=Mode.STEPS, max_groups=1),
        2,
        f"{FEW_HEADS} --max-tokens 2048 --pp 2 {GSPO}",
    ),
]


@pytest.mark.parametrize(("name", "trace", "options", "num_kept", "text"), TRACE_SLICES)
def test_real_trajectories(runner, traces, tmp_path_factory, name, trace, options, num_kept, text):
    batch = import_trajectories(traces / f"{trace}.jsonl", load_encoder("bytes"), options).trajectories
    path = tmp_path_factory.getbasetemp() / f"{name}.jsonl"
    # The shortest ones keep the reference quick; of so few, the rewards may all be zero.
    kept = sorted(batch, key=len)[:num_kept]
    # Both signs: where all advantages are positive, one update may clip every ratio of the next step.
    kept = [replace(t, advantages=np.full(len(t), (-1.0) ** i * (1 + i))) for i, t in enumerate(kept)]
    write_trajectories(path, near_policy(kept))
    assert_exact(compare(runner, str(path), text, "float64"))

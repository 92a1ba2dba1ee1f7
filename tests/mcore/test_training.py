"""The training loop: the same steps under every layout and budget, and nothing half-done on bad input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixflow.runtime.world import Worlds
from prefixflow.testing.generate import two_level_groups, with_routes
from prefixflow.trajectories import RouteShape, Trajectory, read_trajectories, write_trajectories

ROOT = Path(__file__).resolve().parents[2]
METRIC_KEYS = [
    *("step", "loss", "grad_norm", "lr", "reward_mean", "kl", "entropy", "clip_fraction"),
    *("logical_tokens", "computed_tokens", "reuse_ratio", "shared_segments", "microbatches", "dummy_microbatches"),
    *("time_s", "time_forward_s", "time_backward_s", "tokens_per_s"),
    *("peak_bytes", "peak_bytes_predicted", "route_mismatch", "fallback"),
    *("load_balancing_loss", "z_loss", "routes_replayed", "routes_native"),
    *("context_bytes", "context_bytes_planned", "peak_cache_bytes", "host_bytes", "evictions", "recomputed_blocks"),
    *("recomputed_microbatches", "verify_rel_err"),
]

Metrics = list[dict[str, Any]]
Train = Callable[..., Metrics]


def run_main(argv: Sequence[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the entry point on this rank."""
    from megatron.prefixflow.training import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(argv))
    return status, out.getvalue(), err.getvalue()


def run_steps(argv: Sequence[str], num_steps: int) -> tuple[dict[str, np.ndarray], list[float]]:
    """Weights of this rank after some steps, and the gradient norms of these."""
    import torch.distributed as dist

    from megatron.prefixflow.job import prepare
    from megatron.prefixflow.training import Trainer

    trainer = Trainer(prepare(argv, dist.get_world_size()))
    norms = [trainer.step().grad_norm for _ in range(num_steps)]
    weights = {name: p.detach().double().numpy().copy() for name, p in trainer.chunks[0].named_parameters()}
    return weights, norms


def groups_of(*sizes: int, seed: int = 0) -> tuple[Trajectory, ...]:
    """Groups with prompts of about 100 tokens; every reward is set, advantages are between 0.1 and 3 with both signs."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for group, size in enumerate(sizes):
        for t in two_level_groups(1, size, (90, 110), (5, 30), seed=100 * seed + group):
            advantage = rng.choice([-1.0, 1.0]) * 10 ** rng.uniform(-1, 0.5)
            name = f"g{group}{t.id[2:]}"
            trajectories.append(
                replace(t, id=name, group=f"g{group}", advantages=np.full(len(t), advantage), reward=advantage)
            )
    return tuple(trajectories)


def arguments(file: Path, *more: str, dtype: str = "float64", steps: int = 2, size: int = 8) -> list[str]:
    given = {
        "--model": "tiny",
        "--trajectories": file,
        "--dtype": dtype,
        "--global-batch-size": size,
        "--train-iters": steps,
        "--lr": 1e-3,
        "--lr-decay-style": "constant",
        "--prefix-reuse": "on",
    }
    line = [token for name, value in given.items() for token in (name, str(value))]
    return [*line, *more]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two batches: groups of 5 and 3, then a group of 4."""
    write_trajectories(tmp_path / "t.jsonl", groups_of(5, 3, 4))
    return tmp_path / "t.jsonl"


@pytest.fixture
def train(worlds: Worlds, tmp_path: Path) -> Train:
    """`train(world_size, argv)`: run to the end and read the metrics."""

    def run(world_size: int, argv: Sequence[str]) -> Metrics:
        path = tmp_path / f"metrics-{len(list(tmp_path.iterdir()))}.jsonl"
        results = worlds[world_size].run(run_main, [*argv, "--metrics-file", str(path)])
        assert [status for status, *_ in results] == [0] * world_size, results[0][2]
        assert all(out == "" for _, out, _ in results[1:]), "only rank 0 speaks"
        return read_metrics(path)

    return run


def read_metrics(path: Path) -> Metrics:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def column(metrics: Metrics, name: str) -> list[Any]:
    return [line[name] for line in metrics]


def brute_force_positions(trajectories: Sequence[Trajectory]) -> int:
    return len(
        {
            (t.group, t.tokens[: end + 1].tobytes(), int(t.tokens[end + 1]))
            for t in trajectories
            for end in range(len(t) - 1)
        }
    )


# --- batches ---------------------------------------------------------------------------------------------------------


def test_batches_keep_groups_whole() -> None:
    from megatron.prefixflow.data import group_batches

    names = "aaa bbb cccccccccc dd e".replace(" ", "")
    trajectories = [
        Trajectory(id=f"{i}", group=name, tokens=[1], loss_mask=[0], advantages=0.0) for i, name in enumerate(names)
    ]
    # Interleaved: a group is joined wherever its members stand. The group of 10 is larger than a batch.
    batches = group_batches(trajectories[::2] + trajectories[1::2], 7)
    assert ["".join(t.group for t in batch) for batch in batches] == ["aaabbb", "cccccccccc", "dde"]
    assert sorted(t.id for batch in batches for t in batch) == sorted(t.id for t in trajectories)


def test_batches_of_files_come_again_in_every_epoch() -> None:
    from megatron.prefixflow.rollouts import FileBatches

    one, two = (groups_of(2, seed=seed) for seed in (0, 1))
    source = FileBatches([one, two])
    taken = [source.take() for _ in range(4)]
    assert [batch.trajectories for batch in taken] == [one, two, one, two]
    assert [len(batch.warnings) for batch in taken] == [0, 0, 1, 0]
    resumed = FileBatches([one, two])
    resumed.restore(json.loads(json.dumps(source.state())))
    resumed.take()
    assert resumed.take().trajectories == two


def test_a_given_temperature_holds_for_all(file: Path) -> None:
    from megatron.prefixflow.data import with_temperature

    trajectories = read_trajectories(file)
    mixed = (replace(trajectories[0], temperature=0.5), *trajectories[1:])
    assert [t.temperature for t in with_temperature(mixed, None)] == [0.5] + [1.0] * (len(mixed) - 1)
    assert {t.temperature for t in with_temperature(mixed, 0.7)} == {0.7}


def test_the_trace_of_a_pipeline_is_its_table(file: Path, worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    line = arguments(file, "--pp", "2", "--dp", "2", "--max-tokens-per-microbatch", "64", "--kl-coef", "0.1")
    tables = worlds[4].run(run_traced, [*line, "--trace-file", str(path)])
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    expected = {("process_name", d, None): f"data-parallel rank {d}" for d in (0, 1)}
    assert names == expected | {("thread_name", d, s): f"stage {s}" for d in (0, 1) for s in (0, 1)}
    boxes = sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"])
    rows: dict[Any, list[str]] = {}
    for box in boxes:
        place = (box["pid"], box["tid"], box["args"]["step"], box["args"]["pass"])
        rows.setdefault(place, []).append(box["name"])
    assert rows == {place: row for rank in tables for place, row in rank.items()}
    assert len(rows) == 4 * 2 * 2, "a row a stage, in two steps, for the reference policy and for training"
    begins = {(b["pid"], b["args"]["step"], b["args"]["pass"], b["name"]): b for b in boxes}
    for (rank, step, kind, name), box in begins.items():
        before = {"0B": f"1B{name[2:]}", "1F": f"0F{name[2:]}"}.get(name[:2])
        if before is not None:
            earlier = begins[rank, step, kind, before]
            assert earlier["ts"] + earlier["dur"] <= box["ts"], f"{name} began before {before} had ended"


def run_traced(argv: Sequence[str]) -> dict[tuple[int, int, int, str], list[str]]:
    """Train, with a trace; by (data-parallel rank, stage, step, pass) the operations of this rank's tables."""
    from unittest.mock import patch

    from megatron.core import parallel_state

    from megatron.prefixflow import step
    from megatron.prefixflow.training import main

    rows: dict[tuple[int, int, int, str], list[str]] = {}
    number = {"training": 0, "scoring": 0}
    execute = step.execute

    def observed(table: Any, rank: int, *rest: Any) -> None:
        name = "training" if any("B" in str(op) for op in table.rows[rank]) else "scoring"
        number[name] += 1
        (stage,) = {op.stage for op in table.rows[rank]}
        data_rank = parallel_state.get_data_parallel_rank()
        rows[data_rank, stage, number[name], name] = [str(op) for op in table.rows[rank]]
        execute(table, rank, *rest)

    with patch.object(step, "execute", observed):
        assert main(list(argv)) == 0
    return rows


# --- steps -----------------------------------------------------------------------------------------------------------


def test_metrics_of_three_steps(file: Path, train: Train) -> None:
    metrics = train(1, arguments(file, "--lr-decay-style", "linear", "--min-lr", "1e-4", steps=3))
    trajectories = read_trajectories(file)
    assert [list(line) for line in metrics] == [METRIC_KEYS] * 3
    assert column(metrics, "step") == [1, 2, 3]
    # The third step starts over: groups of 5 and 3 again.
    batches = [trajectories[:8], trajectories[8:], trajectories[:8]]
    for line, batch in zip(metrics, batches, strict=True):
        # At ratio 1 the loss is the weighted sum of -advantage, and every trajectory has one advantage.
        assert line["loss"] == pytest.approx(-np.mean([t.advantages[0] for t in batch]), rel=1e-9)
        assert line["reward_mean"] == pytest.approx(np.mean([t.reward for t in batch]), rel=1e-12)
        assert line["logical_tokens"] == sum(len(t) - 1 for t in batch)
        assert line["computed_tokens"] == brute_force_positions(batch)
        assert line["reuse_ratio"] == line["logical_tokens"] / line["computed_tokens"]
        assert line["tokens_per_s"] == pytest.approx(line["logical_tokens"] / line["time_s"])
        assert 0 < line["time_forward_s"] + line["time_backward_s"] < line["time_s"]
        assert line["shared_segments"] == len({t.group for t in batch})
        assert line["peak_bytes"] > 1e7
        assert 1e6 < line["peak_bytes_predicted"] < line["peak_bytes"]
        assert line["clip_fraction"] == line["fallback"] == line["dummy_microbatches"] == 0
        missing = (
            "kl",
            "entropy",
            "route_mismatch",
            "load_balancing_loss",
            "z_loss",
            "routes_replayed",
            "routes_native",
        )
        assert [line[key] for key in missing] == [None] * 7
    # Linear over three steps of 8, although the second batch has 4 trajectories.
    assert column(metrics, "lr") == pytest.approx([1e-3, 7e-4, 4e-4])


def test_layouts_take_the_same_steps(file: Path, train: Train) -> None:
    more = ("--entropy-coef", "0.01", "--kl-coef", "0.1")
    alone = train(1, arguments(file, *more))
    for layout in ((), ("--tp", "2", "--sequence-parallel")):
        metrics = train(2, arguments(file, *layout, *more))
        for key in ("loss", "grad_norm", "kl", "entropy", "reward_mean"):
            assert column(metrics, key) == pytest.approx(column(alone, key), rel=1e-9, abs=1e-12), (layout, key)
        assert column(metrics, "logical_tokens") == column(alone, "logical_tokens"), layout
        # A batch of one group is split over two data-parallel ranks: its prefix is computed on both.
        counts = zip(column(metrics, "computed_tokens"), column(alone, "computed_tokens"), strict=True)
        assert all(ours == one if layout else ours >= one for ours, one in counts), layout


@pytest.mark.parametrize("more", [(), ("--use-distributed-optimizer",)])
def test_a_rank_without_a_group(tmp_path: Path, train: Train, more: tuple[str, ...]) -> None:
    # A single trajectory: a larger group would be split over the ranks.
    write_trajectories(tmp_path / "one.jsonl", groups_of(1))
    line = arguments(tmp_path / "one.jsonl", "--kl-coef", "0.1", dtype="float32")
    alone, two = train(1, line), train(2, [*line, *more])
    for key in ("loss", "grad_norm"):
        assert column(two, key) == pytest.approx(column(alone, key), rel=1e-4), key
    assert column(two, "kl") == pytest.approx(column(alone, "kl"), rel=1e-3, abs=1e-6)
    assert column(two, "microbatches") == column(alone, "microbatches") == [1, 1]


def test_distributed_optimizer_equals_the_plain_one(file: Path, worlds: Worlds) -> None:
    line = arguments(file, "--clip-grad", "0.5", dtype="float32")
    plain, sharded, start = (
        [weights for weights, _ in worlds[2].run(run_steps, [*line, *more], num_steps)]
        for more, num_steps in (((), 2), (("--use-distributed-optimizer", "--overlap-grad-reduce"), 2), ((), 0))
    )
    for name, weight in plain[0].items():
        np.testing.assert_array_equal(weight, plain[1][name], err_msg=name)
        np.testing.assert_allclose(sharded[0][name], weight, rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(sharded[1][name], weight, rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(weight - start[0][name]).max() > 5e-4, f"{name} has not moved"


@pytest.mark.parametrize("clip", [0.0, 0.25, 1e6])
def test_an_sgd_step_is_as_long_as_the_clipped_gradient(tmp_path: Path, worlds: Worlds, clip: float) -> None:
    write_trajectories(tmp_path / "t.jsonl", groups_of(3, 2))
    line = arguments(tmp_path / "t.jsonl", "--optimizer", "sgd", "--sgd-momentum", "0", "--weight-decay", "0")
    line += ["--clip-grad", str(clip), "--lr", "1e-6"]
    (start, _), _ = worlds[2].run(run_steps, line, 0)
    (weights, norms), _ = worlds[2].run(run_steps, line, 2)
    moved = np.sqrt(sum(np.square(weights[name] - start[name]).sum() for name in start))
    # The steps are too short to matter, so the second gradient is the first one again, and nothing is left of that.
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[0] > 0.5
    assert moved == pytest.approx(2e-6 * min(norms[0], clip or np.inf), rel=1e-4)


def test_gradient_norm_does_not_know_the_token_budget(file: Path, train: Train) -> None:
    runs = [train(1, arguments(file, "--max-tokens-per-microbatch", str(n))) for n in (64, 256, 4096)]
    assert len({run[0]["microbatches"] for run in runs}) == 3
    for run in runs:
        assert column(run, "grad_norm") == pytest.approx(column(runs[0], "grad_norm"), rel=1e-11)


@pytest.mark.parametrize(
    "more", [("--recompute-granularity", "full"), ("--recompute-granularity", "selective"), ("--prefix-reuse", "off")]
)
def test_what_changes_nothing(file: Path, train: Train, more: tuple[str, ...]) -> None:
    plain, other = train(1, arguments(file)), train(1, arguments(file, *more))
    for key in ("loss", "grad_norm"):
        assert column(other, key) == pytest.approx(column(plain, key), rel=1e-10), key


def test_a_budget_of_keys_and_values_changes_nothing(file: Path, train: Train) -> None:
    more = ("--max-tokens-per-microbatch", "64")
    plain, other = (train(1, arguments(file, *more, *budget)) for budget in ((), ("--kv-budget-gib", "6e-4")))
    for key in ("loss", "grad_norm"):
        assert column(other, key) == pytest.approx(column(plain, key), rel=1e-10), key
    assert column(plain, "host_bytes") == [0, 0]
    assert all(line["host_bytes"] > 0 and line["peak_cache_bytes"] <= 6e-4 * 2**30 for line in other)


def test_bfloat16_is_near(file: Path, train: Train) -> None:
    exact, rough = train(1, arguments(file)), train(1, arguments(file, "--bf16", dtype="bfloat16"))
    assert column(rough, "grad_norm") == pytest.approx(column(exact, "grad_norm"), rel=0.05)


def test_several_updates_on_one_batch(tmp_path: Path, worlds: Worlds, train: Train) -> None:
    file = tmp_path / "one.jsonl"
    write_trajectories(file, groups_of(4, 3))
    once = train(1, arguments(file))
    twice = train(1, arguments(file, "--updates-per-batch", "2"))
    assert twice[0]["grad_norm"] == pytest.approx(once[0]["grad_norm"], rel=1e-12)
    # Two batches of one update: the old policy is always the present one, so the loss stays.
    assert once[1]["loss"] == pytest.approx(once[0]["loss"], rel=1e-9)
    assert abs(twice[1]["loss"] - twice[0]["loss"]) > 1e-3
    assert once[1]["clip_fraction"] == 0 < twice[1]["clip_fraction"]

    scored = score(worlds, 1, arguments(file), tmp_path / "scores.jsonl")
    given = [replace(t, old_logprobs=scored[t.id]) for t in read_trajectories(file)]
    write_trajectories(tmp_path / "given.jsonl", given)
    from_file = train(1, arguments(tmp_path / "given.jsonl", "--updates-per-batch", "2"))
    for key in ("loss", "grad_norm", "clip_fraction"):
        assert column(from_file, key) == pytest.approx(column(twice, key), rel=1e-9), key


MOE = ("--model", "tiny-moe", "--num-layers", "2", "--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.01")


@pytest.mark.parametrize("replay", ["off", "record", "rollout"])
def test_experts_take_whose_routes_they_are_told(tmp_path: Path, train: Train, replay: str) -> None:
    shape = RouteShape(num_layers=2, topk=2, num_experts=8)
    write_trajectories(tmp_path / "m.jsonl", with_routes(groups_of(4, 4), shape, conflicting=0.05))
    more = ("--ep", "2", "--updates-per-batch", "2", "--routing-replay", replay, "--route-mismatch", "first")
    metrics = train(2, arguments(tmp_path / "m.jsonl", *MOE, *more, dtype="float32"))
    routed = [2 * computed for computed in column(metrics, "computed_tokens")]
    replayed = {"off": [0, 0], "record": [0, routed[1]], "rollout": routed}[replay]
    assert column(metrics, "routes_replayed") == replayed
    assert column(metrics, "routes_native") == [all_ - ours for all_, ours in zip(routed, replayed, strict=True)]
    assert [rate is not None for rate in column(metrics, "route_mismatch")] == [replay == "rollout"] * 2
    # Of a router that spreads evenly it is 1; these are random.
    assert all(0.9 < value < 1.5 for value in column(metrics, "load_balancing_loss"))
    assert all(value > 0 for value in column(metrics, "z_loss"))


def test_reference_is_the_initial_policy(file: Path, tmp_path: Path, worlds: Worlds, train: Train) -> None:
    metrics = train(1, arguments(file, "--kl-coef", "0.5", steps=3))
    kl = column(metrics, "kl")
    assert abs(kl[0]) < 1e-15
    assert min(kl[1:]) > 1e-3
    scored = score(worlds, 1, arguments(file), tmp_path / "scores.jsonl")
    given = [replace(t, ref_logprobs=scored[t.id]) for t in read_trajectories(file)]
    write_trajectories(tmp_path / "given.jsonl", given)
    from_file = train(1, arguments(tmp_path / "given.jsonl", "--kl-coef", "0.5", steps=3))
    for key in ("kl", "loss", "grad_norm"):
        assert column(from_file, key) == pytest.approx(column(metrics, key), rel=1e-9, abs=1e-15), key


def test_zero_advantages_leave_the_backward_only(tmp_path: Path, train: Train) -> None:
    first, *rest = groups_of(3, 3)
    zero = [replace(t, advantages=np.zeros(len(t))) if t.group == "g1" else t for t in rest]
    write_trajectories(tmp_path / "zero.jsonl", [first, *zero])
    line = arguments(tmp_path / "zero.jsonl")
    whole, skipping = train(1, line), train(1, [*line, "--skip-zero-advantage"])
    assert column(skipping, "grad_norm") == pytest.approx(column(whole, "grad_norm"), rel=1e-12)
    assert skipping[0]["computed_tokens"] < 0.7 * whole[0]["computed_tokens"]
    # With a KL term those rows have a gradient.
    with_kl = train(1, [*line, "--skip-zero-advantage", "--kl-coef", "0.1"])
    assert column(with_kl, "computed_tokens") == column(whole, "computed_tokens")


def test_on_with_nothing_to_share_warns_every_step(tmp_path: Path, worlds: Worlds) -> None:
    write_trajectories(tmp_path / "t.jsonl", groups_of(1, 1))
    ((status, out, _),) = worlds[1].run(run_main, arguments(tmp_path / "t.jsonl"))
    assert status == 0
    assert out.count("nothing is shared") == 2
    ((_, out, _),) = worlds[1].run(run_main, [*arguments(tmp_path / "t.jsonl"), "--prefix-reuse", "auto"])
    assert "nothing is shared" not in out


def test_start_up_says_what_runs(file: Path, worlds: Worlds) -> None:
    ((_, out, _),) = worlds[1].run(run_main, [*arguments(file, steps=1), "--use-flash-attn"])
    for text in ("model: 4 layers", "layout: 1 processes", "attention: aten CPU", "no effect here: --use-flash-attn"):
        assert text in out
    assert "packages: Transformer Engine " in out
    assert "step 1/1  loss " in out


# --- log-probabilities only ------------------------------------------------------------------------------------------


def score(worlds: Worlds, world_size: int, argv: Sequence[str], out: Path) -> dict[str, np.ndarray]:
    results = worlds[world_size].run(run_main, [*argv, "--logprobs-only", str(out)])
    assert [status for status, *_ in results] == [0] * world_size, results[0][2]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {line["id"]: np.array(line["logprobs"]) for line in lines}


def test_scores_stand_in_the_order_of_the_file(tmp_path: Path, worlds: Worlds) -> None:
    trajectories = groups_of(5, 3, 4)
    empty = Trajectory(id="single", group="g1", tokens=[7], loss_mask=[0], advantages=1.0)
    # Groups interleaved, and no argument that only training needs.
    write_trajectories(tmp_path / "t.jsonl", [*trajectories[::2], empty, *trajectories[1::2]])
    line = ["--model", "tiny", "--dtype", "float64", "--trajectories", str(tmp_path / "t.jsonl")]
    alone = score(worlds, 1, line, tmp_path / "1.jsonl")
    assert list(alone) == [t.id for t in (*trajectories[::2], empty, *trajectories[1::2])]
    for t in trajectories:
        assert alone[t.id].shape == t.tokens.shape
        assert ((alone[t.id] < 0) == t.loss_mask).all()
    assert alone["single"].tolist() == [0.0]
    for layout in ((), ("--tp", "2", "--sequence-parallel")):
        shared = score(worlds, 2, [*line, *layout, "--global-batch-size", "5"], tmp_path / "2.jsonl")
        assert list(shared) == list(alone)
        for name, values in alone.items():
            np.testing.assert_allclose(shared[name], values, rtol=0, atol=1e-12, err_msg=f"{layout} {name}")


def test_a_hugging_face_model_scores_as_transformers_does(tmp_path: Path, worlds: Worlds) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=515,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    model.save_pretrained(tmp_path / "hf")
    trajectories = [replace(t, temperature=0.5 if t.group == "g1" else 1.0) for t in groups_of(3, 2)]
    write_trajectories(tmp_path / "t.jsonl", trajectories)
    line = ["--model", str(tmp_path / "hf"), "--dtype", "float64", "--trajectories", str(tmp_path / "t.jsonl")]
    scored = score(worlds, 1, line, tmp_path / "scores.jsonl")
    for t in trajectories:
        tokens = torch.from_numpy(t.tokens.copy())
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1] / t.temperature
        expected = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(scored[t.id][1:][t.loss_mask[1:]], expected[t.loss_mask[1:]], atol=1e-9)


# --- refusals --------------------------------------------------------------------------------------------------------


def spoil(file: Path, **fields: Any) -> None:
    lines = file.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | fields)
    file.write_text("\n".join(lines) + "\n")


BAD_RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "short mask": ({"loss_mask": [0, 1]}, (), "line 3"),
    "token outside": ({"tokens": [0, 512], "loss_mask": [0, 1]}, (), "512 at token 1"),
    "unknown argument": ({}, ("--prefix-reus", "on"), "--prefix-reuse"),
    "float64 shards": ({}, ("--use-distributed-optimizer",), "--use-distributed-optimizer"),
    "sampling without a reward": ({}, ("--rollout", "sample"), "--reward-function"),
    "wrong world": ({}, ("--tp", "4"), "does not divide"),
    "long without reuse": ({}, ("--prefix-reuse", "off", "--max-tokens-per-microbatch", "64"), "never cut"),
    "no token per rank": ({}, ("--tp", "2", "--sequence-parallel", "--max-tokens", "1"), "at least 2"),
    "position limit": ({}, ("--seq-length", "50"), "at most 50 positions"),
    "no rollouts": ({}, ("--tis-cap", "2"), "rollout_logprobs"),
    "warm-up": ({}, ("--lr-warmup-iters", "2"), "warm-up"),
    "kernel": ({}, ("--attention-kernel", "flash-attn"), "flash-attn"),
    "missing package": ({}, ("--transformer-impl", "transformer_engine"), "not installed"),
    "K/V budget": ({}, ("--max-tokens", "64", "--kv-budget-gib", "1e-5"), "--kv-budget-gib"),
    "no folder": ({}, ("--logprobs-only", "nowhere/out.jsonl"), "nowhere/out.jsonl"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_refusals_are_one_sentence_and_leave_nothing(name: str, file: Path, tmp_path: Path, worlds: Worlds) -> None:
    fields, more, expected = BAD_RUNS[name]
    if fields:
        spoil(file, **fields)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("earlier\n")
    before = sorted(tmp_path.iterdir())
    results = worlds[2].run(run_main, [*arguments(file), "--metrics-file", str(metrics), *more])
    assert [status for status, *_ in results] == [2, 2]
    (_, out, err), (_, other_out, other_err) = results
    assert out == other_out == other_err == ""
    assert err.startswith("pretrain_rl.py: ")
    assert err.count("\n") == 1
    assert expected in err
    assert metrics.read_text() == "earlier\n"
    assert sorted(tmp_path.iterdir()) == before


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path, worlds: Worlds) -> None:
    good, bad = groups_of(3, seed=1), groups_of(3, seed=2)
    huge = [replace(t, id=f"x{t.id}", group="x", advantages=np.full(len(t), 1e300)) for t in bad]
    write_trajectories(tmp_path / "t.jsonl", [*good, *huge])
    metrics = tmp_path / "metrics.jsonl"
    line = [*arguments(tmp_path / "t.jsonl", dtype="float32", steps=3, size=3), "--metrics-file", str(metrics)]
    results = worlds[2].run(run_main, line)
    assert [status for status, *_ in results] == [1, 1]
    assert "step 2: the gradient norm is" in results[0][2]
    assert results[1][2] == ""
    assert column(read_metrics(metrics), "step") == [1]

    metrics.unlink()
    results = worlds[2].run(run_main, [*line, "--no-check-for-nan-in-loss-and-grad"])
    assert [status for status, *_ in results] == [0, 0]
    assert "this update is left out" in results[0][1]
    norms = column(read_metrics(metrics), "grad_norm")
    assert norms[1] is None
    assert norms[2] > 0


# --- whole programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--metrics-file", "--logprobs-only", "--trace-file"])
def test_an_output_never_replaces_an_input(worlds: Worlds, file: Path, flag: str, tmp_path: Path) -> None:
    before = file.read_bytes()
    for path, status in ((file, 2), (tmp_path / "none" / "x", 2)):
        assert worlds[1].run(run_main, [*arguments(file), flag, str(path)])[0][0] == status
    assert file.read_bytes() == before


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def test_under_torchrun(file: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    line = arguments(file, "--metrics-file", str(metrics), dtype="float32")
    done = launch(*torchrun, "pretrain_rl.py", *line)
    assert done.returncode == 0, done.stderr
    assert column(read_metrics(metrics), "step") == [1, 2]
    assert done.stdout.count("step 2/2") == 1


def test_as_a_plain_program_with_a_bad_file(file: Path, tmp_path: Path) -> None:
    spoil(file, advantages="much")
    done = launch("pretrain_rl.py", *arguments(file), "--metrics-file", str(tmp_path / "metrics.jsonl"))
    assert done.returncode == 2
    sentences = [line for line in done.stderr.splitlines() if line.startswith("pretrain_rl.py: ")]
    assert len(sentences) == 1
    assert 't.jsonl, line 3, field "advantages"' in sentences[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "metrics.jsonl").exists()


def test_real_trajectories(traces: Path, tmp_path: Path, train: Train) -> None:
    from prefixflow.cli import main

    out = tmp_path / "tau.jsonl"
    source = str(traces / "tau_bench_airline.jsonl")
    options = ["--tokenizer", "bytes", "--mode", "steps", "--limit", "1", "--max-length", "6500", "--advantage", "grpo"]
    assert main(["import", source, str(out), *options]) == 0
    trajectories = read_trajectories(out)
    # All trials of the first task failed, so policy losses have no gradient there.
    metrics = train(1, arguments(out, "--policy-loss", "sft", dtype="float32", size=len(trajectories)))
    assert column(metrics, "computed_tokens") == [brute_force_positions(trajectories)] * 2
    assert metrics[0]["reuse_ratio"] > 1.5
    assert metrics[0]["grad_norm"] > 0

"""The `prefixflow` command: what it prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prefixflow.cli import main
from prefixflow.plan.shapes import ModelShape
from prefixflow.testing.generate import Style, mixed_workload, two_level_groups, with_routes
from prefixflow.trajectories import write_trajectories

PLAN_KEYS = {
    "logical_tokens", "computed_tokens", "reuse_ratio", "depth", "shared_segments", "trajectories", "groups",
    "microbatches", "dummy_microbatches", "lead", "predicted_speedup", "bound", "pipeline_efficiency", "rank_loads",
    "peak_bytes", "state_bytes", "peak_by_stage", "memory", "peak_kv_bytes", "peak_cache_bytes", "kv_bytes_kept_to_end",
    "digest", "context_bytes", "split_loss_tokens", "microbatch_cost_spread", "largest_microbatch_tokens", "route_mismatch",
    "context_kv",
}  # fmt: skip
BENCH_KEYS = {
    "prefix_ratio", "group_size", "dense_s", "reuse_s", "speedup", "bound", "fraction_of_bound", "peak_dense_bytes",
    "peak_reuse_bytes", "peak_phase_b_bytes", "peak_kv_bytes", "host_bytes", "n_body", "n_head",
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.jsonl"
    write_trajectories(path, mixed_workload(style=Style(vocab_size=512)))
    return path


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_json_has_the_names_of_the_interface(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = plan_json(capsys, str(file), "--model", "tiny", "--dp", "3", "--max-tokens", "32")
    assert set(report) == PLAN_KEYS
    assert set(report["peak_bytes"]) == {"A", "B", "C"}
    assert 0 < report["peak_kv_bytes"] < report["kv_bytes_kept_to_end"]
    assert report["peak_kv_bytes"] < report["peak_cache_bytes"]
    assert len(report["rank_loads"]) == 3
    assert report["logical_tokens"] > report["computed_tokens"] > 0
    assert report["predicted_speedup"] > 1.0


def test_plan_counts_distinct_pairs_within_each_group(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trajectories = mixed_workload(style=Style(vocab_size=512))
    pairs = {(t.group, tuple(t.tokens[: k + 2])) for t in trajectories for k in range(len(t.tokens) - 1)}
    report = plan_json(capsys, str(file), "--model", "tiny", "--max-tokens", "16")
    assert report["computed_tokens"] == len(pairs)
    assert report["logical_tokens"] == sum(len(t.tokens) - 1 for t in trajectories)


def test_plan_predicts_a_pipeline(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = plan_json(capsys, str(file), "--model", "tiny")
    piped = plan_json(capsys, str(file), "--model", "tiny", "--pp", "4")
    assert flat["pipeline_efficiency"] == 1.0
    assert 0.3 < piped["pipeline_efficiency"] < 1.0
    assert piped["microbatches"] > flat["microbatches"]
    # Three of four layers on the last stage, which has the head too: it sets the pace.
    uneven = plan_json(capsys, str(file), "--model", "tiny", "--pp", "2", "--decoder-first-pipeline-num-layers", "1")
    even = plan_json(capsys, str(file), "--model", "tiny", "--pp", "2")
    assert uneven["predicted_speedup"] < even["predicted_speedup"] * 1.05
    assert uneven["pipeline_efficiency"] < 0.9 * even["pipeline_efficiency"]


def test_plan_reports_how_even_microbatches_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two unrelated trajectories alone in a microbatch each: of one length, or one three times as long."""
    for suffix, expected in ((20, 1.0), (100, 1.5)):
        path = tmp_path / f"{suffix}.jsonl"
        lengths = two_level_groups(1, 1, 20, 20), two_level_groups(1, 1, 20, suffix, seed=1)
        write_trajectories(path, [replace(t, id=str(i), group=str(i)) for i, (t,) in enumerate(lengths)])
        report = plan_json(capsys, str(path), "--model", "tiny", "--max-tokens", str(suffix + 20))
        assert report["microbatch_cost_spread"] == pytest.approx(expected, abs=0.1)
        assert report["microbatches"] == 2


def test_plan_reports_routes_beside_the_file_and_dummies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "routed.jsonl"
    batch = with_routes(two_level_groups(4, 4, 16, 8), ModelShape.load("tiny-moe").route_shape, conflicting=0.1)
    write_trajectories(path, batch)
    moe = ("--model", "tiny-moe", "--ep", "2", "--dp", "2", "--max-tokens", "64")
    exact = plan_json(capsys, str(path), *moe)
    first = plan_json(capsys, str(path), *moe, "--route-mismatch", "first")
    dense = plan_json(capsys, str(path), "--model", "tiny")
    assert exact["route_mismatch"] == first["route_mismatch"] == pytest.approx(0.1, abs=0.02)
    assert dense["route_mismatch"] is None
    assert exact["computed_tokens"] > first["computed_tokens"] == dense["computed_tokens"]
    lone = tmp_path / "lone.jsonl"
    write_trajectories(lone, batch[:1])
    assert main(["plan", str(lone), *moe]) == 0
    text = capsys.readouterr().out
    assert "1 dummies" in text
    assert "0.00% of shared positions" in text


def test_plan_counts_what_context_parallelism_moves_and_saves(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = plan_json(capsys, str(file), "--model", "tiny", "--dtype", "float64")
    two = plan_json(capsys, str(file), "--model", "tiny", "--dtype", "float64", "--cp", "2")
    again = plan_json(capsys, str(file), "--model", "tiny", "--dtype", "float64", "--cp", "2", "--recompute", "full")
    assert one["context_bytes"] == 0
    assert one["context_kv"] is None
    kv_bytes = 4 * 2 * 4 * 16 * 8
    padding = two["context_bytes"] / (2 * kv_bytes) - two["computed_tokens"]
    assert 0 <= padding < 4 * two["microbatches"]
    assert again["context_bytes"] == 1.5 * two["context_bytes"]
    assert two["peak_bytes"]["B"] < one["peak_bytes"]["B"]


def test_plan_weighs_gathered_against_sharded_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt longer than the context of the model that gave its size: planning goes by the size alone."""
    path = tmp_path / "long.jsonl"
    write_trajectories(path, two_level_groups(1, 4, 12_000, 500))
    arguments = (str(path), "--model", "llama3-8b", "--cp", "8")
    auto = plan_json(capsys, *arguments)
    kinds = {kv: plan_json(capsys, *arguments, "--context-parallel-kv", kv) for kv in ("gather", "ring")}
    assert auto["context_kv"]["choice"] == "gather"
    assert "no memory budget" in auto["context_kv"]["reason"]
    for kv, report in kinds.items():
        assert report["context_kv"]["choice"] == kv
        for name in ("peak_bytes", "context_bytes"):
            assert report[name] == report["context_kv"][name][kv] == auto["context_kv"][name][kv]
    for phase in "ABC":
        assert kinds["ring"]["peak_bytes"][phase] < kinds["gather"]["peak_bytes"][phase]
    assert kinds["ring"]["context_bytes"] > kinds["gather"]["context_bytes"]
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "with gather" in text
    assert "with ring" in text


def test_plan_says_what_holds_memory(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By stage, phase and holder; the peaks of phases are the largest sums with the state."""
    report = plan_json(capsys, str(file), "--model", "tiny", "--pp", "2", "--device", "cpu", "--dtype", "float32")
    assert len(report["peak_by_stage"]) == 2
    state = sum(report["state_bytes"].values())
    largest = max(sum(row.values()) - row["host"] for stage in report["peak_by_stage"] for row in stage.values())
    assert max(report["peak_bytes"].values()) == pytest.approx(state + largest, rel=0.01)
    budget = str(0.9 * max(report["peak_bytes"].values()) / 2**30)
    fitted = plan_json(
        capsys,
        str(file),
        "--model",
        "tiny",
        "--pp",
        "2",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--memory-budget-gib",
        budget,
    )
    assert max(fitted["peak_bytes"].values()) <= float(budget) * 2**30
    assert fitted["memory"] != report["memory"]


def test_capacity_compares_dense_and_reuse(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixflow.schedule.capacity.LARGEST_GROUP", 32)
    found = plan_json(
        capsys, str(file), "--model", "tiny", "--device", "cpu", "--capacity", "--memory-budget-gib", "0.05"
    )
    prefixes = {way["way"]: way["prefix_tokens"] for way in found["capacity"]}
    assert prefixes["reuse, offload"] > prefixes["reuse, keep"]
    assert prefixes["reuse, recompute"] > prefixes["reuse, keep"], "in smaller microbatches"
    budgets = {way["way"]: way["prefix_budget"] for way in found["capacity"]}
    assert budgets["dense"] == prefixes["dense"] + found["group"]["suffix_tokens"]
    assert budgets["reuse, recompute"] < prefixes["reuse, recompute"]
    assert prefixes["dense, full recomputation"] > prefixes["dense"] > 0
    assert main(["plan", str(file), "--model", "tiny", "--capacity", "--memory-budget-gib", "0.02"]) == 0
    text = capsys.readouterr().out
    assert "longest prefix" in text
    assert "nothing fits" in text


def test_plan_prints_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), "--model", "tiny"]) == 0
    text = capsys.readouterr().out
    assert "computed of" in text
    assert "bound" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--ep", "2"], "no experts"),
        (["--memory-budget-gib", "0.0001"], "What would fit: --memory-budget-gib"),
        (["--memory-budget-gib", "-1"], "above 0"),
        (["--capacity"], "needs --memory-budget-gib"),
    ],
)
def test_plan_refuses_by_name(file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    assert main(["plan", str(file), *arguments]) == 2
    message = capsys.readouterr().err
    assert arguments[0] in message
    assert part in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "3"], "8 attention heads"),
        (["--tp", "8"], "4 K/V groups"),
        (["--pp", "3"], "--num-layers 4 does not divide evenly over 3 model chunks"),
    ],
)
def test_plan_refuses_what_cannot_run(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["plan", str(file), "--model", "tiny", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_plan_names_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefixflow.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_bench_json_has_the_names_of_the_interface_and_calibrates(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = str(tmp_path / "c.json")
    done = run(
        "bench", "sweep", "--model", "tiny", "--prefix-ratio", "0.75", "--group-size", "3", "--tokens", "96",
        "--max-tokens", "128", "--repeat", "1", "--json", "--calibrate", calibration,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert set(line) >= BENCH_KEYS
    assert line["prefix_ratio"] == 0.75
    assert line["group_size"] == 3
    assert line["peak_kv_bytes"] > 0
    assert line["microbatches_reuse"] > 1
    assert 1.0 < line["bound"] < 3.0
    options = ("--model", "tiny", "--dp", "2", "--calibrate", calibration)
    by_seconds = plan_json(capsys, str(file), *options, "--dtype", "float32")
    assert sum(by_seconds["rank_loads"]) < 60.0, "loads are in seconds"
    assert by_seconds["bound"] == plan_json(capsys, str(file), *options[:4])["bound"]
    assert main(["plan", str(file), *options]) == 2
    assert "dtype 'float32', here 'bfloat16'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bench", "sweep", "--prefix-ratio", "x"], "--prefix-ratio"),
        (["bench", "sweep", "--prefix-ratio", "1.0"], "--prefix-ratio"),
        (["bench", "sweep", "--tokens", "8192", "--max-tokens", "512"], "token budget"),
        (["bench", "sweep", "--repeat", "0"], "--repeat"),
        (["bench", "sweep", "--prefix-ratio", "inf"], "--prefix-ratio"),
        (["bench", "sweep", "--model=tiny", "--tokens", "99999"], "--tokens"),
        (["bench", "sweep", "--pp", "2", "--calibrate", "/nonexistent.json"], "--pp 1"),
        (["parity", "/nonexistent.jsonl"], "/nonexistent.jsonl"),
        (["parity", "/nonexistent.jsonl", "--calibrate", "/nonexistent.json"], "measures nothing"),
        (["parity", "x", "--cases", "/dev/null"], "--cases"),
    ],
)
def test_commands_refuse_before_a_world_starts(arguments: list[str], named: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_parity_command_succeeds_and_fails(tmp_path: Path) -> None:
    style = Style(vocab_size=512)
    shared, lonely = tmp_path / "shared.jsonl", tmp_path / "lonely.jsonl"
    write_trajectories(shared, two_level_groups(1, 3, 12, 4, style=style))
    write_trajectories(lonely, two_level_groups(2, 1, 12, 4, style=style))
    for path, status in ((shared, 0), (lonely, 1)):
        done = run("parity", str(path), "--model", "tiny", "--dtype", "float64", "--json")
        assert done.returncode == status, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["ok"] == (status == 0)
    assert "nothing was shared" in " ".join(result["reasons"])

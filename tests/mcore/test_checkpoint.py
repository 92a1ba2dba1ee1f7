"""Save and resume: bit-equal on the same layout, the same run on another one, and the last good checkpoint survives a kill."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from prefixflow.runtime.world import Worlds
from prefixflow.testing.generate import Style, two_level_groups
from prefixflow.trajectories import write_trajectories

TRACKER = "latest_checkpointed_iteration.txt"

Run = Callable[..., tuple[int, str]]


def main_of(argv: Sequence[str]) -> tuple[int, str]:
    """Exit status and what the entry point printed on this rank."""
    import contextlib
    import io

    from megatron.prefixflow.training import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(list(argv))
    return status, out.getvalue()


def tensors(place: str) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, weights and optimizer, by name."""
    import torch
    from megatron.core import dist_checkpointing

    plain = dist_checkpointing.load_plain_tensors(place)
    return {name: value.double().numpy() for name, value in plain.items() if isinstance(value, torch.Tensor)}


def random_states(place: str) -> Any:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    wanted = {"rng": ShardedObject("rng_state", None, (1, 1), (0, 0))}
    return dist_checkpointing.load(wanted, place, validate_access_integrity=False)["rng"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three batches of 2."""
    write_trajectories(tmp_path / "t.jsonl", two_level_groups(3, 2, (30, 40), (5, 9), seed=1))
    return tmp_path / "t.jsonl"


def arguments(file: Path, *more: str, steps: int = 4, model: str = "tiny", dtype: str = "float64") -> list[str]:
    line = (
        f"--model {model} --trajectories {file} --dtype {dtype} --global-batch-size 2 --train-iters {steps} --lr 1e-3"
    )
    return [*line.split(), "--lr-decay-iters", str(max(9, steps + 1)), "--kl-coef", "0.1", *more]


@pytest.fixture
def run(worlds: Worlds) -> Run:
    def run(world_size: int, argv: Sequence[str]) -> tuple[int, str]:
        return worlds[world_size].run(main_of, argv)[0]

    return run


def metrics_of(path: Path) -> list[dict[str, Any]]:
    timed = {"time_s", "time_forward_s", "time_backward_s", "tokens_per_s", "peak_bytes"}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


def assert_equal(worlds: Worlds, *places: Path) -> None:
    first, second = (worlds[1].run(tensors, str(place))[0] for place in places)
    assert first.keys() == second.keys()
    assert any(name.startswith("optimizer.state.exp_avg_sq") for name in first)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "more"), [("float64", ()), ("bfloat16", ("--use-distributed-optimizer",))], ids=["plain", "distributed"]
)
def test_a_resumed_run_is_bit_equal(
    file: Path, tmp_path: Path, run: Run, worlds: Worlds, dtype: str, more: Sequence[str]
) -> None:
    line = arguments(file, *more, "--save-interval", "2", "--metrics-file", str(tmp_path / "m"), dtype=dtype)
    assert run(2, [*line, "--save", str(tmp_path / "a")])[0] == 0
    whole = metrics_of(tmp_path / "m")
    with open(tmp_path / "m", "a") as metrics:
        # A kill inside a line.
        metrics.write('{"step": 5, "lo')
    resumed = [*line, "--save", str(tmp_path / "b"), "--load", str(tmp_path / "a"), "--ckpt-step", "2"]
    status, out = run(2, resumed)
    assert status == 0
    assert "step 3/4" in out
    assert "step 2/4" not in out
    assert metrics_of(tmp_path / "m") == whole
    assert [line["step"] for line in whole] == [1, 2, 3, 4]
    assert whole[2]["kl"] > 0, "the reference is not the resumed policy"
    assert_equal(worlds, *(tmp_path / name / "iter_0000004" for name in "ab"))
    states = [worlds[1].run(random_states, str(tmp_path / name / "iter_0000004"))[0] for name in "ab"]
    assert repr(states[0]) == repr(states[1])
    assert len(states[0]) == 2, "one for each data-parallel rank"


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("tiny", ["--tp 2", "--pp 2 --vpp 2", "--cp 2"]),
        ("tiny-moe", ["--ep 2", "--pp 2", "--tp 2 --expert-tensor-parallel-size 1 --sequence-parallel"]),
    ],
)
def test_another_layout_goes_on_with_the_same_run(
    file: Path, tmp_path: Path, run: Run, model: str, layouts: Sequence[str]
) -> None:
    line = arguments(file, "--save-interval", "2", model=model)
    assert run(1, [*line, "--save", str(tmp_path / "a"), "--metrics-file", str(tmp_path / "m")])[0] == 0
    whole = metrics_of(tmp_path / "m")
    for layout in layouts:
        path = tmp_path / layout.replace(" ", "")
        more = ["--load", str(tmp_path / "a"), "--ckpt-step", "2", "--metrics-file", str(path)]
        status, out = run(2, [*line, *more, *layout.split()])
        assert status == 0, out
        steps = metrics_of(path)
        assert [s["step"] for s in steps] == [3, 4]
        for ours, expected in zip(steps, whole[2:], strict=True):
            for key in ("loss", "grad_norm", "kl", "lr"):
                assert ours[key] == pytest.approx(expected[key], rel=1e-6 if "moe" in model else 1e-9), (layout, key)


def test_what_cannot_be_loaded(file: Path, tmp_path: Path, run: Run) -> None:
    saved = tmp_path / "a"
    line = arguments(file, steps=1)
    keeps = ["--save", str(saved), "--save-interval", "1", "--save-retain-interval", "2"]
    assert run(1, [*line, *keeps])[0] == 0
    assert run(1, [*arguments(file, steps=2), *keeps, "--load", str(saved)])[0] == 0
    names = sorted(path.name for path in saved.iterdir())
    assert names == ["iter_0000002", TRACKER, "reference", "tensorboard"], "the first step is no multiple of 2"
    load = ["--load", str(saved)]

    def refused(*more: str, argv: Sequence[str] = line) -> str:
        status, out = run(1, [*argv, *more])
        assert status != 0
        return " ".join(out.split("pretrain_rl.py:")[-1].split())

    def without(flag: str) -> list[str]:
        at = line.index(flag)
        return [*line[:at], *line[at + 2 :]]

    status, out = run(1, [*line, "--load", str(tmp_path / "none")])
    assert status == 0
    assert "there is no such folder" in out
    assert "step 1/1" in out
    assert "no such folder" in refused("--load", str(tmp_path / "none"), "--exit-on-missing-checkpoint")
    assert "found iter_0000002" in refused(*load, "--ckpt-step", "7")
    assert "--ckpt-step is -1" in refused(*load, "--ckpt-step", "-1")
    assert "is one checkpoint itself" in refused("--load", str(saved / "iter_0000002"), "--ckpt-step", "7")
    assert "shape" in refused(*load, "--ffn-hidden-size", "256")
    assert "which the model lacks" in refused(*load, argv=arguments(file, steps=1, model="tiny-moe"))
    assert "it lacks" in refused(*load, "--qk-layernorm")
    assert "--override-opt-param-scheduler" in refused(*load, "--lr", "1e-2")
    # The model's arguments from the checkpoint: nothing else says what it is.
    status, out = run(1, [*without("--model"), *load, "--use-checkpoint-args"])
    assert status == 0, out
    assert "step 2 of 1 is done" in out
    place = saved / "iter_0000002"
    for name in ("common.pt", ".metadata", "metadata.json", "__0_0.distcp"):
        whole = (place / name).read_bytes()
        (place / name).write_bytes(bytes(len(whole)))
        assert "is damaged" in refused(*load), name
        (place / name).write_bytes(whole)
    part = max(place.glob("*.distcp"), key=lambda path: path.stat().st_size)
    part.write_bytes(part.read_bytes()[:-100])
    assert "is half a checkpoint" in refused(*load)
    part.unlink()
    assert f"{part.name} is missing" in refused(*load)
    (place / "metadata.json").unlink()
    assert "metadata.json missing" in refused(*load)


# --- kills -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that find Megatron imported."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["megatron.prefixflow.training"])
    return context


def run_alone(argv: Sequence[str], fatal_rename: int | None = None) -> None:
    """A whole run in this process, which ends itself by SIGKILL at a rename: before an even half of it, after an odd one."""
    from megatron.prefixflow.training import main

    renames, rename = 0, os.replace

    def counted(*names: Any) -> None:
        nonlocal renames
        for is_done in (False, True):
            if renames == fatal_rename:
                os.kill(os.getpid(), signal.SIGKILL)
            renames += 1
            if not is_done:
                rename(*names)

    os.replace = counted  # type: ignore[assignment]
    os.environ.pop("RANK", None)
    os._exit(main(list(argv)))


def resumable(file: Path, folder: Path, steps: int) -> list[str]:
    line = arguments(file, "--save", str(folder), "--load", str(folder), "--save-interval", "1", steps=steps)
    return [*line, "--metrics-file", str(folder.with_suffix(".jsonl"))]


def test_a_kill_at_any_rename_loses_nothing(
    file: Path, tmp_path: Path, processes: ForkServerContext, worlds: Worlds
) -> None:
    """Renames of a first run: reference, checkpoint 1, tracker, checkpoint 2, tracker."""
    exit_codes = []
    for fatal in (3, 4, 2, None):
        process = processes.Process(target=run_alone, args=(resumable(file, tmp_path / "a", 3), fatal))
        process.start()
        process.join()
        exit_codes.append(process.exitcode)
        unfinished = list((tmp_path / "a").glob("iter*"))
        assert all((place / "metadata.json").is_file() for place in unfinished)
    assert exit_codes == [-signal.SIGKILL] * 3 + [0]
    assert worlds[1].run(main_of, resumable(file, tmp_path / "b", 3))[0][0] == 0
    assert_equal(worlds, tmp_path / "a" / "iter_0000003", tmp_path / "b" / "iter_0000003")
    assert metrics_of(tmp_path / "a.jsonl") == metrics_of(tmp_path / "b.jsonl")
    hidden = [path.name for path in (tmp_path / "a").iterdir() if path.name.startswith(".") or "replaced" in path.name]
    assert not hidden, "what was never finished is gone"


@pytest.mark.slow
def test_ten_kills_at_random_moments(file: Path, tmp_path: Path, processes: ForkServerContext, worlds: Worlds) -> None:
    assert worlds[1].run(main_of, resumable(file, tmp_path / "b", 20))[0][0] == 0
    rng, num_kills, steps = random.Random(0), 0, []
    folder = tmp_path / "a"
    while True:
        process = processes.Process(target=run_alone, args=(resumable(file, folder, 20),))
        process.start()
        if num_kills < 10:
            before = _tracked(folder)
            # A run that trains is killed soon after its first step; one that is nearly done, while it starts.
            while process.is_alive() and _tracked(folder) == before and before < 17:
                time.sleep(0.01)
            process.join(rng.uniform(0.0, 0.25))
        else:
            process.join()
        if process.exitcode is not None:
            assert process.exitcode == 0
            break
        process.kill()
        process.join()
        num_kills += 1
        steps.append(_tracked(folder))
    print(f"{num_kills} kills, after steps {steps}")
    assert_equal(worlds, folder / "iter_0000020", tmp_path / "b" / "iter_0000020")
    assert metrics_of(tmp_path / "a.jsonl") == metrics_of(tmp_path / "b.jsonl")


def _tracked(folder: Path) -> int:
    path = folder / TRACKER
    return int(path.read_text()) if path.is_file() else 0


def converted_back(saved: Path, hf_dir: Path) -> None:
    from megatron.prefixflow.conversion import megatron_to_hf

    megatron_to_hf(saved, hf_dir)


def test_weights_alone_go_out_and_come_in(tmp_path: Path, run: Run, worlds: Worlds) -> None:
    """Exports to another sampler; starts and reference policies without a training state."""
    from tests.mcore.test_conversion import make_model

    initial = make_model("llama", tmp_path / "initial", num_hidden_layers=1)
    saved, exports = tmp_path / "a", tmp_path / "exports"
    places = ["--save", str(saved), "--save-interval", "2", "--no-save-optim", "--no-save-rng"]
    file = tmp_path / "t.jsonl"
    write_trajectories(file, two_level_groups(3, 2, (30, 40), (5, 9), seed=1, style=Style(vocab_size=64)))
    line = arguments(file, "--kl-coef", "0", steps=2, model=str(initial), dtype="float32")

    status, out = run(1, [*line, *places, "--export-hf-every", "1", str(exports)])
    assert status == 0, out
    assert sorted(path.name for path in exports.iterdir()) == ["latest.txt", "step_0000001", "step_0000002"]
    assert (exports / "latest.txt").read_text() == "step_0000002\n"
    worlds[1].run(converted_back, saved, tmp_path / "back")
    weights = [
        load_file(folder / "model.safetensors") for folder in (tmp_path / "back", exports / "step_0000002", initial)
    ]
    assert weights[0].keys() == weights[1].keys() == weights[2].keys()
    assert all(weights[0][name].equal(value) for name, value in weights[1].items())
    assert not all(weights[0][name].equal(value) for name, value in weights[2].items())

    start = [*line, "--kl-coef", "0.1", "--metrics-file", str(tmp_path / "m"), "--train-iters", "1"]
    for weights_only in (["--pretrained-checkpoint", str(saved)], ["--load", str(saved), "--finetune"]):
        for reference in ([], ["--ref-load", str(initial)]):
            status, out = run(1, [*start, *weights_only, *reference])
            assert status == 0, out
    divergence = [step["kl"] for step in metrics_of(tmp_path / "m")]
    assert [step["step"] for step in metrics_of(tmp_path / "m")] == [1] * 4
    assert divergence[0] == divergence[2] == 0
    assert divergence[1] == divergence[3] > 0


def test_a_schedule_that_is_overridden_holds(file: Path, tmp_path: Path, run: Run) -> None:
    saved, metrics = str(tmp_path / "a"), tmp_path / "m"
    line = [*arguments(file, "--lr-decay-style", "constant", steps=1), "--metrics-file", str(metrics)]
    assert run(1, [*line, "--save", saved, "--save-interval", "1"])[0] == 0
    status, out = run(
        1, [*line, "--load", saved, "--train-iters", "2", "--lr", "5e-3", "--override-opt-param-scheduler"]
    )
    assert status == 0, out
    assert [step["lr"] for step in metrics_of(metrics)] == [1e-3, 5e-3]


@pytest.mark.parametrize("argument", ["--save", "--tensorboard-dir", "--export-hf-every 1"])
def test_a_place_that_cannot_be_written_is_refused_at_the_start(
    file: Path, tmp_path: Path, run: Run, argument: str
) -> None:
    status, out = run(1, [*arguments(file, steps=1), "--save-interval", "1", *argument.split(), str(file / "a")])
    assert status == 2
    assert f"{argument.split()[0]} {file / 'a'}: expected a folder to write to, and {file} is no folder" in out


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_in_another_form_is_no_new_start(file: Path, tmp_path: Path, run: Run, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).touch()
    status, out = run(1, [*arguments(file, steps=1), "--load", str(tmp_path / "a")])
    assert status == 2
    assert "checkpoint" in out


def test_a_model_without_weights_is_random_and_half_of_one_is_refused(file: Path, tmp_path: Path, run: Run) -> None:
    from tests.mcore.test_conversion import TINY

    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama", **TINY, "vocab_size": 512}))
    line = [*arguments(file, "--kl-coef", "0", steps=1), "--model", str(tmp_path / "hf")]
    status, out = run(1, line)
    assert status == 0, out
    assert f"--model {tmp_path / 'hf'} has no safetensors files: the run starts from random weights" in out
    (tmp_path / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    status, out = run(1, line)
    assert status == 2
    assert "lacks b.safetensors, which its index names" in out

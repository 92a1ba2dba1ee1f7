"""Every launch script under examples/: what it would start is parsed, checked and planned, and the figures it states are the plan's.

Scripts are found, not listed. They start programs as "$PYTHON"; a stand-in notes what `pretrain_rl.py` would get and runs the rest.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.prefixflow.arguments import memory_settings, parse_arguments, plan_config, shape_of
from megatron.prefixflow.job import Job, prepare
from prefixflow.schedule.search import plan_pipeline
from prefixflow.testing.generate import Style, two_level_groups, with_routes
from prefixflow.trajectories import write_trajectories

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCED = EXAMPLES / "common.sh"
SLURM = EXAMPLES / "slurm.sh"
SCRIPTS = sorted(set(EXAMPLES.rglob("*.sh")) - {SOURCED, SLURM})
RECIPES = [script for script in SCRIPTS if 'recipe "$@"' in script.read_text()]
TIMEOUT_S = 120
TOLERANCE = 0.05
NUM_NODES_QUICKLY_PLANNED = 4

STAND_IN = """#!{python}
import json, os, sys
program = [a for a in sys.argv[1:] if a.endswith("pretrain_rl.py")]
if not program:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
with open("{notes}", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """What one process of torchrun gets: its own arguments, and those of pretrain_rl.py."""

    torchrun: list[str]
    program: list[str]

    def of_torchrun(self, name: str) -> str | None:
        return self.torchrun[self.torchrun.index(name) + 1] if name in self.torchrun else None

    @property
    def world_size(self) -> int:
        return int(self.of_torchrun("--nproc-per-node") or 1) * int(self.of_torchrun("--nnodes") or 1)


def run(script: Path, *arguments: str, folder: Path, **environment: str) -> tuple[list[Launch], str]:
    """The launches of a script, as of node 0, and what it printed. Programs by their plain names do not run."""
    notes, stand_in = folder / "launches.jsonl", folder / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, notes=notes))
    for name in ("torchrun", "python3"):
        (folder / name).write_text(f'#!/bin/sh\necho "{script.name}: start programs as \\$PYTHON" >&2\nexit 1\n')
    for name in ("python", "torchrun", "python3"):
        (folder / name).chmod(0o755)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("NUM_", "NODE_", "SLURM", "MASTER"))
    }
    clean |= {} if "SLURM_JOB_ID" in environment else {"NODE_RANK": "0", "MASTER_ADDR": "host0"}
    done = subprocess.run(
        [script, *arguments],
        env={**clean, "PYTHON": str(stand_in), "PATH": f"{folder}:{os.environ['PATH']}"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    launches = []
    for line in lines:
        place = next(i for i, argument in enumerate(line) if argument.endswith("pretrain_rl.py"))
        launches.append(Launch(line[:place], line[place + 1 :]))
    return launches, done.stdout


def make_file(folder: Path, arguments: str) -> str:
    """The trajectory file that `make_trajectories.py OUT ARGUMENTS` writes."""
    spec = importlib.util.spec_from_file_location("make_trajectories", EXAMPLES / "make_trajectories.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file = str(folder / "made.jsonl")
    module.main([file, *shlex.split(arguments)])
    return file


def shape_name(script: Path) -> str:
    """A recipe is named after a built-in shape, which stands for the model's folder."""
    return script.stem.replace("_", "-")


def planned_digest(job: Job) -> str:
    """Of the first step's plan, which holds together."""
    plan = plan_pipeline(job.batches[0], plan_config(job.args, job.layout))
    plan.assert_invariants(job.batches[0])
    return plan.digest


def test_every_script_can_be_run() -> None:
    assert len(RECIPES) >= 9
    assert not [script for script in SCRIPTS if not os.access(script, os.X_OK)]
    for script in SCRIPTS:
        assert str(script.relative_to(EXAMPLES.parent)) in script.read_text(), f"{script} does not say how it is called"


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - set(RECIPES)), ids=lambda s: s.stem)
def test_script_is_planned(script: Path, tmp_path: Path) -> None:
    launches, _ = run(script, str(tmp_path), folder=tmp_path)
    assert launches
    for launch in launches:
        planned_digest(prepare(launch.program, launch.world_size))


def _cases() -> list:
    return [
        pytest.param(
            script,
            marks=pytest.mark.slow if int(_stated(script, r"NUM_NODES:-(\d+)")) > NUM_NODES_QUICKLY_PLANNED else (),
            id=f"{script.parent.name}-{script.stem}",
        )
        for script in RECIPES
    ]


def _stated(script: Path, pattern: str) -> str:
    found = re.search(pattern, script.read_text())
    assert found is not None, f"{script}: nothing like {pattern!r}"
    return found.group(1)


@pytest.mark.parametrize("script", _cases())
def test_recipe_does_what_it_predicts(script: Path, tmp_path: Path) -> None:
    file = make_file(tmp_path, _stated(script, r"make_trajectories.py \S+ (.*)"))
    _, printed = run(script, "--plan", shape_name(script), file, "--json", folder=tmp_path)
    report = json.loads(printed)
    speedup, gib = report["predicted_speedup"], max(report["peak_bytes"].values()) / 2**30
    line = f"# Predicted: {speedup:.2f}x the speed of dense, {gib:.1f} GiB on a GPU"
    assert float(_stated(script, r"Predicted: ([\d.]+)x")) == pytest.approx(speedup, rel=TOLERANCE), line
    assert float(_stated(script, r"dense, ([\d.]+) GiB")) == pytest.approx(gib, rel=TOLERANCE), line
    # The file has no routes: they would be as large as a cluster's.
    launches, _ = run(
        script, shape_name(script), file, str(tmp_path / "out"), "--routing-replay", "off", folder=tmp_path
    )
    job = prepare(launches[0].program, launches[0].world_size)
    assert launches[0].world_size == 8 * int(_stated(script, r"NUM_NODES:-(\d+)"))
    assert len(job.batches) == 1
    assert planned_digest(job) == report["digest"]
    # The run's vocabulary is padded.
    state_bytes = memory_settings(job.args, job.layout).model.state_bytes
    assert sum(report["state_bytes"].values()) == pytest.approx(state_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "qwen3_235b_a22b"])
def test_recipe_plans_with_routes(name: str, tmp_path: Path) -> None:
    script, file = EXAMPLES / "rag" / f"{name}.sh", tmp_path / "rollouts.jsonl"
    launch = run(script, shape_name(script), str(file), str(tmp_path / "out"), folder=tmp_path)[0][0]
    routes = shape_of(parse_arguments(launch.program, training=True)).route_shape
    batch = two_level_groups(6, 4, 100, (20, 40), style=Style(vocab_size=1000))
    write_trajectories(file, with_routes(batch, routes, missing=0.1))
    job = prepare(launch.program, launch.world_size)
    plan = plan_pipeline(job.batches[0], plan_config(job.args, job.layout))
    assert plan.config.expert_block == 2
    assert plan.route_report is not None
    assert plan.route_report.num_filled > 0


def test_nodes_of_a_slurm_job_meet(tmp_path: Path) -> None:
    """One after another what srun would start on each node at once."""
    for name, text in {
        "scontrol": "echo node7; echo node8",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit 1; done',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2"}
    recipe = [
        str(EXAMPLES / "rag" / "llama3_8b.sh"),
        "llama3-8b",
        "rollouts.jsonl",
        str(tmp_path / "out"),
        "--lr",
        "2e-6",
    ]
    launches, _ = run(SLURM, *recipe, folder=tmp_path, **job)
    assert [launch.of_torchrun("--node-rank") for launch in launches] == ["0", "1"]
    assert {launch.of_torchrun("--master-addr") for launch in launches} == {"node7"}
    assert {launch.of_torchrun("--master-port") for launch in launches} == {"33456"}
    assert {launch.world_size for launch in launches} == {16}
    assert parse_arguments(launches[0].program, training=True).lr == 2e-6, "what the user adds wins"


def test_several_nodes_need_to_know_where_they_meet(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="MASTER_ADDR"):
        run(RECIPES[0], "m", "t", str(tmp_path / "out"), folder=tmp_path, NUM_NODES="2", MASTER_ADDR="")


@pytest.mark.parametrize("first", [["--plan"], []])
@pytest.mark.parametrize("given", ["NUM_NODES=x", "NUM_NODES=0", "NUM_PROCESSES=1.5", "NODE_RANK=-1"])
def test_counts_that_are_none_are_refused(tmp_path: Path, first: list[str], given: str) -> None:
    name, value = given.split("=")
    with pytest.raises(AssertionError, match=f"{name} is '{value}', expected"):
        run(RECIPES[0], *first, "m", "t", str(tmp_path / "out"), folder=tmp_path, **{name: value})
    assert not (tmp_path / "out").exists()


def test_processes_that_are_no_whole_models_are_refused(tmp_path: Path) -> None:
    script = EXAMPLES / "rag" / "qwen3_235b_a22b.sh"
    with pytest.raises(AssertionError, match="NUM_PROCESSES=3 are no multiple"):
        run(script, "--plan", "m", "t", folder=tmp_path, NUM_NODES="1", NUM_PROCESSES="3")

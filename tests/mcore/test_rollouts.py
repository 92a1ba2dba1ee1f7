"""Training on responses that the policy samples itself, and on files that arrive while it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixflow.runtime.world import Worlds
from prefixflow.testing.generate import two_level_groups
from prefixflow.trajectories import Trajectory, write_trajectories
from tests.mcore.test_training import run_main

REWARD = f"{Path(__file__).with_name('rewards_of_tests.py')}:share_of_small_tokens"
MOE = ("--model", "tiny-moe", "--moe-aux-loss-coeff", "0", "--routing-replay", "rollout")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five prompts of unequal lengths."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rng = np.random.default_rng(0)
    records = [{"id": f"p{i}", "tokens": rng.integers(512, size=20 + i).tolist(), "limit": 256} for i in range(5)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sampling(prompts: Path, *more: str, steps: int = 2) -> list[str]:
    given = {
        "--model": "tiny",
        "--dtype": "float64",
        "--trajectories": prompts,
        "--rollout": "sample",
        "--reward-function": REWARD,
        "--group-size": 4,
        "--global-batch-size": 12,
        "--max-response-length": 6,
        "--temperature": 0.9,
        "--top-p": 0.95,
        "--train-iters": steps,
        "--lr": 1e-3,
        "--lr-decay-style": "constant",
    }
    stops = [str(token) for token in range(60)]
    return [*(str(t) for pair in given.items() for t in pair), "--stop-tokens", *stops, *more]


def _run(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Of every step: its trajectories as plain values, reward and gradient norm."""
    import torch.distributed as dist

    from megatron.prefixflow.job import prepare
    from megatron.prefixflow.training import Trainer

    trainer = Trainer(prepare(argv, dist.get_world_size()))
    steps: list[dict[str, Any]] = []
    take = trainer.source.take

    def keep() -> Any:
        batch = take()
        steps.append({"batch": [(t.id, t.tokens.tolist(), t.reward, t.advantages[-1]) for t in batch.trajectories]})
        return batch

    trainer.source.take = keep  # type: ignore[method-assign]
    for _ in range(trainer.job.args.train_iters):
        metrics = trainer.step()
        steps[-1] |= {"reward": metrics.reward_mean, "norm": metrics.grad_norm, "native": metrics.routes_native}
        steps[-1]["replayed"] = metrics.routes_replayed
    return steps


def norms(steps: list[dict[str, Any]]) -> list[float]:
    return [step["norm"] for step in steps]


def test_dense_and_reuse_sample_and_learn_alike_under_every_layout(worlds: Worlds, prompts: Path) -> None:
    reuse = worlds[1].run(_run, sampling(prompts, "--prefix-reuse", "on", "--tis-cap", "2"))[0]
    rewards = [reward for step in reuse for *_, reward, _ in step["batch"]]
    assert len(set(rewards)) > 4
    assert {len(tokens) for step in reuse for _, tokens, *_ in step["batch"]} > {26, 27}, "some stop, some do not"
    assert [step["batch"][0][0] for step in reuse] == ["p0@0/0", "p3@0/0"]
    assert reuse[1]["batch"][-1][0] == "p0@1/3", "the prompts come again, with other random numbers"
    for size, argv in (
        (1, ("--prefix-reuse", "off")),
        (2, ("--prefix-reuse", "on")),
        (2, ("--prefix-reuse", "on", "--cp", "2")),
        (2, ("--prefix-reuse", "on", "--tp", "2", "--sequence-parallel")),
    ):
        for steps in worlds[size].run(_run, sampling(prompts, *argv)):
            assert [step["batch"] for step in steps] == [step["batch"] for step in reuse], argv
            # Without the cap on importance weights, too: the sampler's log-probabilities are the trainer's.
            assert norms(steps) == pytest.approx(norms(reuse), rel=1e-9), argv


def test_routes_of_sampled_responses_are_replayed(worlds: Worlds, prompts: Path) -> None:
    ways = [("--prefix-reuse", "on"), ("--prefix-reuse", "off"), ("--routing-replay", "off")]
    reuse, dense, native = (worlds[1].run(_run, sampling(prompts, *MOE, *way, steps=1))[0] for way in ways)
    assert reuse[0]["native"] == dense[0]["native"] == 0 < reuse[0]["replayed"] < dense[0]["replayed"]
    assert reuse[0]["batch"] == dense[0]["batch"]
    assert norms(reuse) == pytest.approx(norms(dense), rel=1e-6)
    # The routes are those that the trainer would have taken.
    assert native[0]["replayed"] == 0
    assert norms(reuse) == pytest.approx(norms(native), rel=1e-6)
    split = worlds[2].run(_run, sampling(prompts, *MOE, *ways[0], "--tp", "2", "--sequence-parallel", steps=1))
    assert split[0][0]["batch"] == reuse[0]["batch"]
    assert split[0][0]["native"] == 0


def test_a_batch_is_filled_with_groups_that_teach(worlds: Worlds, prompts: Path) -> None:
    short = ("--max-response-length", "2", "--group-size", "2", "--global-batch-size", "6", "--filter", "zero-variance")
    (step,) = worlds[1].run(_run, sampling(prompts, *short, steps=1))[0]
    groups: dict[str, set[float]] = {}
    for name, _, reward, _ in step["batch"]:
        groups.setdefault(name.split("/")[0], set()).add(reward)
    assert [len(rewards) for rewards in groups.values()] == [2, 2, 2]
    assert step["reward"] != pytest.approx(sum(sum(r) for r in groups.values()) / 6), "of all that was sampled"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--pp", "2"), "(--pp) 2 is not built"),
        (("--group-size", "5"), "--global-batch-size 12 is not a multiple"),
        (("--group-size", "2"), "a step samples from 6 prompts"),
        (("--reward-function", "nowhere:f"), "cannot be imported"),
        (("--seq-length", "25"), "at most 20 tokens"),
        (("--max-response-length", "65537"), "--max-response-length 65537 leaves no room for a prompt"),
        (("--memory-budget-gib", "1e-5"), "--memory-budget-gib"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_the_run(prompts: Path, more: tuple[str, ...], words: str) -> None:
    from megatron.prefixflow.job import prepare

    with pytest.raises(ValueError, match=r".") as caught:
        prepare(sampling(prompts, *more), 2)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fails_once", "fails_once: RuntimeError for the response to prompt 'p1': no reward today"),
        ("overflows", "trajectory 'p0@0/0', field \"reward\": expected rewards"),
    ],
)
def test_an_error_of_the_reward_function_reaches_every_rank(
    worlds: Worlds, prompts: Path, function: str, words: str
) -> None:
    argv = sampling(prompts, "--reward-function", REWARD.replace("share_of_small_tokens", function))
    results = worlds[2].run(run_main, argv)
    assert [status for status, *_ in results] == [1, 1]
    assert words in results[0][2]
    assert results[0][2].count("--reward-function") <= 1


def _groups(seed: int) -> tuple[Trajectory, ...]:
    return tuple(two_level_groups(2, 2, (20, 30), (5, 10), seed=seed))


def _follow(
    argv: Sequence[str], state: dict[str, Any] | None, num_batches: int, *more: str
) -> tuple[list[list[int]], Any, str]:
    """First tokens of the batches that a fresh source gives, its state, and what it says, the error that ends it included."""
    from megatron.prefixflow.arguments import parse_arguments
    from megatron.prefixflow.errors import TrainingError
    from megatron.prefixflow.rollouts import followed_batches

    source = followed_batches(parse_arguments([*argv, *more], training=True))
    if state is not None:
        source.restore(json.loads(json.dumps(state)))
    taken, said = [], ""
    try:
        for _ in range(num_batches):
            batch = source.take()
            said += " ".join(batch.warnings)
            taken.append(batch.trajectories[0].tokens.tolist())
    except TrainingError as error:
        said += str(error)
    return taken, source.state(), said


def test_followed_files_are_used_once_and_in_order_on_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    argv = ["--model", "tiny", "--trajectories", str(tmp_path), "--rollout", "trace", "--global-batch-size", "2"]
    argv += ["--train-iters", "9", "--lr", "1e-3", "--rollout-timeout-minutes", "0"]
    files = [_groups(seed) for seed in range(2)]
    for number, trajectories in enumerate(files):
        write_trajectories(tmp_path / f"{number}.jsonl", trajectories)
    expected = [trajectories[first].tokens.tolist() for trajectories in files for first in (0, 2)]
    before = worlds[2].run(_follow, argv, None, 1)
    assert [taken for taken, *_ in before] == [expected[:1]] * 2
    assert before[0][1] == before[1][1]
    # A run that goes on finishes the file it had begun, and uses none twice.
    after = worlds[2].run(_follow, argv, before[0][1], 9)
    assert [taken for taken, *_ in after] == [expected[1:]] * 2
    assert all("no new trajectories" in problem for *_, problem in after)
    assert all("skipped" not in problem for *_, problem in after)
    # Of the second file nothing is left: said once, with the next batch or where there is none.
    overlong = ("--filter", "overlong", "--max-response-length", "7")
    for num_taken in (2, 4):
        filtered = worlds[2].run(_follow, argv, None, 9, *overlong)
        assert [len(taken) for taken, *_ in filtered] == [num_taken] * 2
        assert all(said.count(" is skipped") == said.count("1.jsonl is skipped") == 1 for *_, said in filtered)
        write_trajectories(tmp_path / "2.jsonl", files[0])
    (tmp_path / "2.jsonl").write_text("no trajectory\n")
    assert all("2.jsonl, line 1" in problem for *_, problem in worlds[2].run(_follow, argv, after[0][1], 1))


def test_logs(tmp_path: Path, prompts: Path, worlds: Worlds) -> None:
    folder, metrics = tmp_path / "tensorboard", tmp_path / "metrics.jsonl"
    more = ("--tensorboard-dir", str(folder), "--metrics-file", str(metrics))
    results = worlds[2].run(run_main, sampling(prompts, *more))
    assert [status for status, *_ in results] == [0, 0], results[0][2]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    written = [json.loads(line) for line in metrics.read_text().splitlines()]
    logged = [(event.step, event.value) for event in events.Scalars("reward_mean")]
    assert logged == [(step["step"], pytest.approx(step["reward_mean"])) for step in written]
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")


def test_weights_and_biases_is_told_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.prefixflow import logs
    from megatron.prefixflow.arguments import ArgumentsError
    from megatron.prefixflow.metrics import StepMetrics

    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda scalars, step: calls.append((step, scalars)), finish=lambda exit_code: calls.append(exit_code)
    )

    def init(**given: Any) -> Any:
        calls.append(given)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    names = ("wandb_project", "wandb_entity", "wandb_exp_name", "wandb_save_dir")
    values = dict.fromkeys((*names, "metrics_file", "reward_curve", "rollout", "tensorboard_dir", "save"))
    args: Any = SimpleNamespace(**{**values, "wandb_project": "counting"}, values={"lr": 1.0})
    fields = dict.fromkeys(StepMetrics.__dataclass_fields__)
    with monkeypatch.context() as without:
        without.setattr(logs, "_is_installed", lambda package: package != "wandb")
        with pytest.raises(ArgumentsError, match="needs the package wandb"):
            logs.check_log_packages(args)
    with logs.TrainingLog(args, is_first=True) as log:
        log.write(StepMetrics(**{**fields, "step": 3, "loss": 0.5, "reward_mean": 0.25}))  # type: ignore[arg-type]
    assert calls[0]["project"] == "counting"
    assert calls[1:] == [(3, {"loss": 0.5, "reward_mean": 0.25}), 0]

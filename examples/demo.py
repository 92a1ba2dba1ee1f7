"""GRPO steps of SmolLM2-135M-Instruct through Megatron-Core, with prefix reuse and, for the first step, without.

    make demo                        or    python examples/demo.py [--quick]

1. Load the model into Megatron-Core, on one process.
2. Sample several answers to each of a few long prompts with the model itself, and score them (`demo_prompts.py`).
3. First step: the same gradient from the same weights, dense and with reuse, in alternating pairs; then the update.
4. More steps with reuse, each on fresh answers of the updated model.

Ends with a table. Exits 1 when the two gradients differ by more than 1e-4, or when nothing was shared.
"""

# ruff: noqa: E402  (environment and warnings are set before torch and Megatron are imported)
from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Megatron's jit fusions otherwise compile on the CPU, about 20 s.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Threads that spin while they wait take the processor from those that work, where other programs run as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Megatron-Core says in eight places that Apex and Transformer Engine are missing.
warnings.filterwarnings("ignore", module=r"megatron\.core|mbridge")

import numpy as np
import torch
import torch.distributed as dist
from demo_prompts import Task, make_task
from rich.console import Console
from rich.table import Table

from megatron.prefixflow.arguments import Arguments, parallel_layout, parse_arguments, plan_config
from megatron.prefixflow.device import torch_device
from megatron.prefixflow.gradients import reduce_gradients
from megatron.prefixflow.job import Job
from megatron.prefixflow.parity import relative_errors
from megatron.prefixflow.planning import plan_step
from megatron.prefixflow.rollouts import FileBatches
from megatron.prefixflow.sampler import Prompt, Response, Sampler, SamplingConfig
from megatron.prefixflow.shards import full_gradients
from megatron.prefixflow.smollm2 import DEFAULT_DIR, make_model
from megatron.prefixflow.training import Trainer
from prefixflow.plan.plan import Plan
from prefixflow.runtime.attention.kernels import select_kernel
from prefixflow.runtime.objective import Objective
from prefixflow.trajectories.advantages import grpo_advantages
from prefixflow.trajectories.types import Trajectory

GRADIENT_LIMIT = 1e-4
TEMPERATURE = 0.8
END_OF_TURN = "<|im_end|>"
# New answers are drawn where all answers to every prompt have earned the same: nothing could be learnt from them.
MAX_DRAWS = 5


class DemoError(RuntimeError):
    """The demo cannot show what it is for; the message says why."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step learns from: the trajectories, and the rewards of each group."""

    trajectories: tuple[Trajectory, ...]
    rewards: tuple[tuple[float, ...], ...]
    seconds: float

    @property
    def num_mixed(self) -> int:
        return sum(len(set(group)) > 1 for group in self.rewards)


class Rollouts:
    """Samples answers to new tasks with the model that is being trained, and scores them."""

    def __init__(self, trainer: Trainer, tokenizer: Any, options: argparse.Namespace) -> None:
        args = trainer.job.args
        self.options = options
        self.tokenizer = tokenizer
        self.sampler = Sampler(
            trainer.chunks[0],
            trainer.groups,
            trainer.job.kernel,
            vocab_size=args.vocab_size,
            max_positions=args.max_position_embeddings,
        )

    def draw(self, step: int) -> Batch:
        """Answers to the tasks of this step, at least one group of them with different rewards."""
        begin = time.perf_counter()
        num_groups = self.options.groups
        tasks = [make_task(step * num_groups + i) for i in range(num_groups)]
        for attempt in range(MAX_DRAWS):
            responses = self.sampler.sample([self._prompt(task) for task in tasks], self._settings(attempt))
            rewards = tuple(map(self._rewards, tasks, responses))
            batch = Batch(_trajectories(responses, rewards), rewards, time.perf_counter() - begin)
            if batch.num_mixed:
                return batch
        raise DemoError(f"{MAX_DRAWS} draws of answers gave no group with different rewards; try another --seed.")

    def _prompt(self, task: Task) -> Prompt:
        ids = self.tokenizer(task.chatml(), add_special_tokens=False)["input_ids"]
        return Prompt(task.id, np.asarray(ids, np.int64))

    def _settings(self, attempt: int) -> SamplingConfig:
        return SamplingConfig(
            self.options.answer_tokens,
            num_samples=self.options.group_size,
            temperature=TEMPERATURE,
            stop_tokens=frozenset([self.tokenizer.convert_tokens_to_ids(END_OF_TURN)]),
            seed=self.options.seed + attempt,
        )

    def _rewards(self, task: Task, responses: Sequence[Response]) -> tuple[float, ...]:
        return tuple(task.reward(task.opening + self.tokenizer.decode(r.tokens)) for r in responses)


def _trajectories(
    responses: Sequence[Sequence[Response]], rewards: Sequence[Sequence[float]]
) -> tuple[Trajectory, ...]:
    made = []
    for group, earned in zip(responses, rewards, strict=True):
        for response, reward, advantage in zip(group, earned, grpo_advantages(earned), strict=True):
            made.append(response.trajectory(advantage=advantage, reward=reward, temperature=TEMPERATURE))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Seconds:
    """CPU time is what the speedup is taken from: other programs on the machine disturb it least."""

    cpu: float
    wall: float


class Comparison:
    """One gradient, dense and with reuse, from the same weights."""

    def __init__(self, trainer: Trainer, batch: Batch) -> None:
        self.trainer = trainer
        self.trajectories = batch.trajectories
        self.plans = {name: self._plan(name, batch.trajectories) for name in ("off", "on")}
        self.seconds: dict[str, list[Seconds]] = {"off": [], "on": []}
        self.gradient_error, self.worst_parameter, self.sampler_error = math.nan, "", math.nan
        self.facts: dict[str, Any] = {}

    def run(self, max_pairs: int, time_limit_s: float) -> None:
        """At most `max_pairs` pairs, no more of them than fit into the time, but at least one."""
        self._step(self._plan("off", self.trajectories[:1]), self.trajectories[:1])
        begin = time.perf_counter()
        for pair in range(max_pairs):
            if pair and (time.perf_counter() - begin) * (pair + 1) / pair > time_limit_s:
                break
            gradients = {}
            for name, plan in self.plans.items():
                objective, seconds = self._step(plan, self.trajectories)
                self.seconds[name].append(seconds)
                if pair == 0:
                    gradients[name] = self._gradients()
            if pair == 0:
                self._note(objective)
                self._compare(gradients)

    def _plan(self, reuse: str, trajectories: Sequence[Trajectory]) -> Plan:
        job = self.trainer.job
        return plan_step(trajectories, plan_config(job.args.replace(prefix_reuse=reuse), job.layout), self.trainer.loss)

    def _step(self, plan: Plan, trajectories: Sequence[Trajectory]) -> tuple[Objective, Seconds]:
        trainer = self.trainer
        cpu, wall = time.process_time(), time.perf_counter()
        for chunk in trainer.ddp:
            chunk.zero_grad_buffer()
        objective = trainer.runner.forward_backward(plan, trajectories, trainer.loss)
        reduce_gradients(trainer.ddp)
        return objective, Seconds(time.process_time() - cpu, time.perf_counter() - wall)

    def _gradients(self) -> dict[str, torch.Tensor]:
        args = self.trainer.job.args
        return full_gradients(self.trainer.ddp, self.trainer.groups, gated=args.swiglu, vocab_size=args.vocab_size)

    def _note(self, objective: Objective) -> None:
        """What the runner counted and scored in the step that has just ended, the first one with reuse."""
        runner = self.trainer.runner
        self.facts = {
            "computed_tokens": runner.num_computed_tokens,
            "cache_reads": runner.caches[0].num_reads,
            "peak_kv_bytes": runner.caches[0].peak_kv_bytes,
            "peak_kv_gradient_bytes": runner.caches[0].peak_gradient_bytes,
        }
        differences = []
        for index, scored in objective.trajectory_logprobs().items():
            trajectory = self.trajectories[index]
            assert trajectory.rollout_logprobs is not None
            differences.append(np.abs(scored - trajectory.rollout_logprobs[trajectory.loss_mask]).max())
        self.sampler_error = float(max(differences))

    def _compare(self, gradients: dict[str, dict[str, torch.Tensor]]) -> None:
        errors = relative_errors(gradients["on"], gradients["off"])
        self.worst_parameter = max(errors, key=lambda name: errors[name])
        self.gradient_error = errors[self.worst_parameter]

    def result(self) -> dict[str, Any]:
        """All figures of the comparison, for `--json` and the table."""
        dense, reuse = self.plans["off"], self.plans["on"]
        pairs = list(zip(self.seconds["off"], self.seconds["on"], strict=True))
        speedup = statistics.median(d.cpu / r.cpu for d, r in pairs)
        return {
            "max_rel_grad_err": self.gradient_error,
            "worst_parameter": self.worst_parameter,
            "sampler_logprob_err": self.sampler_error,
            "logical_tokens": reuse.forest.logical_tokens,
            **self.facts,
            "planned_tokens": reuse.forest.computed_tokens,
            "shared_segments": reuse.forest.num_shared_segments,
            "microbatches_dense": dense.num_microbatches,
            "microbatches_reuse": reuse.num_microbatches,
            "pairs": len(pairs),
            "dense_s": statistics.median(s.cpu for s in self.seconds["off"]),
            "reuse_s": statistics.median(s.cpu for s in self.seconds["on"]),
            "dense_wall_s": statistics.median(s.wall for s in self.seconds["off"]),
            "reuse_wall_s": statistics.median(s.wall for s in self.seconds["on"]),
            "speedup": speedup,
            "speedup_wall": statistics.median(d.wall / r.wall for d, r in pairs),
            "bound": reuse.bound,
            "fraction_of_bound": speedup / reuse.bound,
        }


def failures(result: dict[str, Any]) -> list[str]:
    """Why the demo must not end well."""
    reasons = []
    if not result["max_rel_grad_err"] <= GRADIENT_LIMIT:
        reasons.append(
            f"the gradient of {result['worst_parameter']} differs by {result['max_rel_grad_err']:.3g} between the two "
            f"runs, limit {GRADIENT_LIMIT:g}"
        )
    if not result["shared_segments"] or not result["cache_reads"]:
        reasons.append("no prefix was shared through the K/V cache")
    if result["computed_tokens"] != result["planned_tokens"]:
        reasons.append(f"{result['computed_tokens']} tokens were computed, the plan says {result['planned_tokens']}")
    return reasons


def result_table(result: dict[str, Any]) -> Table:
    table = Table(title="One GRPO step of SmolLM2-135M on Megatron-Core: dense against prefix reuse", show_header=False)
    mib = 2**20
    ratio = result["logical_tokens"] / result["computed_tokens"]
    plural = "" if result["pairs"] == 1 else f", median of {result['pairs']} pairs"
    rows = (
        (
            "largest gradient difference",
            f"{result['max_rel_grad_err']:.2e} of {result['worst_parameter']} (limit {GRADIENT_LIMIT:g})",
        ),
        ("sampler against trainer", f"log-probabilities differ by at most {result['sampler_logprob_err']:.2e}"),
        ("tokens computed", f"{result['computed_tokens']} of {result['logical_tokens']} logical ({ratio:.2f}x fewer)"),
        ("microbatches", f"{result['microbatches_reuse']} with reuse, {result['microbatches_dense']} dense"),
        (
            "K/V cache",
            f"{result['cache_reads']} reads, peak {result['peak_kv_bytes'] / mib:.1f} MiB K/V and "
            f"{result['peak_kv_gradient_bytes'] / mib:.1f} MiB gK/gV",
        ),
        ("time dense", f"{result['dense_s']:.1f} s CPU, {result['dense_wall_s']:.1f} s on the clock"),
        ("time with reuse", f"{result['reuse_s']:.1f} s CPU, {result['reuse_wall_s']:.1f} s on the clock"),
        ("speedup", f"{result['speedup']:.2f}x (CPU time{plural})"),
        ("bound", f"{result['bound']:.2f}x (FLOPs of both sides)"),
        ("fraction of bound", f"{result['fraction_of_bound']:.2f}"),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table


def make_trainer(options: argparse.Namespace, model_dir: Path) -> Trainer:
    """Trainer of `pretrain_rl.py` for the model in `model_dir`, without trajectories yet."""
    args: Arguments = parse_arguments(
        f"--model {model_dir} --dtype float32 --lr {options.lr} --lr-decay-style constant --clip-grad 1.0 "
        f"--train-iters {options.steps} --global-batch-size {options.groups * options.group_size} "
        f"--max-tokens-per-microbatch {options.max_tokens} --prefix-reuse on --seed {options.seed}".split()
    )
    layout = parallel_layout(args)
    return Trainer(Job(args, layout, select_kernel(args.attention_kernel, torch_device()), (), ()))


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The demo; returns the figures of the comparison."""
    from transformers import AutoTokenizer

    begin = time.perf_counter()
    model_dir = make_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    trainer = make_trainer(options, model_dir)
    rollouts = Rollouts(trainer, tokenizer, options)
    console.print(
        f"SmolLM2-135M-Instruct on Megatron-Core, {torch.get_num_threads()} threads, float32, "
        f"{trainer.job.kernel.describe()}; loaded in {time.perf_counter() - begin:.0f} s."
    )
    result: dict[str, Any] = {}
    means = []
    for step in range(options.steps):
        with console.status(f"step {step + 1}: sampling"):
            batch = rollouts.draw(step)
        _tell_batch(console, step, batch)
        if step == 0:
            with console.status("step 1: dense and with reuse, in turn"):
                comparison = Comparison(trainer, batch)
                comparison.run(options.pairs, options.time_limit)
            result = comparison.result()
        with console.status(f"step {step + 1}: forward and backward with reuse"):
            trainer.source = FileBatches([batch.trajectories])
            metrics = trainer.step()
        for warning in trainer.warnings:
            console.print(warning)
        console.print(metrics.summary(options.steps))
        means.append(metrics.reward_mean)
    return {**result, "reward_means": means, "wall_s": time.perf_counter() - begin}


def _tell_batch(console: Console, step: int, batch: Batch) -> None:
    longest = max(len(t) for t in batch.trajectories)
    num_answer = sum(t.num_trained for t in batch.trajectories)
    console.print(
        f"step {step + 1}: {len(batch.trajectories)} answers in {len(batch.rewards)} groups, {num_answer} answer tokens, "
        f"up to {longest} with the prompt, sampled in {batch.seconds:.0f} s; {batch.num_mixed} groups with mixed rewards"
    )
    for group, rewards in enumerate(batch.rewards):
        console.print(f"    group {group}: rewards {' '.join(f'{r:.2f}' for r in rewards)}")


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR, help="Hugging Face folder, made if it is not there")
    parser.add_argument("--steps", type=int, default=3, help="GRPO steps")
    parser.add_argument("--groups", type=int, default=2, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--answer-tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens a microbatch, on both sides")
    parser.add_argument("--pairs", type=int, default=3, help="alternating pairs of the comparison, at most")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds for the pairs; one is always run")
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--quick", action="store_true", help="one step of one group of four short answers, one pair")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    options = parser.parse_args(argv)
    if options.quick:
        options.steps = options.groups = options.pairs = 1
        # The answers do not fit beside their prompt, so that they read it from the cache.
        options.group_size, options.answer_tokens, options.max_tokens = 4, 24, 460
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    console = Console(highlight=False, soft_wrap=True)
    if Path("/sys/class/net/lo").exists():
        # A world of one talks to nobody, and the name of this machine need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        result = run(options, console)
    except (DemoError, ValueError) as error:
        console.print(f"demo: {error}", markup=False)
        return 2
    finally:
        dist.destroy_process_group()
    console.print(result_table(result))
    console.print(f"{options.steps} steps and the comparison took {result['wall_s']:.0f} s.")
    reasons = failures(result)
    for reason in reasons:
        console.print(f"[red]FAILED[/red]: {reason}.")
    if options.json:
        print(json.dumps({**result, "ok": not reasons, "reasons": reasons}))
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())

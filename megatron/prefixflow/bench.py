"""`prefixflow bench`: dense against reuse, alternating in one run, next to the FLOPs bound.

Both sides run the same model, kernels, token budget, recomputation and LM-head rows through the same code; the dense side
packs several whole trajectories a microbatch and shares nothing. The other side shares all there is, or what
`--prefix-reuse` says: `auto` shows that sharing is never slower, `off` how far two equal sides lie apart. One measurement is forward-backward and gradient
reduction of the whole batch. With one process CPU time is taken, which another program on the machine disturbs least; with
several, wall time. Each pair gives one ratio and the median is reported. Memory comes from a run of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron.prefixflow.arguments import (
    Arguments,
    ArgumentsError,
    ddp_config,
    gpt_model_kwargs,
    loss_config,
    memory_settings,
    parallel_layout,
    parse_arguments,
    plan_config,
    shape_of,
    transformer_config,
)
from megatron.prefixflow.bench_makespan import compare_makespans
from megatron.prefixflow.calibration import (
    OperationTimer,
    check_calibration,
    describe,
    fit_calibration,
    is_measuring,
)
from megatron.prefixflow.gradients import reduce_gradients
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.model import build_model, wrap_data_parallel
from megatron.prefixflow.overlap import EarlyReduction
from megatron.prefixflow.planning import MemorySettings
from megatron.prefixflow.session import start_session
from megatron.prefixflow.step import StepRunner
from prefixflow.plan.calibrate import Calibration, Measurement
from prefixflow.plan.plan import Plan, PrefixReuse, build_plan
from prefixflow.runtime.attention.kernels import select_kernel
from prefixflow.runtime.memory import LiveBytes
from prefixflow.runtime.world import World
from prefixflow.schedule.ops import Op
from prefixflow.schedule.search import max_bottleneck
from prefixflow.trajectories.reader import read_trajectories
from prefixflow.trajectories.types import Trajectory

DEFAULT_REPEAT = 5
DENSE_LIMIT = 1.05
CALIBRATION_BUDGET_DIVISORS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload of a sweep: `group_size` trajectories of `num_tokens`, the first `prefix_ratio` of them shared."""

    prefix_ratio: float
    group_size: int
    num_tokens: int
    num_groups: int

    def trajectories(self, vocab_size: int, seed: int) -> tuple[Trajectory, ...]:
        rng = np.random.default_rng(seed)
        num_prefix = round(self.prefix_ratio * self.num_tokens)
        mask = np.arange(self.num_tokens) >= num_prefix
        made = []
        for group in range(self.num_groups):
            prefix = rng.integers(vocab_size, size=num_prefix)
            for member in range(self.group_size):
                suffix = rng.integers(vocab_size, size=self.num_tokens - num_prefix)
                # The first suffix tokens differ, so that exactly the prefix is shared.
                suffix[0] = (prefix[-1] + 1 + member) % vocab_size
                made.append(
                    Trajectory(
                        id=f"{group}/{member}",
                        group=str(group),
                        tokens=np.concatenate([prefix, suffix]),
                        loss_mask=mask,
                        advantages=float(rng.normal()),
                    )
                )
        return tuple(made)


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank measures; `cells` empty: the trajectory file."""

    argv: tuple[str, ...]
    file: str | None
    cells: tuple[Cell, ...]
    repeat: int
    num_threads: int

    @property
    def arguments(self) -> Arguments:
        return parse_arguments(self.argv, training=False)


class Bench:
    """Model and measurements of one rank."""

    def __init__(self, job: Job) -> None:
        self.args = job.arguments
        self.layout = parallel_layout(self.args)
        torch.set_num_threads(job.num_threads)
        self.groups: Groups = start_session(self.layout, self.args.seed)
        chunks = build_model(transformer_config(self.args), self.groups, **gpt_model_kwargs(self.args))
        self.ddp = wrap_data_parallel(chunks, ddp_config(self.args))
        for chunk in self.ddp:
            chunk.broadcast_params()
        self.device = next(chunks[0].parameters()).device
        self.runner = StepRunner(
            chunks,
            self.groups,
            select_kernel(self.args.attention_kernel, self.device),
            vocab_size=self.args.vocab_size,
            max_response_tokens=self.args.max_response_length,
            memory=memory_settings(self.args, self.layout),
        )
        self.runner.reduction = EarlyReduction.of(self.ddp, self.groups)
        self.loss = loss_config(self.args)
        self.measurements: list[Measurement] = []
        self._memory_of: dict[str, MemorySettings | None] = {}

    def plan(self, trajectories: Sequence[Trajectory], reuse: str, max_tokens: int | None = None) -> Plan:
        max_tokens = max_tokens or self.args.max_tokens_per_microbatch
        args = self.args.replace(prefix_reuse=reuse, max_tokens_per_microbatch=max_tokens)
        config = plan_config(args, self.layout)
        plan = self.runner.plan(trajectories, config, self.loss)
        self._memory_of[plan.digest] = self.runner.memory
        return plan

    def step(self, plan: Plan, trajectories: Sequence[Trajectory]) -> None:
        self.runner.memory = self._memory_of[plan.digest]
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.runner.forward_backward(plan, trajectories, self.loss)
        reduce_gradients(self.ddp)

    def measure(self, trajectories: Sequence[Trajectory], repeat: int) -> dict[str, Any]:
        """The interface's JSON object for these trajectories (without the cell's own fields)."""
        dense = self.plan(trajectories, "off")
        reuse = self.plan(trajectories, self.args.prefix_reuse)
        sides = [lambda: self.step(dense, trajectories), lambda: self.step(reuse, trajectories)]
        pairs = alternate(sides, repeat, self.device, wall=dist.get_world_size() > 1)
        if is_measuring(self.args):
            self._calibrate(trajectories)
        speedup = statistics.median(d / r for d, r in pairs)
        shape = shape_of(self.args)
        return {
            "dense_s": statistics.median(d for d, _ in pairs),
            "reuse_s": statistics.median(r for _, r in pairs),
            "speedup": speedup,
            "bound": reuse.bound,
            "fraction_of_bound": speedup / reuse.bound,
            **_bottleneck(dense, reuse, trajectories, speedup),
            **compare_makespans(self.runner, reuse, sides[1], repeat),
            **self._memory(dense, reuse, trajectories),
            "n_body": shape.num_body_parameters,
            "n_head": shape.num_head_parameters,
            "logical_tokens": reuse.forest.logical_tokens,
            "computed_tokens": reuse.forest.computed_tokens,
            "microbatches_dense": dense.num_microbatches,
            "microbatches_reuse": reuse.num_microbatches,
            "spread": [min(d / r for d, r in pairs), max(d / r for d, r in pairs)],
        }

    def _calibrate(self, trajectories: Sequence[Trajectory]) -> None:
        """Measure the operations of steps with and without reuse, under several budgets: mixed sizes tell rates apart."""
        longest = max(map(len, trajectories))
        for divisor in CALIBRATION_BUDGET_DIVISORS:
            budget = self.args.max_tokens_per_microbatch // divisor
            for reuse in (PrefixReuse.OFF, PrefixReuse.ON) if budget >= longest else (PrefixReuse.ON,):
                plan = self.plan(trajectories, reuse.value, budget)
                timer = OperationTimer(plan, self.groups.data_rank, trajectories)
                self.runner.observe = timer
                try:
                    self.step(plan, trajectories)
                finally:
                    self.runner.observe = None
                self.measurements += timer.measurements

    def _memory(self, dense: Plan, reuse: Plan, trajectories: Sequence[Trajectory]) -> dict[str, int]:
        """Peak bytes above weights, gradients and optimizer, largest over ranks; host memory apart.

        peak_phase_b_bytes and the K/V are those of the reuse side.
        """
        peak_dense, _ = self._peaks(dense, trajectories)
        peak_reuse, peak_phase_b = self._peaks(reuse, trajectories)
        peaks = torch.tensor(
            [peak_dense, peak_reuse, peak_phase_b, self.runner.cache_totals.peak_bytes, self.runner.arena.peak_bytes],
            dtype=torch.int64,
        )
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        names = ("peak_dense_bytes", "peak_reuse_bytes", "peak_phase_b_bytes", "peak_kv_bytes", "host_bytes")
        return dict(zip(names, peaks.tolist(), strict=True))

    def _peaks(self, plan: Plan, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
        """(peak of the step, peak while microbatches that nothing else reads run)."""
        phase_b = 0
        microbatches = plan.ranks[self.groups.data_rank]
        with LiveBytes() as live:

            @contextlib.contextmanager
            def watch(op: Op) -> Iterator[None]:
                nonlocal phase_b
                whole_step, live.peak = live.peak, live.now
                yield
                if not microbatches[op.microbatch].writes:
                    phase_b = max(phase_b, live.peak)
                live.peak = max(live.peak, whole_step)

            self.runner.observe = watch
            try:
                self.step(plan, trajectories)
            finally:
                self.runner.observe = None
            return live.peak, phase_b


def _bottleneck(
    dense: Plan, reuse: Plan, trajectories: Sequence[Trajectory], speedup: float
) -> dict[str, float | None]:
    """With a pipeline: the bound from the busiest stage's FLOPs, which has the LM head; null without one."""
    if reuse.config.pipeline_size == 1:
        return {"bottleneck_bound": None, "fraction_of_bottleneck_bound": None}
    bound = max_bottleneck(dense, trajectories) / max_bottleneck(reuse, trajectories)
    return {"bottleneck_bound": bound, "fraction_of_bottleneck_bound": speedup / bound}


def alternate(
    sides: Sequence[Callable[[], None]], repeat: int, device: torch.device, *, wall: bool
) -> list[tuple[float, ...]]:
    """Seconds of each side in `repeat` alternating rounds after one that is not counted."""
    clock = time.perf_counter if wall or device.type == "cuda" else time.process_time
    rounds = []
    for count in range(repeat + 1):
        seconds = []
        for side in sides:
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = clock()
            side()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - start)
        if count:
            rounds.append(tuple(seconds))
    return rounds


def run_cell(job: Job, index: int) -> dict[str, Any]:
    """Measure cell `index` (or the file) on this rank; every rank returns the same object."""
    bench = _bench(job)
    head: dict[str, Any]
    if job.cells:
        cell = job.cells[index]
        trajectories = cell.trajectories(bench.args.vocab_size, bench.args.seed)
        head = {"prefix_ratio": cell.prefix_ratio, "group_size": cell.group_size}
    else:
        trajectories = _read(job, bench.args)
        head = {"prefix_ratio": None, "group_size": None}
    return {**head, **bench.measure(trajectories, job.repeat)}


def run_fit(job: Job) -> Calibration:
    """The calibration of what `run_cell` has measured before."""
    bench = _bench(job)
    return fit_calibration(bench.measurements, bench.args, bench.layout)


_current: tuple[Job, Bench] | None = None


def _bench(job: Job) -> Bench:
    """The model of this process, kept from cell to cell."""
    global _current
    if _current is None or _current[0] != job:
        _current = (job, Bench(job))
    return _current[1]


def _read(job: Job, args: Arguments) -> tuple[Trajectory, ...]:
    assert job.file is not None
    return read_trajectories(job.file, vocab_size=args.vocab_size, max_positions=args.max_position_embeddings)


def run_check_dense(job: Job) -> dict[str, Any]:
    """The dense side against an unmodified Megatron GPTModel with scaled-dot-product attention, same packed tokens."""
    from megatron.prefixflow.bench_dense import UnmodifiedModel

    bench = _bench(job)
    cell = job.cells[0]
    trajectories = cell.trajectories(bench.args.vocab_size, bench.args.seed)
    dense = bench.plan(trajectories, "off")
    unmodified = UnmodifiedModel(bench.args, bench.groups)
    microbatches = unmodified.microbatches(dense, trajectories)
    sides = [lambda: bench.step(dense, trajectories), lambda: unmodified.step(microbatches)]
    pairs = alternate(sides, job.repeat, bench.device, wall=dist.get_world_size() > 1)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return {
        "check": "dense",
        "dense_s": statistics.median(ours for ours, _ in pairs),
        "megatron_s": statistics.median(theirs for _, theirs in pairs),
        "ratio": ratio,
        "limit": DENSE_LIMIT,
        "ok": ratio <= DENSE_LIMIT,
        "spread": [min(o / t for o, t in pairs), max(o / t for o, t in pairs)],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefixflow bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", help="trajectory file, or `sweep` for generated groups")
    parser.add_argument("--prefix-ratio", default="0.833", help="shares of the prefix, comma separated")
    parser.add_argument("--sweep-group-size", "--group-size", default="8", help="trajectories a group")
    parser.add_argument("--tokens", type=int, default=1024, help="prefix + suffix of one trajectory")
    parser.add_argument("--groups", type=int, help="groups in a step (default: one a data-parallel rank)")
    parser.add_argument("--repeat", type=int, default=DEFAULT_REPEAT, help="alternating pairs")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads a process (default 1: CPU time counts spinning)"
    )
    parser.add_argument("--check-dense", action="store_true", help="dense against an unmodified model")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds a cell may take")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--plot", help="PNG of speedup against bound")
    return parser


def _job(options: argparse.Namespace, rest: Sequence[str]) -> Job:
    # Later arguments win, so what is given replaces these.
    argv = ("--model", "small", "--prefix-reuse", PrefixReuse.ON.value, *rest)
    args = parse_arguments(argv, training=False)
    _check_options(options)
    layout = parallel_layout(args)
    check_calibration(args, layout)
    cells: tuple[Cell, ...] = ()
    if options.file == "sweep" or options.check_dense:
        cells = tuple(
            Cell(ratio, size, options.tokens, options.groups or layout.dp)
            for ratio in _numbers(options.prefix_ratio, float, "--prefix-ratio")
            for size in _numbers(options.sweep_group_size, int, "--group-size")
        )
        for cell in cells:
            _check_cell(cell, args.max_position_embeddings)
    file = None if options.file == "sweep" else options.file
    job = Job(argv, file, cells, options.repeat, options.threads)
    for trajectories in [c.trajectories(args.vocab_size, args.seed) for c in cells] or [_read(job, args)]:
        # Refuse what cannot be planned before a world starts.
        for reuse in PrefixReuse:
            build_plan(trajectories, plan_config(args.replace(prefix_reuse=reuse.value)))
    return job


def _check_options(options: argparse.Namespace) -> None:
    for name in ("repeat", "threads", "tokens", "groups"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}, expected at least 1.")
    if options.plot and not Path(options.plot).absolute().parent.is_dir():
        raise ValueError(f"--plot {options.plot}: its folder does not exist.")


def _check_cell(cell: Cell, max_positions: int) -> None:
    if cell.num_tokens - 1 > max_positions:
        raise ValueError(f"--tokens {cell.num_tokens} needs more than the model's {max_positions} positions.")
    if not 0 < cell.prefix_ratio < 1:
        raise ValueError(f"--prefix-ratio {cell.prefix_ratio}: expected a number between 0 and 1.")
    num_prefix = round(cell.prefix_ratio * cell.num_tokens)
    if not 0 < num_prefix < cell.num_tokens or cell.group_size < 1:
        raise ValueError(
            f"--prefix-ratio {cell.prefix_ratio} of --tokens {cell.num_tokens} leaves no prefix or no suffix, or "
            f"--group-size {cell.group_size} is below 1."
        )


def _numbers(text: str, kind: Callable[[str], Any], flag: str) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag}: expected numbers separated by commas, got {text!r}.") from None


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = _parser().parse_known_args(argv)
    try:
        job = _job(options, rest)
    except (ArgumentsError, ValueError, OSError) as error:
        print(f"prefixflow bench: {error}", file=sys.stderr)
        return 2
    size = parallel_layout(job.arguments).world_size
    console = Console(stderr=True)
    results = []
    with World(size, num_threads=job.num_threads) as world:
        if options.check_dense:
            result = world.run(run_check_dense, job, timeout_s=options.timeout)[0]
            print(json.dumps(result))
            return 0 if result["ok"] else 1
        for index in range(max(len(job.cells), 1)):
            result = world.run(run_cell, job, index, timeout_s=options.timeout)[0]
            results.append(result)
            if options.json:
                print(json.dumps(result), flush=True)
            else:
                console.print(f"{_label(result)}: {result['speedup']:.2f}x of {result['bound']:.2f}")
        if is_measuring(job.arguments):
            calibration = world.run(run_fit, job, timeout_s=options.timeout)[0]
            calibration.save(job.arguments.calibrate)
            console.print(describe(calibration))
    if not options.json:
        Console().print(_table(results))
    if options.plot:
        _plot(results, Path(options.plot))
    return 0


def _label(result: dict[str, Any]) -> str:
    if result["prefix_ratio"] is None:
        return "file"
    return f"prefix ratio {result['prefix_ratio']}, group size {result['group_size']}"


def _table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="dense against reuse")
    for name in ("workload", "dense s", "reuse s", "speedup", "bound", "fraction", "peak dense", "peak reuse", "K/V"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            _label(r),
            f"{r['dense_s']:.3f}",
            f"{r['reuse_s']:.3f}",
            f"{r['speedup']:.2f}",
            f"{r['bound']:.2f}",
            f"{r['fraction_of_bound']:.2f}",
            *(f"{r[k] / 2**20:.1f} MiB" for k in ("peak_dense_bytes", "peak_reuse_bytes", "peak_kv_bytes")),
        )
    return table


def _plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for size in sorted({r["group_size"] for r in results}, key=str):
        mine = [r for r in results if r["group_size"] == size]
        (line,) = axes.plot([r["prefix_ratio"] for r in mine], [r["speedup"] for r in mine], "o-", label=f"G = {size}")
        axes.plot([r["prefix_ratio"] for r in mine], [r["bound"] for r in mine], "--", color=line.get_color())
    axes.set_xlabel("share of the prefix, P / (P + S)")
    axes.set_ylabel("speedup over dense (dashed: FLOPs bound)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    sys.exit(main())

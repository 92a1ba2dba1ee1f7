"""`prefixflow plan`: what sharing there is in a file and what it is worth, without a GPU or a process group."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prefixflow.forest import RouteMismatch
from prefixflow.html import PageText, PlannedStep, write_page
from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.calibrate import Calibration, MeasuredOn, layout_key, shape_digest
from prefixflow.plan.context import ContextKV
from prefixflow.plan.cost import CostModel, MeasuredCosts
from prefixflow.plan.layout import ParallelLayout, layers_per_stage
from prefixflow.plan.plan import DEFAULT_MAX_TOKENS, MERGED_PREFIX_TOKENS, MergeGroups, Plan, PlanConfig, PrefixReuse
from prefixflow.plan.shapes import BUILTIN_SHAPES, TRAINABLE_SHAPES, ModelShape
from prefixflow.schedule.capacity import LARGEST_GROUP, GroupShape, find_capacity
from prefixflow.schedule.context import ContextKVChoice, fit_with_context, unfitted_choice
from prefixflow.schedule.fit import AUTO, GIB, MemoryChoice
from prefixflow.schedule.memory import Holder, MemoryModel, Phase, Recompute
from prefixflow.schedule.order import backward_order, forwards_needed, lead
from prefixflow.schedule.peak import MemoryPoint
from prefixflow.schedule.replay import kv_bytes_kept_to_end, replay_cache
from prefixflow.schedule.residency import ActivationPolicy
from prefixflow.schedule.search import max_makespan, plan_pipeline, predicted_timeline, rank_table, stage_costs
from prefixflow.schedule.traffic import received_bytes
from prefixflow.trajectories import Trajectory, read_trajectories, routes_path, trajectory_files

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The figures of one plan, under the names of the JSON output.

    peak_bytes: by phase, state included, largest over ranks. state_bytes: by holder, of the pipeline rank with most.
    peak_by_stage: for each pipeline rank its largest moment of each phase by holder, state left out, largest over
    data-parallel ranks; `host` in host memory. memory: how the step is run within memory.
    peak_kv_bytes, peak_cache_bytes: most cached K/V, and K/V and gK/gV together, on a rank's device; kv_bytes_kept_to_end: the
    most K/V of a rank if none were freed or moved before the step ends.
    """

    logical_tokens: int
    computed_tokens: int
    reuse_ratio: float
    depth: int
    shared_segments: int
    trajectories: int
    groups: int
    microbatches: int
    largest_microbatch_tokens: int
    dummy_microbatches: int
    route_mismatch: float | None
    microbatch_cost_spread: float
    lead: int
    predicted_speedup: float
    bound: float
    pipeline_efficiency: float
    rank_loads: tuple[float, ...]
    split_loss_tokens: int
    peak_bytes: dict[str, int]
    state_bytes: dict[str, int]
    peak_by_stage: tuple[dict[str, dict[str, int]], ...]
    peak_kv_bytes: int
    peak_cache_bytes: int
    kv_bytes_kept_to_end: int
    memory: str
    digest: str
    context_bytes: int
    context_kv: ContextReport | None

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "context_kv": None if self.context_kv is None else asdict(self.context_kv)
        }


@dataclass(frozen=True, slots=True)
class ContextReport:
    """Where K/V are under context parallelism and why, with the memory of a rank by phase and the bytes that all ranks receive
    for each choice."""

    choice: str
    reason: str
    peak_bytes: dict[str, dict[str, int]]
    context_bytes: dict[str, int]


def report_plan(step: PlannedStep, *, context_kv: ContextKVChoice | None = None) -> PlanReport:
    """Figures of a plan; leads, makespans and peaks are the largest over data-parallel ranks.

    context_kv: why `memory` has K/V where it has them; None without context parallelism.
    """
    plan, trajectories, memory = step.plan, step.trajectories, step.memory
    tables = [rank_table(plan, rank) for rank in range(len(plan.ranks))]
    leads = [lead(forwards_needed(backward_order(table.reads, table.after), table.after)) for table in tables]
    by_stage = _largest_moments(step)
    states = [memory.state(rank) for rank in range(memory.pipeline_parallel)]
    rows = segment_row_counts(plan.forest, trajectories)
    timelines = [predicted_timeline(plan, rank, rows) for rank in range(len(tables))]
    slowest = max(timelines, key=lambda timeline: timeline.makespan)
    forest = plan.forest
    return PlanReport(
        logical_tokens=forest.logical_tokens,
        computed_tokens=forest.computed_tokens,
        reuse_ratio=forest.reuse_ratio,
        depth=forest.depth,
        shared_segments=forest.num_shared_segments,
        trajectories=len(trajectories),
        groups=len({t.group for t in trajectories}),
        microbatches=plan.num_microbatches,
        largest_microbatch_tokens=max((m.num_physical_tokens for rank in plan.ranks for m in rank), default=0),
        dummy_microbatches=plan.num_dummy_microbatches,
        route_mismatch=None if plan.route_report is None else plan.route_report.rate,
        microbatch_cost_spread=max(_cost_spread(plan, rank, rows) for rank in range(len(tables))),
        lead=max(leads),
        predicted_speedup=_dense_makespan(plan, trajectories) / slowest.makespan if slowest.makespan else 1.0,
        bound=plan.bound,
        pipeline_efficiency=slowest.efficiency,
        rank_loads=plan.rank_loads,
        split_loss_tokens=plan.split_loss_tokens,
        peak_bytes=_peak_bytes(step, by_stage),
        state_bytes={h.value: n for h, n in max(states, key=lambda state: sum(state.values())).items()},
        peak_by_stage=tuple(
            {
                phase.value: {**{h.value: n for h, n in point.by_holder.items()}, "host": point.host}
                for phase, point in moments.items()
            }
            for moments in by_stage
        ),
        **_cache_peaks(step),
        memory=f"at most {plan.config.max_tokens_per_microbatch} tokens a microbatch, {step.choice.describe()}",
        digest=plan.digest,
        context_bytes=received_bytes(plan, memory, step.choice, rows),
        context_kv=None if context_kv is None else _context_report(step, context_kv, rows),
    )


def _context_report(step: PlannedStep, chosen: ContextKVChoice, rows: Sequence[int]) -> ContextReport:
    steps = {kv.value: other for kv, other in _with_each_context_kv(step).items()}
    return ContextReport(
        choice=chosen.kv.value,
        reason=chosen.reason,
        peak_bytes={kv: _peak_bytes(other) for kv, other in steps.items()},
        context_bytes={kv: received_bytes(other.plan, other.memory, other.choice, rows) for kv, other in steps.items()},
    )


def _with_each_context_kv(step: PlannedStep) -> dict[ContextKV, PlannedStep]:
    """The step as it is run, and with K/V in the other place and everything kept on the device."""
    kept = {kv: replace(step, memory=replace(step.memory, context_kv=kv), choice=MemoryChoice()) for kv in ContextKV}
    return kept | {step.memory.context_kv: step}


def _peak_bytes(step: PlannedStep, by_stage: Sequence[Mapping[Phase, MemoryPoint]] | None = None) -> dict[str, int]:
    """Largest bytes alive in each phase on any rank; by_stage: `_largest_moments`."""
    moments = _largest_moments(step) if by_stage is None else by_stage
    states = [sum(step.memory.state(rank).values()) for rank in range(step.memory.pipeline_parallel)]
    return {
        phase.value: max(
            state + (points[phase].total_bytes if phase in points else 0)
            for state, points in zip(states, moments, strict=True)
        )
        for phase in Phase
    }


def _largest_moments(step: PlannedStep) -> list[dict[Phase, MemoryPoint]]:
    """Of each pipeline rank in each phase, over data-parallel ranks."""
    moments: list[dict[Phase, MemoryPoint]] = [{} for _ in range(step.memory.pipeline_parallel)]
    for data_rank in range(len(step.plan.ranks)):
        for largest, curve in zip(moments, step.curves(data_rank), strict=True):
            for point in curve:
                if point.phase not in largest or point.total_bytes > largest[point.phase].total_bytes:
                    largest[point.phase] = point
    return moments


def _cache_peaks(step: PlannedStep) -> dict[str, int]:
    plan, memory = step.plan, step.memory
    peaks = {"peak_kv_bytes": 0, "peak_cache_bytes": 0, "kv_bytes_kept_to_end": 0}
    for data_rank in range(len(plan.ranks)):
        for pipeline_rank, row in enumerate(rank_table(plan, data_rank).rows):
            moves = step.choice.memory_plan(plan, data_rank, pipeline_rank, memory, None, training=True)
            cache = replay_cache(plan, data_rank, row, memory, moves)
            kept = kv_bytes_kept_to_end(plan, data_rank, row, memory)
            for name, num_bytes in zip(peaks, (cache.peak_kv_bytes, cache.peak_bytes, kept), strict=True):
                peaks[name] = max(peaks[name], num_bytes)
    return peaks


def _cost_spread(plan: Plan, data_rank: int, rows: Sequence[int]) -> float:
    """Largest over mean cost of a rank's microbatches, each on the stage that it costs most; dummies left out."""
    all_costs = stage_costs(plan, data_rank, rows, plan.config.deciding).microbatch_costs()
    costs = [cost for cost, m in zip(all_costs, plan.ranks[data_rank], strict=True) if not m.is_dummy]
    return max(costs) * len(costs) / sum(costs) if costs else 1.0


def _dense_makespan(plan: Plan, trajectories: Sequence[Trajectory]) -> float:
    """Predicted time of the same batch without reuse, in a budget that holds its longest trajectory."""
    longest = max((len(t) for t in trajectories), default=1)
    config = replace(
        plan.config,
        prefix_reuse=PrefixReuse.OFF,
        route_mismatch=None,
        max_tokens_per_microbatch=max(plan.config.max_tokens_per_microbatch, longest + plan.config.token_multiple),
    )
    return max_makespan(plan_pipeline(trajectories, config, omit=plan.forest.omitted), trajectories)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="trajectory file, or a folder of them")
    parser.add_argument("--model", default="small", help="built-in shape, config.json or Hugging Face folder")
    for short, long in (
        ("tp", "tensor-model-parallel-size"),
        ("pp", "pipeline-model-parallel-size"),
        ("cp", "context-parallel-size"),
        ("ep", "expert-model-parallel-size"),
        ("etp", "expert-tensor-parallel-size"),
        ("dp", "data-parallel-size"),
    ):
        parser.add_argument(f"--{short}", f"--{long}", dest=short, type=int, default=1, metavar="N")
    parser.add_argument("--vpp", type=int, default=1, metavar="N", help="model chunks per stage")
    for end in ("first", "last"):
        parser.add_argument(
            f"--decoder-{end}-pipeline-num-layers", type=int, metavar="N", help=f"layers of the {end} pipeline rank"
        )
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument(
        "--use-distributed-optimizer", action="store_true", help="optimizer state divided over data-parallel ranks"
    )
    parser.add_argument(
        "--max-tokens",
        "--max-tokens-per-microbatch",
        dest="max_tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"physical tokens of a microbatch (default {DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument("--prefix-reuse", choices=[r.value for r in PrefixReuse], default="on")
    parser.add_argument(
        "--merge-groups",
        choices=[m.value for m in MergeGroups],
        default="off",
        help=f"one tree for groups with a common prefix of at least {MERGED_PREFIX_TOKENS} tokens, where the plan predicts a "
        "gain",
    )
    parser.add_argument(
        "--calibrate",
        metavar="F",
        help="plan by the measured costs in F, which `prefixflow bench --calibrate F` writes",
    )
    parser.add_argument(
        "--route-mismatch",
        choices=[m.value for m in RouteMismatch],
        default="exact",
        help="conflicting routes of a shared prefix, where the file's routes lie beside it",
    )
    parser.add_argument("--dtype", choices=list(ELEMENT_BYTES), default="bfloat16")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument(
        "--context-parallel-kv",
        choices=("auto", *(kv.value for kv in ContextKV)),
        default="auto",
        help="K/V whole on each context-parallel rank, or sharded and passed round; auto shards where memory is short",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="whose kernels memory is predicted for: fused ones, or torch's own on the CPU",
    )
    parser.add_argument("--prefix-memory", choices=("auto", *(p.value for p in ActivationPolicy)), default="auto")
    parser.add_argument("--kv-budget-gib", type=float, metavar="X", help="device memory for K/V and their gradients")
    parser.add_argument(
        "--memory-budget-gib",
        type=float,
        metavar="X",
        help="memory of one device, everything counted, that the step must fit",
    )
    parser.add_argument(
        "--capacity",
        action="store_true",
        help="longest prefix and largest group of the file's typical shape that fit --memory-budget-gib, by policy",
    )
    parser.add_argument("--html", metavar="OUT.html", help="draw forest, schedule, balance and memory on one page")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run_plan(options: argparse.Namespace) -> int:
    """Print the report; 2 with a sentence where the file or the arguments cannot be planned."""
    try:
        _check_budgets(options)
        _check_page_path(options)
        if options.capacity:
            return _print_capacity(options)
        step, choice = _planned_step(options)
        report = report_plan(step, context_kv=choice)
        if options.html:
            write_page(options.html, _page_text(report, options), step)
    except (ValueError, OSError) as error:
        print(f"prefixflow plan: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        Console().print(_table(report, options))
        Console().print(_memory_table(report))
    return 0


def _check_budgets(options: argparse.Namespace) -> None:
    for flag, value in (("--memory-budget-gib", options.memory_budget_gib), ("--kv-budget-gib", options.kv_budget_gib)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag} is {value}, expected a number of GiB above 0; leave it out for no limit.")
    if options.capacity and options.memory_budget_gib is None:
        raise ValueError("--capacity needs --memory-budget-gib: what fits depends on it.")


def _check_page_path(options: argparse.Namespace) -> None:
    """A page must be a writable place, and never a file that is read; told before the work of planning."""
    if options.html is None:
        return
    page = Path(options.html)
    if page.is_dir() or not page.absolute().parent.is_dir():
        raise ValueError(
            f"--html {page}: expected the name of a file in a folder that exists. Create the folder, or name another file."
        )
    if page.resolve() in {file.resolve() for file in trajectory_files(options.file)}:
        raise ValueError(f"--html {page} is a trajectory file that is read; name another file.")


def _check_layout(shape: ModelShape, layout: ParallelLayout) -> None:
    """Layouts that a run would refuse."""
    for what, number, flag, parts in (
        ("attention heads", shape.num_attention_heads, "--tp", layout.tp),
        ("K/V groups", shape.num_query_groups, "--tp", layout.tp),
        ("experts", shape.num_experts, "--ep", layout.ep),
    ):
        if number % parts:
            raise ValueError(
                f"{shape.name} has {number} {what}, which {flag} {parts} does not divide evenly; choose another {flag}."
            )


def _is_for_planning_only(model: str) -> bool:
    return model in BUILTIN_SHAPES and model not in TRAINABLE_SHAPES


@dataclass(frozen=True, slots=True)
class _Setting:
    """What is planned, before it is."""

    trajectories: Sequence[Trajectory]
    config: PlanConfig
    memory: MemoryModel


def _setting(options: argparse.Namespace) -> _Setting:
    shape = ModelShape.load(options.model)
    if not shape.is_moe and options.ep * options.etp > 1:
        raise ValueError(
            f"{shape.name} has no experts for --ep {options.ep} --etp {options.etp}; name another --model."
        )
    layout = ParallelLayout(
        tp=options.tp, pp=options.pp, vpp=options.vpp, cp=options.cp, ep=options.ep, etp=options.etp, dp=options.dp
    )
    _check_layout(shape, layout)
    replays = shape.is_moe and any(routes_path(file).is_file() for file in trajectory_files(options.file))
    trajectories = read_trajectories(
        options.file,
        vocab_size=shape.vocab_size,
        # Shapes that are known by size only stand for every model of that size, however long its context.
        max_positions=None if _is_for_planning_only(options.model) else shape.max_positions,
        routes=replays,
        route_shape=shape.route_shape if replays else None,
    )
    config = PlanConfig(
        max_tokens_per_microbatch=options.max_tokens,
        data_parallel_size=layout.dp,
        token_multiple=layout.token_multiple if options.sequence_parallel or layout.cp > 1 else 1,
        prefix_reuse=PrefixReuse(options.prefix_reuse),
        merge_groups=MergeGroups(options.merge_groups),
        pipeline_size=layout.pp,
        num_chunks=layout.vpp,
        stage_layers=layers_per_stage(
            shape.num_layers,
            pp=layout.pp,
            vpp=layout.vpp,
            first=options.decoder_first_pipeline_num_layers,
            last=options.decoder_last_pipeline_num_layers,
        ),
        expert_block=layout.expert_block,
        route_mismatch=RouteMismatch(options.route_mismatch) if replays else None,
        cost=CostModel.of_shape(shape),
        measured=_measured_costs(options, shape),
    )
    memory = MemoryModel(
        shape,
        element_bytes=ELEMENT_BYTES[options.dtype],
        tensor_parallel=layout.tp,
        pipeline_parallel=layout.pp,
        context_parallel=layout.cp,
        expert_parallel=layout.ep * layout.etp,
        recompute=Recompute(options.recompute),
        sequence_parallel=options.sequence_parallel,
        stage_layers=config.stage_layers,
        optimizer_shards=layout.dp * layout.cp if options.use_distributed_optimizer else 1,
        expert_optimizer_shards=layout.expert_dp if options.use_distributed_optimizer else 1,
        fused=options.device == "cuda",
    )
    return _Setting(trajectories, config, memory)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * GIB)


def _planned_step(options: argparse.Namespace) -> tuple[PlannedStep, ContextKVChoice | None]:
    """The plan, and where it has K/V under context parallelism."""
    setting = _setting(options)
    trajectories, config, memory = setting.trajectories, setting.config, setting.memory
    is_auto = options.prefix_memory == "auto"
    policy = ActivationPolicy.KEEP if is_auto else ActivationPolicy(options.prefix_memory)
    kv_budget, budget = _bytes(options.kv_budget_gib), _bytes(options.memory_budget_gib)
    wanted = None if options.context_parallel_kv == "auto" else ContextKV(options.context_parallel_kv)
    if budget is None:
        plan, choice = plan_pipeline(trajectories, config), MemoryChoice(policy, kv_budget_bytes=kv_budget)
        context = unfitted_choice(wanted)
    else:
        policies = AUTO if is_auto else (policy,)
        fit, context = fit_with_context(
            trajectories, config, memory, budget, wanted, policies=policies, kv_budget_bytes=kv_budget
        )
        plan, choice = fit.plan, fit.choice
    step = PlannedStep(plan, trajectories, replace(memory, context_kv=context.kv), choice)
    return step, context if memory.context_parallel > 1 else None


def _print_capacity(options: argparse.Namespace) -> int:
    setting = _setting(options)
    group = GroupShape.typical(setting.trajectories)
    found = find_capacity(group, setting.config, setting.memory, round(options.memory_budget_gib * GIB))
    if options.json:
        ways = [{**asdict(c), "way": c.way.name} for c in found]
        print(json.dumps({"group": asdict(group), "memory_budget_gib": options.memory_budget_gib, "capacity": ways}))
        return 0
    table = Table(
        title=f"what fits {options.memory_budget_gib:g} GiB, model {options.model}: groups of {group.size}, prefix "
        f"{group.prefix_tokens:,}, suffix {group.suffix_tokens:,} tokens",
        caption="In brackets: tokens of a microbatch. Dense needs those of a whole trajectory; reuse is tried with parts of it too.",
    )
    for name in ("way", "longest prefix", "largest group"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for c in found:
        longest = f"{c.prefix_tokens:,} ({c.prefix_budget:,})" if c.prefix_tokens else "nothing fits"
        if c.prefix_tokens == setting.memory.shape.max_positions - group.suffix_tokens:
            longest = f"all: {longest}"
        most = f"{c.group_size:,} ({c.group_budget:,})" if c.group_size else "nothing fits"
        if c.group_size == LARGEST_GROUP:
            most = f"at least {most}"
        table.add_row(c.way.name, longest, most)
    Console().print(table)
    return 0


def headline(report: PlanReport, options: argparse.Namespace) -> str:
    """What the plan is worth, in two sentences."""
    logical, computed = report.logical_tokens, report.computed_tokens
    if logical == computed:
        positions = f"Nothing is shared: all {logical:,} positions are computed, as a dense run would."
    else:
        positions = f"{computed:,} positions are computed instead of {logical:,}: {report.reuse_ratio:.1f}x fewer."
    stages, replicas = options.pp * options.vpp, options.dp
    where = f"on {stages} pipeline {'stages' if stages > 1 else 'stage'}"
    if replicas > 1:
        where += f" x {replicas} data-parallel ranks"
    return f"{positions} Predicted {report.predicted_speedup:.1f}x the speed of dense {where}."


def _page_text(report: PlanReport, options: argparse.Namespace) -> PageText:
    sizes = {name: getattr(options, name) for name in ("tp", "pp", "vpp", "cp", "dp")}
    layout = "".join(f", {name} {size}" for name, size in sizes.items() if size > 1) or ", one rank"
    return PageText(
        source=Path(options.file).name,
        setting=f"{options.model}{layout}, {options.dtype}",
        headline=headline(report, options),
        speedup=report.predicted_speedup,
        numbers=_numbers(report, options),
    )


def _measured_costs(options: argparse.Namespace, shape: ModelShape) -> MeasuredCosts | None:
    """Costs of the calibration that was given; it may be of another machine than this one."""
    if options.calibrate is None:
        return None
    calibration = Calibration.load(options.calibrate)
    planned_for = MeasuredOn(
        model=shape_digest(shape),
        device=calibration.measured_on.device,
        dtype=options.dtype,
        layout=layout_key(options.tp, options.cp),
        recompute=options.recompute,
    )
    return calibration.costs_for(planned_for, options.calibrate)


def _table(report: PlanReport, options: argparse.Namespace) -> Table:
    table = Table(title=f"plan of {options.file}, model {options.model}", show_header=False)
    for name, value in _numbers(report, options).items():
        table.add_row(name, value)
    return table


HOLDER_TITLES = {
    Holder.ACTIVATIONS: "kept",
    Holder.KEYS_VALUES: "K/V",
    Holder.KV_GRADIENTS: "gK/gV",
    Holder.LOGITS: "logits",
    Holder.COMMUNICATION: "messages",
    Holder.WORKING: "working",
}


def _memory_table(report: PlanReport) -> Table:
    """Predicted bytes by pipeline rank, phase and holder."""
    sums = [sum(row.values()) - row["host"] for moments in report.peak_by_stage for row in moments.values()]
    unit, scale = ("GiB", GIB) if max(sums, default=0) >= GIB else ("MiB", GIB // 1024)
    state = ", ".join(f"{name} {size / scale:,.1f}" for name, size in report.state_bytes.items())
    table = Table(title=f"memory in {unit}: {state}, and beyond them")
    for name in ("stage", "phase", *HOLDER_TITLES.values(), "sum", "host"):
        table.add_column(name, justify="right")
    for stage, moments in enumerate(report.peak_by_stage):
        for phase, row in moments.items():
            held = [row[holder.value] for holder in HOLDER_TITLES]
            table.add_row(str(stage), phase, *(f"{n / scale:,.1f}" for n in (*held, sum(held), row["host"])))
    return table


def _numbers(report: PlanReport, options: argparse.Namespace) -> dict[str, str]:
    """The figures for people, by name; the terminal and the page show the same."""
    loads = report.rank_loads
    mean = sum(loads) / len(loads) or 1.0
    dummies = f", {report.dummy_microbatches} dummies" if report.dummy_microbatches else ""
    routes = {}
    if report.route_mismatch is not None:
        routes["routes"] = f"{report.route_mismatch:.2%} of shared positions in conflict, {options.route_mismatch}"
    context = {}
    if report.context_kv is not None:
        verb = {"gather": "gathered once", "ring": "sharded and passed round"}[report.context_kv.choice]
        context["context parallelism"] = (
            f"K/V {verb} ({report.context_kv.reason}), "
            f"{report.context_bytes / 2**30:.2f} GiB a step received by all ranks"
        )
        for kv, peaks in report.context_kv.peak_bytes.items():
            moved = report.context_kv.context_bytes[kv]
            context[f"with {kv}"] = f"{_phases(peaks)} at most on a rank, {moved / 2**30:.2f} GiB received"
    return {
        "trajectories": f"{report.trajectories} in {report.groups} group{'s' if report.groups > 1 else ''}",
        "positions": f"{report.computed_tokens:,} computed of {report.logical_tokens:,} logical",
        "reuse ratio": f"{report.reuse_ratio:.2f}",
        "shared segments": f"{report.shared_segments}, trees {report.depth} deep",
        "microbatches": f"{report.microbatches} of at most {report.largest_microbatch_tokens} tokens (budget {options.max_tokens})"
        f"{dummies}, lead {report.lead}",
        **routes,
        "microbatch cost": f"largest {report.microbatch_cost_spread:.2f} of the mean",
        "speedup": f"{report.predicted_speedup:.2f} predicted, bound {report.bound:.2f}",
        "pipeline": f"{report.pipeline_efficiency:.2f} of the ranks' time busy",
        "balance": f"most loaded rank {max(loads) / mean:.2f} of the mean over {len(loads)}"
        + (f", {report.split_loss_tokens:,} positions repeated by splits" if report.split_loss_tokens else ""),
        "peak memory": _phases(report.peak_bytes),
        "memory": report.memory,
        **context,
        "digest": report.digest,
    }


def _phases(peaks: Mapping[str, int]) -> str:
    return ", ".join(f"{phase} {size / 2**30:.2f} GiB" for phase, size in peaks.items())

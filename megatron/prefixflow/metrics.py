"""Metrics of a step: one JSON object a line, and one line that a person can read.

Counts and sums run over data-parallel ranks, so tensor- and context-parallel copies do not count twice. `time_forward_s` and
`time_backward_s` are sums over all ranks of the time inside F and B operations; `time_s` is the step's own
duration and `peak_bytes` the memory peak (`megatron.prefixflow.peaks`), both of the rank with the largest.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.prefixflow.step import StepRunner
from prefixflow.plan.plan import Plan
from prefixflow.runtime.loss import LossTerms
from prefixflow.runtime.router_losses import RouterLossConfig
from prefixflow.schedule.ops import Kind, Op
from prefixflow.trajectories.types import Trajectory


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Fields are the keys of the metrics file, in its order; None is what was not computed.

    step counts optimizer steps from 1. kl and entropy are means over the trained tokens that were scored, clip_fraction
    over all trained tokens of the batch, reward_mean over trajectories that bring a reward. logical_tokens leave out what
    `--skip-zero-advantage` does not run; tokens_per_s counts logical tokens. load_balancing_loss and z_loss are means over
    layers with experts and over trajectories, without coefficients; loss does not contain them. routes_replayed and
    routes_native count computed positions times those layers; route_mismatch is the share of shared positions whose
    trajectories bring different routes. context_bytes are K/V and their gradients that context-parallel ranks have received,
    context_bytes_planned what the plan says they should. peak_cache_bytes: most cached K/V and their gradients on the device of
    one rank, host_bytes: most that one rank had in host memory; evictions: parts of blocks that went there at once;
    recomputed_blocks: blocks that were dropped and written anew; recomputed_microbatches: those whose forward a pipeline stage ran
    again in their backward. All five of the training pass. fallback: groups that were run dense, because sharing does not pay, or
    all of them after a step has differed from its dense run. verify_rel_err: largest relative error of a gradient against that of
    the dense run (in bfloat16 of all gradients at once), where the step is verified; times and peaks leave the dense run out.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    reward_mean: float | None
    kl: float | None
    entropy: float | None
    clip_fraction: float | None
    logical_tokens: int
    computed_tokens: int
    reuse_ratio: float | None
    shared_segments: int
    microbatches: int
    dummy_microbatches: int
    time_s: float
    time_forward_s: float
    time_backward_s: float
    tokens_per_s: float
    peak_bytes: int
    peak_bytes_predicted: int
    route_mismatch: float | None
    fallback: int
    load_balancing_loss: float | None
    z_loss: float | None
    routes_replayed: int | None
    routes_native: int | None
    context_bytes: int
    context_bytes_planned: int
    peak_cache_bytes: int
    host_bytes: int
    evictions: int
    recomputed_blocks: int
    recomputed_microbatches: int
    verify_rel_err: float | None = None

    def to_json(self) -> str:
        """One line of strict JSON: a number that is not finite becomes null."""
        fields = dataclasses.asdict(self)
        return json.dumps({k: v if _is_json(v) else None for k, v in fields.items()})

    def summary(self, num_steps: int) -> str:
        """One line for a person."""
        reward = "" if self.reward_mean is None else f"  reward {self.reward_mean:.4g}"
        kl = "" if self.kl is None else f"  kl {self.kl:.3g}"
        ratio = "" if self.reuse_ratio is None else f", reuse {self.reuse_ratio:.2f}x"
        return (
            f"step {self.step}/{num_steps}  loss {self.loss:.6g}  grad norm {self.grad_norm:.4g}"
            f"  lr {self.lr:.3g}{reward}{kl}  tokens {self.computed_tokens} of "
            f"{self.logical_tokens}{ratio}  {self.time_s:.2f} s  {self.tokens_per_s:.0f} tokens/s"
        )


def _is_json(value: float | int | None) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def append_metrics(path: str | Path, metrics: StepMetrics) -> None:
    """Add one line to the file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(metrics.to_json() + "\n")


class OpTimes:
    """Adds up the seconds of F and of B operations; an observer of `StageRunner`.

    On a GPU the host waits for the device at both ends of an operation, or launches would be timed and not work.
    """

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0

    @contextmanager
    def __call__(self, op: Op) -> Iterator[None]:
        begin = now_s()
        yield
        seconds = now_s() - begin
        if op.kind is Kind.FORWARD:
            self.forward_s += seconds
        else:
            self.backward_s += seconds


def now_s() -> float:
    """Seconds of a clock that goes on only when the device has done all that was launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class RankSums:
    """What one rank adds to the metrics; `reduce` sums over all ranks.

    num_kl and num_entropy: trained tokens whose KL and entropy are known.
    """

    loss: float = 0.0
    num_clipped: float = 0.0
    kl_sum: float = 0.0
    num_kl: float = 0.0
    entropy_sum: float = 0.0
    num_entropy: float = 0.0
    computed_tokens: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    load_balancing: float = 0.0
    z: float = 0.0
    routes_replayed: float = 0.0
    routes_native: float = 0.0
    context_bytes: float = 0.0
    context_bytes_planned: float = 0.0
    evictions: float = 0.0
    recomputed_blocks: float = 0.0
    recomputed_microbatches: float = 0.0

    @classmethod
    def of(
        cls,
        terms: LossTerms | None,
        times: OpTimes,
        runner: StepRunner,
        *,
        is_counted: bool,
    ) -> RankSums:
        """Of the last pass of `runner`.

        is_counted: False on tensor- and context-parallel copies and on stages that do not score; they add their times, their
        routers' totals, since no two ranks route the same positions in the same layer, what they received, and what their
        caches did.
        """
        routers = runner.router_totals
        sums = cls(
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            load_balancing=routers.load_balancing or 0.0,
            z=routers.z or 0.0,
            routes_replayed=routers.routes_replayed,
            routes_native=routers.routes_native,
            context_bytes=runner.context_bytes,
            context_bytes_planned=runner.context_bytes_planned,
            evictions=runner.cache_totals.num_evictions,
            recomputed_blocks=runner.cache_totals.num_recomputes,
            recomputed_microbatches=runner.num_recomputed,
        )
        if not is_counted:
            return sums
        sums = dataclasses.replace(sums, computed_tokens=float(runner.num_computed_tokens))
        if terms is None:
            return sums
        num_entries = float(terms.num_entries)
        return dataclasses.replace(
            sums,
            loss=float(terms.loss),
            num_clipped=float(terms.num_clipped + terms.num_dual_clipped),
            kl_sum=0.0 if terms.kl_sum is None else float(terms.kl_sum),
            num_kl=0.0 if terms.kl_sum is None else num_entries,
            entropy_sum=0.0 if terms.entropy_sum is None else float(terms.entropy_sum),
            num_entropy=0.0 if terms.entropy_sum is None else num_entries,
        )

    def reduce(self, device: torch.device) -> RankSums:
        """Sums over the world; every rank calls this, those without a trajectory too."""
        mine = torch.tensor(dataclasses.astuple(self), dtype=torch.float64, device=device)
        dist.all_reduce(mine)
        return RankSums(*mine.tolist())


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """Maxima over the world."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.tolist()


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """What the optimizer step itself says."""

    step: int
    grad_norm: float
    lr: float
    time_s: float
    peak_bytes: int
    peak_bytes_predicted: int
    peak_cache_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """Layers with experts in the whole model, and the losses of their routers."""

    num_layers: int
    losses: RouterLossConfig


def step_metrics(
    facts: UpdateFacts,
    sums: RankSums,
    plan: Plan,
    trajectories: Sequence[Trajectory],
    routers: RouterFacts | None = None,
) -> StepMetrics:
    """Join the reduced sums of a step with what every rank knows; `routers` is None in a model without experts."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    num_trained = sum(t.num_trained for t in trajectories)
    logical, computed = plan.forest.logical_tokens, round(sums.computed_tokens)
    return StepMetrics(
        step=facts.step,
        loss=sums.loss,
        grad_norm=facts.grad_norm,
        lr=facts.lr,
        reward_mean=_ratio(math.fsum(rewards), len(rewards)),
        kl=_ratio(sums.kl_sum, sums.num_kl),
        entropy=_ratio(sums.entropy_sum, sums.num_entropy),
        clip_fraction=_ratio(sums.num_clipped, num_trained),
        logical_tokens=logical,
        computed_tokens=computed,
        reuse_ratio=_ratio(logical, computed),
        shared_segments=plan.forest.num_shared_segments,
        microbatches=plan.num_microbatches,
        dummy_microbatches=plan.num_dummy_microbatches,
        time_s=facts.time_s,
        time_forward_s=sums.forward_s,
        time_backward_s=sums.backward_s,
        tokens_per_s=logical / facts.time_s,
        peak_bytes=facts.peak_bytes,
        peak_bytes_predicted=facts.peak_bytes_predicted,
        load_balancing_loss=_ratio(sums.load_balancing, routers.num_layers * routers.losses.load_balancing)
        if routers
        else None,
        z_loss=_ratio(sums.z, routers.num_layers * routers.losses.z) if routers else None,
        routes_replayed=round(sums.routes_replayed) if routers else None,
        routes_native=round(sums.routes_native) if routers else None,
        route_mismatch=None if plan.route_report is None else plan.route_report.rate,
        fallback=plan.num_fallback_groups,
        context_bytes=round(sums.context_bytes),
        context_bytes_planned=round(sums.context_bytes_planned),
        peak_cache_bytes=facts.peak_cache_bytes,
        host_bytes=facts.host_bytes,
        evictions=round(sums.evictions),
        recomputed_blocks=round(sums.recomputed_blocks),
        recomputed_microbatches=round(sums.recomputed_microbatches),
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None

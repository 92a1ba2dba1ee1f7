"""`--calibrate F`: measured costs are read from F where it exists; else operations are measured and F is written.

Measuring times each F and B of training steps, in seconds of this machine and model (`prefixflow.plan.calibrate` fits them).
It needs the whole model on one stage: elsewhere an operation's time would include waiting for its neighbours. What was
measured so is used with pipelines too.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.prefixflow.arguments_result import Arguments, shape_of
from megatron.prefixflow.arguments_spec import ArgumentsError
from megatron.prefixflow.metrics import now_s
from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.calibrate import Calibration, MeasuredOn, Measurement, layout_key, shape_digest
from prefixflow.plan.cost import CostModel, MeasuredCosts
from prefixflow.plan.layout import ParallelLayout
from prefixflow.plan.plan import Plan
from prefixflow.plan.work import Work
from prefixflow.schedule.ops import Kind, Op
from prefixflow.trajectories.types import Trajectory


def is_measuring(args: Arguments) -> bool:
    """True where `--calibrate` names a file that is still to be written."""
    return args.calibrate is not None and not Path(args.calibrate).exists()


def check_calibration(args: Arguments, layout: ParallelLayout) -> None:
    """Raises ArgumentsError where measuring is asked for and cannot be done."""
    if not is_measuring(args):
        return
    if layout.pp > 1:
        raise ArgumentsError(
            f"--calibrate {args.calibrate} does not exist, and with --pp {layout.pp} the time of an operation includes "
            "waiting. Measure with --pp 1 first: the file serves pipelines too."
        )
    if not Path(args.calibrate).absolute().parent.is_dir():
        raise ArgumentsError(f"--calibrate {args.calibrate}: its folder does not exist.")


def measured_costs(args: Arguments, layout: ParallelLayout) -> MeasuredCosts | None:
    """What `--calibrate` has measured before; None without the flag, or where it still has to measure."""
    if args.calibrate is None or is_measuring(args):
        return None
    try:
        return Calibration.load(args.calibrate).costs_for(measured_on(args, layout), args.calibrate)
    except ValueError as error:
        raise ArgumentsError(f"--calibrate {error}") from error


def measured_on(args: Arguments, layout: ParallelLayout) -> MeasuredOn:
    """What a calibration of this run would hold for."""
    return MeasuredOn(
        model=shape_digest(shape_of(args)),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}",
        dtype=args.dtype,
        layout=layout_key(layout.tp, layout.cp),
        recompute=args.recompute_granularity or "none",
    )


class OperationTimer:
    """An observer of `StageRunner` that measures the operations of one data-parallel rank's plan."""

    def __init__(self, plan: Plan, data_rank: int, trajectories: Sequence[Trajectory]) -> None:
        rows = segment_row_counts(plan.forest, trajectories)
        self._works = [Work.of(plan.forest, m, rows) for m in plan.ranks[data_rank]]
        self.measurements: list[Measurement] = []

    @contextmanager
    def __call__(self, op: Op) -> Iterator[None]:
        begin = now_s()
        yield
        seconds = now_s() - begin
        self.measurements.append(Measurement(op.kind is Kind.BACKWARD, self._works[op.microbatch], seconds))


def fit_calibration(measurements: Sequence[Measurement], args: Arguments, layout: ParallelLayout) -> Calibration:
    """The calibration of all ranks' measurements, the same on all ranks; collective."""
    everyone: list[list[Measurement]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, list(measurements))
    everything = [m for mine in everyone for m in mine]
    flops = CostModel.of_shape(shape_of(args))
    return Calibration.fit(everything, flops, measured_on(args, layout), datetime.date.today().isoformat())


def describe(calibration: Calibration) -> str:
    """One line for the user."""
    token = calibration.costs.forward.token + calibration.costs.backward.token
    overhead = calibration.costs.sharing
    warning = (
        "; WARNING: the fit is poor, measure more different operations on a machine that does nothing else"
        if calibration.is_poor
        else ""
    )
    return (
        f"calibration of {calibration.num_operations} operations: {1e6 * token:.3g} us a token, a shared segment costs "
        f"{overhead.segment_tokens:.1f} tokens and {overhead.merge_tokens:.3f} of each token that merges it; relative "
        f"residuals {calibration.residual_forward:.3f} forward, {calibration.residual_backward:.3f} backward{warning}"
    )

"""Where the metrics of a run go: the metrics file, TensorBoard, Weights & Biases, and a picture of the reward at the end.

Packages are imported when they are wanted. One that was asked for by name must be there before the run starts;
TensorBoard's default place is written to where the package is installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.prefixflow.arguments import Arguments, ArgumentsError
from megatron.prefixflow.metrics import StepMetrics, append_metrics
from prefixflow.curve import draw_rewards


def check_log_packages(args: Arguments) -> None:
    """Raise ArgumentsError where a package is missing that an argument needs."""
    for flag, value, package in (
        ("--tensorboard-dir", args.tensorboard_dir, "tensorboard"),
        ("--wandb-project", args.wandb_project, "wandb"),
        ("--reward-curve", args.reward_curve, "matplotlib"),
    ):
        if value is not None and not _is_installed(package):
            raise ArgumentsError(
                f"{flag} needs the package {package}, which is not installed. Install it, or leave {flag} out."
            )


class TrainingLog:
    """Writes metrics as they come; the picture when the block ends, also after an error."""

    def __init__(self, args: Arguments, *, is_first: bool) -> None:
        """is_first: rank 0 writes, the others do nothing."""
        self._metrics_file = args.metrics_file if is_first else None
        self._picture = _picture(args) if is_first else None
        self._rewards: list[tuple[int, float]] = []
        folder = _tensorboard_folder(args) if is_first else None
        self._tensorboard = _summary_writer(folder) if folder else None
        self._wandb = _wandb_run(args) if is_first and args.wandb_project is not None else None

    def write(self, metrics: StepMetrics) -> None:
        if self._metrics_file is not None:
            append_metrics(self._metrics_file, metrics)
        if metrics.reward_mean is not None:
            self._rewards.append((metrics.step, metrics.reward_mean))
        if self._tensorboard is None and self._wandb is None:
            return
        scalars = _scalars(metrics)
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, metrics.step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=metrics.step)

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._picture is not None and self._rewards:
            draw_rewards({"reward": self._rewards}, self._picture)
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind is None else 1)


def _picture(args: Arguments) -> Path | None:
    if args.reward_curve is not None:
        return Path(args.reward_curve)
    is_wanted = args.rollout == "sample" and args.metrics_file is not None and _is_installed("matplotlib")
    return Path(args.metrics_file).with_suffix(".png") if is_wanted else None


def _tensorboard_folder(args: Arguments) -> Path | None:
    if args.tensorboard_dir is not None:
        return Path(args.tensorboard_dir)
    return Path(args.save) / "tensorboard" if args.save is not None and _is_installed("tensorboard") else None


def _summary_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _wandb_run(args: Arguments) -> Any:
    import wandb

    return wandb.init(
        project=args.wandb_project,
        entity=args.wandb_entity,
        name=args.wandb_exp_name,
        dir=args.wandb_save_dir,
        config=dict(args.values),
    )


def _scalars(metrics: StepMetrics) -> dict[str, float]:
    """What was computed in this step, by its key in the metrics file."""
    fields = dataclasses.asdict(metrics)
    del fields["step"]
    return {name: value for name, value in fields.items() if value is not None and math.isfinite(value)}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

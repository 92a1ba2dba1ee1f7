"""`--calibrate`: a run measures its operations and writes what they cost; the next one plans by it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from prefixflow.runtime.world import Worlds
from prefixflow.testing.generate import two_level_groups
from prefixflow.trajectories import write_trajectories


def train(argv: Sequence[str]) -> tuple[int, str]:
    """Exit status and stderr of the entry point on this rank."""
    import contextlib
    import io

    from megatron.prefixflow.training import main

    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        return main(list(argv)), err.getvalue()


def planned_costs(argv: Sequence[str]) -> object:
    """The measured costs that a run with these arguments plans by."""
    import torch.distributed as dist

    from megatron.prefixflow.job import prepare
    from megatron.prefixflow.training import Trainer

    trainer = Trainer(prepare(argv, dist.get_world_size()))
    return trainer.plan(trainer.job.batches[0], skip_zero_advantage=False).config.measured


def held_out_ratios(argv: Sequence[str], num_steps: int) -> list[float]:
    """Predicted over measured seconds of the last step's operations, fitted to the steps before."""
    import torch.distributed as dist

    from megatron.prefixflow.calibration import fit_calibration
    from megatron.prefixflow.job import prepare
    from megatron.prefixflow.training import Trainer

    trainer = Trainer(prepare(argv, dist.get_world_size()))
    for _ in range(num_steps):
        trainer.step()
    num_fitted = len(trainer.measurements)
    trainer.step()
    fitted, held_out = trainer.measurements[:num_fitted], trainer.measurements[num_fitted:]
    costs = fit_calibration(fitted, trainer.job.args, trainer.job.layout).costs
    return [m.predicted_s(costs) / m.seconds for m in held_out]


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    write_trajectories(tmp_path / "t.jsonl", two_level_groups(2, 4, (60, 200), (10, 90)))
    line = f"--model tiny --trajectories {tmp_path / 't.jsonl'} --global-batch-size 8 --train-iters 2 --lr 1e-3"
    line += f" --lr-decay-style constant --max-tokens 256 --dtype float32 --calibrate {tmp_path / 'c.json'}"
    return line.split()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_measures_and_the_next_plans_by_it(
    worlds: Worlds, tmp_path: Path, argv: list[str], num_ranks: int
) -> None:
    assert [status for status, _ in worlds[num_ranks].run(train, argv)] == [0] * num_ranks
    written = (tmp_path / "c.json").read_bytes()
    costs = worlds[num_ranks].run(planned_costs, argv)
    assert costs[0] is not None
    assert costs == [costs[0]] * num_ranks
    assert [status for status, _ in worlds[num_ranks].run(train, argv)] == [0] * num_ranks
    assert (tmp_path / "c.json").read_bytes() == written, "a file that is there is read, not written"


def test_predictions_hold_for_operations_that_were_not_fitted(worlds: Worlds, argv: list[str]) -> None:
    """A loose bound: other programs run beside the tests."""
    ratios = worlds[1].run(held_out_ratios, argv, 4)[0]
    assert len(ratios) >= 6
    assert 1 / 4 < np.median(ratios) < 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--pp", "2"], "Measure with --pp 1 first"),
        (["--calibrate", "/nonexistent/c.json"], "folder"),
        (["--dtype", "float64", "--calibrate", "old.json"], "measured with dtype 'float32', here 'float64'"),
        (["--num-layers", "3", "--calibrate", "old.json"], "measured with model"),
    ],
    ids=["pipeline", "folder", "dtype", "model"],
)
def test_what_cannot_be_measured_or_used_is_refused(
    worlds: Worlds, tmp_path: Path, argv: list[str], more: list[str], words: str
) -> None:
    if "old.json" in more:
        old = tmp_path / "old.json"
        assert worlds[1].run(train, [*argv, "--calibrate", str(old)])[0][0] == 0
        more = [str(old) if word == "old.json" else word for word in more]
    num_ranks = 2 if "--pp" in more else 1
    (status, error), *_ = worlds[num_ranks].run(train, [*argv, *more])
    assert status == 2
    assert words in error

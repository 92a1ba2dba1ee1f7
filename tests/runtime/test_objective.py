"""The objective: entry numbers, loss gradients of shared rows, and their independence of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from prefixflow.plan.batch import microbatch_arrays
from prefixflow.plan.plan import PlanConfig, PrefixReuse, build_plan
from prefixflow.runtime.loss import LossConfig
from prefixflow.runtime.objective import Entries, Objective, logical_normalizer
from prefixflow.schedule.ops import Kind
from prefixflow.schedule.table import build_table
from prefixflow.trajectories import Trajectory
from tests.plan.groups import trajectory

CPU = torch.device("cpu")

# A chain (0 is a strict prefix of 1), a branch off its prompt, a copy, a lone one, one without rows.
BATCH = [
    replace(t, advantages=np.full(len(t), advantage))
    for t, advantage in (
        (trajectory([1, 2, 3, 4, 5], name="a", trained=[3, 4]), 1.0),
        (trajectory([1, 2, 3, 4, 5, 6, 7], name="b", trained=[3, 4, 6]), -1e2),
        (trajectory([1, 2, 3, 9], name="c", trained=[3], temperature=0.5), 1e4),
        (trajectory([1, 2, 3, 9], name="d", trained=[3]), -1e6),
        (trajectory([8, 8, 8], name="e", group="other", trained=[1, 2]), 1e-2),
        (trajectory([8, 8], name="f", group="other", trained=[]), 1e8),
    )
]


def with_logprobs(batch: list[Trajectory], *names: str, seed: int = 0) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    drawn: list[dict[str, Any]] = [{name: -rng.uniform(0.1, 2.0, len(t)) for name in names} for t in batch]
    return [replace(t, **fields) for t, fields in zip(batch, drawn, strict=True)]


def logprob(t: Trajectory, token: int) -> float:
    """Stands in for the model: depends on the tokens up to `token` and the temperature alone."""
    prefix = sum((i + 1) * int(x) for i, x in enumerate(t.tokens[: token + 1]))
    return -0.1 - 0.7 * ((prefix * 0.618) % 1.0) / t.temperature


def objective(
    batch: list[Trajectory], config: LossConfig | None, chosen: list[int] | None = None, **options: Any
) -> Objective:
    chosen = list(range(len(batch))) if chosen is None else chosen
    return Objective(
        batch,
        chosen,
        vocab_size=10,
        dtype=torch.float64,
        device=CPU,
        config=config,
        normalizer=logical_normalizer(batch, chosen, CPU),
        **options,
    )


def run(batch: list[Trajectory], config: LossConfig, plan_config: PlanConfig) -> dict:
    """Gradient by (group, prefix, temperature) when the plan's table drives the objective, and the loss."""
    plan = build_plan(batch, plan_config)
    gradients: dict[tuple, float] = {}
    loss = 0.0
    for trees, rank in zip(plan.trees, plan.ranks, strict=True):
        chosen = sorted({m for s in plan.forest.segments if s.tree in trees for m in s.members})
        driven = objective(batch, config, chosen)
        arrays = [microbatch_arrays(plan.forest, m, batch) for m in rank]
        for op in build_table([m.reads for m in rank]).rows[0]:
            a = arrays[op.microbatch]
            index = driven.entry_index(a.entry_trajectory, a.entry_token)
            rows = torch.from_numpy(a.entry_row)
            pairs = zip(a.entry_trajectory, a.entry_token, strict=True)
            owners = dict(zip(a.entry_row, pairs, strict=True))
            if op.kind is Kind.FORWARD:
                scores = [logprob(batch[i], t) for _, (i, t) in sorted(owners.items())]
                driven.record(index, torch.tensor(scores, dtype=torch.float64)[rows], None)
                continue
            got = driven.row_gradients(index, rows, a.num_rows)
            assert got.entropy is None
            for row, (i, t) in owners.items():
                key = (batch[i].group, tuple(batch[i].tokens[: t + 1]), batch[i].temperature)
                gradients[key] = gradients.get(key, 0.0) + float(got.logprobs[row])
        loss += 0.0 if driven.terms is None else float(driven.terms.loss)
    return {**gradients, "loss": loss}


@pytest.mark.parametrize("name", ["sft", "grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_gradient_does_not_depend_on_the_plan(name: str, on_policy: bool) -> None:
    batch = BATCH if on_policy else with_logprobs(BATCH, "old_logprobs")
    config = LossConfig.of(name)
    dense = run(batch, config, PlanConfig(prefix_reuse=PrefixReuse.OFF))
    assert len(dense) == 8
    for budget in (2, 3, 7, 100):
        for ranks in (1, 2, 3):
            shared = run(batch, config, PlanConfig(budget, data_parallel_size=ranks))
            assert shared == pytest.approx(dense, rel=1e-12)


def test_sft_gradient_by_hand() -> None:
    """Nine trained tokens: each entry weighs -1/9, and 'a' and 'b' share the rows of 3 and 4."""
    got = run(BATCH, LossConfig.of("sft"), PlanConfig())
    assert got[("g", (1, 2, 3, 4), 1.0)] == pytest.approx(-2 / 9)
    assert got[("g", (1, 2, 3, 9), 0.5)] == pytest.approx(-1 / 9)
    assert got[("other", (8, 8), 1.0)] == pytest.approx(-1 / 9)
    scores = [logprob(t, k) for t in BATCH for k in np.flatnonzero(t.loss_mask).tolist()]
    assert got["loss"] == pytest.approx(-sum(scores) / 9)


def test_on_policy_gradient_by_hand() -> None:
    """Ratio 1: -advantage / (6 trajectories * tokens of the trajectory), summed over a shared row."""
    got = run(BATCH, LossConfig.of("grpo"), PlanConfig())
    assert got[("g", (1, 2, 3, 4), 1.0)] == pytest.approx(-(1.0 / 12 - 1e2 / 18), rel=1e-12)
    assert got[("g", (1, 2, 3, 9), 1.0)] == pytest.approx(1e6 / 6)
    assert got[("other", (8, 8, 8), 1.0)] == pytest.approx(-1e-2 / 12)


def test_entries_are_numbered_by_trajectory_and_token() -> None:
    entries = Entries(BATCH, [1, 3, 5, 4])
    assert entries.starts.tolist() == [0, 3, 4, 4, 6]
    owner, token = np.array([4, 1, 3, 1, 1, 4]), np.array([2, 6, 3, 3, 4, 1])
    assert entries.index(owner, token).tolist() == [5, 2, 3, 0, 1, 4]
    assert entries.gather(BATCH, "advantages").tolist() == [-1e2] * 3 + [-1e6, 1e-2, 1e-2]
    assert np.isnan(entries.gather(BATCH, "old_logprobs")).all()


def test_entries_of_nothing() -> None:
    entries = Entries(BATCH, [])
    assert len(entries) == 0
    assert entries.gather(BATCH, "advantages").shape == (0,)


@pytest.mark.parametrize(
    ("owner", "token", "reason"),
    [(0, 3, "that this rank does not run"), (1, 5, "that is not trained")],
)
def test_foreign_rows_are_our_own_error(owner: int, token: int, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        Entries(BATCH, [1, 3]).index(np.array([owner]), np.array([token]))


def test_scoring_an_entry_twice_is_our_own_error() -> None:
    driven = objective(BATCH, None)
    index = driven.entry_index(np.array([0]), np.array([3]))
    driven.record(index, torch.tensor([-1.0], dtype=torch.float64), None)
    with pytest.raises(AssertionError, match="scored twice"):
        driven.record(index, torch.tensor([-1.0], dtype=torch.float64), None)


def test_a_backward_before_the_path_is_forwarded_is_our_own_error() -> None:
    """Token 4 of 'a' is known, token 3 is not: sequence-level ratios would be wrong."""
    driven = objective(BATCH, LossConfig.of("gspo"))
    index = driven.entry_index(np.array([0]), np.array([4]))
    driven.record(index, torch.tensor([-1.0], dtype=torch.float64), None)
    with pytest.raises(AssertionError, match="before a forward on the same trajectory's path"):
        driven.row_gradients(index, torch.tensor([0]), 1)


def test_old_logprobs_of_some_trajectories_are_kept() -> None:
    """'b' has none: its old policy is the present one, so its ratio is 1; the others keep theirs."""
    given = with_logprobs(BATCH, "old_logprobs")
    mixed = [replace(t, old_logprobs=None) if t.id == "b" else t for t in given]
    config, key = LossConfig.of("cispo", clip_low=0.9, clip_high=9.0), ("g", (1, 2, 3, 4), 1.0)
    got = run(mixed, config, PlanConfig(3))
    for t in given:
        for token in np.flatnonzero(t.loss_mask).tolist() if t.id in "cde" else ():
            assert t.old_logprobs is not None
            ratio = np.exp(logprob(t, token) - t.old_logprobs[token])
            expected = -ratio * t.advantages[token] / 9
            path = (t.group, tuple(t.tokens[: token + 1]), t.temperature)
            assert got[path] == pytest.approx(expected, rel=1e-12)
    a = given[0]
    assert a.old_logprobs is not None
    ratio = np.exp(logprob(a, 3) - a.old_logprobs[3])
    assert got[key] == pytest.approx((-ratio * 1.0 + 1e2) / 9, rel=1e-12)


def test_normalizer_counts_the_whole_step() -> None:
    """Also trajectories of other ranks and those without a trained token."""
    n = logical_normalizer(BATCH, [1, 5], CPU)
    assert (n.num_trajectories, n.num_tokens, n.max_tokens) == (6, 9, 3)
    assert n.tokens_per_trajectory.tolist() == [3, 0]
    assert logical_normalizer(BATCH, [1], CPU, max_tokens=7).max_tokens == 7
    assert logical_normalizer([], [], CPU).num_tokens == 0


def test_scores_are_handed_out_by_trajectory() -> None:
    driven = objective(BATCH, None, chosen=[3, 4, 5], with_entropy=True)
    index = driven.entry_index(np.array([4, 3, 4]), np.array([2, 3, 1]))
    values = torch.tensor([-0.2, -0.03, -1.0], dtype=torch.float64)
    driven.record(index, values, values * -1000)
    got = {i: v.tolist() for i, v in driven.trajectory_logprobs().items()}
    assert got == {3: [-0.03], 4: [-1.0, -0.2], 5: []}
    assert driven.entropy is not None
    assert driven.entropy.tolist() == [30.0, 1000.0, 200.0]


def test_entropy_gradient_by_hand() -> None:
    """The bonus lowers the loss by 0.5 * entropy / 9 for each entry; two entries share the row."""
    driven = objective(BATCH, LossConfig.of("sft", entropy_coef=0.5))
    owner, token = np.array([0, 1, 0, 1, 1]), np.array([3, 3, 4, 4, 6])
    index = driven.entry_index(owner, token)
    driven.record(index, torch.full((5,), -1.0).double(), torch.full((5,), 2.0).double())
    got = driven.row_gradients(index, torch.tensor([0, 0, 1, 1, 2]), 3)
    assert got.entropy is not None
    assert got.entropy.tolist() == pytest.approx([-1 / 9, -1 / 9, -0.5 / 9])
    assert got.logprobs.tolist() == pytest.approx([-2 / 9, -2 / 9, -1 / 9])
    assert driven.terms is not None
    assert float(driven.terms.loss) == pytest.approx((5 - 0.5 * 10) / 9)

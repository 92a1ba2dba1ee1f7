"""Losses against a brute-force implementation in plain Python, and against numbers worked by hand.

The oracle below walks over one trajectory and one token at a time with `math`, and differentiates
by hand; it shares no code and no tensor operation with the module under test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixflow.runtime.loss import (
    Aggregation,
    EntryTable,
    KLEstimator,
    LossConfig,
    LossTerms,
    Normalizer,
    PolicyLoss,
    coefficients,
    has_zero_weight,
    loss_terms,
)

LOSSES = ("grpo", "dapo", "gspo", "cispo", "sft")
AGGREGATIONS = tuple(aggregation.value for aggregation in Aggregation)


@dataclass(frozen=True)
class Token:
    logprob: float
    old: float
    ref: float
    rollout: float
    advantage: float
    entropy: float


Batch = list[list[Token]]


@dataclass
class Oracle:
    """The loss and, per token in table order, its derivatives; counts of clipped tokens."""

    loss: float
    d_logprob: list[float]
    d_entropy: list[float]
    num_clipped: int
    num_dual_clipped: int


def oracle(config: LossConfig, batch: Batch, num_trajectories: int, max_tokens: int) -> Oracle:
    out = Oracle(0.0, [], [], 0, 0)
    num_tokens = sum(len(tokens) for tokens in batch)
    for tokens in batch:
        if config.aggregation == "token-mean":
            weight = 1.0 / num_tokens
        elif config.aggregation == "seq-mean-token-mean":
            weight = 1.0 / len(tokens) / num_trajectories if tokens else math.nan
        elif config.aggregation == "seq-mean-token-sum":
            weight = 1.0 / num_trajectories
        else:
            weight = 1.0 / max_tokens / num_trajectories
        mean_gap = sum(t.logprob - t.old for t in tokens) / len(tokens) if tokens else 0.0
        for token in tokens:
            value, slope = _policy(config, token, mean_gap, out)
            if config.tis_cap is not None:
                tis = min(math.exp(token.old - token.rollout), config.tis_cap)
                value, slope = value * tis, slope * tis
            kl, kl_slope = _kl(config, token)
            value += config.kl_coef * kl - config.entropy_coef * token.entropy
            slope += config.kl_coef * kl_slope
            out.loss += weight * value
            out.d_logprob.append(weight * slope)
            out.d_entropy.append(-weight * config.entropy_coef)
    return out


def _policy(config: LossConfig, token: Token, mean_gap: float, out: Oracle) -> tuple[float, float]:
    if config.policy_loss == "sft":
        return -token.logprob, -1.0
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    gap = mean_gap if config.policy_loss == "gspo" else token.logprob - token.old
    ratio = math.exp(gap)
    bounded = min(max(ratio, low), high)
    a = token.advantage
    if config.policy_loss == "cispo":
        out.num_clipped += bounded != ratio
        return -bounded * a * token.logprob, -bounded * a
    if (a > 0 and ratio > high) or (a < 0 and ratio < low):
        out.num_clipped += 1
        return -bounded * a, 0.0
    if config.clip_c is not None and a < 0 and ratio > config.clip_c:
        out.num_dual_clipped += 1
        return -config.clip_c * a, 0.0
    return -ratio * a, -ratio * a


def _kl(config: LossConfig, token: Token) -> tuple[float, float]:
    gap = token.ref - token.logprob
    if config.kl_estimator == "k1":
        return -gap, 1.0
    if config.kl_estimator == "k2":
        return gap**2 / 2, -gap
    return math.exp(gap) - gap - 1, 1 - math.exp(gap)


# Trajectory 2 trains nothing, 4 is one token long; the tokens of the others are clipped
# high, clipped low, free, and (with clip_c) bounded from above.
LENGTHS = (7, 40, 0, 13, 1)
NUM_TRAJECTORIES = 9  # others live on other ranks
MAX_TOKENS = 64


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)

    def draws(n: int) -> list[float]:
        return torch.randn(n, generator=generator, dtype=torch.float64).tolist()

    batch = []
    for length, scale in zip(LENGTHS, (1.0, 1e-3, 1.0, 1e2, 10.0), strict=True):
        batch.append(
            [
                Token(-1.0 + 0.2 * x, -1.0 + y, -1.0 + z, -1.0 + y + 0.5 * w, scale * a, abs(e))
                for x, y, z, w, a, e in zip(*(draws(length) for _ in range(6)), strict=True)
            ]
        )
    return batch


def make_table(batch: Batch) -> EntryTable:
    owner = [i for i, tokens in enumerate(batch) for _ in tokens]
    return EntryTable(
        torch.tensor(owner, dtype=torch.int64),
        column(batch, "advantage"),
        column(batch, "old"),
        column(batch, "ref"),
        column(batch, "rollout"),
    )


def column(batch: Batch, name: str) -> Tensor:
    values = [getattr(token, name) for tokens in batch for token in tokens]
    return torch.tensor(values, dtype=torch.float64)


def make_normalizer(batch: Batch) -> Normalizer:
    counts = [len(tokens) for tokens in batch]
    return Normalizer(NUM_TRAJECTORIES, sum(counts), MAX_TOKENS, torch.tensor(counts))


def assert_same(value: Tensor, expected: Sequence[float]) -> None:
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def check(config: LossConfig, batch: Batch) -> Oracle:
    """Compares loss, derivatives and counts, by autograd and by `coefficients`, with the oracle."""
    expected = oracle(config, batch, NUM_TRAJECTORIES, MAX_TOKENS)
    table, normalizer = make_table(batch), make_normalizer(batch)
    logprobs = column(batch, "logprob").requires_grad_()
    entropy = column(batch, "entropy").requires_grad_()
    terms = loss_terms(config, table, normalizer, logprobs, entropy)
    assert float(terms.loss.detach()) == pytest.approx(expected.loss, rel=1e-12)
    assert int(terms.num_clipped) == expected.num_clipped
    assert int(terms.num_dual_clipped) == expected.num_dual_clipped
    assert int(terms.num_entries) == len(expected.d_logprob)
    terms.loss.backward()
    assert logprobs.grad is not None
    assert_same(logprobs.grad, expected.d_logprob)

    formed = coefficients(config, table, normalizer, logprobs, entropy)
    assert formed.entries.tolist() == list(range(len(table)))
    assert formed.logprobs.dtype == torch.float64
    assert_same(formed.logprobs, expected.d_logprob)
    assert not formed.terms.loss.requires_grad
    assert torch.equal(formed.terms.loss, terms.loss.detach())
    if config.needs_entropy:
        assert formed.entropy is not None
        assert entropy.grad is not None
        assert_same(formed.entropy, expected.d_entropy)
        assert_same(entropy.grad, expected.d_entropy)
    else:
        assert formed.entropy is None
    return expected


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("policy_loss", LOSSES)
def test_each_loss_and_aggregation(policy_loss: str, aggregation: str) -> None:
    batch = make_batch()
    config = LossConfig.of(policy_loss, aggregation=aggregation)
    expected = check(config, batch)
    if policy_loss != "sft":
        assert 0 < expected.num_clipped < len(expected.d_logprob), "nothing was clipped, or all"


@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("policy_loss", LOSSES)
def test_kl_and_entropy_terms(policy_loss: str, kl_estimator: str) -> None:
    config = LossConfig.of(policy_loss, kl_coef=30.0, kl_estimator=kl_estimator, entropy_coef=0.7)
    check(config, make_batch())


@pytest.mark.parametrize("policy_loss", ["grpo", "dapo", "gspo"])
def test_dual_clip(policy_loss: str) -> None:
    batch = make_batch()
    # A sequence ratio is tamer than a token's: push trajectory 1 beyond the bound.
    batch[1] = [replace(token, old=token.old - 1.6) for token in batch[1]]
    config = LossConfig.of(policy_loss, clip_c=1.5, kl_coef=0.1)
    assert check(config, batch).num_dual_clipped > 0


@pytest.mark.parametrize("policy_loss", ["grpo", "dapo", "gspo", "cispo"])
def test_truncated_importance_weights(policy_loss: str) -> None:
    batch = make_batch()
    config = LossConfig.of(policy_loss, tis_cap=1.3, kl_coef=0.1, entropy_coef=0.1)
    check(config, batch)
    weights = [math.exp(t.old - t.rollout) for tokens in batch for t in tokens]
    assert min(weights) < 1.3 < max(weights)
    terms = loss_terms(
        config, make_table(batch), make_normalizer(batch),
        column(batch, "logprob"), column(batch, "entropy"),
    )  # fmt: skip
    assert terms.tis_weight_sum is not None
    assert float(terms.tis_weight_sum) == pytest.approx(sum(min(w, 1.3) for w in weights))


def test_worked_by_hand() -> None:
    # Two trajectories of 1 and 2 tokens in a step of 4 trajectories and 5 tokens.
    ln = math.log
    table = EntryTable(
        torch.tensor([0, 1, 1]),
        torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64),
        old_logprobs=torch.tensor([ln(0.2), ln(0.5), ln(0.1)], dtype=torch.float64),
    )
    logprobs = torch.tensor([ln(0.3), ln(0.55), ln(0.05)], dtype=torch.float64)
    normalizer = Normalizer(4, 5, 10, torch.tensor([1, 2]))
    # Ratios 1.5, 1.1, 0.5: the first clipped to 1.2, the last to 0.8. Losses -2.4, 1.1, 0.8.
    expected = {
        "token-mean": (-0.5 / 5, 1.1 / 5),
        "seq-mean-token-mean": ((-2.4 + 1.9 / 2) / 4, 1.1 / 8),
        "seq-mean-token-sum": (-0.5 / 4, 1.1 / 4),
        "seq-mean-token-sum-norm": (-0.5 / 40, 1.1 / 40),
    }
    for aggregation, (loss, slope) in expected.items():
        config = LossConfig.of("grpo", aggregation=aggregation)
        formed = coefficients(config, table, normalizer, logprobs)
        assert float(formed.terms.loss) == pytest.approx(loss, rel=1e-14)
        assert_same(formed.logprobs, [0.0, slope, 0.0])
        assert int(formed.terms.num_clipped) == 2
    # GSPO: the second trajectory's ratio is sqrt(1.1 * 0.5) < 0.8, clipped as a whole.
    gspo = coefficients(LossConfig.of("gspo"), table, normalizer, logprobs)
    assert float(gspo.terms.loss) == pytest.approx((-2.4 + 0.8) / 4, rel=1e-14)
    assert not gspo.logprobs.any()
    # CISPO: weights 1.2, 1.1, 0.8, and no token loses its gradient.
    cispo = coefficients(LossConfig.of("cispo"), table, normalizer, logprobs)
    assert_same(cispo.logprobs, [-2.4 / 5, 1.1 / 5, 0.8 / 5])
    sft = coefficients(LossConfig.of("sft"), table, normalizer, logprobs)
    assert float(sft.terms.loss) == pytest.approx(-ln(0.3 * 0.55 * 0.05) / 5, rel=1e-14)
    assert_same(sft.logprobs, [-0.2, -0.2, -0.2])
    # DAPO's upper bound of 1.28 only shows in the value.
    dapo = coefficients(LossConfig.of("dapo"), table, normalizer, logprobs)
    assert float(dapo.terms.loss) == pytest.approx((-2.56 + 1.9) / 5, rel=1e-14)


def test_gspo_is_the_sequence_objective() -> None:
    """With one advantage a trajectory, the token form has the gradient of -A * s_i."""
    batch = [[replace(t, advantage=3.0) for t in make_batch()[3]]]
    table, normalizer = make_table(batch), make_normalizer(batch)
    logprobs = column(batch, "logprob").requires_grad_()
    config = LossConfig.of("gspo", clip_low=0.99, clip_high=1e6)
    formed = coefficients(config, table, normalizer, logprobs)
    assert table.old_logprobs is not None
    sequence = -3.0 * (logprobs - table.old_logprobs).mean().exp() / NUM_TRAJECTORIES
    sequence.backward()
    assert float(formed.terms.loss) == pytest.approx(float(sequence.detach()), rel=1e-13)
    torch.testing.assert_close(formed.logprobs, logprobs.grad, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("policy_loss", ["grpo", "dapo", "gspo", "cispo"])
def test_absent_old_logprobs_mean_a_ratio_of_exactly_one(policy_loss: str) -> None:
    batch = make_batch()
    table = replace(make_table(batch), old_logprobs=None)
    config = LossConfig.of(policy_loss, aggregation="seq-mean-token-sum", clip_c=None)
    formed = coefficients(config, table, make_normalizer(batch), column(batch, "logprob"))
    torch.testing.assert_close(formed.logprobs, -table.advantages / NUM_TRAJECTORIES, rtol=1e-15, atol=0.0)
    assert int(formed.terms.num_clipped) == 0


@pytest.mark.parametrize("policy_loss", LOSSES)
def test_subsets_add_up_and_do_not_read_the_others(policy_loss: str) -> None:
    batch = make_batch()
    options: dict[str, Any] = {} if policy_loss == "sft" else {"tis_cap": 2.0}
    config = LossConfig.of(policy_loss, kl_coef=0.3, entropy_coef=0.2, **options)
    table, normalizer = make_table(batch), make_normalizer(batch)
    logprobs, entropy = column(batch, "logprob"), column(batch, "entropy")
    whole = coefficients(config, table, normalizer, logprobs, entropy)
    assert whole.entropy is not None
    total: LossTerms | None = None
    grad_logprobs = torch.full_like(logprobs, torch.nan)
    grad_entropy = torch.full_like(logprobs, torch.nan)
    for trajectories in ([1, 4], [2], [0, 3]):
        known = torch.isin(table.trajectory, torch.tensor(trajectories))
        part = coefficients(
            config,
            table,
            normalizer,
            torch.where(known, logprobs, torch.nan),
            torch.where(known, entropy, torch.nan),
            trajectories=trajectories,
        )
        assert part.entries.tolist() == known.nonzero().flatten().tolist()
        assert part.entropy is not None
        grad_logprobs[part.entries], grad_entropy[part.entries] = part.logprobs, part.entropy
        terms = loss_terms(config, table, normalizer, logprobs, entropy, trajectories=trajectories)
        assert float(terms.loss) == float(part.terms.loss)
        total = part.terms if total is None else total + part.terms
    assert torch.equal(grad_logprobs, whole.logprobs)
    assert torch.equal(grad_entropy, whole.entropy)
    assert total is not None
    for field in fields(LossTerms):
        value = getattr(whole.terms, field.name)
        if value is not None:
            torch.testing.assert_close(getattr(total, field.name), value, rtol=1e-12, atol=0.0, msg=field.name)


def test_trajectory_without_trained_token_counts_and_contributes_nothing() -> None:
    full = make_batch()
    without = [tokens for tokens in full if tokens]
    config = LossConfig.of("grpo", kl_coef=0.1)
    results = [coefficients(config, make_table(b), make_normalizer(b), column(b, "logprob")) for b in (full, without)]
    assert torch.equal(results[0].logprobs, results[1].logprobs)
    assert float(results[0].terms.loss) == float(results[1].terms.loss)
    # One trajectory fewer in the step is another matter.
    fewer = replace(make_normalizer(without), num_trajectories=NUM_TRAJECTORIES - 1)
    other = coefficients(config, make_table(without), fewer, column(without, "logprob"))
    ratio = NUM_TRAJECTORIES / (NUM_TRAJECTORIES - 1)
    torch.testing.assert_close(other.logprobs, results[0].logprobs * ratio)


@pytest.mark.parametrize("policy_loss", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_entry_at_all(policy_loss: str, aggregation: str) -> None:
    table = make_table([[]])
    config = LossConfig.of(policy_loss, aggregation=aggregation, entropy_coef=0.1, kl_coef=0.1)
    nothing = torch.zeros(0, dtype=torch.float64)
    formed = coefficients(config, table, Normalizer(1, 0, 0, torch.tensor([0])), nothing, nothing)
    assert float(formed.terms.loss) == 0.0
    assert formed.logprobs.shape == (0,)


def test_metrics_are_sums_over_tokens() -> None:
    batch = make_batch()
    config = LossConfig.of("grpo", kl_estimator="k1")
    terms = loss_terms(
        config, make_table(batch), make_normalizer(batch),
        column(batch, "logprob"), column(batch, "entropy"),
    )  # fmt: skip
    assert terms.kl_sum is not None
    assert terms.entropy_sum is not None
    tokens = list(itertools.chain.from_iterable(batch))
    assert float(terms.kl_sum) == pytest.approx(sum(t.logprob - t.ref for t in tokens))
    assert float(terms.entropy_sum) == pytest.approx(sum(t.entropy for t in tokens))
    assert float(terms.policy) == float(terms.loss)
    without = replace(make_table(batch), ref_logprobs=None)
    bare = loss_terms(config, without, make_normalizer(batch), column(batch, "logprob"))
    assert bare.kl_sum is None
    assert bare.entropy_sum is None
    assert bare.tis_weight_sum is None


def test_clipped_entry_with_an_overflowing_ratio_has_zero_gradient() -> None:
    table = EntryTable(torch.tensor([0]), torch.tensor([1.0]), torch.tensor([-200.0]))
    formed = coefficients(LossConfig.of("grpo"), table, Normalizer(1, 1, 1, torch.tensor([1])), torch.tensor([-1.0]))
    assert formed.logprobs.dtype == torch.float32
    assert formed.logprobs.tolist() == [0.0]
    assert float(formed.terms.loss) == pytest.approx(-1.2)


def test_zero_weight() -> None:
    grpo = LossConfig.of("grpo")
    assert has_zero_weight(grpo, 0.0)
    assert has_zero_weight(grpo, [0.0, -0.0])
    assert has_zero_weight(grpo, torch.zeros(3))
    assert not has_zero_weight(grpo, 1e-300)
    assert not has_zero_weight(grpo, [0.0, 1e-300])
    assert not has_zero_weight(grpo, torch.tensor([0.0, -1e-30]))
    assert not has_zero_weight(LossConfig.of("sft"), 0.0)
    assert not has_zero_weight(LossConfig.of("grpo", kl_coef=1e-9), 0.0)
    assert not has_zero_weight(LossConfig.of("grpo", entropy_coef=1e-9), 0.0)


@pytest.mark.parametrize("policy_loss", ["grpo", "dapo", "gspo", "cispo"])
def test_zero_weight_means_zero_coefficients(policy_loss: str) -> None:
    batch = make_batch()
    batch[1] = [replace(token, advantage=0.0) for token in batch[1]]
    config = LossConfig.of(policy_loss, tis_cap=2.0)
    assert has_zero_weight(config, [token.advantage for token in batch[1]])
    formed = coefficients(
        config, make_table(batch), make_normalizer(batch), column(batch, "logprob"),
        trajectories=[1],
    )  # fmt: skip
    assert formed.logprobs.shape == (LENGTHS[1],)
    assert not formed.logprobs.any()


def test_defaults_of_each_loss() -> None:
    assert LossConfig.of("ppo") == LossConfig.of("grpo", clip_high=None) == LossConfig()
    dapo = LossConfig.of("dapo")
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)
    assert dapo.aggregation is Aggregation.TOKEN_MEAN
    assert LossConfig.of("dapo", clip_high=0.3).clip_high == 0.3
    config = LossConfig(policy_loss="gspo", aggregation="token-mean", kl_estimator="k2")  # type: ignore[arg-type]
    assert config.policy_loss is PolicyLoss.GSPO
    assert config.kl_estimator is KLEstimator.K2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_loss": "gppo"}, "policy loss: expected one of grpo, dapo"),
        ({"aggregation": "mean"}, "aggregation: expected one of token-mean"),
        ({"kl_estimator": "k4"}, "kl estimator: expected one of k1"),
        ({"clip_low": -0.1}, "clip range"),
        ({"clip_c": 1.1}, "more than 1"),
        ({"tis_cap": 0.0}, "tis_cap"),
        ({"kl_coef": math.nan}, "kl_coef: expected a finite"),
        ({"policy_loss": "sft", "tis_cap": 2.0}, "tis_cap has no effect on sft"),
        ({"policy_loss": "cispo", "clip_c": 3.0}, "clip_c has no effect on cispo"),
    ],
)
def test_bad_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**options)


def test_missing_inputs_are_named() -> None:
    batch = make_batch()
    table = replace(make_table(batch), ref_logprobs=None, rollout_logprobs=None)
    logprobs = column(batch, "logprob")
    for options, message in (
        ({"kl_coef": 0.1}, "reference log-probabilities"),
        ({"entropy_coef": 0.1}, "no entropy"),
        ({"tis_cap": 2.0}, "rollout log-probabilities"),
    ):
        config = LossConfig.of("grpo", **options)
        for call in (loss_terms, coefficients):
            with pytest.raises(ValueError, match=message):
                call(config, table, make_normalizer(batch), logprobs)
    with pytest.raises(ValueError, match="one log-probability for each of 61 entries"):
        loss_terms(LossConfig.of("grpo"), table, make_normalizer(batch), logprobs[1:])
    with pytest.raises(ValueError, match="entry table, advantages"):
        replace(table, advantages=logprobs[1:])
    with pytest.raises(AssertionError, match="sorted"):
        replace(table, trajectory=table.trajectory.flip(0))

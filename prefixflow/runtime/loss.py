"""Policy losses on flat entries: one entry per trained token of each trajectory.

The formulas are in docs/numerics.md.

    loss = sum over entries e of  weight_e * (policy_e + kl_coef * kl_e - entropy_coef * entropy_e)

Invariants:

* The weights come from logical counts over the data-parallel group, fixed before the step
  (`Normalizer`). They do not know how trajectories were cut, shared or packed, so neither does the
  gradient.
* The loss is a sum over trajectories: what several calls give for disjoint sets of trajectories
  adds up to what one call gives for all of them, and the sum over data-parallel ranks is the loss
  of the step (gradients are summed, not averaged).
* All entries of a trajectory are in one table, and a call takes a trajectory whole: sequence-level
  ratios need all of its log-probabilities.
* Only `logprobs` and `entropy` carry gradients; advantages, old, reference and rollout
  log-probabilities and every importance weight are constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class PolicyLoss(str, Enum):
    """`--policy-loss`; `grpo` is the clipped PPO objective, `dapo` has other defaults."""

    GRPO = "grpo"
    DAPO = "dapo"
    GSPO = "gspo"
    CISPO = "cispo"
    SFT = "sft"


class Aggregation(str, Enum):
    """`--loss-aggregation`: the weight of an entry, see `Normalizer.entry_weights`."""

    TOKEN_MEAN = "token-mean"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"


class KLEstimator(str, Enum):
    """`--kl-estimator` (http://joschu.net/blog/kl-approx.html)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


# An infinite ratio in float32 would make the zero gradient of a clipped entry NaN (0 * inf).
_MAX_LOG_RATIO = 80.0

_ALIASES = {"ppo": "grpo"}
_DEFAULTS: dict[PolicyLoss, dict[str, Any]] = {
    PolicyLoss.GRPO: {},
    PolicyLoss.DAPO: {"aggregation": Aggregation.TOKEN_MEAN, "clip_high": 0.28},
    PolicyLoss.GSPO: {},
    PolicyLoss.CISPO: {"aggregation": Aggregation.TOKEN_MEAN},
    PolicyLoss.SFT: {"aggregation": Aggregation.TOKEN_MEAN},
}


@dataclass(frozen=True, slots=True)
class LossConfig:
    """What the loss is. `LossConfig.of` fills in the usual values of a named loss.

    clip_low, clip_high: epsilons of the ratio's bounds 1 - clip_low and 1 + clip_high.
    clip_c: bound on the ratio where the advantage is negative (dual clip), None for none.
    kl_coef, kl_estimator: penalty for leaving the reference policy.
    entropy_coef: bonus for entropy.
    tis_cap: cap on the truncated importance weight exp(old - rollout) of each token, None for no
        weight.
    """

    policy_loss: PolicyLoss = PolicyLoss.GRPO
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = KLEstimator.K3
    entropy_coef: float = 0.0
    tis_cap: float | None = None

    def __post_init__(self) -> None:
        name = _ALIASES.get(self.policy_loss, self.policy_loss)
        object.__setattr__(self, "policy_loss", _member(PolicyLoss, name, "policy loss"))
        for field, kind in (("aggregation", Aggregation), ("kl_estimator", KLEstimator)):
            value = _member(kind, getattr(self, field), field.replace("_", " "))
            object.__setattr__(self, field, value)
        self._check_numbers()
        self._check_effects()

    @classmethod
    def of(cls, policy_loss: str, **options: Any) -> LossConfig:
        """The named loss with its own defaults, replaced by the options that are not None."""
        kind = _member(PolicyLoss, _ALIASES.get(policy_loss, policy_loss), "policy loss")
        given = {name: value for name, value in options.items() if value is not None}
        return cls(policy_loss=kind, **{**_DEFAULTS[kind], **given})

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0.0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0.0

    def _check_numbers(self) -> None:
        for field in ("clip_low", "clip_high", "kl_coef", "entropy_coef", "clip_c", "tis_cap"):
            value = getattr(self, field)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{field}: expected a finite number, got {value}.")
        if self.clip_low < 0.0 or self.clip_high < 0.0:
            raise ValueError(
                f"clip range: expected epsilons of at least 0, got low {self.clip_low}, high {self.clip_high}."
            )
        if self.clip_c is not None and self.clip_c <= 1.0 + self.clip_high:
            raise ValueError(
                f"clip_c: expected more than 1 + clip_high = {1.0 + self.clip_high}, got "
                f"{self.clip_c}; 3 is usual, None turns the dual clip off."
            )
        if self.tis_cap is not None and self.tis_cap <= 0.0:
            raise ValueError(f"tis_cap: expected a positive cap, got {self.tis_cap}; None turns it off.")

    def _check_effects(self) -> None:
        is_sft = self.policy_loss is PolicyLoss.SFT
        if self.clip_c is not None and (is_sft or self.policy_loss is PolicyLoss.CISPO):
            raise ValueError(
                f"clip_c has no effect on {self.policy_loss.value}, which has no clipped minimum; leave it out."
            )
        if self.tis_cap is not None and is_sft:
            raise ValueError("tis_cap has no effect on sft, which has no rollout policy; leave it out.")


def has_zero_weight(config: LossConfig, advantages: float | Sequence[float] | Tensor) -> bool:
    """True when a trajectory's rows have an exactly zero gradient.

    Such rows may leave the backward problem; they stay in every normaliser and count. Router terms
    are not seen here: the caller asks only where there are none.

    advantages: one number, or one per trained token.
    """
    if config.policy_loss is PolicyLoss.SFT or config.needs_reference or config.needs_entropy:
        return False
    if isinstance(advantages, Tensor):
        return not bool(advantages.any())
    if isinstance(advantages, Sequence):
        return all(advantage == 0.0 for advantage in advantages)
    return advantages == 0.0


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Logical counts, over the whole data-parallel group but for `tokens_per_trajectory`.

    num_trajectories: trajectories of the step, those without a trained token included.
    num_tokens: trained tokens of the step.
    max_tokens: the constant divisor of seq-mean-token-sum-norm: the maximum response length where
        one is configured, else the most trained tokens of any trajectory of the step.
    tokens_per_trajectory: [n] trained tokens of this rank's trajectories, addressed by
        `EntryTable.trajectory`.
    """

    num_trajectories: int
    num_tokens: int
    max_tokens: int
    tokens_per_trajectory: Tensor

    def entry_weights(self, aggregation: Aggregation, trajectory: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights [e] of entries that belong to the trajectories `trajectory` [e].

        token-mean: 1 / num_tokens
        seq-mean-token-mean: 1 / (num_trajectories * tokens of the trajectory)
        seq-mean-token-sum: 1 / num_trajectories
        seq-mean-token-sum-norm: 1 / (num_trajectories * max_tokens)
        """
        if aggregation is Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return 1.0 / (self.num_trajectories * self.tokens_per_trajectory[trajectory].to(dtype))
        divisor = {
            Aggregation.TOKEN_MEAN: self.num_tokens,
            Aggregation.SEQ_MEAN_TOKEN_SUM: self.num_trajectories,
            Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: self.num_trajectories * self.max_tokens,
        }[aggregation]
        # Nothing trained anywhere in the step leaves no entry to weigh, and a divisor of zero.
        return torch.full(trajectory.shape, 1.0 / max(divisor, 1), dtype=dtype, device=trajectory.device)


@dataclass(frozen=True, slots=True)
class EntryTable:
    """Constants of this rank's E entries, sorted by trajectory.

    trajectory: [E] int64, index of the entry's trajectory on this rank, not decreasing; a
        trajectory without a trained token has no entry.
    advantages: [E].
    old_logprobs: [E], None for the policy at the start of the step, when this step's
        log-probabilities are those.
    ref_logprobs: [E] of the reference policy, needed by the KL term only.
    rollout_logprobs: [E] as the rollout engine computed them, needed by `tis_cap` only.
    """

    trajectory: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.trajectory.shape
        assert self.trajectory.dim() == 1, f"trajectory indices of shape {tuple(shape)}"
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value.shape != shape:
                raise ValueError(
                    f"entry table, {field.name}: expected one value for each of {shape[0]} "
                    f"entries, got shape {tuple(value.shape)}."
                )
        # On a GPU the check would wait for the device.
        if not self.trajectory.is_cuda:
            assert bool((self.trajectory.diff() >= 0).all()), "entries are not sorted by trajectory"

    def __len__(self) -> int:
        return self.trajectory.shape[0]

    def entries_of(self, trajectories: Sequence[int] | Tensor) -> Tensor:
        """Indices [e] of all entries of the given trajectories (distinct, ascending)."""
        wanted = torch.as_tensor(trajectories, dtype=torch.int64, device=self.trajectory.device)
        starts = torch.searchsorted(self.trajectory, wanted)
        counts = torch.searchsorted(self.trajectory, wanted, right=True) - starts
        offsets = starts - (counts.cumsum(0) - counts)
        repeated = offsets.repeat_interleave(counts)
        return repeated + torch.arange(repeated.shape[0], device=repeated.device)

    def take(self, entries: Tensor) -> EntryTable:
        """The table of the entries [e] only."""
        taken: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            taken[field.name] = None if column is None else column[entries]
        return EntryTable(**taken)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Contributions to the loss and sums for the metrics, all 0-dimensional tensors.

    `+` joins the contributions of disjoint sets of trajectories.

    loss: the contribution to the step's loss; carries the gradient when it comes from `loss_terms`.
    policy: the part of `loss` that is neither KL nor entropy.
    num_entries: trained tokens seen.
    num_clipped: tokens whose ratio the clip range (for CISPO: the weight's bounds) has replaced.
    num_dual_clipped: tokens whose loss `clip_c` has bounded.
    kl_sum, entropy_sum: sums over tokens of the chosen estimator and of the entropy, None where not
        known.
    tis_weight_sum: sum over tokens of the truncated importance weights, None without `tis_cap`.
    """

    loss: Tensor
    policy: Tensor
    num_entries: Tensor
    num_clipped: Tensor
    num_dual_clipped: Tensor
    kl_sum: Tensor | None
    entropy_sum: Tensor | None
    tis_weight_sum: Tensor | None

    def __add__(self, other: LossTerms) -> LossTerms:
        sums: dict[str, Any] = {}
        for field in fields(self):
            a, b = getattr(self, field.name), getattr(other, field.name)
            sums[field.name] = None if a is None or b is None else a + b
        return LossTerms(**sums)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """d loss / d logprob [e] and d loss / d entropy [e] of the entries [e] of a table.

    entropy: None where the loss has no entropy term.
    terms: the loss they are the derivatives of, detached.
    """

    entries: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    terms: LossTerms


def loss_terms(
    config: LossConfig,
    table: EntryTable,
    normalizer: Normalizer,
    logprobs: Tensor,
    entropy: Tensor | None = None,
    *,
    trajectories: Sequence[int] | Tensor | None = None,
) -> LossTerms:
    """The contribution of some trajectories to the loss, as a function of `logprobs` [E].

    logprobs, entropy: [E], in table order, float32 or float64, which is the dtype of everything
        computed here. Values of other trajectories are not read.
    trajectories: indices, distinct and ascending; None for all.

    Raises ValueError for shapes that disagree and for an input that the configuration needs and
    neither the table nor the call gives.
    """
    _check_inputs(config, table, logprobs, entropy)
    if trajectories is not None:
        entries = table.entries_of(trajectories)
        table, logprobs = table.take(entries), logprobs[entries]
        entropy = None if entropy is None else entropy[entries]
    return _terms(config, table, normalizer, logprobs, entropy)


def coefficients(
    config: LossConfig,
    table: EntryTable,
    normalizer: Normalizer,
    logprobs: Tensor,
    entropy: Tensor | None = None,
    *,
    trajectories: Sequence[int] | Tensor | None = None,
) -> Coefficients:
    """The derivatives of `loss_terms`, same arguments, for the entries of those trajectories only.

    Add the coefficients of entries that share a row, and give the sum to `RowLogprobs.backward`.
    """
    _check_inputs(config, table, logprobs, entropy)
    if trajectories is None:
        entries = torch.arange(len(table), device=table.trajectory.device)
    else:
        entries = table.entries_of(trajectories)
    with torch.enable_grad():
        leaves = [logprobs.detach()[entries].requires_grad_()]
        if entropy is not None and config.needs_entropy:
            leaves.append(entropy.detach()[entries].requires_grad_())
        row_entropy = leaves[1] if len(leaves) == 2 else None
        if row_entropy is None and entropy is not None:
            row_entropy = entropy.detach()[entries]
        terms = _terms(config, table.take(entries), normalizer, leaves[0], row_entropy)
        grads = torch.autograd.grad(terms.loss, leaves)
    terms = replace(terms, loss=terms.loss.detach())
    return Coefficients(entries, grads[0], grads[1] if len(grads) == 2 else None, terms)


def _terms(
    config: LossConfig,
    table: EntryTable,
    normalizer: Normalizer,
    logprobs: Tensor,
    entropy: Tensor | None,
) -> LossTerms:
    dtype = logprobs.dtype
    weights = normalizer.entry_weights(config.aggregation, table.trajectory, dtype)
    old = logprobs.detach() if table.old_logprobs is None else table.old_logprobs.to(dtype)
    policy = _policy_terms(config, table, normalizer, logprobs, old)
    losses = policy.losses
    tis_weight_sum = None
    if config.tis_cap is not None:
        assert table.rollout_logprobs is not None
        tis_weights = (old - table.rollout_logprobs.to(dtype)).exp().clamp(max=config.tis_cap)
        losses = losses * tis_weights
        tis_weight_sum = tis_weights.sum()
    policy_loss = (weights * losses).sum()
    loss = policy_loss
    kl_sum = entropy_sum = None
    if table.ref_logprobs is not None:
        kl = _kl(config.kl_estimator, logprobs, table.ref_logprobs.to(dtype))
        kl_sum = kl.detach().sum()
        if config.needs_reference:
            loss = loss + config.kl_coef * (weights * kl).sum()
    if entropy is not None:
        entropy_sum = entropy.detach().sum()
        if config.needs_entropy:
            loss = loss - config.entropy_coef * (weights * entropy).sum()
    return LossTerms(
        loss=loss,
        policy=policy_loss.detach(),
        num_entries=torch.tensor(len(table), device=logprobs.device),
        num_clipped=policy.is_clipped.sum(),
        num_dual_clipped=policy.is_dual_clipped.sum(),
        kl_sum=kl_sum,
        entropy_sum=entropy_sum,
        tis_weight_sum=tis_weight_sum,
    )


@dataclass(frozen=True, slots=True)
class _PolicyTerms:
    """Unweighted losses [e] and the entries [e] that a clip has changed."""

    losses: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


def _policy_terms(
    config: LossConfig, table: EntryTable, normalizer: Normalizer, logprobs: Tensor, old: Tensor
) -> _PolicyTerms:
    nowhere = torch.zeros_like(table.trajectory, dtype=torch.bool)
    if config.policy_loss is PolicyLoss.SFT:
        return _PolicyTerms(-logprobs, nowhere, nowhere)
    advantages = table.advantages.to(logprobs.dtype)
    log_ratios = logprobs - old
    if config.policy_loss is PolicyLoss.CISPO:
        ratios = log_ratios.detach().exp()
        bounded = _clip(ratios, config)
        return _PolicyTerms(-bounded * advantages * logprobs, bounded != ratios, nowhere)
    if config.policy_loss is PolicyLoss.GSPO:
        sequence = _trajectory_means(log_ratios.detach(), table.trajectory, normalizer)
        log_ratios = sequence + (logprobs - logprobs.detach())
    ratios = log_ratios.clamp(max=_MAX_LOG_RATIO).exp()
    return _clipped_objective(config, advantages, ratios)


def _clipped_objective(config: LossConfig, advantages: Tensor, ratios: Tensor) -> _PolicyTerms:
    free, bounded = -advantages * ratios, -advantages * _clip(ratios, config)
    is_clipped = bounded > free
    losses = torch.where(is_clipped, bounded, free)
    if config.clip_c is None:
        return _PolicyTerms(losses, is_clipped, torch.zeros_like(is_clipped))
    ceiling = -advantages * config.clip_c
    is_dual_clipped = (advantages < 0) & (losses > ceiling)
    return _PolicyTerms(torch.where(is_dual_clipped, ceiling, losses), is_clipped, is_dual_clipped)


def _clip(ratios: Tensor, config: LossConfig) -> Tensor:
    return ratios.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)


def _trajectory_means(values: Tensor, trajectory: Tensor, normalizer: Normalizer) -> Tensor:
    """The mean of `values` [e] over each entry's trajectory, [e]."""
    tokens = normalizer.tokens_per_trajectory
    sums = values.new_zeros(tokens.shape).index_add_(0, trajectory, values)
    # 0 / 0 for a trajectory without a trained token, which no entry reads.
    return (sums / tokens)[trajectory]


def _kl(estimator: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    gap = ref_logprobs - logprobs
    if estimator is KLEstimator.K1:
        return -gap
    if estimator is KLEstimator.K2:
        return 0.5 * gap.square()
    return gap.expm1() - gap


def _check_inputs(config: LossConfig, table: EntryTable, logprobs: Tensor, entropy: Tensor | None) -> None:
    for name, values in (("log-probability", logprobs), ("entropy", entropy)):
        if values is not None and values.shape != table.trajectory.shape:
            raise ValueError(
                f"loss: expected one {name} for each of {len(table)} entries, got shape {tuple(values.shape)}."
            )
    if config.needs_reference and table.ref_logprobs is None:
        raise ValueError(
            f"loss: kl_coef is {config.kl_coef} but there are no reference log-probabilities; run "
            "the reference pass or give ref_logprobs, or set kl_coef to 0."
        )
    if config.needs_entropy and entropy is None:
        raise ValueError(
            f"loss: entropy_coef is {config.entropy_coef} but no entropy was computed; score the rows with entropy."
        )
    if config.tis_cap is not None and table.rollout_logprobs is None:
        raise ValueError(
            f"loss: tis_cap is {config.tis_cap} but there are no rollout log-probabilities; give "
            "rollout_logprobs in the trajectory file, or leave tis_cap out."
        )


def _member(kind: type[Enum], value: Any, what: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise ValueError(f"{what}: expected one of {known}, got {value!r}.") from None

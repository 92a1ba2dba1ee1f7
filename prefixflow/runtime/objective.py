"""The loss of one data-parallel rank in one step, fed by F and read by B.

F records log-probabilities of entries; B asks for the loss gradient of its rows. A trajectory's coefficients are formed
when the first B needs them: by then every F of its path has run, so sequence-level ratios are exact without another
pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from prefixflow.runtime.loss import (
    EntryTable,
    LossConfig,
    LossTerms,
    Normalizer,
    coefficients,
)
from prefixflow.trajectories.types import LOGPROB_FIELDS, Trajectory


@dataclass(frozen=True, slots=True)
class RowGradients:
    """d loss / d logprob [R] and d loss / d entropy [R] (None without entropy term) of a microbatch's rows."""

    logprobs: Tensor
    entropy: Tensor | None

    def take(self, rows: Tensor) -> RowGradients:
        """Of the rows [r] only."""
        return RowGradients(self.logprobs[rows], None if self.entropy is None else self.entropy[rows])


class Entries:
    """Numbers the trained (trajectory, token) pairs of the chosen trajectories, those of a trajectory together."""

    def __init__(self, trajectories: Sequence[Trajectory], chosen: Sequence[int]) -> None:
        self.chosen = tuple(chosen)
        counts = [trajectories[i].num_trained for i in self.chosen]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self.counts = np.asarray(counts, np.int64)
        self._first_token = np.full(len(trajectories), -1, np.int64)
        lengths = [len(trajectories[i]) for i in self.chosen]
        self._first_token[list(self.chosen)] = np.cumsum([0, *lengths])[:-1]
        trained = np.concatenate([np.zeros(0, bool), *(trajectories[i].loss_mask for i in self.chosen)])
        self._entry_of_token = np.where(trained, np.cumsum(trained) - 1, -1)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def index(self, trajectory: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Entry numbers [E] of (trajectory, token) pairs; pairs of a trajectory may stand in any order."""
        first = self._first_token[trajectory]
        assert (first >= 0).all(), "a row belongs to a trajectory that this rank does not run"
        index = self._entry_of_token[first + token]
        assert (index >= 0).all(), "a row belongs to a token that is not trained"
        return index

    def gather(self, trajectories: Sequence[Trajectory], name: str) -> np.ndarray:
        """The per-token field `name` at the trained tokens, [entries]; NaN where a trajectory has none."""
        parts = [np.zeros(0)]
        for i, count in zip(self.chosen, self.counts, strict=True):
            values = getattr(trajectories[i], name)
            mask = trajectories[i].loss_mask
            parts.append(np.full(count, np.nan) if values is None else values[mask])
        return np.concatenate(parts)


class RowObjective(Protocol):
    """What running a step asks of its loss.

    vocab_size: real tokens of the vocabulary. needs_entropy: whether F computes entropies too.
    """

    vocab_size: int
    needs_entropy: bool

    def entry_index(self, trajectory: np.ndarray, token: np.ndarray) -> Tensor:
        """Numbers [E] by which `record` and `row_gradients` know (trajectory, token) pairs."""
        ...

    def record(self, entry_index: Tensor, logprobs: Tensor, entropy: Tensor | None) -> None:
        """F has scored these entries, [E] each."""
        ...

    def row_gradients(self, entry_index: Tensor, entry_row: Tensor, num_rows: int) -> RowGradients:
        """B asks for the loss gradient of its rows; entry e stands at row `entry_row[e]`."""
        ...

    def finish(self) -> None:
        """All operations of the pass have run, on a rank that scores."""
        ...


class ScoredEntries(ABC):
    """Log-probabilities of entries as F records them, and their loss gradients, formed when B needs them.

    chosen: indices of the trajectories of this rank.
    dtype: of log-probabilities, float64 or float32.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        chosen: Sequence[int],
        *,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        needs_entropy: bool,
    ) -> None:
        self.entries = Entries(trajectories, chosen)
        self.vocab_size = vocab_size
        self.needs_entropy = needs_entropy
        self.logprobs = torch.full((len(self.entries),), torch.nan, dtype=dtype, device=device)
        self.entropy = torch.zeros_like(self.logprobs) if needs_entropy else None
        self._device = device
        self._recorded = np.zeros(len(self.entries), bool)
        self._grad_logprobs = torch.zeros_like(self.logprobs)
        self._grad_entropy = torch.zeros_like(self.logprobs) if needs_entropy else None

    def entry_index(self, trajectory: np.ndarray, token: np.ndarray) -> Tensor:
        """Entry numbers of (trajectory, token) pairs."""
        return torch.from_numpy(self.entries.index(trajectory, token)).to(self._device)

    def record(self, entry_index: Tensor, logprobs: Tensor, entropy: Tensor | None) -> None:
        """Keep the log-probabilities (and entropies) of these entries; each entry is recorded once."""
        index = entry_index.cpu().numpy()
        assert not self._recorded[index].any(), "an entry was scored twice"
        self._recorded[index] = True
        self.logprobs[entry_index] = logprobs.to(self.logprobs.dtype)
        if self.entropy is not None:
            assert entropy is not None
            self.entropy[entry_index] = entropy.to(self.logprobs.dtype)

    def row_gradients(self, entry_index: Tensor, entry_row: Tensor, num_rows: int) -> RowGradients:
        """Loss gradient of rows: the sum over the entries that share a row."""
        owners = np.unique(np.searchsorted(self.entries.starts, entry_index.cpu().numpy(), side="right") - 1)
        with_entropy = self._form(owners)
        grad_logprobs = self.logprobs.new_zeros(num_rows)
        grad_logprobs.index_add_(0, entry_row, self._grad_logprobs[entry_index])
        if not with_entropy:
            return RowGradients(grad_logprobs, None)
        assert self._grad_entropy is not None
        grad_entropy = self.logprobs.new_zeros(num_rows)
        grad_entropy.index_add_(0, entry_row, self._grad_entropy[entry_index])
        return RowGradients(grad_logprobs, grad_entropy)

    def trajectory_logprobs(self) -> dict[int, np.ndarray]:
        """Log-probabilities of each trajectory's trained tokens, by trajectory index."""
        values = self.logprobs.double().cpu().numpy()
        starts = self.entries.starts
        return {i: values[starts[k] : starts[k + 1]] for k, i in enumerate(self.entries.chosen)}

    @abstractmethod
    def finish(self) -> None:
        """All operations of the pass have run."""

    @abstractmethod
    def _form(self, owners: np.ndarray) -> bool:
        """Form the gradients of the entries of these trajectories (places in `chosen`), where that has not happened yet;
        whether any entropy has one."""


class Objective(ScoredEntries):
    """Our own losses: a trajectory's coefficients are formed once its whole path is scored.

    chosen: indices of the trajectories that this rank runs.
    config: None for a pass that only scores (old-policy, reference).
    dtype: of log-probabilities, float64 or float32.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        chosen: Sequence[int],
        *,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        config: LossConfig | None = None,
        normalizer: Normalizer | None = None,
        with_entropy: bool = False,
    ) -> None:
        super().__init__(
            trajectories,
            chosen,
            vocab_size=vocab_size,
            dtype=dtype,
            device=device,
            needs_entropy=with_entropy or (config is not None and config.needs_entropy),
        )
        self._config = config
        self._normalizer = normalizer
        self._formed = np.zeros(len(self.entries.chosen), bool)
        self.terms: LossTerms | None = None
        self._table = self._entry_table(trajectories) if config is not None else None

    def finish(self) -> None:
        """Every trajectory's coefficients were formed by the backwards that needed them."""

    def _form(self, owners: np.ndarray) -> bool:
        assert self._config is not None
        owners = owners[~self._formed[owners]]
        if len(owners):
            self._form_coefficients(owners)
        return self._config.needs_entropy

    def _form_coefficients(self, owners: np.ndarray) -> None:
        assert self._config is not None
        assert self._table is not None
        assert self._normalizer is not None
        self._formed[owners] = True
        self._fill_old_logprobs(owners)
        formed = coefficients(
            self._config,
            self._table,
            self._normalizer,
            self.logprobs,
            self.entropy,
            trajectories=owners.tolist(),
        )
        known = self._recorded[formed.entries.cpu().numpy()].all()
        assert known, "a backward ran before a forward on the same trajectory's path"
        self._grad_logprobs[formed.entries] = formed.logprobs
        if formed.entropy is not None:
            assert self._grad_entropy is not None
            self._grad_entropy[formed.entries] = formed.entropy
        self.terms = formed.terms if self.terms is None else self.terms + formed.terms

    def _fill_old_logprobs(self, owners: np.ndarray) -> None:
        """A trajectory without old log-probabilities beside some with: its old policy is the present one."""
        assert self._table is not None
        old = self._table.old_logprobs
        if old is not None:
            entries = self._table.entries_of(owners.tolist())
            old[entries] = torch.where(old[entries].isnan(), self.logprobs[entries], old[entries])

    def _entry_table(self, trajectories: Sequence[Trajectory]) -> EntryTable:
        owner = np.repeat(np.arange(len(self.entries.chosen)), self.entries.counts)
        fields = {}
        for name in LOGPROB_FIELDS:
            known = [getattr(trajectories[i], name) is not None for i in self.entries.chosen]
            if any(known) if name == "old_logprobs" else known and all(known):
                fields[name] = self._column(trajectories, name)
        return EntryTable(
            trajectory=torch.from_numpy(owner.astype(np.int64)).to(self._device),
            advantages=self._column(trajectories, "advantages"),
            **fields,
        )

    def _column(self, trajectories: Sequence[Trajectory], name: str) -> Tensor:
        values = torch.from_numpy(np.ascontiguousarray(self.entries.gather(trajectories, name)))
        return values.to(device=self._device, dtype=self.logprobs.dtype)


def logical_normalizer(
    trajectories: Sequence[Trajectory],
    chosen: Sequence[int],
    device: torch.device,
    max_tokens: int | None = None,
) -> Normalizer:
    """Counts of the whole step from the whole batch (every rank has it), `chosen` addressed by entry tables."""
    counts = [t.num_trained for t in trajectories]
    return Normalizer(
        num_trajectories=len(trajectories),
        num_tokens=sum(counts),
        max_tokens=max_tokens or max(counts, default=0),
        tokens_per_trajectory=torch.tensor([counts[i] for i in chosen], dtype=torch.int64).to(device),
    )

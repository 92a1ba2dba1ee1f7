"""Our own losses as a framework's loss function: of one loss call, on log-probabilities in full length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prefixflow.runtime.called import LossFunction
from prefixflow.runtime.loss import EntryTable, LossConfig, loss_terms
from prefixflow.runtime.objective import Entries, logical_normalizer
from prefixflow.trajectories import Trajectory
from prefixflow.trajectories.types import LOGPROB_FIELDS


def own_loss(trajectories: Sequence[Trajectory], joint: Sequence[int], config: LossConfig) -> LossFunction:
    """The part of the batch's loss that a call's trajectories have."""

    def call(number: int, logprobs: list[Tensor], entropies: list[Tensor] | None) -> Tensor:
        members = [i for i, its_call in enumerate(joint) if its_call == number]
        assert [len(x) for x in logprobs] == [len(trajectories[i]) for i in members]
        entries = Entries(trajectories, members)

        def column(name: str) -> Tensor:
            return torch.from_numpy(entries.gather(trajectories, name)).to(logprobs[0].dtype)

        def trained(values: Sequence[Tensor]) -> Tensor:
            return torch.cat([v[trajectories[i].loss_mask] for i, v in zip(members, values, strict=True)])

        given = [name for name in LOGPROB_FIELDS if getattr(trajectories[0], name) is not None]
        table = EntryTable(
            trajectory=torch.from_numpy(np.repeat(np.arange(len(members)), entries.counts)),
            advantages=column("advantages"),
            **{name: column(name) for name in given},
        )
        normalizer = logical_normalizer(trajectories, members, logprobs[0].device)
        entropy = None if entropies is None else trained(entropies)
        return loss_terms(config, table, normalizer, trained(logprobs), entropy).loss

    return call

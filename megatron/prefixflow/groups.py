"""The one file that reads Megatron's `parallel_state`: process groups as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from prefixflow.runtime.links import Channel


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of this rank. `model_parallel` is tensor x pipeline; `data_parallel` excludes context parallel ranks, which
    are `context`, and `data_context` is both.

    Experts regroup the ranks of a pipeline stage: `expert` holds different experts, `expert_tensor` shards of the same
    ones, `expert_data` copies of a shard; `expert_model_parallel` is expert x expert tensor x pipeline.
    `channels` are the groups that pipeline messages travel on; empty without pipeline parallelism.
    """

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data_parallel: dist.ProcessGroup
    data_context: dist.ProcessGroup
    context: dist.ProcessGroup
    model_parallel: dist.ProcessGroup
    expert: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    expert_data: dist.ProcessGroup
    expert_model_parallel: dist.ProcessGroup
    channels: Mapping[Channel, dist.ProcessGroup]

    @property
    def tensor_rank(self) -> int:
        return self.tensor.rank()

    @property
    def context_rank(self) -> int:
        return self.context.rank()

    @property
    def data_rank(self) -> int:
        return self.data_parallel.rank()

    @property
    def pipeline_rank(self) -> int:
        return self.pipeline.rank()

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pipeline, first stage first."""
        return tuple(dist.get_process_group_ranks(self.pipeline))


def current_groups(*, with_channels: bool = True) -> Groups:
    """Groups of the initialised `parallel_state`; collective with channels, since it makes the groups of the pipeline's."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    return Groups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=pipeline,
        data_parallel=parallel_state.get_data_parallel_group(),
        data_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
        context=parallel_state.get_context_parallel_group(),
        model_parallel=parallel_state.get_model_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        expert_data=parallel_state.get_expert_data_parallel_group(),
        expert_model_parallel=parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
        channels=_channels(pipeline) if with_channels else {},
    )


def planning_group(groups: Groups, expert_block: int) -> dist.ProcessGroup:
    """The ranks that run one plan together: those of one model, of every `expert_block` data-parallel ranks that exchange
    tokens. Collective over the world."""
    blocks: list[int] = [0] * dist.get_world_size()
    own = groups.data_rank // expert_block
    dist.all_gather_object(blocks, own)
    made = {}
    for block in sorted(set(blocks)):
        made[block] = dist.new_group([rank for rank, its_block in enumerate(blocks) if its_block == block])
    return made[own]


class SharedGroups:
    """Groups that several models of one process share, made once; what makes a group is collective over the world."""

    def __init__(self) -> None:
        self.groups = current_groups()
        self._planning: dict[int, dist.ProcessGroup] = {}

    def planning(self, expert_block: int) -> dist.ProcessGroup:
        """See `planning_group`."""
        if expert_block not in self._planning:
            self._planning[expert_block] = planning_group(self.groups, expert_block)
        return self._planning[expert_block]


_shared: SharedGroups | None = None


def shared_groups() -> SharedGroups:
    """Those of this `parallel_state`."""
    global _shared
    if _shared is None or _shared.groups.pipeline is not parallel_state.get_pipeline_model_parallel_group():
        _shared = SharedGroups()
    return _shared


def process_group_collection() -> ProcessGroupCollection:
    """What Megatron's schedules hand to `finalize_model_grads_func` where their caller has named no groups."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


def _channels(pipeline: dist.ProcessGroup) -> dict[Channel, dist.ProcessGroup]:
    """A group per channel over the ranks of `pipeline`: directions must not wait for each other."""
    if pipeline.size() == 1:
        return {}
    mine = tuple(dist.get_process_group_ranks(pipeline))
    everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    channels: dict[Channel, dist.ProcessGroup] = {}
    for ranks in sorted(set(everyone)):
        for channel in Channel:
            group = dist.new_group(ranks)
            if ranks == mine:
                channels[channel] = group
    return channels

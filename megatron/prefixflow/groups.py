"""The one file that reads Megatron's `parallel_state`: process groups as plain values."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of this rank. `model_parallel` is tensor x pipeline; `data_parallel` excludes context parallel ranks."""

    tensor: dist.ProcessGroup
    data_parallel: dist.ProcessGroup
    data_context: dist.ProcessGroup
    model_parallel: dist.ProcessGroup

    @property
    def tensor_rank(self) -> int:
        return self.tensor.rank()

    @property
    def data_rank(self) -> int:
        return self.data_parallel.rank()


def current_groups() -> Groups:
    """Groups of the initialised `parallel_state`."""
    return Groups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        data_parallel=parallel_state.get_data_parallel_group(),
        data_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
        model_parallel=parallel_state.get_model_parallel_group(),
    )

"""Start Megatron in this process: device layer, parallel groups, seeds. torch.distributed is up before."""

from __future__ import annotations

import logging
import random

import numpy as np
import torch
from megatron.core import parallel_state, rerun_state_machine, tensor_parallel

from megatron.prefixflow.device import install_cpu_device_layer
from megatron.prefixflow.groups import Groups, current_groups
from prefixflow.plan.layout import ParallelLayout
from prefixflow.runtime.world import destroy_subgroups


def start_session(layout: ParallelLayout, seed: int) -> Groups:
    """(Re)initialise Megatron's parallel state for `layout` and seed every generator; returns the groups.

    May be called again in the same world with another layout: the earlier groups are dropped.
    """
    install_cpu_device_layer()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        destroy_subgroups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    _switch_reruns_off()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return current_groups()


def _switch_reruns_off() -> None:
    """Set up Megatron's rerun state machine, disabled: DDP asks it at each reduction and would make one with a warning.

    Its constructor reports even this harmless mode as a warning, which is kept out of the run's output.
    """
    logger = logging.getLogger(rerun_state_machine.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        rerun_state_machine.destroy_rerun_state_machine()
        rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)
    finally:
        logger.setLevel(level)

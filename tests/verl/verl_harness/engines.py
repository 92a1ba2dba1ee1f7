"""verl's Megatron engines as its workers build them, and what comes out of a step of one. Run in a world of gloo processes."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from verl_harness import cpu


@dataclass(frozen=True)
class Layout:
    """Parallel sizes by verl's names shortened; what is left of the world is data parallel."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    transformer: Mapping[str, Any] = field(default_factory=dict)
    replay: str = "disabled"
    is_distributed: bool = True
    ours: Mapping[str, Any] = field(default_factory=dict)


def build(folder: Path, layout: Layout, vendor: str | None, *, is_first: bool = True) -> Any:
    """An initialised engine: verl's own (vendor None) or the one registered for a vendor.

    is_first: start model parallelism anew; else it is shared with the engines that are there, in the same layout.
    """
    cpu.install()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from verl.workers.engine import EngineRegistry

    if is_first:
        restart_model_parallelism()
    configs = engine_configs(folder, layout, vendor)
    with environment(vendor):
        engine_class = EngineRegistry.get_engine_cls("language_model", "megatron")
    with contextlib.redirect_stdout(io.StringIO()):
        engine = engine_class(**configs)
        # verl seeds Megatron's random states only where it sees an accelerator.
        model_parallel_cuda_manual_seed(configs["engine_config"].seed)
        engine.initialize()
    return engine


def restart_model_parallelism() -> None:
    """Forget the groups of the engines before."""
    from megatron.core import parallel_state

    from prefixflow.runtime.world import destroy_subgroups

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        destroy_subgroups()


def engine_configs(folder: Path, layout: Layout, vendor: str | None = None) -> dict[str, Any]:
    """The configurations that an engine is made of; a user of ours adds the external library, and settings where wanted."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.engine import EngineRouterReplayConfig

    engine = McoreEngineConfig(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        use_distributed_optimizer=layout.is_distributed,
        vanilla_mbridge=True,
        override_transformer_config=dict(layout.transformer),
        override_mcore_model_config={"prefixflow": dict(layout.ours)} if layout.ours else {},
        router_replay=EngineRouterReplayConfig(mode=layout.replay),
    )
    # The constructor takes half precision only, too coarse for a comparison of gradients.
    engine.__dict__["dtype"] = "float32"
    return {
        "model_config": HFModelConfig(
            path=str(folder),
            override_config={"attn_implementation": "eager"},
            external_lib=None if vendor is None else "megatron.prefixflow.integrations.verl",
        ),
        "engine_config": engine,
        "optimizer_config": McoreOptimizerConfig(
            lr=1e-2, clip_grad=1.0, total_training_steps=10, lr_decay_style="constant"
        ),
        "checkpoint_config": CheckpointConfig(),
    }


@contextlib.contextmanager
def environment(vendor: str | None) -> Any:
    """What a user sets; verl's own engine is registered for CUDA only."""
    given = {"VERL_ENGINE_DEVICE": "cuda"} if vendor is None else {"VERL_ENGINE_VENDOR": vendor}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def grpo_loss(*, loss_mode: str = "vanilla", **fields: Any) -> Any:
    """verl's own `ppo_loss` with a configuration as its workers bind it."""
    from verl.workers.config import McoreActorConfig
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    config = McoreActorConfig(
        strategy="megatron",
        rollout_n=4,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, dro_beta=0.1),
        **fields,
    )
    return partial(ppo_loss, config=config)


def gradients(engine: Any) -> dict[str, Tensor]:
    """Of every parameter of this rank, as they lie before the optimizer's step."""
    found = {}
    for number, chunk in enumerate(engine.module):
        for name, parameter in chunk.named_parameters():
            found[f"{number}.{name.removeprefix('module.')}"] = parameter.main_grad.detach().clone()
    return found

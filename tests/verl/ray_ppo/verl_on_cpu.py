"""External module of verl for a run of its PPO trainer on the CPU: the harness, and a rollout engine that draws random tokens.

The rollout takes the place of vLLM's, by verl's own registries. Everything else of the trainer is verl's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import ray
import torch.distributed as dist
from verl.workers.engine.megatron import utils as engine_utils
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from verl_harness.cpu import finish_install
from verl_harness.models import VOCAB_SIZE

finish_install()
# Megatron's random states are seeded where verl sees a device.
engine_utils.is_device_available = True

_init_process_group = dist.init_process_group


def _init_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """verl joins a backend for the CPU and one for its device, which are one here."""
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


dist.init_process_group = _init_gloo


class RandomRollout(base.BaseRollout):
    """The side of the trainer's workers: takes weights and drops them."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> None:
        self.config = config
        self.model_config = model_config

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Iterable[Any], **_: Any) -> None:
        for _weight in weights:
            pass


@ray.remote
class RandomServer:
    """Answers of 4 to 12 random tokens."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Any, **_: Any) -> TokenOutput:
        tokens = [self._random.randrange(2, VOCAB_SIZE) for _ in range(self._random.randint(4, 12))]
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 0)
        return TokenOutput(
            token_ids=tokens, log_probs=[-4.5] * len(tokens), stop_reason="completed", extra_fields=steps
        )

    async def sleep(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass

    async def clear_kv_cache(self) -> None:
        pass

    async def abort_all_requests(self, **_: Any) -> None:
        pass

    async def resume_generation(self) -> None:
        pass

    async def release_kv_cache(self) -> None:
        pass

    async def resume_kv_cache(self) -> None:
        pass


class RandomReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        actor: Any = RandomServer  # what ray.remote made of it
        self._server_handle = actor.options(num_cpus=0).remote(self.replica_rank)
        self.servers = [self._server_handle]
        self._server_address = f"random-{self.replica_rank}"


base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.RandomRollout"
RolloutReplicaRegistry.register("vllm", lambda: RandomReplica)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """A reward between 0 and 1 that differs between answers."""
    return sum(map(ord, solution_str)) % 7 / 7

"""verl's Megatron engine with shared prefixes computed once (verl 0.9.1).

Importing this module registers `PrefixReuseEngine` for the vendor `prefixflow`. verl imports it by its own options
(`external_lib` of the model, or `VERL_USE_EXTERNAL_MODULES`) and takes it where `VERL_ENGINE_VENDOR=prefixflow` is set; a
user's `strategy: megatron` stays. docs/integrations/verl.md has the lines.

Everything but the schedule is verl's own: model, optimizer, microbatches, loss, metrics, checkpoints, export. For the length
of one `forward_backward_batch` verl's module finds `megatron.prefixflow.forward_backward` where it asks Megatron for its
schedule.

**Loss calls.** verl divides its losses by counts of the whole batch, so the losses of samples add up, and each sample is a loss
call of its own: a backward then waits for no other sample. Losses that read their microbatch as a whole
(`splits_into_samples`) are called once for each of verl's microbatches.

Seams to verl: `UPSTREAM`, which tests/verl checks name by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id
from verl.utils.megatron.router_replay_patch import RouterReplay
from verl.utils.megatron.router_replay_patch import RouterReplayAction as Action
from verl.utils.megatron.router_replay_utils import is_moe_layer
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from megatron.prefixflow.adapter import SequenceInput, SequenceScores
from megatron.prefixflow.attach import enable_prefix_reuse
from megatron.prefixflow.drop_in import forward_backward

UPSTREAM = {
    "MegatronEngine._build_megatron_module": "(self)",
    "MegatronEngine.forward_backward_batch": "(self, data, loss_function, forward_only=False)",
    "MegatronEngine._routed_num_tokens": "(self, data)",
    "MegatronEngineWithLMHead.postprocess_micro_batch_func": (
        "(self, output, data, forward_only, loss_function, local_cp_size=None)"
    ),
    "get_forward_backward_func": "(pp_size=None, vp_size=None)",
}
"""Names of `verl.workers.engine.megatron.transformer_impl` that are overridden, called or replaced, with their parameters."""

_SAMPLE_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo")
"""Values of `policy_loss.loss_mode` whose loss is a sum over samples; the others read the microbatch as a whole."""


class VerlAdapter:
    """Reads verl's microbatches and calls its loss (a `MicrobatchAdapter`).

    engine: whose methods say what a loss is. loss_function: verl's, or None in a pass that only scores.
    action (attribute): of verl's own routers in this pass, None without replay of routes.
    """

    def __init__(
        self, engine: Any, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> None:
        self._engine = engine
        self._loss_function = loss_function
        self._forward_only = forward_only
        self._is_split = splits_into_samples(loss_function, data)
        is_routed = tu.get_non_tensor_data(data, key="enable_routing_replay", default=False)
        records = is_routed and data.get("routed_experts", None) is None
        # What verl sets its own routers to.
        self.action = None if not is_routed else (Action.RECORD if records else Action.REPLAY_FORWARD)
        self.keep_routes = self._keep_routes if records else None
        self._num_samples: list[int] = []
        self.needs_entropy: bool = tu.get_non_tensor_data(data, key="calculate_entropy", default=False)

    def loss_calls(self, microbatch: TensorDict) -> Sequence[TensorDict]:
        """The samples of a microbatch one by one, or all in one call."""
        self._num_samples.append(len(microbatch))
        return tu.chunk_tensordict(microbatch, len(microbatch)) if self._is_split else [microbatch]

    def sequences(self, call: TensorDict) -> list[SequenceInput]:
        """Prompt and response of each sample; every row is scored, as verl's own engine does."""
        tokens = [row.cpu().numpy() for row in call["input_ids"].unbind()]
        temperatures = _temperatures(call["temperature"], len(tokens))
        routes = self._routes(call, [len(row) for row in tokens])
        return [
            SequenceInput(row, temperature=temperature, routes=taken)
            for row, temperature, taken in zip(tokens, temperatures, routes, strict=True)
        ]

    def loss(self, call: TensorDict, scores: Sequence[SequenceScores], *, non_loss_data: bool = False) -> Any:
        """What verl's own function makes of the output of its own forward, in the layout that it has there."""
        output = {"log_probs": _as_verl([s.logprobs for s in scores])}
        if self.needs_entropy:
            entropies = [s.entropy for s in scores]
            assert all(e is not None for e in entropies)
            output["entropy"] = _as_verl([e for e in entropies if e is not None])
        result = self._engine.postprocess_micro_batch_func(
            output,
            data=call.to(get_device_id()),
            forward_only=self._forward_only,
            loss_function=self._loss_function,
        )
        if len(result) == 2:
            return result
        # verl reports a context-parallel share, rounded down; here a call is of whole sequences on every rank.
        return result[0], self._engine._routed_num_tokens(call).to(result[1]), result[2]

    def _keep_routes(self, routes: Sequence[Sequence[np.ndarray]]) -> None:
        """Leave routes where verl's own forward steps leave them, one entry for each of them in the order of its schedule."""
        of_chunks = [self._by_microbatch(of_chunk) for of_chunk in routes]
        order = [(number, 0) for number in range(len(self._num_samples))]
        if len(of_chunks) > 1:
            group_size = self._engine.tf_config.microbatch_group_size_per_vp_stage
            order = get_schedule_table(len(self._num_samples), len(of_chunks), group_size)
        self._engine.mini_layer_topk_idx_list += [of_chunks[chunk][number] for number, chunk in order]

    def _by_microbatch(self, routes: Sequence[np.ndarray]) -> list[Tensor]:
        """Jagged [samples, tokens, layers, top-k] of each microbatch. The last token of a sample is not run; verl has a row for it."""
        rows = []
        for taken in routes:
            last = np.broadcast_to(np.arange(taken.shape[2], dtype=taken.dtype), (1, *taken.shape[1:]))
            rows.append(torch.from_numpy(np.concatenate([taken, last])).to(get_device_id()))
        starts = np.cumsum([0, *self._num_samples])
        return [torch.nested.as_nested_tensor(rows[a:b], layout=torch.jagged) for a, b in pairwise(starts)]

    def _routes(self, data: TensorDict, lengths: Sequence[int]) -> list[np.ndarray | None]:
        """[tokens - 1, moe layers, top-k] of each sample, None where the experts choose natively."""
        if self.action is not Action.REPLAY_FORWARD:
            return [None] * len(lengths)
        routes = [rows[: n - 1].cpu().numpy() for rows, n in zip(data["routed_experts"].unbind(), lengths, strict=True)]
        config = self._engine.tf_config
        if routes[0].shape[1] == config.num_layers:
            layers = [i for i in range(config.num_layers) if is_moe_layer(config, i)]
            routes = [rows[:, layers] for rows in routes]
        routes = [rows.astype(np.int16) for rows in routes]
        if self._engine.engine_config.router_replay.mode == "R2":
            return list(routes)
        # R3: a sample without a response was never routed by the rollout engine.
        has_response = [bool(n) for n in _row_sums(data["response_mask"])]
        return [rows if known else None for rows, known in zip(routes, has_response, strict=True)]


@EngineRegistry.register(model_type="language_model", backend="megatron", device=["cuda", "cpu"], vendor="prefixflow")
class PrefixReuseEngine(MegatronEngineWithLMHead):
    """verl's engine with another schedule.

    Settings (`ReuseSettings`) are the entry `prefixflow` of the engine's `override_mcore_model_config`.
    """

    def _build_megatron_module(self) -> Any:
        refuse_unsupported(self.engine_config, self.model_config)
        module = super()._build_megatron_module()
        settings = self.engine_config.override_mcore_model_config.get("prefixflow", {})
        self.reuse = enable_prefix_reuse(module, **settings)
        return module

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """As verl's own, with `prefixflow/...` among the metrics; the rows after a sample's last token read 0."""
        _refuse_batch(data)
        data = _with_jagged_inputs(data)
        self._check_routes(data, forward_only)
        adapter = VerlAdapter(self, data, loss_function, forward_only)
        with _schedule(partial(_run, adapter)):
            output = super().forward_backward_batch(data, loss_function, forward_only)
        if output:
            output["metrics"].update({name: [value] for name, value in self.reuse.metrics.items()})
        return output

    def _check_routes(self, data: TensorDict, forward_only: bool) -> None:
        is_routed = tu.get_non_tensor_data(data, key="enable_routing_replay", default=False)
        mode = self.engine_config.router_replay.mode
        if not is_routed or data.get("routed_experts", None) is not None or (forward_only and mode == "R2"):
            return
        raise ValueError(
            f"The batch is to be routed by replay (router_replay.mode {mode}) but holds no routed_experts. Under R2 the "
            "old-policy pass records them and its result has to be merged into the batch; under R3 they come with the rollout."
        )


def _run(adapter: VerlAdapter, *, forward_step_func: Callable[..., Any], **arguments: Any) -> list[Any]:
    """The schedule that verl gets. Its own replay of routes goes by its own forwards, and is off until the first of them."""
    if adapter.action is not None:
        RouterReplay.clear_global_router_replay_action()
        forward_step_func = _resuming(adapter.action, forward_step_func)
    return forward_backward(forward_step_func=forward_step_func, adapter=adapter, **arguments)


def _resuming(action: Action, forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
    is_on = False

    def forward_step(*args: Any) -> Any:
        nonlocal is_on
        if not is_on:
            RouterReplay.set_global_router_replay_action(action)
            is_on = True
        return forward_step_func(*args)

    return forward_step


def refuse_unsupported(engine_config: Any, model_config: Any) -> None:
    """ValueError names the first option of verl under which this engine would not compute the same."""
    refused = {
        "megatron.dynamic_context_parallel": engine_config.dynamic_context_parallel,
        "megatron.use_megatron_fsdp": engine_config.use_megatron_fsdp,
        "megatron.qat.enable": engine_config.qat.enable,
        "model.use_fused_kernels": engine_config.use_fused_kernels or model_config.use_fused_kernels,
        "model.mtp.enable": model_config.mtp.enable,
        "model.lora": (model_config.lora or {}).get("rank", 0) > 0 or model_config.lora_rank > 0,
        "model_type value_model": model_config.model_type == "value_model",
        "a model with images": hasattr(model_config.hf_config, "vision_config"),
    }
    for name, is_given in refused.items():
        if is_given:
            raise ValueError(
                f"{name} is not supported with VERL_ENGINE_VENDOR=prefixflow. Leave it out, or unset the variable to train "
                "with verl's own engine."
            )


def splits_into_samples(loss_function: Callable[..., Any] | None, data: TensorDict) -> bool:
    """True where the loss of a microbatch is the sum of the losses of its samples, whatever they are together with.

    Known for `sft_loss` and for `ppo_loss` with most policy losses; any other function is taken not to.
    """
    if loss_function is None:
        return True
    if tu.get_non_tensor_data(data, key="force_group_size", default=1) > 1:
        return False
    if not isinstance(loss_function, partial) or loss_function.args:
        return False
    name = f"{loss_function.func.__module__}.{loss_function.func.__name__}"
    if name == "verl.workers.utils.losses.sft_loss":
        return True
    if name != "verl.workers.utils.losses.ppo_loss" or "config" not in loss_function.keywords:
        return False
    config = loss_function.keywords["config"]
    # Without these numbers verl divides by what it finds in the microbatch.
    is_horizon_free = config.loss_agg_mode != "seq-mean-token-sum-norm" or config.loss_scale_factor is not None
    has_count = tu.get_non_tensor_data(data, key="global_batch_size", default=None) is not None
    return config.policy_loss.get("loss_mode", "vanilla") in _SAMPLE_LOSSES and is_horizon_free and has_count


@contextlib.contextmanager
def _schedule(function: Callable[..., Any]) -> Iterator[None]:
    """verl's module gets `function` from `get_forward_backward_func`, as long as this is entered."""
    upstream = transformer_impl.get_forward_backward_func
    transformer_impl.get_forward_backward_func = lambda *_, **__: function
    try:
        yield
    finally:
        transformer_impl.get_forward_backward_func = upstream


def _refuse_batch(data: TensorDict) -> None:
    refused = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
    for name in refused:
        if tu.get_non_tensor_data(data, key=name, default=False):
            raise ValueError(
                f"{name} reads whole rows of logits, which this engine never forms. Leave it out, or unset "
                "VERL_ENGINE_VENDOR to train with verl's own engine."
            )
    pad_mode = tu.get_non_tensor_data(data, key="pad_mode", default=DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING:
        raise ValueError(
            f"pad_mode is {pad_mode}: expected NO_PADDING, the only one that verl's Megatron engine takes."
        )


def _with_jagged_inputs(data: TensorDict) -> TensorDict:
    """The batch with `input_ids` and `routed_experts` jagged; padded ones lose what `attention_mask` leaves out."""
    padded = [name for name in ("input_ids", "routed_experts") if _is_padded(data.get(name, None))]
    if not padded:
        return data
    mask = data.get("attention_mask", None)
    if mask is None:
        raise ValueError(f"{padded[0]} is padded, which needs an attention_mask in the batch, got none.")
    unpadded = data.clone(recurse=False)
    for name in padded:
        rows = [row[kept] for row, kept in zip(data[name], mask.bool(), strict=True)]
        unpadded[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return unpadded


def _is_padded(tensor: Tensor | None) -> bool:
    return tensor is not None and not tensor.is_nested


def _temperatures(temperature: Any, count: int) -> list[float]:
    values = temperature.flatten().tolist() if isinstance(temperature, Tensor) else [float(temperature)] * count
    # As verl does: 0 stands for padding.
    return [value if value > 0 else 1e-8 for value in values]


def _row_sums(mask: Tensor) -> list[float]:
    rows = mask.unbind() if mask.is_nested else list(mask)
    return [float(row.sum()) for row in rows]


def _as_verl(values: Sequence[Tensor]) -> Tensor:
    """Jagged [samples, tokens] out of [tokens] each: verl's row t is about token t + 1, and its last row about nothing."""
    shifted = [torch.cat([v[1:], v.new_zeros(1)]) for v in values]
    lengths = torch.tensor([0, *(len(v) for v in values)], device=values[0].device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(shifted), offsets=lengths.cumsum(0))

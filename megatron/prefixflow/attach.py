"""Prefix reuse on a Megatron model that somebody else built: taken on, used, and taken off without a trace.

Strategy:

1. The model is checked first (`attach_checks`); what could not be exact is refused, on all ranks alike.
2. Core attention, transformer layers and routers get a *class* that is a subclass of the one they have (`__class__`). The
   objects stay: parameters, names, hooks and state are not touched, and the old class put back is the old module.
3. These classes act in our passes only: attention and layers where `packed_seq_params` carries a microbatch of ours, routers
   while a routing context is set. Otherwise they call what they stand before.
4. A copy, or a pickle, of an enabled model is of the model as it was: modules have their old classes in it, and no handle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron.prefixflow.attach_checks import check_chunk, check_wrappers
from megatron.prefixflow.device import torch_device
from megatron.prefixflow.groups import Groups, SharedGroups, shared_groups
from megatron.prefixflow.model import bare_model
from megatron.prefixflow.overlap import EarlyReduction, reduction_order
from megatron.prefixflow.params import MicrobatchParams, attention_context
from megatron.prefixflow.planning import MemorySettings
from megatron.prefixflow.router import PlannedRouter
from megatron.prefixflow.routing import moe_layer_numbers
from megatron.prefixflow.spec import SegmentAttention, SegmentTransformerLayer, default_softmax_scale
from megatron.prefixflow.step import StepRunner
from prefixflow.forest import RouteMismatch
from prefixflow.plan.context import ContextKV
from prefixflow.plan.cost import CostModel
from prefixflow.plan.layout import ParallelLayout
from prefixflow.plan.plan import PlanConfig, PrefixReuse
from prefixflow.plan.shapes import ModelShape
from prefixflow.runtime.attention.kernels import KERNEL_NAMES, select_kernel
from prefixflow.schedule.context import unfitted_choice
from prefixflow.schedule.memory import MemoryModel, Recompute
from prefixflow.schedule.residency import ActivationPolicy

_CHOICES: dict[str, tuple[str, ...]] = {
    "prefix_reuse": tuple(value.value for value in PrefixReuse),
    "attention_kernel": KERNEL_NAMES,
    "prefix_memory": ("auto", *(policy.value for policy in ActivationPolicy)),
    "context_parallel_kv": ("auto", *(value.value for value in ContextKV)),
    "route_mismatch": tuple(value.value for value in RouteMismatch),
    "on_mismatch": ("stop", "fallback"),
}
_HANDLE = "_prefix_reuse_handle"


@dataclass(frozen=True, slots=True)
class ReuseSettings:
    """How prefixes are shared in a framework's steps; the names are those of the arguments of `pretrain_rl.py`.

    max_tokens_per_microbatch: physical tokens; None takes the largest microbatch that the framework brings in a step.
    prefix_reuse: 'auto' shares where it saves more than it costs, 'on' all there is, 'off' nothing (the framework's own
        schedule runs).
    kv_budget_gib, memory_budget_gib: GiB of one device, of cached K/V and of everything; None for no limit.
    route_mismatch: of routes to replay that differ in a shared position: 'exact' does not share it, 'first' takes those of the
        first sequence of the step, which changes the result.
    verify_steps: so many first steps are also run by the framework's own schedule and compared; a mismatch stops the run or
        falls back to that schedule for good (`on_mismatch`).
    require_sharing: a step in which nothing is shared is an error.

    Raises ValueError for a value that is none of these.
    """

    max_tokens_per_microbatch: int | None = None
    prefix_reuse: str = "auto"
    attention_kernel: str = "auto"
    prefix_memory: str = "auto"
    kv_budget_gib: float | None = None
    memory_budget_gib: float | None = None
    context_parallel_kv: str = "auto"
    route_mismatch: str = "exact"
    verify_steps: int = 0
    on_mismatch: str = "stop"
    require_sharing: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(choices)}.")
        for name in ("kv_budget_gib", "memory_budget_gib"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}, expected a number above 0, or None for no limit.")
        tokens = self.max_tokens_per_microbatch
        if tokens is not None and not (_is_number(tokens, int) and tokens > 0):
            raise ValueError(f"max_tokens_per_microbatch is {tokens!r}, expected a whole number above 0, or None.")
        if not _is_number(self.verify_steps, int) or self.verify_steps < 0:
            raise ValueError(f"verify_steps is {self.verify_steps!r}, expected a whole number of at least 0.")
        if not isinstance(self.require_sharing, bool):
            raise ValueError(f"require_sharing is {self.require_sharing!r}, expected True or False.")
        if self.require_sharing and self.prefix_reuse == "off":
            raise ValueError(
                "require_sharing and prefix_reuse='off' contradict each other: nothing is shared then. Use prefix_reuse 'auto' or "
                "'on', or leave require_sharing out."
            )

    @classmethod
    def of(cls, **settings: Any) -> ReuseSettings:
        """ValueError for an unknown name."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in settings.keys() - set(names):
            near = difflib.get_close_matches(name, names, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"There is no setting {name!r}; expected one of {', '.join(names)}.{hint}")
        # YAML reads a bare `on` or `off` as a boolean.
        reuse = settings.get("prefix_reuse")
        return cls(**settings | ({"prefix_reuse": "on" if reuse else "off"} if isinstance(reuse, bool) else {}))


class PrefixReuseHandle:
    """Prefix reuse on one model, from `enable_prefix_reuse` to `disable`; a context manager that disables at its end.

    model: as it was given. chunks: the bare `GPTModel`s of this rank. groups: process groups. layout: sizes of the groups.
    shape: of the whole model. expert_block: consecutive data-parallel ranks that exchange tokens; planning_group: all ranks of
    those, which run one plan together. runner: runs plans on the chunks.
    metrics (attribute): of the last step, by the names of docs/integrations.md.
    num_verified, gave_up (attributes): steps that were compared, and whether one failed and reuse is off for good.
    """

    def __init__(self, model: Any, chunks: Sequence[GPTModel], settings: ReuseSettings, shared: SharedGroups) -> None:
        self.model = model
        self.chunks = tuple(chunks)
        self.settings = settings
        self.groups = groups = shared.groups
        self.layout = _layout(groups, len(self.chunks))
        self.shape = model_shape(self.chunks[0])
        self.expert_block = self.layout.expert_block if self.shape.is_moe else 1
        self.planning_group = shared.planning(self.expert_block)
        self.metrics: dict[str, float] = {}
        self.num_verified = 0
        self.gave_up = False
        self._stage_layers = _stage_layers(self.chunks, groups)
        self.runner = StepRunner(
            self.chunks,
            groups,
            select_kernel(settings.attention_kernel, torch_device()),
            vocab_size=self.shape.vocab_size,
            memory=self._memory_settings(),
        )
        self._upstream: list[tuple[torch.nn.Module, type]] = []
        self._attach()

    def __enter__(self) -> PrefixReuseHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not enabled.
        return type(None), ()

    @property
    def is_enabled(self) -> bool:
        return bool(self._upstream)

    def plan_config(self, max_tokens: int, *, with_routes: bool = False) -> PlanConfig:
        """What planning a step needs to know.

        max_tokens: physical tokens of a microbatch, where the settings have none; it is raised to what a microbatch needs at
            least. with_routes: replay the trajectories' routes, as the setting `route_mismatch` says.
        """
        config, layout = self.chunks[0].config, self.layout
        pads = config.sequence_parallel or layout.cp > 1
        multiple = layout.token_multiple if pads else 1
        budget = self.settings.max_tokens_per_microbatch or max_tokens
        return PlanConfig(
            max_tokens_per_microbatch=max(budget // multiple, 1) * multiple,
            data_parallel_size=layout.dp,
            token_multiple=multiple,
            pipeline_size=layout.pp,
            num_chunks=layout.vpp,
            stage_layers=self._stage_layers,
            expert_block=self.expert_block,
            equal_tokens=config.moe_token_dispatcher_type == "allgather" and self.expert_block > 1,
            route_mismatch=RouteMismatch(self.settings.route_mismatch) if with_routes else None,
            prefix_reuse=PrefixReuse(self.settings.prefix_reuse),
            cost=CostModel.of_shape(self.shape),
        )

    @contextlib.contextmanager
    def step(self, *, training: bool = True, force_all_reduce: bool = False, model: Any = None) -> Iterator[None]:
        """Around passes of `runner` that make up one step.

        Parameters are gathered first, where DDP does that during a forward. In training DDP's own triggers are off meanwhile:
        with overlap_grad_reduce, reductions start during the last backwards, and those that have not by the end start then,
        unless DDP's `no_sync` is active. They are finished by `finalize_model_grads`, as ever.

        model: the model in the wrappers that it has now; None takes those that it had when reuse was enabled.

        Raises ValueError where weights are frozen in training, where the handle is disabled, where Megatron's own routing
        replay is active, and for wrappers that are refused.
        """
        if not self.is_enabled:
            raise ValueError("Prefix reuse was disabled on this model; call enable_prefix_reuse again.")
        self._check_replay()
        all_ddp = _data_parallel(self.model if model is None else model)
        for ddp in all_ddp:
            _finish_parameter_gathers(ddp)
        if not training:
            yield
            return
        self._check_trainable()
        overlapping = [ddp for ddp in all_ddp if _starts_reductions(ddp)]
        if len(overlapping) == len(self.chunks) and not force_all_reduce:
            self.runner.reduction = EarlyReduction.of(overlapping, self.groups)
        configs = [ddp.ddp_config for ddp in all_ddp]
        try:
            for ddp, config in zip(all_ddp, configs, strict=True):
                # DDP's backward hooks read this, the buckets keep the configuration they were made with.
                ddp.ddp_config = dataclasses.replace(config, overlap_grad_reduce=False)
            yield
        finally:
            self.runner.reduction = None
            for ddp, config in zip(all_ddp, configs, strict=True):
                ddp.ddp_config = config
        for reducible in reduction_order(overlapping):
            if not reducible.has_started:
                reducible.buckets.start_grad_sync(force_all_reduce=force_all_reduce)

    def disable(self) -> None:
        """Give every module its own class back; the model is what it was. A second call does nothing."""
        for module, upstream in self._upstream:
            module.__class__ = upstream
            vars(module).pop("context", None)
        self._upstream.clear()
        for chunk in self.chunks:
            vars(chunk).pop(_HANDLE, None)

    def _attach(self) -> None:
        for chunk in self.chunks:
            for layer in chunk.decoder.layers:
                self._swap(layer, SegmentTransformerLayer)
                self._swap(layer.self_attention.core_attention, AttachedAttention)
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    self._swap(module, PlannedRouter)
            vars(chunk)[_HANDLE] = self

    def _swap(self, module: Any, ours: Any) -> None:
        upstream: Any = type(module)
        self._upstream.append((module, upstream))
        module.__class__ = _attached_class(ours, upstream)

    def _check_trainable(self) -> None:
        if not all(p.requires_grad for chunk in self.chunks for p in chunk.parameters()):
            raise ValueError("The model's weights are frozen: it can be scored, and not trained. Unfreeze them first.")

    def _check_replay(self) -> None:
        """Routes come with the sequences; Megatron's own replay would be passed over without a word."""
        for chunk in self.chunks:
            for module in chunk.modules():
                action = getattr(getattr(module, "router_replay", None), "router_replay_action", None)
                if action is not None:
                    raise ValueError(
                        f"Megatron's routing replay is set to {action}, which prefix reuse does not follow: give the routes as "
                        "SequenceInput.routes, and clear the action before the step."
                    )

    def _memory_settings(self) -> MemorySettings:
        wanted = self.settings.context_parallel_kv
        context_kv = None if wanted == "auto" else ContextKV(wanted)
        return MemorySettings.of(
            self._memory_model(context_kv),
            policy=self.settings.prefix_memory,
            kv_budget_gib=self.settings.kv_budget_gib,
            budget_gib=self.settings.memory_budget_gib,
            context_kv=context_kv,
        )

    def _memory_model(self, context_kv: ContextKV | None) -> MemoryModel:
        chunk, layout = self.chunks[0], self.layout
        config, parameter = chunk.config, next(chunk.parameters())
        shards = any(ddp.ddp_config.use_distributed_optimizer for ddp in _data_parallel(self.model))
        return MemoryModel(
            self.shape,
            element_bytes=parameter.dtype.itemsize,
            tensor_parallel=layout.tp,
            pipeline_parallel=layout.pp,
            context_parallel=layout.cp,
            expert_parallel=layout.ep * layout.etp,
            recompute=Recompute(config.recompute_granularity or "none"),
            sequence_parallel=bool(config.sequence_parallel),
            stage_layers=self._stage_layers,
            padded_vocab_size=chunk.vocab_size,
            optimizer_shards=layout.dp * layout.cp if shards else 1,
            expert_optimizer_shards=layout.expert_dp if shards else 1,
            fused=parameter.device.type == "cuda",
            context_kv=unfitted_choice(context_kv).kv,
        )


def enable_prefix_reuse(model: Any, **settings: Any) -> PrefixReuseHandle:
    """Make a Megatron model ready for `forward_backward`; collective over all ranks.

    model: a `GPTModel`, bare or in wrappers with `.module` (DDP, Float16Module), or the list of a rank's chunks.
    settings: see `ReuseSettings`.

    Outside our passes the model computes what it did before, to the bit. `disable` of the handle, or the end of a `with`
    block over it, takes reuse off again.

    Raises ValueError, on all ranks alike and before anything is changed, for a model or a setting that any of them refuses, and
    for settings that differ between them.
    """
    chunks = [bare_model(chunk) for chunk in _listed(model)]
    chosen = _agreed(settings, _refusal(model, chunks))
    return PrefixReuseHandle(model, chunks, chosen, shared_groups())


def handle_of(model: Any) -> PrefixReuseHandle | None:
    """The handle of a model, of one of its chunks, or of a wrapper around it; None where reuse is not enabled."""
    for chunk in _listed(model):
        return getattr(bare_model(chunk), _HANDLE, None)
    return None


def model_shape(chunk: GPTModel) -> ModelShape:
    """The shape of the whole model that a chunk is of, for costs, bounds and memory estimates.

    Its vocabulary is the padded one: Megatron's own loss takes the columns that pad as any other.
    """
    config: TransformerConfig = chunk.config
    experts: dict[str, Any] = {}
    if config.num_moe_experts is not None:
        numbers = set(moe_layer_numbers(config))
        pattern = tuple(int(number in numbers) for number in range(1, config.num_layers + 1))
        experts = {
            "num_experts": config.num_moe_experts,
            "moe_topk": config.moe_router_topk,
            "moe_ffn_hidden_size": config.moe_ffn_hidden_size or config.ffn_hidden_size,
            "moe_shared_ffn_hidden_size": config.moe_shared_expert_intermediate_size or 0,
            "moe_normalize_topk": not config.moe_router_pre_softmax,
            "moe_layer_pattern": () if all(pattern) else pattern,
        }
    return ModelShape(
        name=type(chunk).__name__,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        ffn_hidden_size=config.ffn_hidden_size,
        vocab_size=chunk.vocab_size,
        max_positions=chunk.max_sequence_length,
        gated=config.gated_linear_unit,
        tied_embeddings=chunk.share_embeddings_and_output_weights,
        qk_layernorm=config.qk_layernorm,
        qkv_bias=config.add_qkv_bias,
        rotary_base=int(chunk.rotary_base),
        norm_epsilon=config.layernorm_epsilon,
        **experts,
    )


class AttachedAttention(SegmentAttention):
    """Core attention of somebody else's model: ours under a microbatch of ours, else that which was there."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        params = kwargs.get("packed_seq_params")
        if not isinstance(params, MicrobatchParams):
            return super().forward(query, key, value, *args, **kwargs)
        return self.attend(attention_context(params), query, key, value, scale=default_softmax_scale(self.config))


@functools.cache
def _attached_class(ours: Any, upstream: Any) -> Any:
    """A subclass of both, of the same memory layout as `upstream`; copies of its objects are of `upstream`."""

    def reduce(module: Any, protocol: Any) -> Any:
        function, (_, *arguments), *rest = upstream.__reduce_ex__(module, protocol)
        return (function, (upstream, *arguments), *rest)

    # Bases of ours stand first: where they are abstract classes too, the layout follows from the first.
    return type(f"{upstream.__name__}WithReuse", (ours, upstream), {"__reduce_ex__": reduce, "__module__": __name__})


def _listed(model: Any) -> list[Any]:
    return list(model) if isinstance(model, list | tuple) else [model]


def _wrappers(model: Any) -> list[Any]:
    """The wrappers around a chunk, outermost first."""
    found = []
    while not isinstance(model, GPTModel) and hasattr(model, "module"):
        found.append(model)
        model = model.module
    return found


def _data_parallel(model: Any) -> list[Any]:
    """Megatron's DDP wrappers of the chunks; ValueError for others that reduce gradients."""
    wrappers = [wrapper for chunk in _listed(model) for wrapper in _wrappers(chunk)]
    check_wrappers(wrappers)
    return [wrapper for wrapper in wrappers if isinstance(wrapper, DistributedDataParallel)]


def _starts_reductions(ddp: Any) -> bool:
    """True where a backward would start the reduction of a bucket whose gradients are complete."""
    buckets = (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
    return ddp.ddp_config.overlap_grad_reduce and all(group.is_last_microbatch for group in buckets)


def _refusal(model: Any, chunks: Sequence[Any]) -> str | None:
    """Why this rank's part of the model is refused."""
    try:
        if not chunks:
            raise ValueError("got an empty list. Give the list of this rank's model chunks that the framework holds.")
        for wrapped, chunk in zip(_listed(model), chunks, strict=True):
            check_wrappers(_wrappers(wrapped))
            if handle_of(chunk) is not None:
                raise ValueError(
                    "prefix reuse is enabled on it already. Use handle_of(model), or disable that handle first."
                )
            check_chunk(chunk)
        num_chunks = chunks[0].config.virtual_pipeline_model_parallel_size or 1
        if len(chunks) != num_chunks:
            raise ValueError(
                f"got {len(chunks)} model chunks, expected all {num_chunks} of this rank. Give the list that the framework holds."
            )
    except ValueError as error:
        return str(error)
    return None


def _agreed(settings: Mapping[str, Any], refusal: str | None) -> ReuseSettings:
    """The settings of all ranks; ValueError on every rank of the world where one refuses its model or settings, or they differ.

    A rank that refused alone would leave the others waiting for it.
    """
    chosen: ReuseSettings | None = None
    try:
        chosen = ReuseSettings.of(**settings)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = refusal and f"Prefix reuse cannot be enabled on this model: {refusal}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (chosen, refusal))
    refusals = [found for _, found in told]
    for found in refusals:
        if found is not None:
            raise ValueError(found if set(refusals) == {found} else f"{found} ({_ranks_with(refusals, found)})")
    for field in dataclasses.fields(ReuseSettings):
        values = [getattr(of_rank, field.name) for of_rank, _ in told]
        if len(distinct := list(dict.fromkeys(values))) > 1:
            differing = ", ".join(f"{value!r} on {_ranks_with(values, value)}" for value in distinct)
            raise ValueError(f"{field.name} differs between ranks: {differing}. Give all ranks the same settings.")
    assert chosen is not None
    return chosen


def _ranks_with(values: Sequence[Any], value: Any) -> str:
    ranks = [str(rank) for rank, its_value in enumerate(values) if its_value == value]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"


def _is_number(value: Any, kind: Any) -> bool:
    # A boolean is a whole number to Python.
    return isinstance(value, kind) and not isinstance(value, bool)


def _layout(groups: Groups, num_chunks: int) -> ParallelLayout:
    return ParallelLayout(
        tp=groups.tensor.size(),
        pp=groups.pipeline.size(),
        vpp=num_chunks,
        cp=groups.context.size(),
        ep=groups.expert.size(),
        etp=groups.expert_tensor.size(),
        dp=groups.data_parallel.size(),
    )


def _stage_layers(chunks: Sequence[GPTModel], groups: Groups) -> tuple[int, ...]:
    """Layers of every global stage; collective over the pipeline."""
    of_ranks: list[list[int]] = [[] for _ in range(groups.pipeline.size())]
    dist.all_gather_object(of_ranks, [len(chunk.decoder.layers) for chunk in chunks], group=groups.pipeline)
    return tuple(layers[number] for number in range(len(chunks)) for layers in of_ranks)


def _finish_parameter_gathers(ddp: DistributedDataParallel) -> None:
    """Have all parameters here: the head reads its weight without a call that would wait for it."""
    if not (ddp.use_forward_hook and ddp.remove_forward_pre_hook_handles):
        return
    for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
        group.finish_param_sync(skip_next_bucket_dispatch=True)

"""What `Arguments` become: layout, plan, model, gradient buffers, optimizer, schedule and loss."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron.prefixflow.arguments_checks import loss_options, stage_options
from megatron.prefixflow.arguments_result import Arguments, shape_of
from megatron.prefixflow.arguments_spec import ArgumentsError
from megatron.prefixflow.calibration import measured_costs
from megatron.prefixflow.planning import MemorySettings
from prefixflow.forest import RouteMismatch
from prefixflow.plan.context import ContextKV
from prefixflow.plan.cost import CostModel
from prefixflow.plan.layout import ParallelLayout, layers_per_stage
from prefixflow.plan.plan import MergeGroups, PlanConfig, PrefixReuse
from prefixflow.runtime.loss import LossConfig
from prefixflow.schedule.context import unfitted_choice
from prefixflow.schedule.memory import MemoryModel, Recompute


def parallel_layout(args: Arguments, world_size: int | None = None) -> ParallelLayout:
    """The layout in a world of `world_size` processes, or with None in the smallest possible one.

    Raises:
        ArgumentsError: the sizes do not fit each other or the world.
    """
    try:
        return ParallelLayout.for_world(
            world_size,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            vpp=args.vpp,
            cp=args.context_parallel_size,
            ep=args.expert_model_parallel_size,
            etp=args.expert_tensor_parallel_size,
            dp=args.data_parallel_size,
        )
    except ValueError as error:
        raise ArgumentsError(str(error)) from error


def plan_config(args: Arguments, parallel: ParallelLayout | None = None) -> PlanConfig:
    """What planning needs; `parallel` is by default the smallest layout."""
    parallel = parallel or parallel_layout(args)
    pads = args.sequence_parallel or parallel.cp > 1
    replays = args.routing_replay == "rollout"
    expert_block = parallel.expert_block if args.num_experts else 1
    return PlanConfig(
        max_tokens_per_microbatch=args.max_tokens_per_microbatch,
        data_parallel_size=parallel.dp,
        token_multiple=parallel.token_multiple if pads else 1,
        pipeline_size=parallel.pp,
        num_chunks=parallel.vpp,
        stage_layers=layers_per_stage(**stage_options(args.values)),
        expert_block=expert_block,
        # Between microbatches of several ranks it gathers tensors of one shape; the others exchange sizes first.
        equal_tokens=args.moe_token_dispatcher_type == "allgather" and expert_block > 1,
        route_mismatch=RouteMismatch(args.route_mismatch) if replays else None,
        prefix_reuse=PrefixReuse(args.prefix_reuse),
        merge_groups=MergeGroups(args.merge_groups),
        cost=CostModel.of_shape(shape_of(args)),
        measured=measured_costs(args, parallel),
    )


def _wanted_context_kv(args: Arguments) -> ContextKV | None:
    """None where the memory decides."""
    return None if args.context_parallel_kv == "auto" else ContextKV(args.context_parallel_kv)


def _context_line(args: Arguments) -> str:
    """Where K/V are, at the start of a run: `auto` with a budget is settled by the plan of each step."""
    if args.context_parallel_kv == "ring":
        return "context parallelism: K/V sharded and passed round, as asked for"
    if args.context_parallel_kv == "gather":
        return "context parallelism: K/V gathered, as asked for"
    if args.memory_budget_gib is None:
        return "context parallelism: K/V gathered, since there is no memory budget"
    return (
        f"context parallelism: K/V of a step gathered, or passed round where that would need more than "
        f"{args.memory_budget_gib:g} GiB"
    )


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def cpu_safe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `TransformerConfig` without the fused kernels that exist on GPUs only."""
    fusions = (
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "apply_rope_fusion",
        "moe_grouped_gemm",
        "moe_permute_fusion",
    )
    return {**config, **dict.fromkeys(fusions, False), "use_cpu_initialization": True}


def transformer_config(args: Arguments, *, on_gpu: bool | None = None) -> TransformerConfig:
    """The model's configuration. `on_gpu`: default, whether CUDA is there."""
    keywords = _transformer_keywords(args)
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    if not on_gpu:
        keywords = cpu_safe(keywords)
    else:
        has_te = has_transformer_engine()
        has_apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
        keywords["gradient_accumulation_fusion"] &= has_te or has_apex
        keywords["apply_rope_fusion"] &= has_te
    try:
        return TransformerConfig(**keywords)
    except (ValueError, AssertionError) as error:
        raise ArgumentsError(f"Megatron-Core refuses this model: {error or 'no reason given'}") from error


def _transformer_keywords(args: Arguments) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(TransformerConfig)}
    keywords = {n: args.values[n] for n in names & args.values.keys()}
    keywords |= {
        "params_dtype": args.params_dtype,
        "pipeline_dtype": args.params_dtype,
        "virtual_pipeline_model_parallel_size": args.vpp if args.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "num_moe_experts": args.num_experts,
        "moe_router_load_balancing_type": _single(args.moe_router_load_balancing_type),
        "moe_aux_loss_coeff": _single(args.moe_aux_loss_coeff),
        "gradient_accumulation_fusion": args.gradient_accumulation_fusion and args.dtype != "float64",
        "masked_softmax_fusion": False,
        "transformer_impl": "transformer_engine" if has_transformer_engine() else "local",
        # The loss is ours and counts trajectories: Megatron must not scale gradients by dp.
        "calculate_per_token_loss": True,
    }
    if args.init_method_xavier_uniform:
        keywords["init_method"] = torch.nn.init.xavier_uniform_
    return keywords | _activation_keywords(args)


def _activation_keywords(args: Arguments) -> dict[str, Any]:
    if args.swiglu:
        return {
            "activation_func": F.silu,
            "gated_linear_unit": True,
            "bias_activation_fusion": args.bias_swiglu_fusion,
        }
    if args.quick_geglu:
        return {
            "activation_func": quick_gelu,
            "gated_linear_unit": True,
            "bias_activation_fusion": args.bias_gelu_fusion,
        }
    if args.squared_relu:
        return {"activation_func": squared_relu, "bias_activation_fusion": False}
    # Megatron's fused GELU adds the bias, so it needs one.
    return {"bias_activation_fusion": args.bias_gelu_fusion and args.add_bias_linear}


def _single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def padded_vocab_size(args: Arguments) -> int:
    """Rows of the embedding and the LM head over all tensor-parallel ranks."""
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-args.vocab_size // multiple) * multiple


def gpt_model_kwargs(args: Arguments) -> dict[str, Any]:
    """Keywords of `GPTModel` but for the configuration, the spec and the pipeline stage."""
    return {
        "vocab_size": padded_vocab_size(args),
        "max_sequence_length": args.max_position_embeddings,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": "rope",
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "rope_scaling": args.use_rope_scaling,
        "rope_scaling_factor": args.rope_scaling_factor,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
    }


def optimizer_config(args: Arguments) -> OptimizerConfig:
    """The optimizer's configuration; clipping and the norm are ours, see docs/architecture.md."""
    names = {f.name for f in dataclasses.fields(OptimizerConfig)}
    keywords = {n: args.values[n] for n in names & args.values.keys()}
    return OptimizerConfig(**keywords | {"params_dtype": args.params_dtype, "fp16": False})


def ddp_config(args: Arguments) -> DistributedDataParallelConfig:
    """Configuration of the gradient buffers."""
    in_fp32 = args.accumulate_allreduce_grads_in_fp32 or args.bf16
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_fp32 and not args.grad_reduce_in_bf16 and args.dtype != "float64",
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
        overlap_grad_reduce=args.overlap_grad_reduce,
        bucket_size=args.ddp_bucket_size,
        pad_buckets_for_high_nccl_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
    )


def scheduler_options(args: Arguments) -> dict[str, Any]:
    """Keywords of `OptimizerParamScheduler` but for the optimizer; its steps are trajectories."""
    size = args.global_batch_size
    total = args.train_iters * size
    decay = args.lr_decay_samples or (args.lr_decay_iters or args.train_iters) * size
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    else:
        warmup = args.lr_warmup_samples or args.lr_warmup_iters * size
    wsd_iters = args.lr_wsd_decay_iters
    wsd = args.lr_wsd_decay_samples or (None if wsd_iters is None else wsd_iters * size)
    constant = args.weight_decay_incr_style == "constant"
    return {
        "init_lr": args.lr_warmup_init,
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": args.lr_decay_style,
        "start_wd": args.weight_decay if constant else args.start_weight_decay,
        "end_wd": args.weight_decay if constant else args.end_weight_decay,
        "wd_incr_steps": total,
        "wd_incr_style": args.weight_decay_incr_style,
        "use_checkpoint_opt_param_scheduler": args.use_checkpoint_opt_param_scheduler,
        "override_opt_param_scheduler": args.override_opt_param_scheduler,
        "wsd_decay_steps": wsd,
        "lr_wsd_decay_style": args.lr_wsd_decay_style,
    }


def loss_config(args: Arguments) -> LossConfig:
    """The loss, with the named loss's own defaults where nothing was given."""
    return LossConfig.of(**loss_options(args.values))


def memory_model(args: Arguments, parallel: ParallelLayout) -> MemoryModel:
    """The bytes that the plan counts with."""
    return MemoryModel(
        shape_of(args),
        element_bytes=args.params_dtype.itemsize,
        tensor_parallel=parallel.tp,
        pipeline_parallel=parallel.pp,
        context_parallel=parallel.cp,
        expert_parallel=parallel.ep * parallel.etp,
        recompute=Recompute(args.recompute_granularity or "none"),
        sequence_parallel=bool(args.sequence_parallel),
        stage_layers=layers_per_stage(**stage_options(args.values)),
        padded_vocab_size=padded_vocab_size(args),
        optimizer_shards=parallel.dp * parallel.cp if args.use_distributed_optimizer else 1,
        expert_optimizer_shards=parallel.expert_dp if args.use_distributed_optimizer else 1,
        fused=torch.cuda.is_available(),
        context_kv=unfitted_choice(_wanted_context_kv(args)).kv,
    )


def memory_settings(args: Arguments, parallel: ParallelLayout) -> MemorySettings:
    """What the run may do for its memory, and the bytes that the plan counts with."""
    return MemorySettings.of(
        memory_model(args, parallel),
        policy=args.prefix_memory,
        kv_budget_gib=args.kv_budget_gib,
        budget_gib=args.memory_budget_gib,
        context_kv=_wanted_context_kv(args),
    )


def startup_lines(args: Arguments, parallel: ParallelLayout) -> tuple[str, ...]:
    """Architecture, layout, what has no effect, and warnings, one line each."""
    shape = shape_of(args)
    model = (
        f"model: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_attention_heads} heads, {shape.num_query_groups} K/V groups, "
        f"ffn {shape.ffn_hidden_size}, vocabulary {shape.vocab_size} "
        f"(padded {padded_vocab_size(args)}), {shape.num_parameters / 1e6:.1f} M parameters, "
        f"{args.normalization}, rope base {shape.rotary_base}, {args.dtype}"
    )
    if shape.is_moe:
        model += (
            f", {shape.num_experts} experts in {shape.num_moe_layers} layers, "
            f"top-{shape.moe_topk}, expert ffn {shape.moe_ffn_hidden_size}"
        )
    sequence_parallel = ", sequence parallel" if args.sequence_parallel else ""
    recompute = args.recompute_granularity or "none"
    lines = [
        model,
        f"layout: {parallel.world_size} processes, {parallel}{sequence_parallel}, recomputation {recompute}",
    ]
    if parallel.cp > 1:
        lines.append(_context_line(args))
    if args.no_effect:
        lines.append(f"no effect here: {' '.join(args.no_effect)}")
    return (*lines, *(f"warning: {warning}" for warning in args.warnings))

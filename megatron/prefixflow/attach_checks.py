"""What a Megatron model that somebody else built must be like for prefix reuse to be exact, checked before it is touched.

Strategy: every field of `TransformerConfig` stands in exactly one of three places, by what it may hold:

    COVERED    any value: it is Megatron's own code that acts on it, in our passes as in others, or we read it
    UNREAD     any value: nothing of it takes part in our passes
    REFUSALS   the values that stand there

A field of a newer Megatron-Core that is in none is refused wherever it is not at its default. What no field says (wrappers,
heads, classes of modules, frozen weights) is read off the modules: a class that we replace or bypass must be Megatron's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    TorchFullyShardedDataParallel,
)
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

try:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
except ImportError:
    TEDotProductAttention = None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


COVERED = _names(
    """tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size sequence_parallel
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size bf16 params_dtype deterministic_mode
    gradient_accumulation_fusion async_tensor_model_parallel_allreduce calculate_per_token_loss num_layers
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split hidden_size num_attention_heads softmax_scale num_query_groups ffn_hidden_size
    kv_channels apply_residual_connection_post_layernorm layernorm_epsilon
    layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset
    activation_func_clamp_value num_moe_experts rotary_interleaved normalization qk_layernorm
    disable_bf16_reduced_precision_matmul bias_activation_fusion persist_layer_norm memory_efficient_layer_norm
    bias_dropout_fusion apply_rope_fusion use_fused_weighted_squared_relu recompute_granularity recompute_method
    recompute_num_layers recompute_modules moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_shared_expert_overlap moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_num_groups
    moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function
    moe_router_dtype moe_grouped_gemm moe_use_legacy_grouped_gemm moe_token_dispatcher_type moe_enable_deepep
    moe_flex_dispatcher_backend moe_permute_fusion moe_layer_recompute moe_apply_probs_on_input moe_deepep_num_sms moe_hybridep_num_sms
    clone_scatter_output_in_embedding use_te_activation_func disable_parameter_transpose_cache finalize_model_grads_func
    grad_scale_func timers transformer_impl"""
)
"""Fields that Megatron's own code, run by us, acts on, or that we read."""

UNREAD = _names(
    # Initialisation, which is over.
    """perform_initialization use_cpu_initialization init_method output_layer_init_method init_method_std embedding_init_method
    embedding_init_method_std use_te_rng_tracker inference_rng_tracker inference_sampling_seed config_logger_dir"""
    # Megatron's schedules and their messages; ours follow the table of operations.
    """ pipeline_model_parallel_comm_backend pipeline_dtype variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync
    use_ring_exchange_p2p deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage
    barrier_with_L1_time no_sync_func grad_sync_func param_sync_func
    cp_comm_type max_seqlen_per_dp_cp_rank autocast_dtype"""
    # Megatron's replay, which is bypassed where it is not active, and refused by a step where it is.
    """ moe_enable_routing_replay"""
    # Core attention and the loss on the logits, which ours stand in for.
    """ attention_backend attention_softmax_in_fp32 apply_query_key_layer_scaling masked_softmax_fusion log_max_attention_logit
    cross_entropy_loss_fusion cross_entropy_fusion_impl"""
    # Inference and tests of Megatron.
    """ flash_decode symmetric_ar_type use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill
    test_mode moe_per_layer_logging"""
    # Act only with what is refused.
    """ mtp_loss_scaling_factor mtp_standalone window_attn_skip_freq qk_clip_alpha qk_clip_threshold dsa_indexer_n_heads
    dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads activation_func_fp8_input_store
    fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 kitchen_attention_backend
    fp4_recipe fp4_quantizer_factory moe_token_drop_policy cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
    cuda_graph_warmup_steps cuda_graph_scope mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
    use_mamba_mem_eff_path hetereogenous_dist_checkpoint offload_modules min_offloaded_tensor_size cpu_offloading_activations
    cpu_offloading_weights cpu_offloading_double_buffering wgrad_deferral_limit ep_overlap_early_attn_memory_release
    tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
    tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
    tp_comm_bootstrap_backend moe_router_bias_update_rate moe_extended_tp
    moe_router_topk_limited_devices moe_token_dropping"""
)
"""Fields that take no part in our passes, or only together with one that is refused."""


def _is_set(value: Any) -> bool:
    return value not in (None, False, 0, 0.0)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Fields with values for which `is_refused` holds."""

    names: str
    reason: str
    is_refused: Callable[[Any], bool] = _is_set


_LOW_PRECISION = "FP8 and FP4 are not built"
_GRAPHS = "CUDA graphs need microbatches of one shape, and ours differ"
_ATTENTION = (
    "a suffix must see its whole prefix by softmax attention; windows, sinks, linear and hybrid attention are not built"
)
_OFFLOAD = "activations are kept, offloaded or recomputed by our own memory plan (the setting prefix_memory)"
_DELAYED = "weight gradients must be complete when a backward ends; delayed ones are not built"
_CAPACITY = "what a token is routed to must not depend on what else is in its microbatch"
_ROUTER_LOSS = "a router's loss is a mean over the framework's microbatches, which are not the ones that are run"
_TP_OVERLAP = "Transformer Engine's overlap needs microbatches of one length"

REFUSALS: tuple[_Refusal, ...] = (
    _Refusal("hidden_dropout attention_dropout", "dropout draws differently in a shared and a repeated prefix"),
    _Refusal("fp16 enable_autocast", "precisions are those of the parameters: bfloat16, float32 and float64"),
    _Refusal("fp32_residual_connection", "hidden states have the precision of the parameters"),
    _Refusal(
        """fp8 fp8_param fp8_dot_product_attention fp8_multi_head_attention fp4 fp4_param use_kitchen use_kitchen_attention
        quant_recipe moe_router_padding_for_quantization moe_router_padding_for_fp8""",
        _LOW_PRECISION,
    ),
    _Refusal("enable_cuda_graph external_cuda_graph", _GRAPHS),
    _Refusal("cuda_graph_impl", _GRAPHS, lambda value: value not in (None, "none")),
    _Refusal(
        "multi_latent_attention",
        "latent attention caches compressed K/V, which prefix reuse is not built for",
    ),
    _Refusal(
        "window_size attention_output_gate experimental_attention_variant linear_attention_freq is_hybrid_model",
        _ATTENTION,
    ),
    _Refusal("softmax_type", _ATTENTION, lambda value: value not in (None, "vanilla")),
    _Refusal("no_rope_freq", "layers without RoPE are not built"),
    _Refusal("mrope_section", "multimodal positions are not built"),
    _Refusal("mtp_num_layers", "multi-token prediction reads positions across the branch points of a forest"),
    _Refusal("qk_l2_norm", "Llama 4's query-key norm comes with chunked attention, which is not built"),
    _Refusal("qk_clip", "QK-clip needs the largest attention logit, which our kernels do not report"),
    _Refusal("fused_single_qkv_rope", "RoPE is applied at explicit positions, which the fused form does not take"),
    _Refusal("batch_invariant_mode", "our attention kernels have no batch-invariant form"),
    _Refusal("init_model_with_meta_device", "FSDP shards parameters outside the order of the operation table"),
    _Refusal("distribute_saved_activations cpu_offloading cpu_offloading_num_layers _cpu_offloading_context", _OFFLOAD),
    _Refusal("fine_grained_activation_offloading", _OFFLOAD),
    _Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        "which layers are recomputed must not depend on the number of a microbatch",
    ),
    _Refusal("defer_embedding_wgrad_compute delay_wgrad_compute overlap_moe_expert_parallel_comm", _DELAYED),
    _Refusal("tp_comm_overlap", _TP_OVERLAP),
    _Refusal(
        "hierarchical_context_parallel_sizes hybrid_context_parallel",
        "K/V of a segment are moved over the whole context-parallel group",
    ),
    _Refusal("pipeline_model_parallel_layout", "hand-written stage layouts are not built"),
    _Refusal("heterogeneous_block_specs", "layers must be alike, but for MoE layers"),
    _Refusal("moe_expert_capacity_factor", _CAPACITY, lambda value: value is not None),
    _Refusal("moe_pad_expert_input_to_capacity", _CAPACITY),
    _Refusal("moe_input_jitter_eps", "random jitter routes a shared and a repeated prefix differently"),
    _Refusal("moe_router_force_load_balancing", "random routes are for benchmarks and train nothing"),
    _Refusal("moe_router_fusion", "the fused router cannot replay routes"),
    _Refusal("moe_latent_size", "latent experts are not built"),
    _Refusal("moe_z_loss_coeff", _ROUTER_LOSS),
)


_ROUTER_OPTIONS = {
    "moe_router_load_balancing_type": "sinkhorn balances over a whole microbatch",
    "moe_aux_loss_coeff": _ROUTER_LOSS,
    "moe_router_enable_expert_bias": "the biases would move by counts of computed positions, where a shared one counts once; "
    "moe_router_bias_update_rate 0 keeps them as they are",
}
"""What is refused together with another field."""


def check_config(config: TransformerConfig) -> None:
    """ValueError names the first field under which prefix reuse would not be exact, or of which nothing is known."""
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"expected a TransformerConfig of Megatron-Core, got {type(config).__name__}.")
    for refusal in REFUSALS:
        for name in refusal.names.split():
            value = getattr(config, name, None)
            has_no_part = name.startswith("moe_") and config.num_moe_experts is None
            if refusal.is_refused(value) and not has_no_part:
                raise ValueError(_sentence(name, value, refusal.reason))
    _check_router_options(config)
    known = COVERED | UNREAD | refused_fields().keys()
    for field in dataclasses.fields(TransformerConfig):
        value = getattr(config, field.name)
        if field.name not in known and value != field.default:
            raise ValueError(_sentence(field.name, value, "nothing is known about this field of Megatron-Core"))


def refused_fields() -> dict[str, str]:
    """Fields with values that are refused, and why."""
    always = {name: refusal.reason for refusal in REFUSALS for name in refusal.names.split()}
    return always | _ROUTER_OPTIONS


def _check_router_options(config: TransformerConfig) -> None:
    if config.num_moe_experts is None:
        return
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else kinds
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients] * len(kinds)
    is_refused = {
        "moe_router_load_balancing_type": "sinkhorn" in kinds,
        # Frameworks switch a loss off by its kind, and leave the coefficient of the pre-training in place.
        "moe_aux_loss_coeff": any(c for kind, c in zip(kinds, coefficients, strict=True) if kind != "none"),
        "moe_router_enable_expert_bias": config.moe_router_enable_expert_bias
        and config.moe_router_bias_update_rate != 0,
    }
    for name, reason in _ROUTER_OPTIONS.items():
        if is_refused[name]:
            raise ValueError(_sentence(name, getattr(config, name), reason))


def _sentence(name: str, value: Any, reason: str) -> str:
    return f"{name} is {value!r} in the model's configuration: {reason}. Build the model without it, or do not enable reuse."


# Without Transformer Engine Megatron has a stand-in there, or nothing.
_CORE_ATTENTION = {kind for kind in (DotProductAttention, TEDotProductAttention) if isinstance(kind, type)}


def accept_core_attention(kind: type[torch.nn.Module]) -> None:
    """Let prefix reuse stand in for a class of core attention that is not Megatron's own.

    It must be softmax attention over causal sequences and nothing else, scaled as the configuration says, and have the
    attributes `config` and `layer_number`.
    """
    _CORE_ATTENTION.add(kind)


def check_wrappers(wrappers: Sequence[torch.nn.Module]) -> None:
    """ValueError where gradients are reduced in a way that our order of operations does not keep."""
    others = (torch.nn.parallel.DistributedDataParallel, FullyShardedDataParallel, TorchFullyShardedDataParallel)
    for wrapper in wrappers:
        if isinstance(wrapper, others):
            raise ValueError(
                f"the model is wrapped in {_named(wrapper)}, which shards parameters or reduces gradients as Megatron's own "
                "schedules run. Wrap it in megatron.core.distributed.DistributedDataParallel."
            )
        if isinstance(wrapper, DistributedDataParallel) and wrapper.ddp_config.num_distributed_optimizer_instances > 1:
            raise ValueError(
                "num_distributed_optimizer_instances is more than 1 in the DDP configuration; gradient reduction is built for "
                "one instance."
            )


def check_chunk(chunk: Any) -> None:
    """ValueError names the first module of a model chunk that we would replace or bypass, and that is not Megatron's own."""
    if not isinstance(chunk, GPTModel):
        raise ValueError(
            f"expected a GPTModel of Megatron-Core, bare or in wrappers with `.module`, got {_named(chunk)}. Only "
            "decoder-only text models are supported."
        )
    for name in ("forward", "_preprocess", "_postprocess"):
        if getattr(type(chunk), name) is not getattr(GPTModel, name):
            raise ValueError(f"{_named(chunk)} has a {name} of its own, and only GPTModel's is known. {_INSTEAD}")
    check_config(chunk.config)
    if type(chunk.decoder).forward is not TransformerBlock.forward:
        raise ValueError(f"the decoder is a {_named(chunk.decoder)}, expected Megatron's TransformerBlock. {_INSTEAD}")
    _check_embedding(chunk)
    _check_head(chunk)
    for layer in chunk.decoder.layers:
        _check_layer(layer)
    is_trained = {parameter.requires_grad for parameter in chunk.parameters()}
    if len(is_trained) > 1:
        frozen = next(name for name, parameter in chunk.named_parameters() if not parameter.requires_grad)
        raise ValueError(
            f"parameter {frozen} is frozen and others are not; LoRA and partly frozen models are not built. Train all weights, "
            "or freeze all to score only."
        )


_INSTEAD = "Build the model from Megatron-Core's own layer specs, or do not enable reuse."


def _named(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _check_embedding(chunk: GPTModel) -> None:
    if chunk.position_embedding_type != "rope" or type(chunk.rotary_pos_emb) is not RotaryEmbedding:
        raise ValueError(
            f"position_embedding_type is {chunk.position_embedding_type!r}, expected 'rope' with Megatron's RotaryEmbedding: only "
            "RoPE takes the explicit positions that prefix reuse needs."
        )
    if chunk.mtp_process:
        raise ValueError(
            "the model has a multi-token prediction block, which is not built. Build it without mtp_block_spec."
        )
    if not chunk.pre_process:
        return
    if type(chunk.embedding) is not LanguageModelEmbedding:
        raise ValueError(f"the embedding is a {_named(chunk.embedding)}, expected LanguageModelEmbedding. {_INSTEAD}")
    if chunk.config.sequence_parallel and not chunk.embedding.scatter_to_sequence_parallel:
        raise ValueError("scatter_embedding_sequence_parallel is off under sequence parallelism: leave it on.")


def _check_head(chunk: GPTModel) -> None:
    if not chunk.post_process:
        return
    head = chunk.output_layer
    if type(head) is not ColumnParallelLinear or head.bias is not None:
        raise ValueError(
            f"the head is a {_named(head)}, expected a ColumnParallelLinear without bias over the vocabulary: value and reward "
            "heads have no log-probabilities. Do not enable reuse on this model."
        )


def _check_layer(layer: Any) -> None:
    place = f"layer {getattr(layer, 'layer_number', '?')}"
    if not isinstance(layer, TransformerLayer) or type(layer).forward is not TransformerLayer.forward:
        raise ValueError(f"{place} is a {_named(layer)}, expected Megatron's TransformerLayer. {_INSTEAD}")
    if not isinstance(layer.cross_attention, IdentityOp):
        raise ValueError(f"{place} has cross-attention; only decoder-only text models are supported.")
    attention = layer.self_attention
    if not isinstance(attention, SelfAttention) or type(attention).forward is not Attention.forward:
        raise ValueError(
            f"attention of {place} is a {_named(attention)}, expected Megatron's SelfAttention. {_INSTEAD}"
        )
    if attention.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise ValueError(f"attention of {place} has mask type {attention.attn_mask_type.name}, expected causal.")
    core = attention.core_attention
    if type(core) not in _CORE_ATTENTION:
        raise ValueError(
            f"core attention of {place} is a {_named(core)}, expected one of "
            f"{', '.join(sorted(kind.__name__ for kind in _CORE_ATTENTION))}. {_INSTEAD}"
        )
    if core.layer_number != layer.layer_number:
        raise ValueError(f"core attention of {place} says that it is of layer {core.layer_number}. {_INSTEAD}")
    for router in (module for module in layer.modules() if isinstance(module, Router)):
        if not isinstance(router, TopKRouter) or type(router).forward is not TopKRouter.forward:
            raise ValueError(f"the router of {place} is a {_named(router)}, expected Megatron's TopKRouter. {_INSTEAD}")

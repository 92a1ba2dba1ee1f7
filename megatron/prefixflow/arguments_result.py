"""Parsed arguments, and the model shapes that they describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prefixflow.plan.shapes import ModelShape, RopeScaling

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ARCHITECTURE = _names(
    """num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size
    vocab_size max_position_embeddings normalization layernorm_epsilon add_bias_linear add_qkv_bias
    qk_layernorm swiglu squared_relu quick_geglu glu_linear_offset activation_func_clamp_value
    apply_residual_connection_post_layernorm untie_embeddings_and_output_weights rotary_base
    rotary_percent rotary_interleaved use_rope_scaling rope_scaling_factor
    rotary_seq_len_interpolation_factor num_experts moe_layer_freq moe_ffn_hidden_size
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_enable_expert_bias
    init_method_std embedding_init_method_std init_method_xavier_uniform"""
)
"""Values that say which parameters a model has and how they start."""

CHECKPOINT_DESTS = _ARCHITECTURE | _names(
    """group_query_attention moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_score_function"""
)
"""Values that a checkpoint knows best (`--use-checkpoint-args`)."""

_INDIFFERENT = _names(
    """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size data_parallel_size sequence_parallel vpp
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split padded_vocab_size
    make_vocab_size_divisible_by recompute recompute_activations recompute_granularity
    recompute_method recompute_num_layers recompute_modules gradient_accumulation_fusion
    bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion moe_grouped_gemm
    moe_use_legacy_grouped_gemm moe_token_dispatcher_type moe_enable_deepep
    moe_flex_dispatcher_backend moe_permute_fusion moe_deepep_num_sms moe_hybridep_num_sms
    moe_shared_expert_overlap prefix_reuse merge_groups max_tokens_per_microbatch micro_batch_size prefix_memory
    kv_budget_gib memory_budget_gib measure_memory context_parallel_kv attention_kernel dtype bf16
    verify_steps on_verify_mismatch require_sharing overlap_grad_reduce ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw metrics_file trace_file calibrate
    tensorboard_dir wandb_project wandb_entity wandb_exp_name wandb_save_dir reward_curve rollout_timeout_minutes
    distributed_backend distributed_timeout_minutes"""
)
"""Values that change how a step is computed, not what it computes."""

TRAINING_ONLY = _names(
    """adam_beta1 adam_beta2 adam_eps apply_wd_to_qk_layernorm check_for_nan_in_loss_and_grad ckpt_format ckpt_step
    decoupled_lr decoupled_min_lr distributed_backend distributed_timeout_minutes end_weight_decay
    exit_on_missing_checkpoint export_hf_every finetune global_batch_size group_size load logprobs_only lr lr_decay_iters
    lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters
    lr_wsd_decay_samples lr_wsd_decay_style metrics_file min_lr no_load_optim no_load_rng no_save_optim no_save_rng
    on_verify_mismatch optimizer override_opt_param_scheduler pretrained_checkpoint ref_load reward_curve reward_function
    rollout rollout_timeout_minutes save save_interval save_retain_interval sgd_momentum start_weight_decay stop_tokens
    tensorboard_dir top_p trace_file train_iters train_samples trajectories updates_per_batch
    use_checkpoint_opt_param_scheduler verify_steps wandb_entity wandb_exp_name wandb_project wandb_save_dir weight_decay
    weight_decay_incr_style"""
)
"""Values that nothing but the training loop reads."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Parsed arguments: `arguments.hidden_size` reads `values["hidden_size"]`.

    given: dests that the command line or `--model` set. no_effect: flags given that change nothing.
    warnings: sentences for the user, once at the start.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    no_effect: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "values" or name not in self.values:
            raise AttributeError(name)
        return self.values[name]

    @property
    def params_dtype(self) -> torch.dtype:
        return DTYPES[self.values["dtype"]]

    def was_given(self, dest: str) -> bool:
        """True where the command line or `--model` set this value."""
        return dest in self.given

    @property
    def hf_model(self) -> str | None:
        """`--model` where it is a folder with weights."""
        model = self.values["model"]
        # An index without its files is a folder that was fetched by half, and not one to start from random weights.
        has_weights = model is not None and any(Path(model).glob("*.safetensors*"))
        return model if has_weights else None

    @property
    def shape_key(self) -> str:
        """Equal for two models of the same architecture and initialisation."""
        return repr({name: self.values[name] for name in sorted(_ARCHITECTURE)})

    @property
    def reference_key(self) -> tuple[str, ...]:
        """Equal where a dense, unsharded run on the same file computes the same.

        Layout, token budget, memory and kernels are left out; the rest counts.
        """
        names = sorted(self.values.keys() - _INDIFFERENT)
        return tuple(f"{name}={self.values[name]!r}" for name in names)

    def replace(self, **changes: Any) -> Arguments:
        """A copy with other values; nothing is derived or validated again."""
        unknown = changes.keys() - self.values.keys()
        assert not unknown, f"no such arguments: {sorted(unknown)}"
        return dataclasses.replace(self, values={**self.values, **changes})


_SCALING_FACTORS = {"llama3": "rope-scaling-factor", "linear": "rotary-seq-len-interpolation-factor"}


def arguments_for_shape(shape: ModelShape) -> list[str]:
    """The command line that makes a model of this shape."""
    scaling = shape.rope_scaling
    values = {
        "num-layers": shape.num_layers,
        "hidden-size": shape.hidden_size,
        "num-attention-heads": shape.num_attention_heads,
        "kv-channels": shape.kv_channels,
        "ffn-hidden-size": shape.ffn_hidden_size,
        "vocab-size": shape.vocab_size,
        "max-position-embeddings": shape.max_positions,
        "normalization": "RMSNorm",
        "norm-epsilon": shape.norm_epsilon,
        "position-embedding-type": "rope",
        "rotary-base": shape.rotary_base,
    }
    flags = {
        "disable-bias-linear": True,
        "swiglu": shape.gated,
        "untie-embeddings-and-output-weights": not shape.tied_embeddings,
        "qk-layernorm": shape.qk_layernorm,
        "add-qkv-bias": shape.qkv_bias,
        "use-rope-scaling": scaling is not None and scaling.kind == "llama3",
        "group-query-attention": shape.num_query_groups != shape.num_attention_heads,
    }
    if flags["group-query-attention"]:
        values["num-query-groups"] = shape.num_query_groups
    if scaling is not None:
        values[_SCALING_FACTORS[scaling.kind]] = scaling.factor
    if shape.is_moe:
        values |= _expert_values(shape)
        # Megatron normalises the top-k weights unless the softmax comes first.
        flags["moe-router-pre-softmax"] = not shape.moe_normalize_topk
    line = [token for name, value in values.items() for token in (f"--{name}", str(value))]
    return line + [f"--{name}" for name, is_set in flags.items() if is_set]


def _expert_values(shape: ModelShape) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num-experts": shape.num_experts,
        "moe-router-topk": shape.moe_topk,
        "moe-ffn-hidden-size": shape.moe_ffn_hidden_size,
    }
    if shape.moe_layer_pattern:
        values["moe-layer-freq"] = f"[{','.join(map(str, shape.moe_layer_pattern))}]"
    if shape.moe_shared_ffn_hidden_size:
        values["moe-shared-expert-intermediate-size"] = shape.moe_shared_ffn_hidden_size
    return values


def shape_of(args: Arguments) -> ModelShape:
    """The shape that these arguments describe, for costs, bounds and memory estimates."""
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(i % frequency == 0) for i in range(args.num_layers)]
    experts: dict[str, Any] = {}
    if args.num_experts:
        experts = {
            "num_experts": args.num_experts,
            "moe_topk": args.moe_router_topk,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_shared_ffn_hidden_size": args.moe_shared_expert_intermediate_size or 0,
            "moe_normalize_topk": not args.moe_router_pre_softmax,
            "moe_layer_pattern": () if all(frequency) else tuple(frequency),
        }
    return ModelShape(
        name=args.model or "arguments",
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        vocab_size=args.vocab_size,
        max_positions=args.max_position_embeddings,
        gated=args.swiglu or args.quick_geglu,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        qk_layernorm=args.qk_layernorm,
        qkv_bias=args.add_qkv_bias,
        rotary_base=args.rotary_base,
        rope_scaling=_scaling_of(args),
        norm_epsilon=args.layernorm_epsilon,
        **experts,
    )


def _scaling_of(args: Arguments) -> RopeScaling | None:
    if args.use_rope_scaling:
        return RopeScaling(args.rope_scaling_factor)
    factor = args.rotary_seq_len_interpolation_factor
    return None if factor is None else RopeScaling(factor, "linear")

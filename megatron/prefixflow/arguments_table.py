"""What `pretrain_rl.py` does with every argument name: the data behind `arguments.py`.

Source of the names: `megatron/training/arguments.py` of Megatron-LM at core_r0.16, and the
dataclasses it generates arguments from. Each name has exactly one `Effect`. Arguments that a
Megatron-Core dataclass has a field for are generated from that field (`GENERATED_EFFECTIVE` lists
those that act); `OWN_ROWS` and `OUR_ROWS` hold the effective rest; `NO_EFFECT` and `REFUSALS` hold the
other two kinds. A refusal may also name single values of an argument of the other kinds.

Invariants:

* A name is in one kind only, and a field of an installed Megatron-Core version that is in none is refused.
* An argument that would change what Megatron computes is effective or refused, never without effect.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Effect(Enum):
    """What an argument does here."""

    EFFECTIVE = "effective"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Arity(Enum):
    """How many values follow the name on the command line."""

    FLAG = "flag"
    VALUE = "value"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class Row:
    """An effective argument that no dataclass field stands for.

    flags: spellings, the one used in messages first. kind: converter of one value, unused for flags.
    default: for a flag, the value without it; giving it yields the opposite.
    """

    flags: str
    kind: Callable[[str], Any] | None
    default: Any
    meaning: str
    choices: tuple[Any, ...] = ()
    arity: Arity = Arity.VALUE
    num_values: int | None = None
    dest: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Names that are accepted and change nothing here; `flags`, `values` and `lists` by arity."""

    reason: str
    flags: str = ""
    values: str = ""
    lists: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Names that are refused, except with values in `harmless`; with `harmful`, only with those."""

    names: str
    reason: str
    way_out: str
    arity: Arity = Arity.FLAG
    harmless: tuple[Any, ...] = ()
    harmful: tuple[Any, ...] = ()


def layer_pattern(text: str) -> int | list[int]:
    """An integer N, or a list in `[...]`, `+`, `*` and parentheses, one entry a layer.

    Example: `([0]*1+[1]*23)`.

    Raises:
        ValueError: anything else.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.List(elts=elements):
                return [value(element) for element in elements]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
        raise ValueError("expected an integer or a list pattern like ([0]*1+[1]*23)")

    stripped = text.strip().strip("'\"")
    try:
        return value(ast.parse(stripped, mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError("expected an integer or a list pattern like ([0]*1+[1]*23)") from error


def number_or_text(text: str) -> Any:
    """`text` as an int or a float where it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


EXCLUDED_FIELDS = _names(
    # Callables, live objects, and fields that Megatron-LM has no argument for.
    """timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func
    param_sync_func _cpu_offloading_context init_method output_layer_init_method
    embedding_init_method activation_func virtual_pipeline_model_parallel_size params_dtype
    enable_autocast autocast_dtype pipeline_dtype
    num_microbatches_with_partial_activation_checkpoints variable_seq_lengths batch_p2p_comm
    batch_p2p_sync deallocate_pipeline_outputs cpu_offloading cpu_offloading_activations
    cpu_offloading_weights cpu_offloading_double_buffering softmax_scale gated_linear_unit
    bias_activation_fusion activation_func_fp8_input_store memory_efficient_layer_norm
    fused_single_qkv_rope fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red
    use_kitchen moe_token_dropping cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
    disable_parameter_transpose_cache inference_sampling_seed use_inference_optimized_layers
    heterogeneous_block_specs hetereogenous_dist_checkpoint quant_recipe
    tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_atomic_ag tp_comm_atomic_rs
    moe_router_topk_limited_devices store_param_remainders decoupled_weight_decay
    grad_reduce_in_fp32 check_for_nan_in_grad bucket_size pad_buckets_for_high_nccl_busbw
    reduce_scatter_with_fp32_accumulation average_in_collective preserve_fp32_weights"""
)

FIELDS_WITH_OTHER_ARGUMENTS = _names(
    # Fields whose argument has another name, type or default: they are rows below.
    """num_moe_experts num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    pipeline_model_parallel_layout window_size window_attn_skip_freq no_rope_freq moe_layer_freq
    linear_attention_freq moe_router_load_balancing_type moe_aux_loss_coeff cp_comm_type
    cuda_graph_scope use_te_rng_tracker fp8_param gradient_accumulation_fusion overlap_p2p_comm
    attention_softmax_in_fp32 masked_softmax_fusion persist_layer_norm bias_dropout_fusion
    apply_rope_fusion use_custom_fsdp nccl_ub align_param_gather muon_split_qkv optimizer min_lr
    main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype num_query_groups
    optimizer_offload_fraction"""
)

GENERATED_EFFECTIVE = _names(
    """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    sequence_parallel expert_model_parallel_size expert_tensor_parallel_size
    perform_initialization use_cpu_initialization bf16 deterministic_mode
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split num_layers
    hidden_size num_attention_heads ffn_hidden_size kv_channels hidden_dropout attention_dropout
    apply_residual_connection_post_layernorm layernorm_epsilon
    add_bias_linear add_qkv_bias glu_linear_offset activation_func_clamp_value rotary_interleaved
    normalization qk_layernorm init_method_std embedding_init_method_std
    disable_bf16_reduced_precision_matmul use_fused_weighted_squared_relu recompute_granularity
    recompute_method recompute_num_layers recompute_modules moe_shared_expert_intermediate_size
    moe_shared_expert_gate moe_shared_expert_overlap moe_ffn_hidden_size moe_router_topk
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
    moe_router_enable_expert_bias moe_router_bias_update_rate moe_grouped_gemm
    moe_use_legacy_grouped_gemm moe_z_loss_coeff moe_token_dispatcher_type moe_enable_deepep
    moe_flex_dispatcher_backend moe_permute_fusion moe_apply_probs_on_input moe_deepep_num_sms
    moe_hybridep_num_sms clone_scatter_output_in_embedding config_logger_dir lr decoupled_lr
    decoupled_min_lr weight_decay apply_wd_to_qk_layernorm adam_beta1 adam_beta2 adam_eps
    sgd_momentum use_distributed_optimizer overlap_grad_reduce clip_grad"""
)

FLAG_ALIASES: dict[str, str] = {
    "tensor_model_parallel_size": "--tp",
    "pipeline_model_parallel_size": "--pp",
    "context_parallel_size": "--cp",
    "expert_model_parallel_size": "--ep",
    "expert_tensor_parallel_size": "--etp",
}
"""Short forms of generated arguments."""

DEFAULT_OVERRIDES: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": False,
}
"""Defaults of generated arguments that are not Megatron's."""


def _flag(flags: str, meaning: str, default: bool = False, dest: str = "") -> Row:
    return Row(flags, None, default, meaning, arity=Arity.FLAG, dest=dest)


_SCHEDULE = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

OWN_ROWS: tuple[Row, ...] = (
    # Model
    Row("--num-experts", int, None, "experts of a MoE layer; none makes a dense model"),
    Row("--moe-layer-freq", layer_pattern, 1, "every N-th layer has experts, or a 0/1 pattern"),
    Row(
        "--moe-router-load-balancing-type",
        str,
        ["aux_loss"],
        "auxiliary losses of the router",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        arity=Arity.LIST,
    ),
    Row("--moe-aux-loss-coeff", float, [0.0], "one coefficient per loss above", arity=Arity.LIST),
    _flag("--group-query-attention", "fewer K/V heads than query heads"),
    Row("--num-query-groups", int, 1, "K/V heads, with --group-query-attention"),
    Row("--max-position-embeddings", int, None, "positions that the model accepts"),
    Row(
        "--position-embedding-type",
        str,
        "rope",
        "position embedding (Megatron's default is learned_absolute)",
        choices=("learned_absolute", "rope", "mrope", "relative", "none"),
    ),
    _flag("--use-rotary-position-embeddings", "the same as --position-embedding-type rope"),
    Row("--rope-type", str, None, "kind of RoPE", choices=("rope", "yarn")),
    Row("--rotary-base", int, 10_000, "base of the RoPE frequencies"),
    Row("--rotary-percent", float, 1.0, "part of each head that is rotated"),
    Row("--rotary-seq-len-interpolation-factor", float, None, "divides the positions"),
    _flag("--use-rope-scaling", "Llama 3.1's frequency scaling"),
    Row("--rope-scaling-factor", float, 8.0, "factor of that scaling"),
    _flag("--swiglu", "gated MLP with SiLU"),
    _flag("--squared-relu", "squared ReLU in the MLP"),
    _flag("--quick-geglu", "gated MLP with the quick GELU"),
    _flag(
        "--untie-embeddings-and-output-weights",
        "separate weights for the embedding and the LM head",
    ),
    _flag("--init-method-xavier-uniform", "Xavier initialisation"),
    Row("--vocab-size", int, None, "vocabulary before padding"),
    Row("--padded-vocab-size", int, None, "vocabulary after padding; computed where not given"),
    Row(
        "--make-vocab-size-divisible-by",
        int,
        128,
        "pads the vocabulary to a multiple of this times tp",
    ),
    # Layout
    Row(
        "--num-layers-per-virtual-pipeline-stage",
        int,
        None,
        "layers of a model chunk (interleaving)",
    ),
    Row(
        "--num-virtual-stages-per-pipeline-rank --vpp",
        int,
        None,
        "model chunks of a stage (interleaving)",
    ),
    Row("--decoder-first-pipeline-num-layers", int, None, "layers of the first stage"),
    Row("--decoder-last-pipeline-num-layers", int, None, "layers of the last stage"),
    # Training
    Row("--train-iters", int, None, "optimizer steps"),
    Row("--train-samples", int, None, "trajectories; the other way to say --train-iters"),
    Row("--global-batch-size", int, None, "trajectories of a step; a group is never cut"),
    Row(
        "--micro-batch-size",
        int,
        None,
        "with --seq-length, the default of --max-tokens-per-microbatch",
    ),
    Row("--seq-length", int, None, "longest trajectory (default: --max-position-embeddings)"),
    Row("--seed", int, 1234, "of initialisation, sampling and data order"),
    Row(
        "--distributed-backend",
        str,
        None,
        "default: nccl with a GPU, gloo without",
        choices=("nccl", "gloo"),
    ),
    Row("--distributed-timeout-minutes", int, 10, "time limit of a collective"),
    _flag("--recompute-activations", "the same as --recompute-granularity selective"),
    # Optimizer
    Row("--optimizer", str, "adam", "optimizer", choices=("adam", "sgd", "muon", "dist_muon")),
    Row("--min-lr", float, 0.0, "lowest learning rate"),
    Row("--lr-decay-style", str, "linear", "decay of the learning rate", choices=_SCHEDULE),
    Row(
        "--lr-wsd-decay-style",
        str,
        "exponential",
        "decay at the end of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    ),
    Row("--lr-decay-iters", int, None, "steps of the decay (default: --train-iters)"),
    Row("--lr-decay-samples", int, None, "the same in trajectories"),
    Row("--lr-wsd-decay-iters", int, None, "steps of the decay at the end of WSD"),
    Row("--lr-wsd-decay-samples", int, None, "the same in trajectories"),
    Row("--lr-warmup-fraction", float, None, "warm-up as a part of the decay"),
    Row("--lr-warmup-iters", int, 0, "warm-up in steps"),
    Row("--lr-warmup-samples", int, 0, "warm-up in trajectories"),
    Row("--lr-warmup-init", float, 0.0, "learning rate at the start of the warm-up"),
    Row("--start-weight-decay", float, None, "weight decay at the start"),
    Row("--end-weight-decay", float, None, "weight decay at the end"),
    Row(
        "--weight-decay-incr-style",
        str,
        "constant",
        "how weight decay grows",
        choices=("constant", "linear", "cosine"),
    ),
    _flag(
        "--override-opt-param-scheduler --override-opt_param-scheduler",
        "the command line's schedule wins over the checkpoint's",
    ),
    _flag(
        "--use-checkpoint-opt-param-scheduler --use-checkpoint-opt_param-scheduler",
        "the checkpoint's schedule wins over the command line's",
    ),
    # Precision and gradients
    _flag("--accumulate-allreduce-grads-in-fp32", "fp32 gradients (always so with --bf16)"),
    _flag("--grad-reduce-in-bf16", "bf16 gradients"),
    _flag(
        "--no-check-for-nan-in-loss-and-grad",
        "do not stop at a NaN",
        default=True,
        dest="check_for_nan_in_loss_and_grad",
    ),
    Row(
        "--ddp-bucket-size", int, None, "elements of a gradient bucket, with --overlap-grad-reduce on the first pp rank"
    ),
    _flag("--ddp-pad-buckets-for-high-nccl-busbw", "bucket sizes that suit NCCL"),
    # Fusions
    _flag(
        "--no-gradient-accumulation-fusion",
        "no fused gradient accumulation",
        default=True,
        dest="gradient_accumulation_fusion",
    ),
    _flag("--no-bias-gelu-fusion", "no fused GELU", default=True, dest="bias_gelu_fusion"),
    _flag("--no-bias-swiglu-fusion", "no fused SwiGLU", default=True, dest="bias_swiglu_fusion"),
    _flag(
        "--no-bias-dropout-fusion",
        "no fused bias and residual",
        default=True,
        dest="bias_dropout_fusion",
    ),
    _flag("--no-rope-fusion", "no fused RoPE", default=True, dest="apply_rope_fusion"),
    # Checkpoints
    Row("--load", str, None, "folder of checkpoints to go on from: the latest, or that of --ckpt-step"),
    Row("--save", str, None, "folder for checkpoints"),
    Row("--save-interval --persistent-save-interval", int, None, "steps between checkpoints"),
    Row("--save-retain-interval", int, None, "keep checkpoints of its multiples and the latest; others are removed"),
    Row("--pretrained-checkpoint", str, None, "weights to start from where --load finds nothing"),
    Row("--ckpt-step", int, None, "step to load, instead of the latest"),
    Row(
        "--ckpt-format",
        str,
        "torch_dist",
        "format of checkpoints",
        choices=("torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"),
    ),
    _flag("--finetune", "load weights only and start at step 0"),
    _flag("--no-save-optim", "save without the optimizer"),
    _flag("--no-save-rng", "save without the random state"),
    _flag("--no-load-optim", "do not load the optimizer"),
    _flag("--no-load-rng", "do not load the random state"),
    _flag("--use-checkpoint-args", "take those of the model's arguments that are not given from the checkpoint"),
    _flag("--exit-on-missing-checkpoint", "stop where --load finds nothing, instead of starting anew"),
    Row("--tensorboard-dir", str, None, "folder of TensorBoard files (default: tensorboard in --save)"),
    Row("--wandb-project", str, None, "log to this project of Weights & Biases"),
    Row("--wandb-entity", str, None, "owner of that project"),
    Row("--wandb-exp-name", str, None, "name of the run there"),
    Row("--wandb-save-dir", str, None, "folder of its local files"),
)


def _ours(flags: str, kind: Callable[[str], Any] | None, default: Any, meaning: str, **more: Any) -> Row:
    return Row(flags, kind, default, meaning, ours=True, **more)


OUR_ROWS: tuple[Row, ...] = (
    _ours("--recompute", str, None, "short form of --recompute-granularity", choices=("none", "selective", "full")),
    _ours(
        "--model",
        str,
        None,
        "built-in shape, config.json or Hugging Face folder: sets the model's arguments",
    ),
    _ours(
        "--dtype",
        str,
        None,
        "precision (default: --bf16, else float32)",
        choices=("float64", "float32", "bfloat16"),
    ),
    _ours(
        "--data-parallel-size --dp",
        int,
        None,
        "checked against the world; default: what the world leaves",
    ),
    _ours(
        "--attention-kernel",
        str,
        "auto",
        "attention kernel",
        choices=("auto", "aten", "flash-attn", "einsum"),
    ),
    _ours("--trajectories", str, None, "trajectory file, or folder of them; with --rollout sample, of prompts"),
    _ours(
        "--rollout",
        str,
        None,
        "trace: wait for new trajectory files and use each once; sample: sample responses from the policy (default: use "
        "the files that are there again in every epoch)",
        choices=("trace", "sample"),
    ),
    _ours("--rollout-timeout-minutes", float, 60.0, "how long --rollout trace waits for a new file"),
    _ours("--reward-function", str, None, "module:function or file.py:function that scores sampled responses"),
    _ours("--group-size", int, None, "samples of a prompt"),
    _ours(
        "--stop-tokens",
        int,
        [],
        "token ids that end a sampled response (default: those that end a text in the --model folder)",
        arity=Arity.LIST,
    ),
    _ours(
        "--temperature",
        float,
        None,
        "divides the logits of every log-probability (default: each trajectory's own)",
    ),
    _ours("--top-p", float, None, "nucleus of sampling"),
    _ours(
        "--max-response-length",
        int,
        None,
        "tokens of a sampled response, and the length that seq-mean-token-sum-norm divides by",
    ),
    _ours(
        "--advantage-estimator",
        str,
        None,
        "compute advantages from rewards (default: the file's; grpo for sampled responses)",
        choices=("grpo", "rloo", "dr-grpo", "reinforce++"),
    ),
    _ours(
        "--filter",
        str,
        [],
        "leave out groups of equal rewards, and responses that were cut off",
        choices=("zero-variance", "overlong"),
        arity=Arity.LIST,
    ),
    _ours("--tis-cap", float, None, "cap of the truncated importance weight"),
    _ours("--updates-per-batch", int, 1, "optimizer steps on one batch"),
    _ours(
        "--ref-load", str, None, "reference policy: checkpoint or Hugging Face folder (default: the initial weights)"
    ),
    _ours("--prefix-reuse", str, "auto", "share prefixes", choices=("auto", "on", "off")),
    _ours(
        "--merge-groups",
        str,
        "off",
        "one tree for groups with a long common prefix, where the plan predicts a gain",
        choices=("off", "auto"),
    ),
    _ours("--max-tokens-per-microbatch --max-tokens", int, None, "physical tokens of a microbatch"),
    _ours(
        "--prefix-memory",
        str,
        "auto",
        "where activations wait for their backward",
        choices=("auto", "keep", "offload", "recompute"),
    ),
    _ours(
        "--kv-budget-gib",
        float,
        None,
        "device memory of a rank for cached K/V and their gradients; what exceeds it goes to the host",
    ),
    _ours(
        "--memory-budget-gib",
        float,
        None,
        "memory of one device, everything counted, that a step's predicted peak must fit; the plan chooses token budget, lead, "
        "activation policy and cache budget",
    ),
    _ours(
        "--measure-memory",
        None,
        False,
        "count live tensors on the CPU for the metric peak_bytes: slow, for checks",
        arity=Arity.FLAG,
    ),
    _ours(
        "--context-parallel-kv",
        str,
        "auto",
        "K/V under context parallelism: whole on each rank, or sharded and passed round; auto shards where memory is short",
        choices=("auto", "gather", "ring"),
    ),
    _ours("--routing-replay", str, "off", "routes of MoE layers", choices=("off", "record", "rollout")),
    _ours(
        "--route-mismatch",
        str,
        "exact",
        "conflicting routes of a shared prefix",
        choices=("exact", "first"),
    ),
    _ours(
        "--policy-loss",
        str,
        "grpo",
        "loss (ppo: the same as grpo)",
        choices=("grpo", "ppo", "dapo", "gspo", "cispo", "sft"),
    ),
    _ours(
        "--loss-aggregation",
        str,
        None,
        "weights of tokens and trajectories (default: the loss's own)",
        choices=(
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
        ),
    ),
    _ours("--clip-low", float, None, "lower clip epsilon (default 0.2)"),
    _ours("--clip-high", float, None, "upper clip epsilon (default 0.2; dapo 0.28)"),
    _ours("--clip-c", float, None, "dual clip"),
    _ours("--kl-coef", float, 0.0, "weight of the KL term"),
    _ours("--kl-estimator", str, "k3", "estimator of the KL term", choices=("k1", "k2", "k3")),
    _ours("--entropy-coef", float, 0.0, "weight of the entropy bonus"),
    _ours(
        "--skip-zero-advantage",
        None,
        False,
        "leave rows of zero weight out of the backward",
        arity=Arity.FLAG,
    ),
    _ours("--logprobs-only", str, None, "write log-probabilities to this file and stop"),
    _ours(
        "--calibrate",
        str,
        None,
        "plan by the measured costs in this file; where it does not exist, measure and write it",
    ),
    _ours(
        "--verify-steps",
        int,
        0,
        "run the first N steps after every start dense as well, and compare log-probabilities, loss and every gradient",
    ),
    _ours(
        "--on-verify-mismatch",
        str,
        "stop",
        "after a step that differs from its dense run: stop, or run dense from there on",
        choices=("stop", "fallback"),
    ),
    _ours("--require-sharing", None, False, "a batch in which nothing is shared is an error", arity=Arity.FLAG),
    _ours("--metrics-file", str, None, "one JSON object a step"),
    _ours("--trace-file", str, None, "timeline of operations"),
    _ours(
        "--reward-curve",
        str,
        None,
        "picture of the reward at the end of a run (default with --rollout sample: beside --metrics-file)",
    ),
    _ours(
        "--export-hf-every",
        str,
        None,
        "N DIR: write a Hugging Face folder every N steps",
        arity=Arity.LIST,
        num_values=2,
    ),
)


NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect(
        "logging: every step writes one JSON object to --metrics-file",
        flags="""--log-params-norm --log-num-zeros-in-grad --log-throughput --log-progress
        --log-energy --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard
        --disable-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard
        --log-memory-to-tensorboard --log-world-size-to-tensorboard --log-device-memory-used
        --log-max-attention-logit --no-barrier-with-level-1-timing --moe-per-layer-logging
        --no-one-logger --one-logger-async --log-straggler --disable-straggler-on-startup
        --run-workload-inspector-server""",
        values="""--timing-log-level --timing-log-option --tensorboard-log-interval
        --tensorboard-queue-size --logging-level --log-interval --log-memory-interval --one-logger-project
        --one-logger-run-name --app-tag-run-name --app-tag-run-version --straggler-ctrlr-port
        --straggler-minmax-count""",
    ),
    NoEffect(
        "profiling of Megatron's own loop",
        flags="""--profile --use-pytorch-profiler --record-memory-history
        --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack
        --pytorch-profiler-collect-chakra""",
        values="--profile-step-start --profile-step-end --memory-snapshot-path",
        lists="--profile-ranks",
    ),
    NoEffect(
        "housekeeping of Megatron's own loop",
        flags="""--manual-gc --no-manual-gc-eval --disable-manual-gc-eval --exit-signal-handler
        --exit-signal-handler-for-dataloader --decrease-batch-size-if-needed
        --check-for-spiky-loss --check-for-large-grads --adlr-autoresume --inprocess-restart
        --inprocess-empty-cuda-cache --enable-ft-package --calc-ft-timeouts --disable-msc
        --enable-experimental --perform-rl-step --use-mcore-models --test-mode""",
        values="""--manual-gc-interval --empty-unused-memory-level --exit-signal
        --check-weight-hash-across-dp-replicas-interval --train-sync-interval --exit-interval
        --exit-duration-in-mins --result-rejected-tracker-filename --adlr-autoresume-interval
        --inprocess-max-iterations --inprocess-monitor-thread-interval
        --inprocess-monitor-process-interval --inprocess-progress-watchdog-interval
        --inprocess-heartbeat-interval --inprocess-soft-timeout --inprocess-hard-timeout
        --inprocess-heartbeat-timeout --inprocess-barrier-timeout --inprocess-completion-timeout
        --inprocess-last-call-wait --inprocess-termination-grace-time --inprocess-granularity
        --inprocess-active-world-size --ft-num-warmup-iters --rerun-mode""",
    ),
    NoEffect(
        "there is no validation pass",
        flags="--full-validation --multiple-validation-sets",
        values="--eval-iters --eval-interval --start-eval-at-iter",
    ),
    NoEffect(
        "data come from --trajectories, already tokenized",
        flags="""--no-mmap-bin-files --reset-position-ids --reset-attention-mask --eod-mask-loss
        --no-create-attention-mask-in-dataloader --allow-ambiguous-pad-tokens
        --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --legacy-tokenizer
        --trust-remote-code --tokenizer-sentencepiece-legacy --tokenizer-hf-use-fast
        --tokenizer-hf-include-special-tokens""",
        values="""--split --data-cache-path --num-workers --num-dataset-builder-threads
        --dataloader-type --object-storage-cache-path --mid-level-dataset-surplus --sample-rate
        --mask-prob --short-seq-prob --encoder-seq-length --decoder-seq-length
        --per-dataset-sequences-path --vocab-file --merge-file --vocab-extra-ids --tokenizer-type
        --tokenizer-model --tokenizer-metadata --tiktoken-pattern --tiktoken-num-special-tokens
        --sft-tokenizer-prompt-format""",
        lists="--tokenizer-special-tokens --tiktoken-special-tokens",
    ),
    NoEffect(
        "fill-in-the-middle acts with --fim-data, which is refused",
        values="""--fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix
        --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token""",
    ),
    NoEffect(
        "process groups are built here, for NCCL or gloo",
        flags="""--disable-gloo-process-groups --use-sharp --use-nccl-ub
        --disable-symmetric-registration --create-all-gather-group""",
        values="""--local-rank --distributed-timeout-seconds-after-init
        --nccl-communicator-config-path --sharp-enabled-group
        --pipeline-model-parallel-comm-backend""",
        lists="--high-priority-stream-groups",
    ),
    NoEffect(
        "communication follows the table of operations, not Megatron's schedules",
        flags="""--overlap-param-gather
        --overlap-param-gather-with-optimizer-step --no-align-grad-reduce
        --disable-align-grad-reduce --no-align-param-gather --no-overlap-p2p-communication
        --overlap-p2p-communication-warmup-flush --use-ring-exchange-p2p
        --no-scatter-gather-tensors-in-pipeline --defer-embedding-wgrad-compute
        --delay-wgrad-compute --overlap-moe-expert-parallel-comm
        --ep-overlap-early-attn-memory-release --mtp-standalone --no-gradient-reduce-div-fusion
        --ddp-average-in-collective --ddp-reduce-scatter-with-fp32-accumulation""",
        values="--wgrad-deferral-limit --ddp-num-buckets",
        lists="--cp-comm-type",
    ),
    NoEffect(
        "attention runs in the kernels of --attention-kernel, which accumulate in fp32 or better",
        flags="""--use-flash-attn --attention-softmax-in-fp32 --apply-query-key-layer-scaling
        --no-masked-softmax-fusion --onnx-safe""",
        values="--attention-backend --window-attn-skip-freq",
    ),
    NoEffect(
        "log-probabilities come from our own vocabulary-parallel head",
        flags="--cross-entropy-loss-fusion --fp16-lm-cross-entropy",
        values="--cross-entropy-fusion-impl",
    ),
    NoEffect(
        "the loss is always normalised by logical counts",
        flags="--calculate-per-token-loss",
    ),
    NoEffect(
        "norms, linear layers and activations are those of the chosen layer spec",
        flags="""--no-persist-layer-norm --use-te-activation-func --te-rng-tracker
        --no-async-tensor-model-parallel-allreduce""",
        values="--transformer-impl",
    ),
    NoEffect(
        "Transformer Engine's overlap needs microbatches of one length",
        flags="""--tp-comm-overlap --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs
        --no-tp-comm-split-ag --no-tp-comm-split-rs --no-tp-comm-bulk-wgrad
        --no-tp-comm-bulk-dgrad --tp-comm-overlap-rs-dgrad""",
        values="--tp-comm-overlap-cfg --tp-comm-bootstrap-backend",
    ),
    NoEffect(
        "acts only with what is refused: fp16, FP8, FP4, precision-aware or offloaded optimizer",
        flags="""--first-last-layers-bf16 --no-fp8-wgrad --use-torch-optimizer-for-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params
        --reuse-grad-buf-for-mxfp8-param-ag""",
        values="""--loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window
        --hysteresis --fp8-recipe --fp8-quantizer-factory --fp8-margin --fp8-interval
        --fp8-amax-history-len --fp8-amax-compute-algo --num-layers-at-start-in-bf16
        --num-layers-at-end-in-bf16 --fp4-recipe --fp4-quantizer-factory --main-grads-dtype
        --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype --optimizer-offload-fraction""",
    ),
    NoEffect(
        "acts only with --optimizer muon, which is refused",
        flags="--muon-no-split-qkv --muon-use-nesterov",
        values="""--muon-momentum --muon-scale-mode --muon-fp32-matmul-prec --muon-num-ns-steps
        --muon-tp-mode --muon-extra-scale-factor""",
    ),
    NoEffect(
        "acts only with FSDP, which is refused",
        flags="""--fsdp-double-buffer --fsdp-manual-registration --keep-fp8-transpose-cache
        --enable-full-sharding-in-hsdp --torch-fsdp2-no-reshard-after-forward
        --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load""",
        values="--suggested-communication-unit-size --outer-dp-sharding-strategy",
    ),
    NoEffect(
        "acts only with MLA, MTP, hybrid or linear attention, which are refused",
        flags="""--cache-mla-latents --disable-mamba-mem-eff-path --dsa-indexer-use-sparse-loss""",
        values="""--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
        --rotary-scaling-factor --mscale --mscale-all-dim --mtp-loss-scaling-factor
        --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads
        --dsa-indexer-n-heads --dsa-indexer-head-dim --dsa-indexer-topk --dsa-indexer-loss-coeff
        --linear-conv-kernel-dim --linear-key-head-dim --linear-value-head-dim
        --linear-num-key-heads --linear-num-value-heads --relative-attention-num-buckets
        --relative-attention-max-distance --qk-clip-alpha --qk-clip-threshold
        --kitchen-attention-backend""",
    ),
    NoEffect(
        "acts only with token dropping, upcycling or fine-grained offloading, which are refused",
        values="--moe-token-drop-policy --moe-upcycling-granularity --min-offloaded-tensor-size",
        lists="--offload-modules",
    ),
    NoEffect(
        "acts only with CUDA graphs, which are refused",
        flags="""--decode-only-cuda-graphs --rl-training-cuda-graphs
        --moe-pad-experts-for-cuda-graph-inference""",
        values="--cuda-graph-warmup-steps",
        lists="--cuda-graph-scope",
    ),
    NoEffect(
        "acts only with hybrid context parallelism, which is refused",
        values="--max-seqlen-per-dp-cp-rank",
    ),
    NoEffect(
        "checkpoints are written by one format and path",
        flags="""--async-save --use-persistent-ckpt-worker --ckpt-fully-parallel-save
        --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure
        --dist-ckpt-save-pre-mcore-014 --dist-ckpt-optim-fully-reshardable
        --distrib-optim-fully-reshardable-mem-efficient --use-dist-ckpt --auto-detect-ckpt-format
        --no-use-tokenizer-model-from-checkpoint-args
        --disable-use-tokenizer-model-from-checkpoint-args --replication
        --ckpt-convert-update-legacy-dist-opt-format --use-mp-args-from-checkpoint-args
        --load-main-params-from-ckpt --no-ckpt-load-validate-sharding-integrity
        --disable-ckpt-load-validate-sharding-integrity""",
        values="""--dist-ckpt-format --dist-ckpt-strictness --non-persistent-save-interval
        --non-persistent-ckpt-type --non-persistent-global-ckpt-dir
        --non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --replication-jump
        --replication-factor --ckpt-convert-format --ckpt-convert-save
        --ckpt-fully-parallel-load-exchange-algo""",
    ),
    NoEffect(
        "Megatron's inference engine is not used",
        flags="""--flash-decode --inference-rng-tracker --output-bert-embeddings
        --use-legacy-static-engine --inference-dynamic-batching
        --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events --nccl-all-reduce-for-prefill
        --disable-chunked-prefill --enable-chunked-prefill --inference-wandb-logging
        --no-inference-wandb-logging --inference-fuse-tp-communication""",
        values="""--inference-batch-times-seqlen-threshold --max-tokens-to-oom
        --bert-embedder-type --inference-max-requests --inference-max-seq-length
        --inference-max-batch-size --inference-dynamic-batching-buffer-size-gb
        --inference-dynamic-batching-paused-buffer-size-gb
        --inference-dynamic-batching-mamba-memory-ratio --inference-dynamic-batching-block-size
        --inference-dynamic-batching-buffer-guaranteed-fraction
        --inference-dynamic-batching-buffer-overflow-factor
        --inference-dynamic-batching-max-requests-override
        --inference-dynamic-batching-max-tokens-override --inference-dynamic-batching-max-requests
        --inference-dynamic-batching-max-tokens --inference-dynamic-batching-num-cuda-graphs
        --inference-dynamic-batching-unified-memory-level
        --inference-dynamic-batching-cuda-graph-max-tokens
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count --symmetric-ar-type
        --mlp-chunks-for-prefill --inference-wandb-logging-step-interval
        --inference-logging-step-interval --inference-coordinator-port""",
    ),
    NoEffect(
        "the engine and memory of Megatron's own RL loop",
        flags="""--rl-offload-optimizer-during-inference --rl-offload-kv-cache-during-training
        --no-rl-offload-kv-cache-during-training --rl-remove-kv-cache-during-training
        --no-rl-remove-kv-cache-during-training --rl-reset-cuda-graphs --no-rl-reset-cuda-graphs
        --no-rl-partial-rollouts --no-rl-inference-logprobs-is-correction
        --rl-calculate-intra-group-similarity --no-rl-calculate-intra-group-similarity
        --rl-use-sequence-packing --no-rl-use-sequence-packing --no-rl-training-cuda-graphs
        --rl-offload-inference-model-weights-when-idle
        --no-rl-offload-inference-model-weights-when-idle --rl-verify-model-weights-swap
        --no-rl-verify-model-weights-swap --no-rl-skip-bos-token --no-langrl-external-server""",
        values="""--rl-prompts-per-eval --rl-sequence-packing-bin-size
        --rl-sequence-packing-max-sequences-per-bin --rl-sequence-packing-algo
        --rl-inference-tensor-model-parallel-size --rl-inference-pipeline-model-parallel-size
        --rl-inference-expert-model-parallel-size --rl-inference-expert-tensor-model-parallel-size
        --rl-inference-model-unified-memory-level --refit-method --rl-parallel-generation-tasks
        --langrl-inference-server-type --langrl-inference-server-conversation-template""",
    ),
    NoEffect(
        "belongs to BERT, retrieval or vision training",
        flags="""--bert-no-binary-head --biencoder-shared-query-context-model --use-one-sent-docs
        --retriever-score-scaling --no-data-sharding --dino-norm-last-layer
        --retro-no-verify-neighbor-count""",
        values="""--ict-head-size --biencoder-projection-dim --query-in-block-prob
        --indexer-batch-size --indexer-log-interval --retriever-seq-length --num-classes --img-h
        --img-w --num-channels --patch-dim --classes-fraction --data-per-class-fraction
        --head-lr-mult --vision-pretraining-type --vision-backbone-type --swin-backbone-type
        --mask-type --mask-factor --iter-per-epoch --dino-local-img-size --dino-local-crops-number
        --dino-head-hidden-size --dino-bottleneck-size --dino-freeze-last-layer
        --dino-warmup-teacher-temp --dino-teacher-temp --dino-warmup-teacher-temp-epochs
        --retro-cyclic-train-iters --retro-encoder-layers --retro-encoder-hidden-dropout
        --retro-encoder-attention-dropout --retro-num-neighbors --retro-num-retrieved-chunks
        --retro-attention-gate""",
        lists="--retriever-report-topk-accuracies",
    ),
)


_VALUE, _LIST = Arity.VALUE, Arity.LIST
_FP8 = ("FP8 and FP4 are not built", "leave it out and train with --bf16")
_FSDP = (
    "FSDP shards parameters outside the order of the operation table",
    "use --use-distributed-optimizer, with --tp and --pp for memory",
)
_GRAPHS = (
    "CUDA graphs need microbatches of one shape, and ours differ",
    "leave it out",
)
_MLA = (
    "latent attention caches compressed K/V, which prefix reuse is not built for",
    "train a model with multi-head or grouped-query attention",
)
_WINDOW = (
    "a suffix must see its whole prefix; sliding windows and sinks are not built",
    "train a model with full attention",
)
_HYBRID = (
    "hybrid and linear attention carry a state that K/V reuse does not cover",
    "train a model whose layers all have softmax attention",
)
_CAPACITY = (
    "dropping by capacity depends on what else is in the microbatch, so reuse would not be exact",
    "leave it out: routing is dropless",
)
_OTHER_TASK = ("only decoder-only text models are trained here", "leave it out")
_MULTIMODAL = ("multimodal positions are not built", "train the language model alone")
_DATA = (
    "training data are trajectories, not indexed text",
    "give --trajectories (`prefixflow import` makes them)",
)
_DEPRECATED = "Megatron itself no longer accepts it"
_LORA = (
    "LoRA is not built (and is not an argument of Megatron-LM)",
    "train all weights",
)
_OFFLOAD = (
    "activations are kept, offloaded or recomputed by our own memory plan",
    "use --prefix-memory, or --recompute-granularity",
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--hidden-dropout --attention-dropout",
        "dropout draws differently in a shared and a repeated prefix, so reuse would not be exact",
        "set it to 0, which is the default here",
        _VALUE,
        harmless=(0.0,),
    ),
    Refusal(
        "--position-embedding-type",
        "only RoPE takes the explicit positions that prefix reuse needs",
        "use --position-embedding-type rope",
        _VALUE,
        harmless=("rope",),
    ),
    Refusal(
        "--rope-type",
        "Megatron has YaRN for latent attention only, and that is not built",
        "leave it out",
        _VALUE,
        harmless=("rope",),
    ),
    Refusal(
        "--fp32-residual-connection",
        "hidden states, and the messages between stages, have the precision of the parameters",
        "leave it out, or train in float32",
    ),
    Refusal("--no-position-embedding", "only RoPE is built", "use --position-embedding-type rope"),
    Refusal(
        "--no-rope-freq",
        "layers without RoPE are not built",
        "train a model with RoPE in every layer",
        _VALUE,
    ),
    Refusal("--mrope-section", *_MULTIMODAL, _LIST),
    Refusal("--vision-pretraining", *_MULTIMODAL),
    Refusal(
        "--fp16",
        "loss scaling is not built; precisions are bf16, fp32 and float64",
        "use --bf16",
    ),
    Refusal("--fp8-format --fp4-format --te-precision-config-file", *_FP8, _VALUE),
    Refusal("--kitchen-config-file --kitchen-recipe-number", *_FP8, _VALUE),
    Refusal(
        """--fp8-param-gather --fp4-param-gather --moe-router-padding-for-fp8
        --moe-router-padding-for-quantization --use-kitchen-attention""",
        *_FP8,
    ),
    Refusal("--enable-cuda-graph --external-cuda-graph", *_GRAPHS),
    Refusal("--cuda-graph-impl", *_GRAPHS, _VALUE, harmless=("none",)),
    Refusal("--multi-latent-attention", *_MLA),
    Refusal("--window-size", *_WINDOW, _VALUE),
    Refusal("--softmax-type", *_WINDOW, _VALUE, harmless=("vanilla",)),
    Refusal(
        "--mtp-num-layers",
        "multi-token prediction reads positions across the branch points of a forest",
        "leave it out",
        _VALUE,
        harmless=(0,),
    ),
    Refusal(
        "--use-megatron-fsdp --use-custom-fsdp --use-torch-fsdp2 --init-model-with-meta-device",
        *_FSDP,
    ),
    Refusal("--data-parallel-sharding-strategy", *_FSDP, _VALUE, harmless=("no_shard",)),
    Refusal("--lora-rank --lora-alpha --lora-dropout", *_LORA, _VALUE),
    Refusal("--lora-target-modules", *_LORA, _LIST),
    Refusal("--is-hybrid-model", *_HYBRID),
    Refusal(
        """--hybrid-override-pattern --hybrid-layer-pattern --experimental-attention-variant
        --linear-attention-freq""",
        *_HYBRID,
        _VALUE,
    ),
    Refusal("--hybrid-attention-ratio --hybrid-mlp-ratio", *_HYBRID, _VALUE, harmless=(0.0,)),
    Refusal("--attention-output-gate", *_HYBRID),
    Refusal(
        "--qk-l2-norm",
        "Llama 4's query-key norm comes with chunked attention layers, which are not built",
        "train a model with --qk-layernorm or without",
    ),
    Refusal(
        "--qk-clip",
        "QK-clip rescales weights by the largest attention logit, which our kernels do not report",
        "leave it out",
    ),
    Refusal(
        "--apply-layernorm-1p",
        "norms here have no zero-centred weight",
        "add 1 to the norm weights and leave it out",
    ),
    Refusal(
        "--openai-gelu",
        "Megatron-Core has no such activation",
        "use the default GELU",
    ),
    Refusal(
        "--moe-enable-routing-replay",
        "Megatron's replay is first-in-first-out and pairs the wrong microbatches here",
        "use --routing-replay",
    ),
    Refusal("--moe-expert-capacity-factor", *_CAPACITY, _VALUE, harmless=(-1, -1.0)),
    Refusal("--moe-pad-expert-input-to-capacity", *_CAPACITY),
    Refusal(
        "--moe-input-jitter-eps",
        "random jitter routes a shared and a repeated prefix differently",
        "leave it out",
        _VALUE,
        harmless=(0.0,),
    ),
    Refusal(
        "--moe-router-load-balancing-type",
        "sinkhorn balances over a whole microbatch, and global_aux_loss depends on the order of microbatches and on what the "
        "other data-parallel ranks have run by then, so reuse would not be exact",
        "use aux_loss, seq_aux_loss or none",
        _LIST,
        harmful=("sinkhorn", "global_aux_loss"),
    ),
    Refusal(
        "--moe-router-force-load-balancing",
        "random routes are for benchmarks and train nothing",
        "leave it out",
    ),
    Refusal(
        "--moe-router-fusion",
        "the fused router can neither replay routes nor weigh shared positions",
        "leave it out",
    ),
    Refusal(
        "--moe-layer-recompute",
        "Megatron deprecates it",
        "use --recompute-granularity selective --recompute-modules moe",
    ),
    Refusal("--moe-extended-tp", "Megatron deprecates it", "use --expert-tensor-parallel-size"),
    Refusal(
        "--moe-use-upcycling",
        "making a MoE model of a dense one is not built",
        "convert the checkpoint beforehand",
    ),
    Refusal("--moe-latent-size", "latent experts are not built", "leave it out", _VALUE),
    Refusal("--fine-grained-activation-offloading --distribute-saved-activations", *_OFFLOAD),
    Refusal("--cpu-offloading-num-layers", *_OFFLOAD, _VALUE, harmless=(0,)),
    Refusal(
        "--batch-invariant-mode",
        "our attention kernels have no batch-invariant form",
        "use --deterministic-mode",
    ),
    Refusal(
        "--hierarchical-context-parallel-sizes",
        "K/V of a segment are gathered once over the whole context-parallel group",
        "leave it out; see --context-parallel-kv",
        _LIST,
    ),
    Refusal(
        "--hybrid-context-parallel",
        "microbatches are already packed and balanced by token budget",
        "leave it out",
    ),
    Refusal(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "the interleaved order uses groups of pp microbatches",
        "leave it out",
        _VALUE,
    ),
    Refusal(
        "--pipeline-model-parallel-layout",
        "hand-written stage layouts are not built",
        "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
        _VALUE,
    ),
    Refusal(
        "--use-tp-pp-dp-mapping",
        "ranks are ordered tp-cp-ep-dp-pp",
        "leave it out",
    ),
    Refusal(
        "--num-distributed-optimizer-instances",
        "gradient reduction is built for one instance",
        "leave it out",
        _VALUE,
        harmless=(1,),
    ),
    Refusal(
        "--optimizer",
        "Muon needs whole weight matrices, and its distributed form is not built",
        "use adam or sgd",
        _VALUE,
        harmful=("muon", "dist_muon"),
    ),
    Refusal(
        "--use-precision-aware-optimizer --optimizer-cpu-offload",
        "low-precision and offloaded optimizer states need Transformer Engine and are not built",
        "use --use-distributed-optimizer for memory",
    ),
    Refusal(
        "--dump-param-to-param-group-map",
        "it belongs to FSDP",
        "leave it out",
        _VALUE,
    ),
    Refusal(
        "--data-parallel-random-init",
        "data-parallel ranks must hold the same weights",
        "leave it out",
    ),
    Refusal("--lazy-mpu-init", "process groups are built here", "leave it out", _VALUE),
    Refusal("--fake-process-group", "gradients need real groups", "use `prefixflow plan`"),
    Refusal(
        "--rampup-batch-size",
        "the batch has one size throughout",
        "leave it out",
        _LIST,
    ),
    Refusal("--step-batch-size-schedule", "the batch has one size throughout", "leave it out", _VALUE),
    Refusal(
        "--iterations-to-skip --phase-transition-iterations",
        "each batch of trajectories is trained once, in order",
        "remove the trajectories from the file",
        _LIST,
    ),
    Refusal(
        "--error-injection-rate --error-injection-type",
        "faults are not injected",
        "leave it out",
        _VALUE,
        harmless=(0, "transient_error"),
    ),
    Refusal("--skip-train", "there is no evaluation", "use --logprobs-only to score trajectories"),
    Refusal(
        "--ckpt-format",
        "checkpoints are written as torch_dist",
        "use --ckpt-format torch_dist",
        _VALUE,
        harmful=("torch", "zarr", "torch_dcp", "fsdp_dtensor"),
    ),
    Refusal(
        "--no-weight-decay-cond-type",
        "Megatron deprecates it",
        "use --apply-wd-to-qk-layernorm",
        _VALUE,
    ),
    Refusal(
        "--transformer-impl",
        "its layers are for inference only",
        "use local",
        _VALUE,
        harmful=("inference_optimized",),
    ),
    Refusal("--use-legacy-models", "models are Megatron-Core's", "leave it out"),
    Refusal("--spec", "the layer spec carries our attention", "leave it out", _LIST),
    Refusal("--yaml-cfg", "arguments come from the command line", "write them out", _VALUE),
    Refusal(
        "--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json",
        "layers must be alike, but for MoE layers",
        "use --moe-layer-freq where that is meant",
        _VALUE,
    ),
    Refusal("--encoder-num-layers --decoder-num-layers", *_OTHER_TASK, _VALUE),
    Refusal(
        """--retro-project-dir --ict-load --bert-load --titles-data-path --evidence-data-path
        --block-data-path --embedding-path""",
        *_OTHER_TASK,
        _VALUE,
    ),
    Refusal("--retro-add-retriever", *_OTHER_TASK),
    Refusal("--data-path --train-data-path --valid-data-path --test-data-path", *_DATA, _LIST),
    Refusal("--data-args-path --per-split-data-args-path", *_DATA, _VALUE),
    Refusal("--mock-data --fim-data", *_DATA),
    Refusal("--sft", "the loss is chosen by name", "use --policy-loss sft"),
    Refusal("--batch-size", _DEPRECATED, "use --global-batch-size", _VALUE),
    Refusal("--warmup", _DEPRECATED, "use --lr-warmup-fraction or --lr-warmup-iters", _VALUE),
    Refusal("--model-parallel-size", _DEPRECATED, "use --tensor-model-parallel-size", _VALUE),
    Refusal("--checkpoint-activations", _DEPRECATED, "use --recompute-granularity"),
    Refusal("--grpo-group-size", "it belongs to Megatron's RL loop", "use --group-size", _VALUE),
    Refusal(
        "--grpo-prompts-per-step",
        "it belongs to Megatron's RL loop",
        "use --global-batch-size (trajectories)",
        _VALUE,
    ),
    Refusal("--grpo-iterations", "it belongs to Megatron's RL loop", "use --updates-per-batch", _VALUE),
    Refusal("--grpo-clamp-eps-lower", "it belongs to Megatron's RL loop", "use --clip-low", _VALUE),
    Refusal("--grpo-clamp-eps-upper", "it belongs to Megatron's RL loop", "use --clip-high", _VALUE),
    Refusal("--grpo-kl-beta", "it belongs to Megatron's RL loop", "use --kl-coef", _VALUE),
    Refusal(
        "--grpo-entropy-term-weight",
        "it belongs to Megatron's RL loop",
        "use --entropy-coef",
        _VALUE,
    ),
    Refusal(
        "--grpo-filter-groups-with-same-reward",
        "it belongs to Megatron's RL loop",
        "use --filter zero-variance",
    ),
    Refusal(
        "--grpo-default-temperature --rl-default-temperature",
        "it belongs to Megatron's RL loop",
        "use --temperature",
        _VALUE,
    ),
    Refusal(
        "--grpo-default-top-p --rl-default-top-p",
        "it belongs to Megatron's RL loop",
        "use --top-p",
        _VALUE,
    ),
    Refusal("--rl-default-top-k", "sampling has no top-k", "use --top-p", _VALUE, harmless=(-1, 0)),
    Refusal(
        "--rl-inference-logprobs-is-correction",
        "it belongs to Megatron's RL loop",
        "use --tis-cap",
    ),
    Refusal(
        "--rl-importance-sampling-truncation-coef",
        "it belongs to Megatron's RL loop",
        "use --tis-cap",
        _VALUE,
    ),
    Refusal("--rl-partial-rollouts", "rollouts are whole", "leave it out"),
    Refusal("--rl-skip-bos-token", "trajectories are already tokens", "write them without the token"),
    Refusal("--langrl-external-server", "there is no inference server", "use --rollout"),
    Refusal(
        "--langrl-env-config",
        "there is no environment",
        "use --rollout and --reward-function",
        _VALUE,
    ),
)

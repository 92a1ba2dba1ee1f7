"""Dependent values and validation of the command line, over one dict of values by dest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.prefixflow.arguments_spec import ArgumentsError, flag_of
from prefixflow.plan.layout import layers_per_stage
from prefixflow.plan.plan import DEFAULT_MAX_TOKENS
from prefixflow.runtime.loss import LossConfig


def derive(values: dict[str, Any], given: Mapping[str, Any], training: bool, warnings: list[str]) -> None:
    """Fill in what follows from other values; `warnings` collects sentences for the user.

    Raises:
        ArgumentsError: something required is missing, or two arguments contradict each other.
    """
    _derive_model(values, given, warnings)
    _derive_layout(values, training, warnings)
    _derive_recomputation(values)
    _derive_precision(values, given)
    _derive_token_budget(values, given)
    _derive_verification(values, given, warnings)
    if values["policy_loss"] == "ppo":
        values["policy_loss"] = "grpo"
    if training:
        _derive_training(values, given)


def _derive_model(values: dict[str, Any], given: Mapping[str, Any], warnings: list[str]) -> None:
    _require(values, "num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    _require(values, "max_position_embeddings")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if values["ffn_hidden_size"] is None:
        # Two thirds of 4 * hidden, so that a gated MLP has as many weights, in steps of 64.
        gated = int(4 * hidden * 2 / 3 / 64) * 64
        values["ffn_hidden_size"] = gated if values["swiglu"] else 4 * hidden
    if values["kv_channels"] is None:
        if hidden % heads:
            raise ArgumentsError(
                f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}. Give --kv-channels."
            )
        values["kv_channels"] = hidden // heads
    if not values["group_query_attention"]:
        if "num_query_groups" in given and given["num_query_groups"] != heads:
            warnings.append(
                "--num-query-groups has no effect without --group-query-attention: every head has its own K/V."
            )
        values["num_query_groups"] = heads
    values["num_experts"] = values["num_experts"] or None
    if values["num_experts"] is None:
        values["moe_ffn_hidden_size"] = None
    elif values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    values["seq_length"] = values["seq_length"] or values["max_position_embeddings"]


def _derive_token_budget(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    if values["max_tokens_per_microbatch"] is not None:
        return
    if values["micro_batch_size"] is None and "seq_length" not in given:
        values["max_tokens_per_microbatch"] = DEFAULT_MAX_TOKENS
    else:
        # Megatron's microbatch: so many sequences of the full length.
        values["max_tokens_per_microbatch"] = (values["micro_batch_size"] or 1) * values["seq_length"]


def _derive_layout(values: dict[str, Any], training: bool, warnings: list[str]) -> None:
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    for dest in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if values[dest] < 1:
            raise ArgumentsError(f"{flag_of(dest)} is {values[dest]}, expected at least 1.")
    if values["expert_tensor_parallel_size"] is None:
        dense = values["num_experts"] is None
        values["expert_tensor_parallel_size"] = 1 if dense or not training else tp
    if values["num_experts"] and tp > 1 and not training:
        values["sequence_parallel"] = True
    if values["sequence_parallel"] and tp == 1:
        warnings.append("--sequence-parallel has no effect without tensor parallelism; it is off.")
        values["sequence_parallel"] = False
    if values["context_parallel_kv"] != "auto" and values["context_parallel_size"] == 1:
        warnings.append(
            f"--context-parallel-kv {values['context_parallel_kv']} has no effect without context parallelism."
        )
    layers_per_chunk = values["num_layers_per_virtual_pipeline_stage"]
    if layers_per_chunk is None:
        values["vpp"] = values["num_virtual_stages_per_pipeline_rank"] or 1
        return
    if values["num_virtual_stages_per_pipeline_rank"] is not None:
        raise ArgumentsError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "say the same; give one of them."
        )
    if values["num_layers"] % (pp * layers_per_chunk):
        raise ArgumentsError(
            f"--num-layers {values['num_layers']} is not a multiple of pp * "
            f"--num-layers-per-virtual-pipeline-stage = {pp} * {layers_per_chunk}."
        )
    values["vpp"] = values["num_layers"] // (pp * layers_per_chunk)


def _derive_verification(values: dict[str, Any], given: Mapping[str, Any], warnings: list[str]) -> None:
    if values["verify_steps"] and values["prefix_reuse"] == "off":
        warnings.append("--verify-steps has no effect with --prefix-reuse off: every step is dense.")
    if "on_verify_mismatch" in given and not values["verify_steps"]:
        warnings.append("--on-verify-mismatch has no effect without --verify-steps.")


def _derive_recomputation(values: dict[str, Any]) -> None:
    if values["recompute"] is not None:
        if values["recompute_granularity"] is not None:
            raise ArgumentsError("--recompute and --recompute-granularity say the same; give one.")
        values["recompute_granularity"] = {"none": None}.get(values["recompute"], values["recompute"])
    if values["recompute_activations"] and values["recompute_granularity"] is None:
        values["recompute_granularity"] = "selective"
    if values["recompute_granularity"] == "full":
        values["recompute_method"] = values["recompute_method"] or "uniform"
        values["recompute_num_layers"] = values["recompute_num_layers"] or 1


def _derive_precision(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    if "dtype" not in given:
        values["dtype"] = "bfloat16" if values["bf16"] else "float32"
    elif values["bf16"] and values["dtype"] != "bfloat16":
        raise ArgumentsError(f"--bf16 and --dtype {values['dtype']} contradict each other; give one of them.")
    values["bf16"] = values["dtype"] == "bfloat16"


def _derive_training(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    _require(values, "trajectories")
    if values["logprobs_only"] is not None:
        return
    _require(values, "global_batch_size", "lr")
    size = values["global_batch_size"]
    if size < 1:
        raise ArgumentsError(f"--global-batch-size is {size}, expected at least 1 trajectory.")
    if values["train_iters"] is not None and values["train_samples"] is not None:
        raise ArgumentsError("--train-iters and --train-samples say the same; give one of them.")
    if values["train_samples"] is not None:
        values["train_iters"] = values["train_samples"] // size
    _require(values, "train_iters")
    if values["max_tokens_per_microbatch"] is None:
        # Megatron's microbatch: so many sequences of the full length.
        values["max_tokens_per_microbatch"] = (values["micro_batch_size"] or 1) * values["seq_length"]


def _require(values: Mapping[str, Any], *dests: str) -> None:
    missing = [flag_of(dest) for dest in dests if values[dest] is None]
    if missing:
        raise ArgumentsError(f"{', '.join(missing)}: required, and not given.")


def _validate_model(values: Mapping[str, Any]) -> None:
    for dest in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups"):
        if values[dest] < 1:
            raise ArgumentsError(f"{flag_of(dest)} is {values[dest]}, expected at least 1.")
    heads, groups = values["num_attention_heads"], values["num_query_groups"]
    tp = values["tensor_model_parallel_size"]
    if heads % groups:
        raise ArgumentsError(f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}.")
    for dest in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if values[dest] % tp:
            raise ArgumentsError(
                f"{flag_of(dest)} {values[dest]} does not divide evenly over "
                f"--tensor-model-parallel-size {tp}. Use a divisor of it for tensor parallelism."
            )
    if values["max_tokens_per_microbatch"] < 1:
        raise ArgumentsError(
            f"--max-tokens-per-microbatch is {values['max_tokens_per_microbatch']}, expected at least 1."
        )
    if values["seq_length"] > values["max_position_embeddings"]:
        raise ArgumentsError(
            f"--seq-length {values['seq_length']} is more than --max-position-embeddings "
            f"{values['max_position_embeddings']}."
        )
    activations = [f for f in ("swiglu", "squared_relu", "quick_geglu") if values[f]]
    if len(activations) > 1:
        raise ArgumentsError(f"{' and '.join(flag_of(f) for f in activations)} are both activations; give one.")
    padded = values["padded_vocab_size"]
    if padded is not None and (padded < values["vocab_size"] or padded % tp):
        raise ArgumentsError(
            f"--padded-vocab-size {padded} must be at least --vocab-size {values['vocab_size']} "
            f"and a multiple of --tensor-model-parallel-size {tp}. Leave it out to have it computed."
        )


def _validate_layers(values: Mapping[str, Any]) -> None:
    try:
        layers_per_stage(**stage_options(values))
    except ValueError as error:
        raise ArgumentsError(str(error)) from error


def stage_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `layers_per_stage`."""
    return {
        "num_layers": values["num_layers"],
        "pp": values["pipeline_model_parallel_size"],
        "vpp": values["vpp"],
        "first": values["decoder_first_pipeline_num_layers"],
        "last": values["decoder_last_pipeline_num_layers"],
        "with_embedding": values["account_for_embedding_in_pipeline_split"],
        "with_loss": values["account_for_loss_in_pipeline_split"],
    }


def _validate_experts(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    experts, ep = values["num_experts"], values["expert_model_parallel_size"]
    if experts is None:
        lost = [d for d in ("moe_ffn_hidden_size", "moe_layer_freq") if d in given]
        if ep > 1 or lost:
            names = ", ".join([flag_of(d) for d in lost] or ["--expert-model-parallel-size"])
            raise ArgumentsError(f"{names} needs --num-experts.")
        return
    if values["moe_router_topk"] > experts:
        raise ArgumentsError(f"--moe-router-topk {values['moe_router_topk']} is more than --num-experts {experts}.")
    if experts % ep:
        raise ArgumentsError(f"--num-experts {experts} does not divide evenly over --expert-model-parallel-size {ep}.")
    pattern = values["moe_layer_freq"]
    if isinstance(pattern, list) and len(pattern) != values["num_layers"]:
        raise ArgumentsError(
            f"--moe-layer-freq has {len(pattern)} entries, expected --num-layers {values['num_layers']}."
        )
    if isinstance(pattern, int) and pattern < 1:
        raise ArgumentsError(f"--moe-layer-freq is {pattern}, expected at least 1 (every layer has experts).")
    if values["moe_router_enable_expert_bias"] and values["moe_router_score_function"] != "sigmoid":
        raise ArgumentsError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid.")
    num_groups, group_topk = values["moe_router_num_groups"], values["moe_router_group_topk"]
    if (num_groups is None) != (group_topk is None):
        raise ArgumentsError("--moe-router-num-groups and --moe-router-group-topk need each other: give both or none.")
    if num_groups is not None and experts % num_groups:
        raise ArgumentsError(
            f"--num-experts {experts} does not divide evenly over --moe-router-num-groups {num_groups}."
        )
    width, shards = values["moe_ffn_hidden_size"], values["expert_tensor_parallel_size"]
    if width % shards:
        raise ArgumentsError(
            f"--moe-ffn-hidden-size {width} does not divide evenly over --expert-tensor-parallel-size {shards}."
        )
    if values["moe_token_dispatcher_type"] == "flex" and ep * shards == 1:
        raise ArgumentsError(
            "--moe-token-dispatcher-type flex exchanges tokens between ranks, and here one rank has all experts. Raise "
            "--expert-model-parallel-size, or use --moe-token-dispatcher-type alltoall."
        )
    kinds, coefficients = values["moe_router_load_balancing_type"], values["moe_aux_loss_coeff"]
    if len(kinds) != len(coefficients):
        raise ArgumentsError(
            f"--moe-aux-loss-coeff has {len(coefficients)} values, expected one for each of the "
            f"{len(kinds)} losses of --moe-router-load-balancing-type."
        )
    if values["tensor_model_parallel_size"] > 1 and not values["sequence_parallel"]:
        raise ArgumentsError("experts with tensor parallelism need sequence parallelism: add --sequence-parallel.")


def _validate_recomputation(values: Mapping[str, Any]) -> None:
    if values["recompute_granularity"] == "full":
        return
    for dest in ("recompute_method", "recompute_num_layers"):
        if values[dest] is not None:
            raise ArgumentsError(f"{flag_of(dest)} needs --recompute-granularity full.")


def _validate_sharing(values: Mapping[str, Any]) -> None:
    if values["verify_steps"] < 0:
        raise ArgumentsError(f"--verify-steps is {values['verify_steps']}, expected at least 0.")
    if not values["require_sharing"]:
        return
    for dest, value, instead in (("prefix_reuse", "off", "auto or on"), ("on_verify_mismatch", "fallback", "stop")):
        if values[dest] == value:
            raise ArgumentsError(
                f"--require-sharing and {flag_of(dest)} {value} contradict each other: nothing is shared then. Use "
                f"{flag_of(dest)} {instead}, or leave --require-sharing out."
            )


def _validate_loss(values: Mapping[str, Any]) -> None:
    try:
        LossConfig.of(**loss_options(values))
    except ValueError as error:
        raise ArgumentsError(str(error)) from error
    temperature = values["temperature"]
    if temperature is not None and not temperature > 0:
        raise ArgumentsError(f"--temperature is {temperature}, expected more than 0.")


def _validate_numbers(values: Mapping[str, Any]) -> None:
    """Numbers that torch or Megatron would take without a word, or refuse after the model is built."""
    for dest in ("lr", "min_lr", "weight_decay", "clip_grad", "adam_eps", "init_method_std"):
        value = values[dest]
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ArgumentsError(f"{flag_of(dest)} is {value}, expected a finite number of at least 0.")
    for dest in ("rope_scaling_factor", "rotary_seq_len_interpolation_factor"):
        value = values[dest]
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ArgumentsError(f"{flag_of(dest)} is {value}, expected a finite number above 0.")
    minutes = values["rollout_timeout_minutes"]
    if not (math.isfinite(minutes) and minutes >= 0):
        raise ArgumentsError(f"--rollout-timeout-minutes is {minutes}, expected a finite number of at least 0.")
    for dest in ("kv_budget_gib", "memory_budget_gib"):
        budget = values[dest]
        if budget is not None and not (math.isfinite(budget) and budget > 0):
            raise ArgumentsError(
                f"{flag_of(dest)} is {budget}, expected a number of GiB above 0; leave it out for no limit."
            )
    if not 0 <= values["seed"] < 2**32:
        raise ArgumentsError(f"--seed is {values['seed']}, expected a number from 0 to 2^32 - 1.")


def _validate_training(values: Mapping[str, Any]) -> None:
    if values["lr"] is not None and values["min_lr"] > values["lr"]:
        raise ArgumentsError(f"--min-lr {values['min_lr']} is more than --lr {values['lr']}.")
    if values["lr_warmup_fraction"] is not None:
        for dest in ("lr_warmup_iters", "lr_warmup_samples"):
            if values[dest]:
                raise ArgumentsError(f"--lr-warmup-fraction and {flag_of(dest)}: give one of them.")
    _validate_checkpoints(values)
    if values["weight_decay_incr_style"] != "constant":
        _require(values, "start_weight_decay", "end_weight_decay")
    if values["dtype"] == "float64" and values["use_distributed_optimizer"]:
        raise ArgumentsError(
            "--use-distributed-optimizer does not take float64 tensors (Megatron-Core checks their "
            "type). Use --dtype float32, or leave it out."
        )


def _validate_checkpoints(values: Mapping[str, Any]) -> None:
    if values["save"] is not None:
        _require(values, "save_interval")
    for dest in ("save_interval", "save_retain_interval"):
        if values[dest] is not None and values[dest] < 1:
            raise ArgumentsError(f"{flag_of(dest)} is {values[dest]}, expected at least 1.")
    updates = values["updates_per_batch"]
    if values["save"] is not None and (values["save_interval"] % updates or values["train_iters"] % updates):
        raise ArgumentsError(
            f"checkpoints are written between batches, and --updates-per-batch {updates} does not divide --save-interval "
            f"{values['save_interval']} and --train-iters {values['train_iters']}. Use multiples of it."
        )
    saves_optimizer = values["save"] is not None and not values["no_save_optim"]
    loads_optimizer = values["load"] is not None and not (values["no_load_optim"] or values["finetune"])
    if values["optimizer"] == "sgd" and (saves_optimizer or loads_optimizer):
        raise ArgumentsError(
            "--optimizer sgd: Megatron-Core has no form for its state in a checkpoint. Use adam, or give --no-save-optim and "
            "--no-load-optim (the momentum then starts anew)."
        )
    if values["ckpt_step"] is not None:
        _require(values, "load")
    if values["override_opt_param_scheduler"] and values["use_checkpoint_opt_param_scheduler"]:
        raise ArgumentsError(
            "--override-opt-param-scheduler takes the command line's schedule and --use-checkpoint-opt-param-scheduler the "
            "checkpoint's: give one of them."
        )
    if values["finetune"] and values["load"] is None and values["pretrained_checkpoint"] is None:
        raise ArgumentsError("--finetune needs --load or --pretrained-checkpoint.")


def _validate_rollouts(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    rollout = values["rollout"]
    if rollout is not None and values["logprobs_only"] is not None:
        raise ArgumentsError(f"--logprobs-only scores files that are there; leave --rollout {rollout} out.")
    if "overlong" in values["filter"]:
        _require(values, "max_response_length")
    if rollout == "sample":
        _require(values, "reward_function", "group_size", "max_response_length")
        _validate_sampling(values)
        return
    idle = [d for d in ("reward_function", "group_size", "top_p", "stop_tokens") if d in given]
    if idle:
        raise ArgumentsError(
            f"{', '.join(map(flag_of, idle))}: only --rollout sample samples; add it, or leave them out."
        )


def _validate_sampling(values: Mapping[str, Any]) -> None:
    for dest, least in (("group_size", 1), ("max_response_length", 1)):
        if values[dest] < least:
            raise ArgumentsError(f"{flag_of(dest)} is {values[dest]}, expected at least {least}.")
    size, group = values["global_batch_size"], values["group_size"]
    if size % group:
        raise ArgumentsError(
            f"--global-batch-size {size} is not a multiple of --group-size {group}: a step trains whole groups."
        )
    if group == 1 and values["advantage_estimator"] != "reinforce++":
        raise ArgumentsError(
            "--group-size 1: the advantage of a lone response is 0 but for --advantage-estimator reinforce++, which compares "
            "over the batch. Raise --group-size, or use that."
        )
    top_p = values["top_p"]
    if top_p is not None and not 0 < top_p <= 1:
        raise ArgumentsError(f"--top-p is {top_p}, expected more than 0 and at most 1.")
    outside = [token for token in values["stop_tokens"] if not 0 <= token < values["vocab_size"]]
    if outside:
        raise ArgumentsError(
            f"--stop-tokens {outside[0]}: expected token ids from 0 up to --vocab-size {values['vocab_size']}."
        )


def validate(values: Mapping[str, Any], given: Mapping[str, Any], training: bool) -> None:
    """Check what one process can check; `layout` checks the sizes against the world.

    Raises:
        ArgumentsError: values that do not fit each other.
    """
    _validate_model(values)
    _validate_layers(values)
    _validate_experts(values, given)
    _validate_recomputation(values)
    _validate_loss(values)
    _validate_numbers(values)
    _validate_sharing(values)
    if training:
        _validate_training(values)
        _validate_rollouts(values, given)


def loss_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `LossConfig.of`."""
    names = "policy_loss clip_low clip_high clip_c kl_coef kl_estimator entropy_coef tis_cap"
    options = {name: values[name] for name in names.split()}
    return options | {"aggregation": values["loss_aggregation"]}

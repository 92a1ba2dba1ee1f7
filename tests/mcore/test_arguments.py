"""The command line of pretrain_rl.py: names have one effect, refusals speak, values arrive in Megatron's configs."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron.prefixflow import arguments_docs
from megatron.prefixflow import arguments_table as table
from megatron.prefixflow.arguments import (
    ArgumentsError,
    arguments_for_shape,
    build_parser,
    ddp_config,
    gpt_model_kwargs,
    loss_config,
    optimizer_config,
    padded_vocab_size,
    parallel_layout,
    parse_arguments,
    plan_config,
    scheduler_options,
    shape_of,
    startup_lines,
    transformer_config,
)
from megatron.prefixflow.arguments_result import TRAINING_ONLY
from megatron.prefixflow.arguments_spec import CONFIG_CLASSES, Argument, all_arguments
from megatron.prefixflow.arguments_table import Arity, Effect
from megatron.prefixflow.configs import cpu_safe
from prefixflow.plan.layout import ParallelLayout
from prefixflow.plan.shapes import BUILTIN_SHAPES, TRAINABLE_SHAPES, RopeScaling
from prefixflow.runtime.world import run_world

DOCS = Path(__file__).parents[2] / "docs"
BY_FLAG = {flag: argument for argument in all_arguments() for flag in argument.flags}


def tokens_of(text: str) -> list[str]:
    return text.split()


TRAINING = tokens_of("""--trajectories t.jsonl --global-batch-size 32 --train-iters 10 --lr 1e-3
--model tiny""")

LLAMA3_8B = tokens_of("""--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0
--hidden-dropout 0.0 --tokenizer-type NullTokenizer --vocab-size 128256
--make-vocab-size-divisible-by 128 --tensor-model-parallel-size 4 --sequence-parallel
--micro-batch-size 2 --global-batch-size 128 --train-iters 100 --lr 1e-6 --min-lr 1e-7
--lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
--clip-grad 1.0 --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --log-interval 1
--eval-iters 0 --transformer-impl transformer_engine --use-flash-attn --attention-backend flash
--no-gradient-accumulation-fusion --distributed-timeout-minutes 60 --seed 42 --use-mcore-models
--trajectories rollouts --policy-loss gspo --clip-low 3e-4 --clip-high 4e-4""")

QWEN3_30B_A3B = tokens_of("""--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32
--num-query-groups 4 --kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
--normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-6 --rotary-percent 1.0
--swiglu --untie-embeddings-and-output-weights --vocab-size 151936 --rotary-base 1000000
--max-position-embeddings 40960 --moe-ffn-hidden-size 768 --moe-router-score-function softmax
--moe-token-dispatcher-type alltoall --moe-router-topk 8 --moe-layer-freq '([1]*48)'
--num-experts 128 --moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32
--moe-permute-fusion --moe-aux-loss-coeff 0 --tensor-model-parallel-size 2 --sequence-parallel
--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --global-batch-size 256
--train-iters 10 --lr 1e-6 --bf16 --trajectories rollouts --routing-replay rollout""")


def refusal_of(argv, *, training=False) -> str:
    with pytest.raises(ArgumentsError) as error:
        parse_arguments(argv, training=training)
    return str(error.value)


# One effect for every name.


def test_every_name_stands_in_one_table():
    assert len(all_arguments()) > 700
    assert max(Counter(flag for a in all_arguments() for flag in a.flags).values()) == 1
    effective = {f for row in (*table.OWN_ROWS, *table.OUR_ROWS) for f in row.flags.split()}
    no_effect = [f for g in table.NO_EFFECT for f in tokens_of(f"{g.flags} {g.values} {g.lists}")]
    refused = [f for refusal in table.REFUSALS for f in refusal.names.split()]
    assert max(Counter(no_effect).values()) == 1
    assert max(Counter(refused).values()) == 1
    assert not effective & set(no_effect)
    for refusal in table.REFUSALS:
        other = [n for n in refusal.names.split() if BY_FLAG[n].effect is not Effect.REFUSED]
        assert not other or refusal.harmful or refusal.harmless, f"{other} can never be used"


def test_dests_are_not_shared():
    assert max(Counter(a.dest for a in all_arguments()).values()) == 1


def test_every_table_entry_is_read():
    for name in table.GENERATED_EFFECTIVE:
        assert any(a.dest == name and a.effect is Effect.EFFECTIVE for a in all_arguments()), name
    for group in table.NO_EFFECT:
        for name in tokens_of(f"{group.flags} {group.values} {group.lists}"):
            assert BY_FLAG[name].effect is Effect.NO_EFFECT, name
    for refusal in table.REFUSALS:
        for name in refusal.names.split():
            assert BY_FLAG[name].refusal is refusal, name


def test_what_only_training_reads_are_arguments():
    effective = {a.dest for a in all_arguments() if a.effect is Effect.EFFECTIVE}
    assert effective >= TRAINING_ONLY


def test_every_field_of_megatrons_configs_is_classified():
    dests = {a.dest for a in all_arguments()}
    for config in CONFIG_CLASSES:
        for field in dataclasses.fields(config):
            elsewhere = table.EXCLUDED_FIELDS | table.FIELDS_WITH_OTHER_ARGUMENTS
            assert field.name in dests or field.name in elsewhere, field.name
    unknown = [a.dest for a in all_arguments() if a.refusal and "it is new" in a.refusal.reason]
    if version("megatron-core").startswith("0.16."):
        assert not unknown


def test_a_field_of_a_later_version_is_refused(monkeypatch):
    @dataclasses.dataclass
    class Later(TransformerConfig):
        brand_new_attention: bool = False
        """What it does."""

    from megatron.prefixflow import arguments_spec

    monkeypatch.setattr(arguments_spec, "CONFIG_CLASSES", (Later,))
    monkeypatch.setattr(arguments_spec, "_field_docstrings", lambda config: {})
    (argument,) = [a for a in arguments_spec._generated_arguments() if "brand" in a.dest]
    assert argument.effect is Effect.REFUSED
    assert argument.flags == ("--brand-new-attention",)


@pytest.mark.parametrize(
    "name",
    tokens_of("""--num-experts --num-layers-per-virtual-pipeline-stage --train-iters --global-batch-size
    --micro-batch-size --seq-length --max-position-embeddings --vocab-size
    --make-vocab-size-divisible-by --swiglu --disable-bias-linear --normalization
    --position-embedding-type --rotary-base --use-rope-scaling
    --untie-embeddings-and-output-weights --group-query-attention --qk-layernorm --add-qkv-bias
    --expert-tensor-parallel-size --recompute-granularity --recompute-method --lr-decay-style
    --lr-warmup-iters --use-checkpoint-args --load --save --save-interval --seed --bf16 --tp --pp
    --vpp --cp --ep --etp --dp --max-tokens --trajectories --rollout --reward-function --group-size
    --temperature --top-p --max-response-length --advantage-estimator --filter --tis-cap
    --updates-per-batch --ref-load --prefix-reuse --max-tokens-per-microbatch --prefix-memory
    --kv-budget-gib --memory-budget-gib --context-parallel-kv --routing-replay --route-mismatch
    --policy-loss --loss-aggregation --clip-low --clip-high --clip-c --kl-coef --kl-estimator
    --entropy-coef --skip-zero-advantage --logprobs-only --calibrate --verify-steps --metrics-file
    --trace-file --export-hf-every --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --no-rope-fusion"""),
)
def test_promised_names_are_known(name):
    assert BY_FLAG[name].effect is not Effect.REFUSED


# Refusals.


def refused_sample(argument: Argument) -> list[str]:
    """A command line of this argument that must be refused."""
    refusal, flag = argument.refusal, argument.flags[0]
    assert refusal is not None
    if argument.arity is Arity.FLAG:
        return [flag]
    if refusal.harmful:
        return [flag, str(refusal.harmful[0])]
    options = [str(c) for c in argument.choices] or ["7"]
    harmless = [str(value) for value in refusal.harmless]
    return [flag, next(option for option in options if option not in harmless)]


REFUSABLE = [a for a in all_arguments() if a.refusal is not None]
HARMLESS = [
    (a, value)
    for a in all_arguments()
    if a.refusal is not None and a.arity is Arity.VALUE
    for value in a.refusal.harmless
]


@pytest.mark.parametrize("argument", REFUSABLE, ids=lambda a: a.flags[0])
def test_refusal(argument):
    message = refusal_of(refused_sample(argument))
    assert argument.flags[0] in message
    assert argument.refusal.reason in message
    assert argument.refusal.way_out in message


@pytest.mark.parametrize(("argument", "value"), HARMLESS, ids=str)
def test_harmless_values_pass(argument, value):
    parse_arguments([argument.flags[0], str(value)])


def test_a_refused_name_without_its_value_is_still_refused():
    assert "FP8" in refusal_of(["--fp8-format"])


def test_all_refusals_are_told_at_once():
    message = refusal_of(["--fp16", "--hidden-dropout", "0.1", "--multi-latent-attention"])
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        (["--num-layer", "3"], "--num-layers"),
        (["--num_layers", "3"], "--num-layers"),
        (["--moe-topk=3"], "--moe-router-topk"),
        (["--prefix-resue", "on"], "--prefix-reuse"),
        (["--hidden-drop", "0"], "--hidden-dropout"),
    ],
)
def test_unknown_names_get_the_nearest(argv, nearest):
    message = refusal_of(argv)
    assert argv[0].split("=")[0] in message
    assert f"{nearest}." in message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["stray"], "'stray'"),
        (["--num-layers", "x"], "--num-layers"),
        (["--num-layers"], "--num-layers"),
        (["--policy-loss", "pp0"], "grpo"),
        (["--model", "tinny"], "tiny"),
        (["--moe-layer-freq", "__import__"], "--moe-layer-freq"),
        (["--export-hf-every", "3"], "--export-hf-every"),
    ],
)
def test_malformed_values(argv, words):
    assert words in refusal_of(argv)


# What has no effect.


def test_no_effect_is_listed_once_and_changes_nothing():
    argv = "--log-interval 5 --log-interval 7 --use-flash-attn --eval-iters 0 --profile-ranks 0 1"
    args = parse_arguments(argv.split())
    assert sorted(args.no_effect) == [
        "--eval-iters",
        "--log-interval",
        "--profile-ranks",
        "--use-flash-attn",
    ]
    assert dict(args.values) == dict(parse_arguments([]).values)
    lines = [line for line in startup_lines(args, parallel_layout(args)) if "no effect" in line]
    assert len(lines) == 1
    assert "--log-interval" in lines[0]


@pytest.mark.parametrize(
    "argument", [a for a in all_arguments() if a.effect is Effect.NO_EFFECT], ids=lambda a: a.flags[0]
)
def test_no_effect_arguments_parse(argument):
    argv = [argument.flags[0]] + ([] if argument.arity is Arity.FLAG else ["1"])
    assert parse_arguments(argv).no_effect == (argument.flags[0],)


# Values arrive.


def test_generated_defaults_are_megatrons():
    for config in CONFIG_CLASSES:
        for field in dataclasses.fields(config):
            for argument in all_arguments():
                if argument.source == config.__name__ and argument.dest == field.name:
                    meta = field.metadata.get("argparse_meta", {})
                    expected = {"default": field.default, **meta}["default"]
                    overridden = argument.dest in table.DEFAULT_OVERRIDES
                    factory = expected is dataclasses.MISSING
                    assert overridden or factory or argument.default == expected, field.name
    changed = {n for n in table.DEFAULT_OVERRIDES if "dropout" in n}
    assert changed == {"hidden_dropout", "attention_dropout"}


SAMPLES = {
    "recompute_granularity": ["selective"],
    "recompute_modules": ["mlp", "core_attn"],
    "num_layers": ["6"],
    "moe_token_dispatcher_type": ["alltoall"],
    "moe_router_score_function": ["sigmoid"],
    "config_logger_dir": [""],
}
INTERDEPENDENT = frozenset(
    tokens_of("""tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size bf16
    expert_model_parallel_size expert_tensor_parallel_size sequence_parallel hidden_dropout
    attention_dropout recompute_method recompute_num_layers use_cpu_initialization
    moe_grouped_gemm moe_permute_fusion moe_ffn_hidden_size moe_enable_deepep
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    moe_router_enable_expert_bias moe_shared_expert_overlap hidden_size num_attention_heads
    moe_router_num_groups moe_router_group_topk config_logger_dir""")
)
PLAIN = [
    a
    for a in all_arguments()
    if a.effect is Effect.EFFECTIVE
    and a.source in ("TransformerConfig", "OptimizerConfig")
    and a.dest not in INTERDEPENDENT
]


@pytest.mark.parametrize("argument", PLAIN, ids=lambda a: a.flags[0])
def test_a_field_reaches_its_config(argument):
    """Every generated argument that stands alone ends in the configuration whose field it is."""
    texts: list[str] = []
    expected: object = not argument.default
    if argument.arity is not Arity.FLAG:
        number = "0.25" if argument.kind is float else "8"
        others = [str(c) for c in argument.choices if c != argument.default]
        texts = SAMPLES.get(argument.dest, others[:1] or [number])
        values = [argument.kind(text) for text in texts]
        expected = values if argument.arity is Arity.LIST else values[0]
    assert expected != argument.default
    args = parse_arguments([argument.flags[0], *texts])
    config = transformer_config(args, on_gpu=False)
    if argument.source == "OptimizerConfig":
        config = optimizer_config(args)
    assert getattr(config, argument.dest) == expected


@pytest.mark.parametrize(
    ("argv", "field", "expected"),
    [
        ("", "hidden_dropout", 0.0),
        ("", "calculate_per_token_loss", True),
        ("", "gated_linear_unit", True),
        ("", "activation_func", F.silu),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--no-initialization", "perform_initialization", False),
        ("--dtype float64", "params_dtype", torch.float64),
        ("--bf16", "params_dtype", torch.bfloat16),
        ("--bf16", "bf16", True),
        ("--dtype bfloat16", "bf16", True),
        ("--tp 2 --sequence-parallel", "sequence_parallel", True),
        ("--tp 4", "tensor_model_parallel_size", 4),
        ("--recompute full", "recompute_granularity", "full"),
        ("--recompute full", "recompute_method", "uniform"),
        ("--recompute full", "recompute_num_layers", 1),
        ("--recompute none", "recompute_granularity", None),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--recompute-granularity full --recompute-method block", "recompute_method", "block"),
        ("--pp 2 --vpp 2", "virtual_pipeline_model_parallel_size", 2),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 1", "virtual_pipeline_model_parallel_size", 2),
        ("--pp 2", "virtual_pipeline_model_parallel_size", None),
        ("--pp 2 --decoder-first-pipeline-num-layers 3", "num_layers_in_first_pipeline_stage", 3),
        ("--pp 2 --decoder-last-pipeline-num-layers 3", "num_layers_in_last_pipeline_stage", 3),
        ("--model tiny-moe", "num_moe_experts", 8),
        ("--model tiny-moe", "moe_ffn_hidden_size", 256),
        ("--model tiny-moe --tp 2", "sequence_parallel", True),
        ("--model tiny-moe --tp 2", "expert_tensor_parallel_size", 1),
        ("--model tiny-moe --ep 4", "expert_model_parallel_size", 4),
        ("--model tiny-moe --moe-grouped-gemm", "moe_grouped_gemm", False),
        ("--model tiny-moe --moe-layer-freq [0,1]*2", "moe_layer_freq", [0, 1, 0, 1]),
        ("--model tiny-moe --moe-aux-loss-coeff 1e-2", "moe_aux_loss_coeff", 1e-2),
        ("--model tiny-moe", "moe_router_load_balancing_type", "aux_loss"),
        (
            "--model tiny-moe --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
            "moe_aux_loss_coeff",
            [0.1, 0.2],
        ),
    ],
)
def test_values_of_the_transformer_config(argv, field, expected):
    config = transformer_config(parse_arguments(argv.split()), on_gpu=False)
    assert getattr(config, field) == expected


def test_cpu_configs_have_no_gpu_kernels():
    config = transformer_config(parse_arguments(["--bf16"]), on_gpu=False)
    for name in cpu_safe({}):
        assert getattr(config, name) is (name == "use_cpu_initialization"), name
    on_gpu = transformer_config(parse_arguments(["--bf16"]), on_gpu=True)
    assert on_gpu.bias_activation_fusion
    assert on_gpu.bias_dropout_fusion


def test_mlp_of_scripts_that_name_no_activation():
    argv = tokens_of("""--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100
    --max-position-embeddings 128""")
    args = parse_arguments(argv)
    config = transformer_config(args, on_gpu=True)
    assert config.activation_func is F.gelu
    assert (config.ffn_hidden_size, config.num_query_groups) == (256, 4)
    assert config.add_bias_linear
    assert config.normalization == "LayerNorm"
    assert parse_arguments([*argv, "--swiglu"]).ffn_hidden_size == 128
    assert gpt_model_kwargs(args)["share_embeddings_and_output_weights"]


def test_model_keywords():
    argv = tokens_of("--tp 2 --vocab-size 500 --use-rope-scaling --rope-scaling-factor 4 --rotary-base 77")
    kwargs = gpt_model_kwargs(parse_arguments(argv))
    assert kwargs["vocab_size"] == 512
    assert kwargs["max_sequence_length"] == 65_536
    assert (kwargs["rope_scaling"], kwargs["rope_scaling_factor"]) == (True, 4.0)
    assert kwargs["rotary_base"] == 77
    assert not kwargs["share_embeddings_and_output_weights"]
    assert padded_vocab_size(parse_arguments(["--padded-vocab-size", "515"])) == 515
    assert padded_vocab_size(parse_arguments(tokens_of("--make-vocab-size-divisible-by 100"))) == 600


def test_gradient_buffers():
    plain = ddp_config(parse_arguments([]))
    assert not plain.grad_reduce_in_fp32
    assert not plain.overlap_grad_reduce
    assert plain.check_for_nan_in_grad
    assert ddp_config(parse_arguments(["--bf16"])).grad_reduce_in_fp32
    assert not ddp_config(parse_arguments(["--bf16", "--grad-reduce-in-bf16"])).grad_reduce_in_fp32
    args = parse_arguments(tokens_of("--ddp-bucket-size 123 --no-check-for-nan-in-loss-and-grad"))
    assert ddp_config(args).bucket_size == 123
    assert not ddp_config(args).check_for_nan_in_grad
    assert ddp_config(parse_arguments(["--overlap-grad-reduce"])).overlap_grad_reduce
    assert ddp_config(parse_arguments(["--use-distributed-optimizer"])).use_distributed_optimizer


def test_optimizer_of_a_training_run():
    argv = [*TRAINING, *tokens_of("--optimizer sgd --sgd-momentum 0.5 --min-lr 1e-5 --bf16")]
    config = optimizer_config(parse_arguments(argv, training=True))
    assert isinstance(config, OptimizerConfig)
    assert (config.optimizer, config.sgd_momentum, config.lr, config.min_lr) == ("sgd", 0.5, 1e-3, 1e-5)
    assert config.params_dtype is torch.bfloat16


def test_schedule_counts_trajectories():
    base = scheduler_options(parse_arguments([*TRAINING, "--lr-warmup-iters", "3"], training=True))
    assert (base["lr_warmup_steps"], base["lr_decay_steps"]) == (96, 320)
    assert (base["start_wd"], base["end_wd"], base["wsd_decay_steps"]) == (0.01, 0.01, None)
    argv = "--lr-decay-iters 5 --lr-warmup-fraction 0.5 --lr-decay-style WSD --lr-wsd-decay-iters 2"
    other = scheduler_options(parse_arguments([*TRAINING, *argv.split()], training=True))
    assert (other["lr_warmup_steps"], other["lr_decay_steps"]) == (80, 160)
    assert (other["wsd_decay_steps"], other["lr_wsd_decay_style"]) == (64, "exponential")
    grow = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.3"
    grown = scheduler_options(parse_arguments([*TRAINING, *grow.split()], training=True))
    assert (grown["start_wd"], grown["end_wd"], grown["wd_incr_steps"]) == (0.1, 0.3, 320)


def test_samples_say_the_same_as_steps():
    argv = "--trajectories t --global-batch-size 32 --train-samples 320 --lr 1e-3 --model tiny"
    assert parse_arguments(argv.split(), training=True).train_iters == 10


def test_loss():
    assert parse_arguments(["--policy-loss", "ppo"]).policy_loss == "grpo"
    assert loss_config(parse_arguments(tokens_of("--policy-loss ppo"))) == loss_config(parse_arguments([]))
    dapo = loss_config(parse_arguments(tokens_of("--policy-loss dapo --clip-low 0.125")))
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation.value) == (0.125, 0.28, "token-mean")
    argv = "--loss-aggregation seq-mean-token-sum --kl-coef 0.5 --kl-estimator k1 --entropy-coef 0.25 --tis-cap 2"
    config = loss_config(parse_arguments(argv.split()))
    assert (config.aggregation.value, config.kl_coef, config.kl_estimator.value) == ("seq-mean-token-sum", 0.5, "k1")
    assert (config.entropy_coef, config.tis_cap) == (0.25, 2.0)


def test_plan():
    args = parse_arguments(tokens_of("--tp 4 --sequence-parallel --dp 3 --max-tokens 800 --prefix-reuse off"))
    plan = plan_config(args)
    assert (plan.max_tokens_per_microbatch, plan.data_parallel_size, plan.token_multiple) == (800, 3, 4)
    assert plan.prefix_reuse.value == "off"
    assert plan.cost.linear == BUILTIN_SHAPES["tiny"].body_flops_per_token
    assert plan_config(args, ParallelLayout(tp=4, dp=7)).data_parallel_size == 7
    assert plan_config(parse_arguments(["--tp", "4"])).token_multiple == 1


@pytest.mark.parametrize(
    ("argv", "tokens"),
    [
        ("", 4096),
        ("--max-tokens 99", 99),
        ("--seq-length 300", 300),
        ("--micro-batch-size 4 --seq-length 300", 1200),
        ("--micro-batch-size 4 --seq-length 300 --max-tokens-per-microbatch 77", 77),
    ],
)
def test_token_budget(argv, tokens):
    assert parse_arguments(argv.split()).max_tokens_per_microbatch == tokens


# Validation.


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--tp 3", "--num-attention-heads 8 does not divide evenly"),
        ("--tp 8", "--num-query-groups 4 does not divide evenly"),
        ("--tp 2 --ffn-hidden-size 513", "--ffn-hidden-size 513 does not divide evenly"),
        ("--num-query-groups 3", "not a multiple of --num-query-groups 3"),
        ("--num-layers 0", "--num-layers is 0"),
        ("--seq-length 70000", "more than --max-position-embeddings 65536"),
        ("--squared-relu", "both activations"),
        ("--padded-vocab-size 500", "at least --vocab-size 512"),
        ("--padded-vocab-size 513 --tp 2", "a multiple of"),
        ("--max-tokens 0", "--max-tokens-per-microbatch is 0"),
        ("--bf16 --dtype float64", "contradict"),
        ("--recompute-method block", "needs --recompute-granularity full"),
        ("--recompute full --recompute-granularity full", "say the same"),
        ("--moe-ffn-hidden-size 4", "needs --num-experts"),
        ("--kl-coef nan", "kl_coef"),
        ("--clip-high -1", "clip range"),
        ("--temperature 0", "--temperature is 0.0"),
        ("--pp 0", "--pipeline-model-parallel-size is 0"),
        ("--tp -1", "--tensor-model-parallel-size is -1"),
        ("--lr nan", "--lr is nan"),
        ("--weight-decay inf", "--weight-decay is inf"),
        ("--clip-grad nan", "--clip-grad is nan"),
        ("--kv-budget-gib 0", "expected a number of GiB above 0"),
        ("--seed -1", "--seed is -1"),
        ("--policy-loss sft --tis-cap 2", "tis_cap"),
        ("--verify-steps -1", "--verify-steps is -1"),
        ("--require-sharing --prefix-reuse off", "contradict each other"),
        ("--require-sharing --verify-steps 1 --on-verify-mismatch fallback", "Use --on-verify-mismatch stop"),
        ("--pp 3", "does not divide evenly over 3 model chunks"),
        ("--pp 2 --vpp 3", "does not divide evenly over 6 model chunks"),
        ("--pp 2 --vpp 2 --num-layers-per-virtual-pipeline-stage 1", "say the same"),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 3", "is not a multiple of pp"),
        ("--ep 2", "needs --num-experts"),
        ("--model tiny-moe --ep 3", "--num-experts 8 does not divide evenly"),
        ("--model tiny-moe --moe-token-dispatcher-type flex", "use --moe-token-dispatcher-type alltoall"),
        ("--model tiny-moe --moe-router-topk 9", "more than --num-experts 8"),
        ("--model tiny-moe --moe-layer-freq [1]*3", "has 3 entries"),
        ("--model tiny-moe --moe-aux-loss-coeff 0.1 0.2", "has 2 values"),
    ],
)
def test_values_that_do_not_fit(argv, words):
    assert words in refusal_of(argv.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--lr 1e-3 --global-batch-size 8 --train-iters 1 --model tiny", "--trajectories"),
        ("--trajectories t --global-batch-size 8 --train-iters 1 --model tiny", "--lr"),
        ("--trajectories t --lr 1 --train-iters 1 --model tiny", "--global-batch-size"),
        ("--trajectories t --lr 1 --global-batch-size 8 --model tiny", "--train-iters"),
        ("--trajectories t --lr 1 --global-batch-size 8 --train-iters 1", "--num-layers"),
    ],
)
def test_what_training_requires(argv, words):
    message = refusal_of(argv.split(), training=True)
    assert "required" in message
    assert words in message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--min-lr 1", "--min-lr 1.0 is more than --lr"),
        ("--global-batch-size 0", "--global-batch-size is 0"),
        ("--train-samples 9", "say the same"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 3", "give one of them"),
        ("--weight-decay-incr-style linear", "--start-weight-decay"),
        ("--dtype float64 --use-distributed-optimizer", "float64"),
    ],
)
def test_training_values_that_do_not_fit(argv, words):
    assert words in refusal_of([*TRAINING, *argv.split()], training=True)


def test_save_needs_its_interval():
    assert "--save-interval" in refusal_of([*TRAINING, "--save", "x"], training=True)


def test_experts_with_tensor_parallelism_need_sequence_parallelism():
    argv = [*TRAINING[:-1], "tiny-moe", "--tp", "2"]
    assert "--sequence-parallel" in refusal_of(argv, training=True)
    args = parse_arguments([*argv, "--sequence-parallel"], training=True)
    assert args.expert_tensor_parallel_size == 2


def test_arguments_without_effect_in_this_combination_warn():
    args = parse_arguments(["--sequence-parallel"])
    assert not args.sequence_parallel
    assert "--sequence-parallel" in args.warnings[0]
    argv = tokens_of("""--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100
    --max-position-embeddings 128 --num-query-groups 2""")
    args = parse_arguments(argv)
    assert args.num_query_groups == 4
    assert "--group-query-attention" in args.warnings[0]
    assert any("warning" in line for line in startup_lines(args, parallel_layout(args)))
    args = parse_arguments(["--context-parallel-kv", "ring"])
    assert "--context-parallel-kv" in args.warnings[0]
    args = parse_arguments(["--verify-steps", "2", "--prefix-reuse", "off"])
    assert "--verify-steps has no effect with --prefix-reuse off" in args.warnings[0]


def test_the_start_says_where_keys_are_under_context_parallelism():
    for more, words in (
        ("", "gathered, since there is no memory budget"),
        ("--context-parallel-kv ring", "passed round, as asked for"),
        ("--context-parallel-kv gather --memory-budget-gib 3", "gathered, as asked for"),
        ("--memory-budget-gib 3", "more than 3 GiB"),
    ):
        args = parse_arguments(tokens_of(f"--cp 2 {more}"))
        assert not args.warnings
        assert sum(words in line for line in startup_lines(args, parallel_layout(args))) == 1


def test_layout():
    args = parse_arguments(tokens_of("--tp 2"))
    assert parallel_layout(args) == ParallelLayout(tp=2)
    assert parallel_layout(args, 6) == ParallelLayout(tp=2, dp=3)
    with pytest.raises(ArgumentsError, match="the world has 5 processes"):
        parallel_layout(args, 5)


# Launch scripts and shapes.


def test_llama_launch_script():
    args = parse_arguments(LLAMA3_8B, training=True)
    assert dataclasses.replace(shape_of(args), name="llama3-8b") == BUILTIN_SHAPES["llama3-8b"]
    assert args.max_tokens_per_microbatch == 2 * 8192
    config = transformer_config(args, on_gpu=True)
    assert (config.sequence_parallel, config.recompute_granularity, config.bf16) == (True, "full", True)
    assert gpt_model_kwargs(args)["vocab_size"] == 128_512
    lines = "\n".join(startup_lines(args, parallel_layout(args, 16)))
    assert "8030.3 M parameters" in lines
    assert "16 processes, tp 4 pp 1 cp 1 dp 4, sequence parallel, recomputation full" in lines
    assert "--overlap-param-gather" in lines
    assert "--overlap-grad-reduce" not in lines


def test_qwen_moe_launch_script():
    args = parse_arguments(QWEN3_30B_A3B, training=True)
    ours = dataclasses.replace(shape_of(args), name="qwen3-30b-a3b")
    assert ours == BUILTIN_SHAPES["qwen3-30b-a3b"]
    config = transformer_config(args, on_gpu=False)
    assert (config.num_moe_experts, config.moe_router_topk, config.qk_layernorm) == (128, 8, True)
    assert config.moe_layer_freq == [1] * 48
    layout = parallel_layout(args, 16)
    assert (layout.ep, layout.etp, layout.dp, layout.expert_dp) == (8, 1, 8, 2)
    assert "128 experts in 48 layers" in startup_lines(args, layout)[0]


@pytest.mark.parametrize("name", BUILTIN_SHAPES)
def test_shapes_survive_the_command_line(name):
    shape = BUILTIN_SHAPES[name]
    args = parse_arguments(arguments_for_shape(shape))
    assert dataclasses.replace(shape_of(args), name=name) == shape
    assert parse_arguments(["--model", name]).shape_key == args.shape_key


@pytest.mark.parametrize("scaling", [RopeScaling(32.0), RopeScaling(2.5, "linear")])
def test_scaled_rope_survives_the_command_line(scaling):
    shape = dataclasses.replace(BUILTIN_SHAPES["tiny"], rope_scaling=scaling, qkv_bias=True)
    assert dataclasses.replace(shape_of(parse_arguments(arguments_for_shape(shape))), name="tiny") == shape


def test_help_can_be_shown():
    text = build_parser().format_help()
    assert "--prefix-reuse" in text
    assert "--hidden-size" in text


def test_arguments_after_a_model_win():
    args = parse_arguments(tokens_of("--model small --num-layers 3"))
    assert (args.num_layers, args.hidden_size) == (3, 512)
    assert set(TRAINABLE_SHAPES) <= set(BUILTIN_SHAPES)


def count_parameters(name: str) -> tuple[int, int]:
    """Parameters of the decoder, and of the whole model, of Megatron's own GPTModel of this shape."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron.prefixflow.session import start_session

    start_session(ParallelLayout(), seed=1)
    args = parse_arguments(arguments_for_shape(BUILTIN_SHAPES[name]))
    config = transformer_config(args)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config=config, transformer_layer_spec=spec, **gpt_model_kwargs(args))
    decoder = sum(p.numel() for p in model.decoder.parameters())
    return decoder, sum(p.numel() for p in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts a gloo world")
def test_shapes_count_the_parameters_of_the_model():
    shape = BUILTIN_SHAPES["tiny"]
    assert run_world(1, count_parameters, "tiny") == [(shape.num_body_parameters, shape.num_parameters)]


# The result.


def test_arguments_are_values(tmp_path):
    args = parse_arguments(["--tp", "2"])
    assert pickle.loads(pickle.dumps(args)) == args
    assert copy.copy(args) == args
    assert args.replace(seed=5).seed == 5
    assert args.was_given("tensor_model_parallel_size")
    assert not args.was_given("seed")
    with pytest.raises(AttributeError):
        _ = args.no_such_value
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.values = {}  # type: ignore[misc]


def test_keys_of_reference_runs():
    base = parse_arguments([])
    layout = parse_arguments(tokens_of("--tp 2 --sequence-parallel --max-tokens 100 --recompute full"))
    assert layout.reference_key == base.reference_key
    assert layout.shape_key == base.shape_key
    assert parse_arguments(tokens_of("--kl-coef 0.5")).reference_key != base.reference_key
    assert parse_arguments(tokens_of("--temperature 0.5")).reference_key != base.reference_key
    assert parse_arguments(tokens_of("--rotary-base 7")).shape_key != base.shape_key


def test_weights_of_a_folder(tmp_path):
    assert parse_arguments(["--model", "tiny"]).hf_model is None
    shape = dataclasses.asdict(BUILTIN_SHAPES["tiny"])
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert parse_arguments(["--model", str(tmp_path)]).hf_model is None
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert parse_arguments(["--model", str(tmp_path)]).hf_model == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("arguments.md", arguments_docs.arguments_markdown),
        ("refused.md", arguments_docs.refused_markdown),
    ],
)
def test_documents_are_up_to_date(name, render):
    if not version("megatron-core").startswith("0.16."):
        pytest.skip("the documents are written for Megatron-Core 0.16")
    option = {"arguments.md": "--markdown", "refused.md": "--refused"}[name]
    assert (DOCS / name).read_text() == render(), f"run: python -m megatron.prefixflow.arguments {option} > docs/{name}"

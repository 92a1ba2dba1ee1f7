"""Prefix reuse on a model that somebody else built: refused where it cannot be exact, without a trace where it is not used."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron.prefixflow import attach_checks
from megatron.prefixflow.attach import ReuseSettings, enable_prefix_reuse, handle_of
from megatron.prefixflow.attach_checks import COVERED, REFUSALS, UNREAD, check_config, refused_fields
from megatron.prefixflow.planning import plan_step
from megatron.prefixflow.reference import Reference
from megatron.prefixflow.session import start_session
from prefixflow.plan.layout import ParallelLayout
from prefixflow.runtime.loss import LossConfig
from prefixflow.runtime.world import Worlds
from prefixflow.testing.generate import Style, two_level_groups
from prefixflow.trajectories.types import Trajectory

VOCABULARY = 64
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "qk norm, recomputed": {
        "qk_layernorm": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_layer_freq": [0, 1]},
}
SFT = LossConfig.of("sft")


def config_of(**changes: Any) -> TransformerConfig:
    fields = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "moe_router_load_balancing_type": "none",
    }
    return TransformerConfig(**fields | changes)


def stock_model(config: TransformerConfig, **changes: Any) -> GPTModel:
    """As a stranger builds it: Megatron's local spec, nothing of ours."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=changes.get("vp_stage")
    )
    # Bridges take a base from Hugging Face, where it may be a float.
    rope = {"position_embedding_type": "rope", "rotary_base": 10_000.0}
    keywords = {"vocab_size": VOCABULARY, "max_sequence_length": 128, **rope}
    return GPTModel(config=config, transformer_layer_spec=spec, **keywords | changes).to(config.params_dtype)


def computed(model: Any) -> dict[str, Tensor]:
    """Logits of two sequences, and gradients of their mean square."""
    tokens = torch.arange(18).view(2, 9) % VOCABULARY
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).triu(1)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    logits = model(tokens, torch.arange(9).expand(2, 9), mask)
    logits.float().square().mean().backward()
    gradients = {name: getattr(p, "main_grad", p.grad).clone() for name, p in parameters.items()}
    return {"logits": logits.detach(), **gradients}


def looks(model: Any) -> list[Any]:
    """What must be as before: classes, state, attributes and hooks of every module."""
    modules = [(name, type(m), sorted(vars(m)), len(m._forward_hooks)) for name, m in model.named_modules()]
    return [modules, list(model.state_dict()), [id(p) for p in model.parameters()]]


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], x) for name, x in expected.items())


def wrapped(model: GPTModel, wrapping: str) -> Any:
    inner = Float16Module(model.config, model) if "Float16Module" in wrapping else model
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), inner) if "DDP" in wrapping else inner


def around_enabling(kind: dict[str, Any], wrapping: str) -> dict[str, bool]:
    start_session(ParallelLayout(), 1)
    low = {"bf16": True, "params_dtype": torch.bfloat16} if "Float16Module" in wrapping else {}
    bare = stock_model(config_of(**kind, **low))
    model = wrapped(bare, wrapping)
    classes, checks = [type(m) for m in bare.modules()], {}
    with enable_prefix_reuse(model):
        groups = {id(group): group for group in dist.distributed_c10d._world.pg_map}
        twin = copy.deepcopy(bare, groups)
        checks["a copy is not enabled"] = handle_of(twin) is None and [type(m) for m in twin.modules()] == classes
    looked, before = looks(model), computed(model)
    checks["a copy computes the same"] = torch.equal(computed(twin)["logits"], computed(bare)["logits"])
    with enable_prefix_reuse(model) as handle:
        checks["unused: the same numbers"] = same(computed(model), before)
        checks["unused: the same state"] = list(model.state_dict()) == looked[1]
        checks["found"] = handle_of(model) is handle_of([model]) is handle_of(bare) is handle
        checks["other classes"] = looks(model)[0] != looked[0]
        try:
            enable_prefix_reuse(model)
        except ValueError as error:
            checks["twice is an error"] = "enabled on it already" in str(error)
    handle.disable()
    checks["nothing is left"] = looks(model) == looked and handle_of(model) is None
    checks["after: the same numbers"] = same(computed(model), before)
    return checks


@pytest.mark.parametrize("wrapping", ["bare", "DDP", "DDP, Float16Module"])
@pytest.mark.parametrize("kind", KINDS)
def test_outside_our_passes_nothing_changes(worlds: Worlds, kind: str, wrapping: str) -> None:
    (checks,) = worlds[1].run(around_enabling, KINDS[kind], wrapping)
    assert all(checks.values()), checks


def against_reference(kind: dict[str, Any], wrapping: str) -> tuple[float, int, bool]:
    """Largest relative error of a gradient, how often the stock core attention was called, and whether a trace is left."""
    start_session(ParallelLayout(), 1)
    bare = stock_model(config_of(**kind, params_dtype=torch.float64))
    trajectories = two_level_groups(3, 3, (20, 30), (3, 9), seed=1, style=Style(vocab_size=VOCABULARY))
    expected = Reference(bare, SFT).step(trajectories).grads
    for name, router in bare.named_modules():
        if name.endswith("router"):
            router.router_replay = None
    model = wrapped(bare, wrapping)
    bare.zero_grad(set_to_none=True)
    looked = looks(model)
    with enable_prefix_reuse(model, prefix_reuse="on", max_tokens_per_microbatch=16) as handle:
        plan = plan_step(trajectories, handle.plan_config(999), SFT)
        assert sum(plan.forest.lengths) > sum(len(s.span) for s in plan.forest.segments)
        with mock.patch.object(DotProductAttention, "forward") as upstream, handle.step():
            handle.runner.forward_backward(plan, trajectories, SFT)
    errors = [
        float((getattr(p, "main_grad", p.grad) - expected[name]).norm() / expected[name].norm())
        for name, p in bare.named_parameters()
    ]
    return max(errors), upstream.call_count, looks(model) != looked


@pytest.mark.parametrize(("kind", "wrapping"), [*zip(KINDS, ["bare", "DDP", "DDP"], strict=True)])
def test_our_passes_give_the_gradients_of_the_untouched_model(worlds: Worlds, kind: str, wrapping: str) -> None:
    ((error, num_upstream_calls, leaves_a_trace),) = worlds[1].run(against_reference, KINDS[kind], wrapping)
    # Routers round to float32.
    assert error < (1e-6 if kind == "experts" else 1e-12)
    assert num_upstream_calls == 0
    assert not leaves_a_trace


def built_by_mbridge() -> tuple[list[str], float]:
    """Wrappers of a model that mbridge built for a local spec, and the gradient norm of a step of ours on it."""
    from mbridge.core.parallel_states import ParallelStates
    from mbridge.models.qwen3 import Qwen3Bridge
    from transformers import Qwen3Config

    class Bridge(Qwen3Bridge):
        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            return get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, normalization="RMSNorm")

    start_session(ParallelLayout(), 1)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    hf_config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    # Where mbridge looks for it; transformers 5 keeps it elsewhere.
    hf_config.rope_theta = 10_000.0
    bridge = Bridge(hf_config, parallel_states=ParallelStates.get_parallel_state())
    for name in ("masked_softmax_fusion", "persist_layer_norm"):
        setattr(bridge.config, name, False)
    model = bridge.get_model(wrap_with_ddp=True, ddp_config={"overlap_grad_reduce": True})
    trajectories = two_level_groups(2, 3, 20, 5, seed=1, style=Style(vocab_size=VOCABULARY))
    with enable_prefix_reuse(model, prefix_reuse="on") as handle:
        plan = plan_step(trajectories, handle.plan_config(32), SFT)
        with handle.step():
            handle.runner.forward_backward(plan, trajectories, SFT)
    finalize_model_grads(model)
    wrappers = [type(model[0]).__name__, type(model[0].module).__name__]
    return wrappers, sum(float(p.main_grad.norm()) for p in model[0].parameters())


@pytest.mark.skipif(importlib.util.find_spec("mbridge") is None, reason="needs the extra hf")
def test_a_model_that_mbridge_built(worlds: Worlds) -> None:
    ((wrappers, norm),) = worlds[1].run(built_by_mbridge)
    assert wrappers == ["DistributedDataParallel", "Float16Module"]
    assert norm > 0


# Refusals.

BAD_VALUES: dict[str, Any] = {
    "cuda_graph_impl": "local",
    "softmax_type": "learnable",
    "fp8": "hybrid",
    "fp4": "e2m1",
    "window_size": (8, 0),
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "no_rope_freq": [0, 1],
    "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"],
    "moe_expert_capacity_factor": 0.0,
}


def refusal_of(config: TransformerConfig, name: str, value: Any) -> str:
    setattr(config, name, value)
    with pytest.raises(ValueError, match=name) as raised:
        check_config(config)
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(refused_fields()))
def test_refused_fields(name: str) -> None:
    config = config_of(**KINDS["experts"])
    check_config(config)
    if name == "moe_aux_loss_coeff":
        # Frameworks switch the loss off by its kind, and leave the coefficient.
        config.moe_aux_loss_coeff = 0.01
        check_config(config)
        config.moe_router_load_balancing_type = "aux_loss"
    assert "Build the model without it" in refusal_of(config, name, BAD_VALUES.get(name, True))


def test_options_of_routers_that_do_not_act_are_accepted() -> None:
    check_config(config_of(moe_z_loss_coeff=0.01, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01))
    # Biases that stay as they are only choose experts.
    fixed = config_of(
        **KINDS["experts"],
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_bias_update_rate=0.0,
    )
    check_config(fixed)


def test_every_field_is_classified_once() -> None:
    listed = [*COVERED, *UNREAD, *refused_fields()]
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert fields - set(listed) == set(), "new fields of Megatron-Core: what do they mean for prefix reuse?"
    assert set(listed) - fields == set(), "fields that Megatron-Core no longer has"
    assert len(listed) == len(set(listed))
    names = [name for refusal in REFUSALS for name in refusal.names.split()]
    assert len(names) == len(set(names))


def test_an_unknown_field_is_refused_away_from_its_default() -> None:
    with mock.patch.object(attach_checks, "COVERED", COVERED - {"rotary_interleaved"}):
        check_config(config_of())
        refusal_of(config_of(), "rotary_interleaved", True)


class OtherAttention(DotProductAttention):
    pass


def _with_other_attention(model: GPTModel) -> None:
    model.decoder.layers[1].self_attention.core_attention.__class__ = OtherAttention


def _with_value_head(model: GPTModel) -> None:
    model.output_layer = torch.nn.Linear(32, 1)


def _partly_frozen(model: GPTModel) -> None:
    model.decoder.layers[0].mlp.linear_fc1.weight.requires_grad_(False)


def _in_torch_ddp(model: GPTModel) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


MODELS: dict[str, tuple[Callable[[GPTModel], Any], dict[str, Any]]] = {
    "OtherAttention, expected one of DotProductAttention": (_with_other_attention, {}),
    "value and reward heads": (_with_value_head, {}),
    "parameter decoder.layers.0.mlp.linear_fc1.weight is frozen": (_partly_frozen, {}),
    "Wrap it in megatron.core.distributed": (_in_torch_ddp, {}),
    "'learned_absolute', expected 'rope'": (lambda model: None, {"position_embedding_type": "learned_absolute"}),
    "expected a GPTModel": (lambda model: model.decoder, {}),
    "got 2 model chunks, expected all 1": (lambda model: [model, model], {}),
    "got an empty list": (lambda model: [], {}),
}


def refused_models() -> dict[str, tuple[str, bool]]:
    start_session(ParallelLayout(), 1)
    found = {}
    for expected, (change, keywords) in MODELS.items():
        bare = stock_model(config_of(), **keywords)
        model = change(bare)
        looked = looks(bare)
        try:
            enable_prefix_reuse(bare if model is None else model)
        except ValueError as error:
            found[expected] = (str(error), looks(bare) == looked)
    return found


def test_refused_models(worlds: Worlds) -> None:
    (found,) = worlds[1].run(refused_models)
    assert list(found) == list(MODELS)
    for expected, (sentence, is_untouched) in found.items():
        assert expected in sentence
        assert sentence.startswith("Prefix reuse cannot be enabled on this model: ")
        assert is_untouched


def on_two_stages() -> list[Any]:
    """Both stages refuse a model whose last chunk has a value head; then what each knows of the whole model."""
    groups = start_session(ParallelLayout(pp=2, vpp=2), 1)
    config = config_of(
        num_layers=6,
        num_layers_in_last_pipeline_stage=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    stages = [groups.pipeline_rank, groups.pipeline_rank + 2]
    model = [
        stock_model(config, pre_process=stage == 0, post_process=stage == 3, vp_stage=chunk)
        for chunk, stage in enumerate(stages)
    ]
    head = getattr(model[1], "output_layer", None)
    if head is not None:
        model[1].output_layer = torch.nn.Linear(32, 1)
    with pytest.raises(ValueError, match="value and reward heads"):
        enable_prefix_reuse(model)
    if head is not None:
        model[1].output_layer = head
    with enable_prefix_reuse(model) as handle:
        first, plan_config = handle.groups, handle.plan_config(64)
        assert handle_of(model[1]) is handle
    with enable_prefix_reuse(model) as handle:
        assert handle.groups is first, "channels were made twice"
    return [plan_config.stage_layers, plan_config.pipeline_size, plan_config.num_chunks, handle.shape.num_layers]


def test_stages_refuse_together(worlds: Worlds) -> None:
    assert worlds[2].run(on_two_stages) == [[(2, 1, 2, 1), 2, 2, 6]] * 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"prefix_reus": "on"}, "Did you mean prefix_reuse?"),
        ({"prefix_reuse": "always"}, "expected one of auto, on, off"),
        ({"route_mismatch": "last"}, "expected one of exact, first"),
        ({"kv_budget_gib": 0.0}, "is 0.0, expected a number above 0"),
        ({"max_tokens_per_microbatch": 512.5}, "is 512.5, expected a whole number above 0"),
        ({"memory_budget_gib": "80"}, "is '80', expected a number above 0"),
        ({"memory_budget_gib": math.inf}, "is inf, expected a number above 0"),
        ({"kv_budget_gib": math.nan}, "is nan, expected a number above 0"),
        ({"verify_steps": -1}, "expected a whole number of at least 0"),
        ({"verify_steps": True}, "is True, expected a whole number"),
        ({"require_sharing": "no"}, "require_sharing is 'no', expected True or False"),
        ({"require_sharing": True, "prefix_reuse": False}, "contradict each other"),
    ],
)
def test_refused_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        ReuseSettings.of(**settings)
    assert ReuseSettings.of(prefix_reuse=True).prefix_reuse == "on"


def different_ranks(**layout: int) -> list[str]:
    """What each rank says where one has other settings than the other, a setting that is refused, or a model that is."""
    start_session(ParallelLayout(**layout), 1)
    rank, stages = dist.get_rank(), layout.get("pp", 1)
    config = config_of(pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32)
    model = stock_model(config, pre_process=stages == 1 or rank == 0, post_process=stages == 1 or rank == 1)
    sentences = []
    for given, settings in (
        (model, {"prefix_reuse": "on" if rank else "auto"}),
        (model, {"verify_steps": -rank}),
        ([] if rank else model, {}),
    ):
        with pytest.raises(ValueError, match="rank") as raised:
            enable_prefix_reuse(given, **settings)
        sentences.append(str(raised.value))
    enable_prefix_reuse(model).disable()
    return sentences


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}])
def test_all_ranks_refuse_what_one_of_them_does(worlds: Worlds, layout: dict[str, int]) -> None:
    first, second = worlds[2].run(partial(different_ranks, **layout))
    assert first == second
    differing, setting, model = first
    assert differing.startswith("prefix_reuse differs between ranks: 'auto' on rank 0, 'on' on rank 1.")
    assert setting == "verify_steps is -1, expected a whole number of at least 0. (rank 1)"
    assert "got an empty list" in model


# Gradient buffers of somebody else's DDP.


def overlapped_steps() -> dict[str, Any]:
    """Steps of ours and of Megatron's in turn, on a DDP that reduces during the backward and on a plain one."""
    groups = start_session(ParallelLayout(dp=2), 1)
    trajectories = two_level_groups(4, 3, (20, 30), (3, 9), seed=1, style=Style(vocab_size=VOCABULARY))
    tokens = torch.arange(9)[None] + groups.data_rank
    gradients: list[list[Tensor]] = []
    found: dict[str, Any] = {"early": 0}
    for overlaps in (False, True):
        torch.manual_seed(1)
        bare = stock_model(config_of(calculate_per_token_loss=True))
        config = DistributedDataParallelConfig(overlap_grad_reduce=overlaps, bucket_size=2000)
        ddp = DistributedDataParallel(bare.config, config, bare)
        # A framework may wrap the model afterwards.
        handle = enable_prefix_reuse(bare, prefix_reuse="on", max_tokens_per_microbatch=16)
        plan = plan_step(trajectories, handle.plan_config(16), SFT)
        results = []
        for run in ("early", "at the end", "Megatron's", "Megatron's", "early"):
            ddp.zero_grad_buffer()
            if run != "Megatron's":
                with handle.step(force_all_reduce=run == "at the end", model=ddp):
                    handle.runner.forward_backward(plan, trajectories, SFT)
                    found["early"] += sum(g.grad_reduce_handle is not None for g in ddp.bucket_groups)
                assert all((g.grad_reduce_handle is not None) == overlaps for g in ddp.bucket_groups)
            else:
                ddp(tokens, torch.arange(9)[None], torch.ones(1, 1, 9, 9).triu(1) > 0).square().mean().backward()
            finalize_model_grads([ddp])
            results += [p.main_grad.clone() for p in bare.parameters()]
        gradients.append(results)
        found[f"configuration is back, overlap {overlaps}"] = ddp.ddp_config is config
        with ddp.no_sync(), handle.step(model=ddp):
            handle.runner.forward_backward(plan, trajectories, SFT)
        found[f"no_sync starts nothing, overlap {overlaps}"] = all(
            g.grad_reduce_handle is None for g in ddp.bucket_groups
        )
    found["difference"] = max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients, strict=True))
    return found


def test_gradient_buffers_that_reduce_early(worlds: Worlds) -> None:
    for found in worlds[2].run(overlapped_steps):
        assert found.pop("difference") < 1e-6
        assert all(found.values()), found


def gathered_parameters() -> bool:
    """Whether a step has all parameters where each rank has only updated its own part of them."""
    start_session(ParallelLayout(dp=2), 1)
    bare = stock_model(config_of())
    options = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
    ddp = DistributedDataParallel(bare.config, DistributedDataParallelConfig(**options), bare)
    expected = [p.detach() + 1 for p in bare.parameters()]
    for buffer in ddp.buffers:
        own = buffer.param_data.view(2, -1)[dist.get_rank()] + 1
        buffer.param_data.zero_()
        buffer.param_data.view(2, -1)[dist.get_rank()] = own
    with enable_prefix_reuse(ddp) as handle, handle.step(training=False):
        return all(torch.equal(p, x) for p, x in zip(bare.parameters(), expected, strict=True))


def test_parameters_are_gathered_before_a_step(worlds: Worlds) -> None:
    assert worlds[2].run(gathered_parameters) == [True, True]


def steps_that_are_refused() -> list[str]:
    start_session(ParallelLayout(), 1)
    sentences = []
    model = stock_model(config_of(**KINDS["experts"], moe_enable_routing_replay=True))
    handle = enable_prefix_reuse(model)

    def try_step() -> None:
        try:
            with handle.step():
                pass
        except ValueError as error:
            sentences.append(str(error))

    beyond = Trajectory(id="0", group="step", tokens=[1, VOCABULARY], loss_mask=[0, 1], advantages=0.0)
    try:
        handle.runner.plan_calls([beyond], handle.plan_config(8), placement=[0], joint=[0], group=handle.planning_group)
    except ValueError as error:
        sentences.append(str(error))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    try_step()
    RouterReplay.clear_global_router_replay_instances()
    for module in model.modules():
        if hasattr(module, "router_replay"):
            module.router_replay.clear_router_replay_action()
    model.requires_grad_(False)
    try_step()
    with handle.step(training=False):
        handle.disable()
    try_step()
    return sentences


def test_steps_that_are_refused(worlds: Worlds) -> None:
    (sentences,) = worlds[1].run(steps_that_are_refused)
    words = ("below the vocabulary size 64, got 64 at token 1", "routing replay is set", "frozen", "was disabled")
    assert [expected in sentence for expected, sentence in zip(words, sentences, strict=True)] == [True] * 4

"""slime's Megatron backend with shared prefixes against the same code without them.

slime needs CUDA and SGLang, so its modules are stood in for by tests/mcore/slime_standin; where slime can be imported, its
symbols are checked.
"""

from __future__ import annotations

import functools
import importlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixflow.plan.layout import ParallelLayout
from prefixflow.runtime.world import Worlds

STANDIN = "tests.mcore.slime_standin.backends.megatron_utils"
VOCABULARY = 96  # of tests.mcore.foreign
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}

# One rank's samples: (group, prompt length, response length). Groups are scattered over the microbatches of two steps.
SAMPLES = [(0, 40, 7), (1, 33, 12), (0, 40, 1), (1, 33, 9), (0, 40, 5), (2, 21, 6), (0, 40, 0), (2, 21, 3), (1, 33, 4)]
MICROBATCHES = [[0, 5], [3, 2, 6], [4, 1], [7, 8]]
NUM_MICROBATCHES = [2, 2]
GLOBAL_BATCH_SIZES = [5, 4]


def slime_args(**given: Any) -> Namespace:
    args = Namespace(
        loss_type="policy_loss",
        advantage_estimator="grpo",
        custom_tis_function_path=None,
        calculate_per_token_loss=False,
        recompute_loss_function=False,
        use_rollout_entropy=True,
        rollout_temperature=0.7,
        eps_clip=0.2,
        eps_clip_high=0.28,
        entropy_coef=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.05,
        log_probs_chunk_size=-1,
        data_pad_size_multiplier=16,
        allgather_cp=False,
        seq_length=64,
        decoder_seq_length=None,
        micro_batch_size=1,
    )
    return Namespace(**{**vars(args), **given})


def rollout_of(rank: int, *, shares: bool = True) -> dict[str, Any]:
    """Samples of a data-parallel rank; masks have holes, one masks everything. Without `shares`, every prompt is another."""
    rng = np.random.default_rng(7 + rank)
    prompts = {group: rng.integers(1, VOCABULARY, length) for group, length, _ in SAMPLES}
    data: dict[str, Any] = {"tokens": [], "loss_masks": [], "rollout_mask_sums": []}
    for number, (group, length, response) in enumerate(SAMPLES):
        prompt = prompts[group] if shares else rng.integers(1, VOCABULARY, length)
        mask = torch.tensor(rng.random(response) < 0.8).int() * (number != 4)
        data["tokens"].append(torch.tensor(np.concatenate([prompt, rng.integers(1, VOCABULARY, response)])))
        data["loss_masks"].append(mask)
        data["rollout_mask_sums"].append(torch.clamp_min(mask.sum(), 1))
    data["total_lengths"] = [prompt + length for _, prompt, length in SAMPLES]
    data["response_lengths"] = [length for _, _, length in SAMPLES]
    return data


class PackedAttention(torch.nn.Module):
    """Core attention over packed rows: Megatron's own without Transformer Engine refuses them."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.scale = 1 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        """query [T, n, d], key and value [T, n_kv, d] -> [T, n, d]."""
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        rows = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend(*(x.transpose(0, 1) for x in row)).transpose(0, 1) for row in rows])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )


def build_model(layout: ParallelLayout, dtype: torch.dtype, args: Namespace) -> list[Any]:
    """A model as slime's own provider would build it: Megatron's specs, Megatron's DDP."""
    from megatron.prefixflow.attach_checks import accept_core_attention
    from tests.mcore.faults import restore
    from tests.mcore.foreign import Model

    accept_core_attention(PackedAttention)
    options = {
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable lengths, without experts too
        "overlap_p2p_comm": layout.vpp > 1,  # as Megatron-LM's arguments have it
        "batch_p2p_comm": layout.vpp == 1,
        "calculate_per_token_loss": args.calculate_per_token_loss,
        **(EXPERTS if layout.ep > 1 else {}),
    }
    model = Model(layout, 2 * layout.vpp, dtype, options, attention=PackedAttention).build()
    restore()
    return model


def parameters_of(model: list[Any]) -> dict[str, Any]:
    return {f"{number}.{name}": p for number, chunk in enumerate(model) for name, p in chunk.named_parameters()}


class KeptGradients:
    """An optimizer that takes a plain step and keeps what it was given."""

    def __init__(self, model: list[Any]) -> None:
        self._parameters = parameters_of(model)
        self.steps: list[dict[str, Tensor]] = []

    def zero_grad(self) -> None:
        pass

    def step(self) -> tuple[bool, float, None]:
        self.steps.append({name: p.main_grad.clone() for name, p in self._parameters.items()})
        with torch.no_grad():
            for parameter in self._parameters.values():
                parameter -= 0.1 * parameter.main_grad
        return True, 0.0, None


def train(model: list[Any], args: Namespace, rollout: dict[str, Any]) -> dict[str, Any]:
    """slime's course of a rollout: log-probabilities, two updates, log-probabilities again."""
    from megatron.core import parallel_state

    data, loss, slime, cp_utils = (
        importlib.import_module(f"{STANDIN}.{name}") for name in ("data", "loss", "model", "cp_utils")
    )
    iterators = [data.DataIterator(rollout, MICROBATCHES) for _ in model]
    score = functools.partial(
        slime.forward_only, loss.get_log_probs_and_entropy, args, model, iterators, NUM_MICROBATCHES
    )
    passes = [score()]
    if passes[0]:
        _add_policies(rollout, passes[0]["log_probs"], cp_utils.slice_log_prob_with_cp)
    optimizer = KeptGradients(model)
    for iterator in iterators:
        iterator.reset()
    losses = []
    for step, (number, size) in enumerate(zip(NUM_MICROBATCHES, GLOBAL_BATCH_SIZES, strict=True)):
        size *= parallel_state.get_data_parallel_world_size()
        losses.append(slime.train_one_step(args, 0, step, iterators, model, optimizer, None, number, size)[0])
    passes.append(score(store_prefix="new_"))
    return {"passes": passes, "losses": losses, "gradients": optimizer.steps}


def _add_policies(rollout: dict[str, Any], logprobs: list[Tensor], cut: Callable[..., Tensor]) -> None:
    """Advantages, and an old and a reference policy that are not the present one."""
    generator = torch.Generator().manual_seed(3)
    lengths = list(zip(rollout["total_lengths"], rollout["response_lengths"], strict=True))
    for name, size in (("log_probs", 0.3), ("ref_log_probs", 0.5)):
        noise = [cut(size * torch.randn(response, generator=generator), total, response) for total, response in lengths]
        rollout[name] = [x + n for x, n in zip(logprobs, noise, strict=True)]
    values = torch.randn(len(logprobs), generator=generator).tolist()
    rollout["advantages"] = [torch.full_like(x, value) for x, value in zip(logprobs, values, strict=True)]


def compare(
    layout: ParallelLayout, dtype: torch.dtype, args: Namespace, shares: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    """Largest errors of PrefixFlow's run against slime's own, on this rank, and what it reports of itself."""
    from megatron.core import parallel_state

    from megatron.prefixflow.attach import handle_of
    from megatron.prefixflow.integrations import slime

    model = build_model(layout, dtype, args)
    weights = _weights(model)

    def run() -> dict[str, Any]:
        _restore(model, weights)
        return train(model, args, rollout_of(parallel_state.get_data_parallel_rank(), shares=shares))

    dense = run()
    with slime.install(args, package=STANDIN, **settings):
        ours = run()
    assert handle_of(model) is None
    after = run()
    metrics = _taken_out(ours["losses"])
    return {**_compared(ours, dense), "after": max(_errors(after, dense)), "metrics": metrics}


def compare_context(args: Namespace) -> dict[str, Any]:
    """Two context-parallel ranks against two data-parallel ranks with the same samples; losses and gradients."""
    from megatron.prefixflow.integrations import slime

    model = build_model(ParallelLayout(dp=2), torch.float64, args)
    weights = _weights(model)
    dense = train(model, args, rollout_of(0))
    model = build_model(ParallelLayout(cp=2), torch.float64, args)
    _restore(model, weights)
    with slime.install(args, package=STANDIN, prefix_reuse="on", require_sharing=True):
        ours = train(model, args, rollout_of(0))
    metrics = _taken_out(ours["losses"])
    ours["passes"] = dense["passes"] = []
    return {**_compared(ours, dense), "after": 0.0, "metrics": metrics}


def _weights(model: list[Any]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters_of(model).items()}


def _restore(model: list[Any], weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters_of(model).items():
            parameter.copy_(weights[name])


def _taken_out(losses: list[dict[str, float]]) -> list[dict[str, float]]:
    """PrefixFlow's counters of each step, no longer in its losses."""
    return [{name: loss.pop(name) for name in list(loss) if name.startswith("prefixflow/")} for loss in losses]


def _compared(ours: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    return {name: max(_errors(ours[name], expected[name])) for name in expected}


def _errors(got: Any, expected: Any) -> Iterator[float]:
    """Relative errors of all tensors and numbers in two structures that are alike."""
    if isinstance(expected, Tensor):
        assert got.shape == expected.shape
        yield float((got - expected).double().norm() / expected.double().norm().clamp(min=1e-12))
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name in expected:
            yield from _errors(got[name], expected[name])
    elif isinstance(expected, list):
        for one, other in zip(got, expected, strict=True):
            yield from _errors(one, other)
    else:
        yield abs(got - expected) / max(abs(expected), 1e-12)
    yield 0.0


ONE = ParallelLayout()
CASES: dict[str, tuple[ParallelLayout, torch.dtype, dict[str, Any]]] = {
    "grpo": (ONE, torch.float64, {}),
    "gspo, mean of tokens, loss recomputed": (
        ONE,
        torch.float64,
        {"advantage_estimator": "gspo", "calculate_per_token_loss": True, "recompute_loss_function": True},
    ),
    "whole microbatches": (ONE, torch.float64, {"custom_tis_function_path": "weights.that_mix_samples"}),
    "sft": (ONE, torch.float32, {"loss_type": "sft_loss", "rollout_temperature": 1.0}),
    "tp 2": (ParallelLayout(tp=2), torch.float64, {}),
    "pp 2": (ParallelLayout(pp=2), torch.float64, {}),
    "pp 2, two chunks": (ParallelLayout(pp=2, vpp=2), torch.float64, {}),
    "ep 2": (ParallelLayout(dp=2, ep=2), torch.float64, {}),
    "dp 2": (ParallelLayout(dp=2), torch.float64, {"use_rollout_entropy": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_losses_gradients_and_scores(worlds: Worlds, name: str) -> None:
    layout, dtype, options = CASES[name]
    settings = {"prefix_reuse": "on", "require_sharing": True, "verify_steps": 1}
    results = worlds[layout.world_size].run(compare, layout, dtype, slime_args(**options), True, settings)
    # Megatron's router rounds to float32.
    check(results, 1e-6 if layout.ep > 1 else TOLERANCE[dtype])


@pytest.mark.parametrize("per_token", [False, True])
def test_context_parallel_ranks_have_parts_of_a_loss(worlds: Worlds, per_token: bool) -> None:
    check(worlds[2].run(compare_context, slime_args(calculate_per_token_loss=per_token)), 1e-9)


def check(results: list[dict[str, Any]], tolerance: float) -> None:
    for result in results:
        assert {name: result[name] for name in ("passes", "losses", "gradients")} == pytest.approx(
            dict.fromkeys(("passes", "losses", "gradients"), 0.0), abs=tolerance
        )
        assert result["after"] == 0.0, "slime without PrefixFlow again"
    for metrics in results[-1]["metrics"]:
        assert metrics["prefixflow/fallback"] == 0
        assert metrics["prefixflow/shared_tokens_ratio"] > 0.2


def test_with_nothing_to_share_slime_runs_itself(worlds: Worlds) -> None:
    (result,) = worlds[1].run(compare, ONE, torch.float32, slime_args(), False, {})
    assert [metrics["prefixflow/fallback"] for metrics in result["metrics"]] == [1, 1]
    assert [result[name] for name in ("passes", "losses", "gradients", "after")] == [0.0] * 4


REFUSED: dict[str, dict[str, Any]] = {
    "custom_loss": {"loss_type": "custom_loss"},
    "score-centering": {"use_score_centering": True},
    "rollout-top-p": {"rollout_top_p": 0.9},
    "mtp": {"enable_mtp_training": True},
    "qkv-format": {"qkv_format": "bshd"},
    "use-routing-replay": {"use_routing_replay": True},
    "use-rollout-routing-replay": {"use_rollout_routing_replay": True},
    "allgather-cp": {"allgather_cp": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_not_covered_are_refused_by_name(name: str) -> None:
    from megatron.prefixflow.integrations import slime

    with pytest.raises(ValueError, match=name):
        slime.install(slime_args(**REFUSED[name]), package=STANDIN)
    with pytest.raises(ValueError, match="Did you mean prefix_reuse"):
        slime.install(package=STANDIN, prefix_reus="on")
    with slime.install(slime_args(), package=STANDIN), pytest.raises(ValueError, match="already"):
        slime.install(package=STANDIN)


def refusals() -> dict[str, str]:
    """What a step says of models, samples and losses that are not covered."""
    from megatron.prefixflow.integrations import slime

    data, loss, module = (importlib.import_module(f"{STANDIN}.{name}") for name in ("data", "loss", "model"))
    model = build_model(ONE, torch.float32, slime_args())
    said = {}

    def score(name: str, function: Callable[..., Any] = loss.get_log_probs_and_entropy, **fields: Any) -> None:
        iterators = [data.DataIterator({**rollout_of(0), **fields}, MICROBATCHES)]
        try:
            module.forward_only(function, slime_args(), model, iterators, NUM_MICROBATCHES)
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)

    with slime.install(package=STANDIN, prefix_reuse="on"):
        score("values", loss.get_values)
        score("images", multimodal_train_inputs=[{"pixels": torch.zeros(1)}] * len(SAMPLES))
        score("no prompt", response_lengths=rollout_of(0)["total_lengths"])
        model[0].role = "critic"
        score("critic")
    with slime.install(package=STANDIN, prefix_reuse="on", critic="original"):
        score("critic left to slime")
        model[0].role = "actor"
        with mock.patch.object(loss, "calculate_log_probs_and_entropy", _not_asking):
            score("moved")
        score("actor")
    return said


def _not_asking(logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return logits[:, :1], logits[:, 0]


def test_models_and_losses_that_are_not_covered_are_refused_at_the_step(worlds: Worlds) -> None:
    (said,) = worlds[1].run(refusals)
    assert said.keys() == {"values", "images", "no prompt", "critic", "moved"}
    assert "computed by get_values" in said["values"]
    assert "a model that is given pixels" in said["images"]
    assert "a prompt of at least one token" in said["no prompt"]
    assert "a critic" in said["critic"]
    assert "took PrefixFlow's scores for logits" in said["moved"]


def test_the_standin_is_like_slime_and_a_moved_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.prefixflow.integrations import slime

    loss = importlib.import_module(f"{STANDIN}.loss")
    model = importlib.import_module(f"{STANDIN}.model")
    assert slime.moved_symbols(STANDIN) == []
    monkeypatch.setattr(loss, "loss_function", lambda args, num_microbatches, batch, logits: None)
    monkeypatch.setattr(model, "forward_only", lambda f, args, model, data_iterator: None)
    monkeypatch.delattr(loss, "calculate_log_probs_and_entropy")
    first, second, third = slime.moved_symbols(STANDIN)
    assert "forward_only does not call get_forward_backward_func" in first
    assert "calculate_log_probs_and_entropy is missing" in second
    assert "loss_function takes (args, num_microbatches, batch, logits)" in third
    with pytest.raises(ValueError, match="loss_function takes"):
        slime.install(package=STANDIN)


def test_slime_itself_where_it_is_installed() -> None:
    pytest.importorskip("slime.backends.megatron_utils.model", exc_type=ImportError)
    from megatron.prefixflow.integrations import slime

    assert slime.moved_symbols() == []

"""The sampler against whole forwards of an untouched Megatron model, one token at a time, and against training's scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from prefixflow.runtime.world import Worlds

# Half the vocabulary is likely to be drawn once in 30 tokens, so some responses stop and some do not.
STOP = frozenset(range(20))
ARGV = ("--model", "tiny", "--dtype", "float64")
PROMPT_TOKENS = (5, 37, 1)

# (tokens, logprobs, is_stopped) of one response, by prompt and number.
Samples = list[list[tuple[list[int], list[float], bool]]]


def _config(**changes: Any) -> Any:
    from megatron.prefixflow.sampler import SamplingConfig

    base = SamplingConfig(24, num_samples=4, temperature=0.7, stop_tokens=STOP, seed=3)
    return dataclasses.replace(base, **changes)


def _prompts() -> list[Any]:
    from megatron.prefixflow.sampler import Prompt

    rng = np.random.default_rng(1)
    return [Prompt(f"prompt-{i}", rng.integers(512, size=n)) for i, n in enumerate(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def weights(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    worlds[1].run(_write_weights, str(path))
    return str(path)


def _write_weights(path: str) -> None:
    from safetensors.torch import load_file, save_file

    from megatron.prefixflow.parity import Case, write_weights

    write_weights(Case("", ARGV), path)
    full = load_file(path)
    # Weights of initialisation predict nearly uniform tokens: a wrong key or position would hardly show.
    sharper = {name: 6 * w if w.dim() == 2 else w for name, w in full.items()}
    save_file(sharper, path)


def _sampler(weights: str, *more: str) -> tuple[Any, Any, Any]:
    """(sampler, model, groups) in this world."""
    from safetensors.torch import load_file

    from megatron.prefixflow.arguments import gpt_model_kwargs, parallel_layout, parse_arguments, transformer_config
    from megatron.prefixflow.model import build_model
    from megatron.prefixflow.sampler import Sampler
    from megatron.prefixflow.session import start_session
    from megatron.prefixflow.shards import load_full_parameters
    from prefixflow.runtime.attention.kernels import AtenCpuKernel

    args = parse_arguments((*ARGV, *more))
    layout = parallel_layout(args)
    groups = start_session(layout, 1)
    (model,) = build_model(transformer_config(args), groups, **gpt_model_kwargs(args))
    load_full_parameters([model], load_file(weights), groups, gated=args.swiglu)
    sampler = Sampler(model, groups, AtenCpuKernel(), vocab_size=args.vocab_size, max_positions=200)
    return sampler, model, groups


def _plain(responses: Sequence[Sequence[Any]]) -> Samples:
    return [[(r.tokens.tolist(), r.logprobs.tolist(), r.is_stopped) for r in group] for group in responses]


def _sample(weights: str, config: Any, argv: Sequence[str] = ()) -> Samples:
    sampler, *_ = _sampler(weights, *argv)
    return _plain(sampler.sample(_prompts(), config))


def _sample_naively(weights: str, config: Any) -> Samples:
    """Every token from a forward of the whole sequence through Megatron's own model; sampling by the definition."""
    from safetensors.torch import load_file

    from megatron.prefixflow.arguments import gpt_model_kwargs, parse_arguments, transformer_config
    from megatron.prefixflow.reference import build_reference_model
    from megatron.prefixflow.sampler import _uniforms
    from megatron.prefixflow.session import start_session
    from prefixflow.plan.layout import ParallelLayout

    args = parse_arguments(ARGV)
    start_session(ParallelLayout(), 1)
    model = build_reference_model(transformer_config(args), **gpt_model_kwargs(args)).double().eval()
    stored = load_file(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])
    return [
        [_one_naively(model, p, config, _uniforms(config, p.id, g)) for g in range(config.num_samples)]
        for p in _prompts()
    ]


@torch.no_grad()
def _one_naively(model: Any, prompt: Any, config: Any, uniforms: np.ndarray) -> tuple[list[int], list[float], bool]:
    sequence, logprobs = prompt.tokens.tolist(), []
    for u in uniforms:
        length = len(sequence)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        ids = torch.tensor(sequence)[None]
        logits = model(input_ids=ids, position_ids=torch.arange(length)[None], attention_mask=mask)[0, -1].numpy()
        logits = logits / (config.temperature or 1.0)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        token = int(p.argmax()) if config.temperature == 0 else _draw(p, u, config.top_p)
        logprobs.append(float(np.log(p[token])))
        sequence.append(token)
        if token in config.stop_tokens:
            return sequence[len(prompt.tokens) :], logprobs, True
    return sequence[len(prompt.tokens) :], logprobs, False


def _draw(p: np.ndarray, u: float, top_p: float) -> int:
    if top_p == 1.0:
        return int((p.cumsum() <= u).sum())
    order, kept, total = np.argsort(-p), [], 0.0
    for token in order:
        kept.append(token)
        total += p[token]
        if total >= top_p:
            break
    return int(kept[int((p[kept].cumsum() <= u * total).sum())])


def _assert_same(got: Samples, expected: Samples) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        for (tokens, logprobs, stopped), (want, want_logprobs, want_stopped) in zip(ours, theirs, strict=True):
            assert tokens == want
            assert stopped == want_stopped
            np.testing.assert_allclose(logprobs, want_logprobs, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.0}, {}, {"top_p": 0.6, "temperature": 1.0}],
    ids=["greedy", "tempered", "top-p"],
)
def test_samples_are_those_of_whole_forwards(worlds: Worlds, weights: str, changes: dict[str, Any]) -> None:
    config = _config(**changes)
    got = worlds[1].run(_sample, weights, config)[0]
    _assert_same(got, worlds[1].run(_sample_naively, weights, config)[0])
    if changes.get("temperature") != 0.0:
        lengths = {len(tokens) for group in got for tokens, *_ in group}
        stopped = {is_stopped for group in got for *_, is_stopped in group}
        assert len(lengths) > 3, "the case has lost its different lengths"
        assert stopped == {True, False}


def _score(weights: str, config: Any) -> list[float]:
    """Largest difference between the sampler's log-probabilities and those of a training plan, by trajectory."""
    from megatron.prefixflow.step import StepRunner
    from prefixflow.plan.plan import PlanConfig, build_plan

    sampler, model, groups = _sampler(weights)
    responses = [r for group in sampler.sample(_prompts(), config) for r in group]
    made = [r.trajectory(advantage=1.0, temperature=config.scored_temperature) for r in responses]
    runner = StepRunner([model], groups, sampler.kernel, vocab_size=512)
    plan = build_plan(made, PlanConfig(48))
    assert plan.forest.num_shared_segments >= 2
    scored = runner.score(plan, made).trajectory_logprobs()
    return [
        float(np.abs(scored[i] - t.rollout_logprobs[t.loss_mask]).max())
        for i, t in enumerate(made)
        if t.rollout_logprobs is not None
    ]


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.5}, {"temperature": 0.0}], ids=["tempered", "top-p", "greedy"])
def test_logprobs_are_those_of_training(worlds: Worlds, weights: str, changes: dict[str, Any]) -> None:
    differences = worlds[1].run(_score, weights, _config(**changes))[0]
    assert len(differences) == 4 * len(PROMPT_TOKENS)
    assert max(differences) < 1e-9


@pytest.mark.parametrize("argv", [("--tp", "2"), ("--tp", "2", "--sequence-parallel")], ids=["tp2", "tp2-sp"])
def test_tensor_parallel_ranks_sample_alike(worlds: Worlds, weights: str, argv: tuple[str, ...]) -> None:
    config = _config(top_p=0.9)
    first, second = worlds[2].run(_sample, weights, config, argv)
    assert first == second
    _assert_same(first, worlds[1].run(_sample, weights, config)[0])


def test_samples_do_not_depend_on_their_batch(worlds: Worlds, weights: str) -> None:
    together = worlds[1].run(_sample, weights, _config())[0]
    one_prompt_at_a_time = worlds[1].run(_sample, weights, _config(max_live_responses=1))[0]
    _assert_same(one_prompt_at_a_time, together)
    fewer = worlds[1].run(_sample, weights, _config(num_samples=2))[0]
    _assert_same(fewer, [group[:2] for group in together])
    other_seed = worlds[1].run(_sample, weights, _config(seed=4))[0]
    assert other_seed != together


def test_every_response_has_random_numbers_of_its_own() -> None:
    from megatron.prefixflow.sampler import _uniforms

    keys = [(seed, prompt, number) for seed in (0, 1) for prompt in ("a", "b") for number in (0, 1)]
    drawn = [_uniforms(_config(seed=seed), prompt, number) for seed, prompt, number in keys]
    assert len({tuple(u) for u in drawn}) == len(keys)
    again = _uniforms(_config(seed=0), "a", 0)
    assert (again == drawn[0]).all()


def _counts(weights: str, config: Any) -> tuple[int, int, Samples, bool]:
    sampler, model, _ = _sampler(weights)
    model.train()
    samples = _plain(sampler.sample(_prompts(), config))
    return sampler.num_prefill_tokens, sampler.num_decoded_tokens, samples, model.training


def test_a_prompt_runs_once_and_the_last_token_never(worlds: Worlds, weights: str) -> None:
    prefilled, decoded, samples, is_training = worlds[1].run(_counts, weights, _config())[0]
    assert prefilled == sum(PROMPT_TOKENS)
    assert decoded == sum(len(tokens) - 1 for group in samples for tokens, *_ in group)
    assert is_training, "sampling must leave the model's mode as it was"


def _refusals(weights: str) -> list[str]:
    from megatron.prefixflow.sampler import Prompt

    sampler, *_ = _sampler(weights)
    one = np.ones(1, np.int64)
    cases: list[list[Any]] = [
        [Prompt("a", np.ones(0, np.int64))],
        [Prompt("a", one * 512)],
        [Prompt("a", one), Prompt("a", one + 1)],
        [Prompt("a", np.ones(180, np.int64))],
    ]
    return [_message(partial(sampler.sample, prompts, _config())) for prompts in cases]


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def test_bad_prompts_are_refused(worlds: Worlds, weights: str) -> None:
    empty, outside, twice, long = worlds[1].run(_refusals, weights)[0]
    assert "P >= 1" in empty
    assert "vocabulary size 512" in outside
    assert "one id" in twice
    assert "203 positions, the model has 200" in long


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_response_tokens": 0}, "max_response_tokens is 0"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _config(**changes)


def test_parallelisms_without_a_sampler_are_refused() -> None:
    from types import SimpleNamespace

    from megatron.prefixflow.sampler import refuse_unsupported

    sizes = {"pipeline_model_parallel_size": 1, "expert_model_parallel_size": 2}
    with pytest.raises(ValueError, match=r"\(--ep\) 2"):
        refuse_unsupported(SimpleNamespace(**sizes))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    from megatron.prefixflow.sampler import choose

    p = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], dtype=torch.float64)
    num = 2000
    uniforms = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    logits = p.log().expand(num, -1)
    for top_p, expected in ((1.0, [0.5, 0.0, 0.3, 0.15, 0.05]), (0.75, [0.625, 0.0, 0.375, 0.0, 0.0])):
        tokens, logprobs = choose(logits, uniforms, _config(temperature=1.0, top_p=top_p))
        shares = torch.bincount(tokens, minlength=5) / num
        torch.testing.assert_close(shares, torch.tensor(expected, dtype=shares.dtype), rtol=0, atol=1e-3)
        # Of the distribution before it is cut.
        torch.testing.assert_close(logprobs, p.log()[tokens])
    # Random numbers at the ends of their range.
    ends = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert choose(logits[:2], ends, _config(temperature=1.0))[0].tolist() == [0, 4]


def test_a_nucleus_wider_than_the_first_candidates() -> None:
    from megatron.prefixflow.sampler import choose

    logits = torch.zeros(1, 4000, dtype=torch.float64)
    chosen = {int(choose(logits, torch.tensor([u]), _config(temperature=1.0, top_p=0.9))[0]) for u in (0.01, 0.5, 0.99)}
    assert len(chosen) == 3

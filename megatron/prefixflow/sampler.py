"""Sample responses from the Megatron model that is being trained.

Steps, for as many prompts at a time as `max_live_responses` allows
1. Each prompt runs once, as a microbatch of its own that writes one block of the K/V cache. Its last hidden state gives
   the distribution of the first token of all its responses.
2. All responses advance together, one token a step: the linear layers see one batch of live responses, attention reads
   the prompt's block once for all its responses (`prefixflow.runtime.attention.decode`).
3. A response that has ended leaves the batch; a prompt's block is dropped with its last response.

Invariants
1. A response depends on its prompt, its number, the weights and the seed, not on what it is batched with, as far as
   rounding allows: each has random numbers of its own, one a token, and the token is where that number falls in the
   cumulative distribution.
2. Log-probabilities are of the tempered distribution before `top_p` cuts it, so they compare with training's.
3. Tensor-parallel ranks take the same tokens: logits are gathered for the sampled rows, and the random numbers agree.
4. The routes of a model with experts are those that its layers took, one row for each token that was run: a replay of
   them (`--routing-replay rollout`) routes as here.

Data- and context-parallel ranks hold whole models, and may sample different prompts at the same time. Not covered:
pipeline and expert parallelism, where ranks would have to advance together.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from megatron.prefixflow.groups import Groups
from megatron.prefixflow.params import LayerAttention, MicrobatchParams
from megatron.prefixflow.positions import RotaryTable
from megatron.prefixflow.router import ROUTE_DTYPE, RoutingContext
from megatron.prefixflow.routing import chunk_routers, moe_layer_numbers
from prefixflow.plan.slices import CachedSlice, LocalSlice
from prefixflow.ranges import Range
from prefixflow.runtime.attention.decode import DecodeContext, ResponseCache
from prefixflow.runtime.attention.function import AttentionContext, Operation
from prefixflow.runtime.attention.kernels import AttentionKernel
from prefixflow.runtime.cache import KVCache, accumulation_dtype
from prefixflow.trajectories.types import Trajectory

# Enough of the most likely tokens for nearly every nucleus; the others are sorted only where it is not.
_FIRST_CANDIDATES = 512


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """`id` names the prompt and picks its random numbers; tokens int64 [P], P >= 1."""

    id: str
    tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How to sample.

    num_samples: responses for each prompt.
    temperature: divides the logits; 0 takes the most likely token (log-probabilities are then of temperature 1).
    top_p: the smallest set of most likely tokens with this much probability is drawn from.
    stop_tokens: any of them ends a response and is its last token.
    max_live_responses: responses that are decoded at a time; bounds memory. At least one prompt's are.
    """

    max_response_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    stop_tokens: frozenset[int] = field(default_factory=frozenset)
    seed: int = 0
    max_live_responses: int = 256

    def __post_init__(self) -> None:
        for name in ("max_response_tokens", "num_samples", "max_live_responses"):
            if getattr(self, name) < 1:
                raise ValueError(f"Sampling: {name} is {getattr(self, name)}, expected at least 1.")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"Sampling: temperature is {self.temperature}, expected a finite number of at least 0.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"Sampling: top_p is {self.top_p}, expected more than 0 and at most 1.")

    @property
    def scored_temperature(self) -> float:
        """The temperature of the log-probabilities."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sample: tokens int64 [S] with the stop token if there was one, and their log-probabilities float64 [S].

    routes: int16 [P + S - 1, MoE layers, top-k] of prompt and response; None in a model without experts.
    """

    prompt: Prompt
    number: int
    tokens: np.ndarray
    logprobs: np.ndarray
    is_stopped: bool
    routes: np.ndarray | None = None

    def trajectory(self, *, advantage: float, reward: float | None = None, temperature: float = 1.0) -> Trajectory:
        """The trajectory of prompt and response, of which the response is trained; the group is the prompt."""
        num_prompt = len(self.prompt.tokens)
        tokens = np.concatenate([self.prompt.tokens, self.tokens])
        return Trajectory(
            id=f"{self.prompt.id}/{self.number}",
            group=self.prompt.id,
            tokens=tokens,
            loss_mask=np.arange(len(tokens)) >= num_prompt,
            advantages=advantage,
            rollout_logprobs=np.concatenate([np.zeros(num_prompt), self.logprobs]),
            reward=reward,
            temperature=temperature,
            routes=self.routes,
        )


class Sampler:
    """Samples from `model`, a bare `GPTModel` made by `build_model`, with its weights as they are at each call.

    vocab_size: before padding; padded entries are never sampled.
    max_positions: the longest sequence of positions that the model takes; None: no limit.

    Counts since it was made: `num_prefill_tokens` and `num_decoded_tokens` that the model ran.
    """

    def __init__(
        self,
        model: Any,
        groups: Groups,
        kernel: AttentionKernel,
        *,
        vocab_size: int,
        max_positions: int | None = None,
    ) -> None:
        refuse_unsupported(model.config)
        self.model = model
        self.groups = groups
        self.kernel = kernel
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.device = next(model.parameters()).device
        self.num_prefill_tokens = 0
        self.num_decoded_tokens = 0
        self._rotary = RotaryTable(model.rotary_pos_emb)
        self._routes = _RouteRecorder(model, groups) if model.config.num_moe_experts is not None else None

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], config: SamplingConfig) -> tuple[tuple[Response, ...], ...]:
        """`num_samples` responses for each prompt. Collective over the tensor-parallel group.

        Raises ValueError for a prompt that is empty, too long or outside the vocabulary, and for equal ids.
        """
        self._check(prompts, config)
        was_training = self.model.training
        self.model.eval()
        try:
            return self._sample(prompts, config)
        finally:
            self.model.train(was_training)

    def _sample(self, prompts: Sequence[Prompt], config: SamplingConfig) -> tuple[tuple[Response, ...], ...]:
        head = _Head(self.model, self.vocab_size, self.groups.tensor)
        num_prompts = max(1, config.max_live_responses // config.num_samples)
        responses: list[tuple[Response, ...]] = []
        for start in range(0, len(prompts), num_prompts):
            wave = _Wave(prompts[start : start + num_prompts], config)
            self._run_wave(wave, head, config)
            responses += wave.responses()
        return tuple(responses)

    def _run_wave(self, wave: _Wave, head: _Head, config: SamplingConfig) -> None:
        cache, own = KVCache(), ResponseCache()
        first = torch.cat([self._prefill(block, wave, cache) for block in range(len(wave.prompts))])
        logits = head.logits(first).repeat_interleave(config.num_samples, 0)
        while True:
            tokens, logprobs = choose(logits, wave.uniforms(self.device), config)
            kept = wave.take(tokens.cpu().numpy(), logprobs.double().cpu().numpy())
            for block in set(cache.live_blocks) - wave.live_blocks:
                cache.release(block)
            if not len(kept):
                return
            if len(kept) < len(tokens):
                own.keep(torch.from_numpy(kept).to(self.device))
            logits = head.logits(self._decode(wave, cache, own))

    def _prefill(self, block: int, wave: _Wave, cache: KVCache) -> Tensor:
        """Run prompt number `block`, writing its K/V as this block; the hidden state [1, h] of its last token."""
        prompt = wave.prompts[block]
        num_tokens = len(prompt.tokens)
        num_physical = self._padded(num_tokens)
        runs = [Range(0, num_tokens), Range(num_tokens, num_physical)]
        context = AttentionContext(
            local=tuple(LocalSlice(run, run, causal=True) for run in runs if len(run)),
            cached=(),
            writes=((block, runs[0]),),
            cache=cache,
            kernel=self.kernel,
            operation=Operation.FORWARD_ONLY,
        )
        hidden, routes = self._hidden(prompt.tokens, np.arange(num_tokens), context)
        wave.keep_prompt_routes(routes)
        self.num_prefill_tokens += num_tokens
        return hidden[num_tokens - 1 : num_tokens]

    def _decode(self, wave: _Wave, cache: KVCache, own: ResponseCache) -> Tensor:
        """Run the last token of every live response: hidden states [B, h]."""
        tokens, positions = wave.inputs()
        context = DecodeContext(wave.slices(), len(tokens), cache, own, self.kernel)
        hidden, routes = self._hidden(tokens, positions, context)
        wave.keep_routes(routes)
        own.advance()
        self.num_decoded_tokens += len(tokens)
        return hidden[: len(tokens)]

    def _hidden(
        self, tokens: np.ndarray, positions: np.ndarray, context: LayerAttention
    ) -> tuple[Tensor, np.ndarray | None]:
        """Hidden states [T, h] before the LM head, T padded to what sequence parallelism wants, and the tokens' routes."""
        if self._routes is None:
            return self._decoder(tokens, positions, context), None
        with self._routes.recording(self._padded(len(tokens))):
            hidden = self._decoder(tokens, positions, context)
        return hidden, self._routes.routes(len(tokens))

    def _decoder(self, tokens: np.ndarray, positions: np.ndarray, context: LayerAttention) -> Tensor:
        padding = (0, self._padded(len(tokens)) - len(tokens))
        ids = torch.from_numpy(np.pad(tokens, padding)).to(self.device).unsqueeze(0)
        places = torch.from_numpy(np.pad(positions, padding)).to(self.device)
        hidden = self.model.decoder(
            hidden_states=self.model.embedding(input_ids=ids, position_ids=places.unsqueeze(0)),
            attention_mask=None,
            rotary_pos_emb=self._rotary.rows(places, int(positions.max()) + 1),
            packed_seq_params=MicrobatchParams.of(context),
        )
        if self.model.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.groups.tensor
            )
        return hidden.squeeze(1)

    def _padded(self, num_tokens: int) -> int:
        multiple = self.groups.tensor.size() if self.model.config.sequence_parallel else 1
        return -(-num_tokens // multiple) * multiple

    def _check(self, prompts: Sequence[Prompt], config: SamplingConfig) -> None:
        if len({prompt.id for prompt in prompts}) < len(prompts):
            raise ValueError("Sampling: two prompts have one id, so their samples would be alike; give each its own.")
        for prompt in prompts:
            _check_prompt(prompt, self.vocab_size)
            # The last token of a response is not run.
            num_positions = len(prompt.tokens) + config.max_response_tokens - 1
            if self.max_positions is not None and num_positions > self.max_positions:
                raise ValueError(
                    f"Prompt {prompt.id!r} and a response of {config.max_response_tokens} tokens take {num_positions} "
                    f"positions, the model has {self.max_positions}; shorten the prompt or the response."
                )


class _Wave:
    """Responses that are decoded together: what they are so far, and which are live.

    Row r is response r % num_samples of prompt r // num_samples.
    """

    def __init__(self, prompts: Sequence[Prompt], config: SamplingConfig) -> None:
        self.prompts = prompts
        self._config = config
        num_rows = len(prompts) * config.num_samples
        self._live = np.arange(num_rows)
        self._length = 0
        self._tokens = np.zeros((num_rows, config.max_response_tokens), np.int64)
        self._logprobs = np.zeros((num_rows, config.max_response_tokens))
        self._lengths = np.zeros(num_rows, np.int64)
        self._stopped = np.zeros(num_rows, bool)
        self._uniforms = np.stack(
            [_uniforms(config, prompt.id, number) for prompt in prompts for number in range(config.num_samples)]
        )
        self._prompt_routes: list[np.ndarray] = []
        self._routes: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def live_blocks(self) -> set[int]:
        return set((self._live // self._config.num_samples).tolist())

    def uniforms(self, device: torch.device) -> Tensor:
        """Random numbers [B] in [0, 1) for the next token of each live response."""
        return torch.from_numpy(self._uniforms[self._live, self._length]).to(device)

    def take(self, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Add a token to every live response; returns which of them (places in the batch) stay live."""
        self._tokens[self._live, self._length] = tokens
        self._logprobs[self._live, self._length] = logprobs
        self._length += 1
        self._lengths[self._live] = self._length
        stopped = np.isin(tokens, list(self._config.stop_tokens))
        self._stopped[self._live[stopped]] = True
        is_full = self._length == self._config.max_response_tokens
        kept = np.flatnonzero(~stopped & (not is_full))
        self._live = self._live[kept]
        return kept

    def keep_prompt_routes(self, routes: np.ndarray | None) -> None:
        """Routes [P, MoE layers, top-k] of the next prompt."""
        if routes is not None:
            self._prompt_routes.append(routes)

    def keep_routes(self, routes: np.ndarray | None) -> None:
        """Routes [B, MoE layers, top-k] of the last tokens of the live responses."""
        if routes is not None:
            self._routes.append((self._live.copy(), routes))

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Last tokens [B] of the live responses, and their positions [B]."""
        num_prompt_tokens = np.asarray([len(prompt.tokens) for prompt in self.prompts])
        positions = num_prompt_tokens[self._live // self._config.num_samples] + self._length - 1
        return self._tokens[self._live, self._length - 1], positions

    def slices(self) -> tuple[CachedSlice, ...]:
        """The live responses of each prompt, with the prompt's block."""
        blocks = self._live // self._config.num_samples
        bounds = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(blocks)]
        ranges = [Range(a, b) for a, b in itertools.pairwise(bounds)]
        return tuple(CachedSlice(rows, (int(blocks[rows.start]),)) for rows in ranges)

    def responses(self) -> list[tuple[Response, ...]]:
        found: dict[int, list[Response]] = defaultdict(list)
        for row, length in enumerate(self._lengths):
            index, number = divmod(row, self._config.num_samples)
            found[index].append(
                Response(
                    prompt=self.prompts[index],
                    number=number,
                    tokens=self._tokens[row, :length].copy(),
                    logprobs=self._logprobs[row, :length].copy(),
                    is_stopped=bool(self._stopped[row]),
                    routes=self._routes_of(row, index),
                )
            )
        return [tuple(found[index]) for index in range(len(self.prompts))]

    def _routes_of(self, row: int, prompt: int) -> np.ndarray | None:
        if not self._prompt_routes:
            return None
        # Live rows ascend, so a binary search finds this one; a response's last token is never run.
        steps = self._routes[: self._lengths[row] - 1]
        own = [routes[np.searchsorted(live, row)][None] for live, routes in steps]
        return np.concatenate([self._prompt_routes[prompt], *own])


class _RouteRecorder:
    """Lets the routers of a model run without a plan, and keeps what they chose."""

    def __init__(self, model: Any, groups: Groups) -> None:
        self._routers = chunk_routers(model)
        self._layers = moe_layer_numbers(model.config)
        self._device = next(model.parameters()).device
        self._tensor = groups.tensor
        self._is_split = model.config.sequence_parallel and groups.tensor.size() > 1
        self._chosen: dict[int, Tensor] = {}
        for router in self._routers:
            router.keep_buffers_float32()

    @contextmanager
    def recording(self, num_rows: int) -> Iterator[None]:
        """Around a forward of `num_rows` tokens, padding among them."""
        rows = num_rows // (self._tensor.size() if self._is_split else 1)
        zeros = torch.zeros(rows, device=self._device)
        context = RoutingContext(
            segments=(0,),
            segment_of=zeros.long(),
            multiplicity=zeros,
            mean_weight=zeros,
            losses=None,
            layers=self._layers,
            operation=Operation.FORWARD_ONLY,
        )
        for router in self._routers:
            router.context = context
        try:
            yield
        finally:
            for router in self._routers:
                router.context = None
        self._chosen = context.chosen

    def routes(self, num_tokens: int) -> np.ndarray:
        """int16 [num_tokens, MoE layers, top-k] of the forward before; collective over split tensor-parallel ranks."""
        here = torch.stack([self._chosen[layer] for layer in self._layers], dim=1).to(ROUTE_DTYPE).contiguous()
        if self._is_split:
            # Backends have no 16-bit integers in common.
            wide = here.int()
            parts = [torch.empty_like(wide) for _ in range(self._tensor.size())]
            dist.all_gather(parts, wide, group=self._tensor)
            here = torch.cat(parts).to(ROUTE_DTYPE)
        return here[:num_tokens].cpu().numpy()


class _Head:
    """The LM head of a vocabulary-parallel model for a few rows, its logits gathered."""

    def __init__(self, model: Any, vocab_size: int, group: dist.ProcessGroup) -> None:
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        self._dtype = accumulation_dtype(weight.dtype)
        # A CPU has no product of half-precision matrices with a float32 result: converted once, not at each token.
        self._weight = weight.detach() if weight.is_cuda else weight.detach().to(self._dtype)
        self._vocab_size = vocab_size
        self._group = group

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, h] -> [R, vocab_size] in accumulation precision, the same on all ranks of the group."""
        here = self._product(hidden)
        if self._group.size() == 1:
            return here[:, : self._vocab_size]
        parts = [torch.empty_like(here) for _ in range(self._group.size())]
        dist.all_gather(parts, here, group=self._group)
        return torch.cat(parts, dim=1)[:, : self._vocab_size]

    def _product(self, hidden: Tensor) -> Tensor:
        if hidden.is_cuda and hidden.dtype != self._dtype:
            return torch.mm(hidden, self._weight.t(), out_dtype=self._dtype)
        return hidden.to(self._dtype) @ self._weight.t()


def choose(logits: Tensor, uniforms: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Tokens [R] and their log-probabilities [R] from logits [R, V] and random numbers [R] in [0, 1).

    The token is where the random number falls in the cumulative distribution, tokens in order of their ids (of their
    probabilities under `top_p`).
    """
    if config.temperature not in (0.0, 1.0):
        logits = logits / config.temperature
    logprobs = logits.log_softmax(-1)
    if config.temperature == 0.0:
        tokens = logprobs.argmax(-1)
    elif config.top_p < 1.0:
        tokens = _nucleus(logprobs, uniforms, config.top_p)
    else:
        tokens = _invert(logprobs.double().exp(), uniforms)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _nucleus(logprobs: Tensor, uniforms: Tensor, top_p: float) -> Tensor:
    num_candidates = min(_FIRST_CANDIDATES, logprobs.shape[1])
    values, tokens = logprobs.topk(num_candidates)
    probabilities = values.double().exp()
    if bool((probabilities.sum(-1) < top_p).any()):
        values, tokens = logprobs.sort(dim=-1, descending=True)
        probabilities = values.double().exp()
    # A token is in the nucleus while those before it do not reach top_p; the first always is.
    before = probabilities.cumsum(-1) - probabilities
    place = _invert(probabilities.masked_fill(before >= top_p, 0.0), uniforms)
    return tokens.gather(1, place.unsqueeze(1)).squeeze(1)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Columns [R] where `uniforms` [R] fall in the cumulative sums of probabilities [R, V] (float64, any sum)."""
    cumulative = probabilities.cumsum(-1)
    target = (uniforms.unsqueeze(1) * cumulative[:, -1:]).contiguous()
    place = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return place.clamp(max=probabilities.shape[1] - 1)


def _uniforms(config: SamplingConfig, prompt_id: str, number: int) -> np.ndarray:
    """The random numbers of one response, one a token: a function of seed, prompt and number alone."""
    key = hashlib.sha256(repr((config.seed, prompt_id, number)).encode()).digest()
    return np.random.default_rng(list(key)).random(config.max_response_tokens)


def _check_prompt(prompt: Prompt, vocab_size: int) -> None:
    tokens = prompt.tokens
    if tokens.ndim != 1 or tokens.dtype != np.int64 or not len(tokens):
        raise ValueError(
            f"Prompt {prompt.id!r}: expected int64 token ids [P] with P >= 1, got {tokens.dtype} {list(tokens.shape)}."
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"Prompt {prompt.id!r}: expected token ids from 0 up to the vocabulary size {vocab_size}, got "
            f"{tokens.min()} to {tokens.max()}; use the tokenizer of the model."
        )


def refuse_unsupported(config: Any) -> None:
    """ValueError where the sampler cannot run a model of this layout (`TransformerConfig`)."""
    for name, flag in (
        ("pipeline_model_parallel_size", "--pipeline-model-parallel-size (--pp)"),
        ("expert_model_parallel_size", "--expert-model-parallel-size (--ep)"),
    ):
        if getattr(config, name) > 1:
            raise ValueError(
                f"Sampling from the model with {flag} {getattr(config, name)} is not built: expected 1. Use tensor, data "
                "and context parallelism, or sample elsewhere and follow its files (--rollout trace)."
            )

"""Run operations of the table on a Megatron model chunk.

All state is keyed by microbatch: what F(m) leaves behind (its output with the graph, its attention context, its rows)
stays until B(m) takes it, in whatever order the table asks. K/V of a segment live in the cache from F of its
microbatch to the last operation that reads them; gK/gV from the first reader's B to its own B.

Activations between F(m) and B(m), by the memory plan's policy for m on this stage:

    KEEP       the graph keeps them
    OFFLOAD    they wait in host memory; B brings them back as it reaches them
    RECOMPUTE  F makes no graph and keeps the stage's input only; B runs the body once more first, as part of the backward:
               it stores, records and counts nothing, and takes the routes that F took
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from megatron.prefixflow.context import recomputes_attention
from megatron.prefixflow.params import MicrobatchParams
from megatron.prefixflow.positions import RotaryTable
from megatron.prefixflow.router import RoutingContext
from megatron.prefixflow.routing import StageRouting
from prefixflow.forest import Forest
from prefixflow.plan.batch import MicrobatchArrays, microbatch_arrays
from prefixflow.plan.microbatch import Microbatch
from prefixflow.runtime.attention.function import AttentionContext, Operation
from prefixflow.runtime.attention.kernels import AttentionKernel
from prefixflow.runtime.attention.ring import RingStep
from prefixflow.runtime.cache import KVCache
from prefixflow.runtime.context import ContextParallel, SplitMicrobatch
from prefixflow.runtime.host import HostArena, HostTensor
from prefixflow.runtime.logprobs import RowLogprobs, VocabShard
from prefixflow.runtime.objective import RowObjective
from prefixflow.runtime.offload import STORAGES_AHEAD, SavedTensors
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.residency import ActivationPolicy, MemoryAction, MemoryPlan, Move
from prefixflow.trajectories.types import Trajectory


@dataclass(frozen=True, slots=True)
class Workload:
    """What one data-parallel rank runs in one step; `routes` are those of the trajectories, where they are replayed."""

    forest: Forest
    microbatches: Sequence[Microbatch]
    trajectories: Sequence[Trajectory]
    routes: Sequence[np.ndarray] | None = None


@dataclass(slots=True)
class _Scored:
    """Rows of a microbatch on the last stage, from F to B.

    rows: those of this rank's positions; row_index: their places among its positions; own: their numbers among the
    `num_rows` of the microbatch, None where they are all of them.
    """

    rows: RowLogprobs
    row_index: Tensor
    own: Tensor | None
    num_rows: int
    entry_row: Tensor
    entry_index: Tensor


class _StageInput(torch.autograd.Function):
    """Identity on what the stage received, whose backward leaves its gradient in `gradients`.

    Unlike a leaf, it does not keep what it received: only what the layers save of it stays. `anchor` is a leaf that makes
    it part of the graph.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor, anchor: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return received.view_as(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradients.append(gradient)
        return None, None, None


@dataclass(slots=True)
class _Graph:
    """Of a microbatch's body: where it begins, and the gradient of what the stage received, once B has run.

    The output itself is not kept: once sent (or scored), only its graph is needed.
    """

    root: GradientEdge
    input_gradients: list[Tensor]


@dataclass(slots=True)
class _Alive:
    """State of a microbatch between its F and its B.

    received: input of the stage, where the body runs again (None on the first stage, and elsewhere).
    graph: None where B makes it. saved: what the graph saves, where it is offloaded; hidden_rows: likewise, of `scored`.
    """

    received: Tensor | None
    graph: _Graph | None
    shape: torch.Size
    dtype: torch.dtype
    context: AttentionContext
    routing: RoutingContext | None
    scored: _Scored | None
    saved: SavedTensors | None = None
    hidden_rows: HostTensor | None = None


class StageRunner:
    """F and B of microbatches on one model chunk (`prefixflow.runtime.executor.Stage`).

    model: a `GPTModel` (not its DDP wrapper) built with `megatron.prefixflow.spec.block_spec`.
    cache: K/V of this chunk's layers, its own: chunks of one rank are at different microbatches.
    training: graphs are kept for B; otherwise F alone runs, without graphs (old-policy and reference passes).
    routing: of this chunk's routers; None in a model without experts.
    parallel: ranks that share each microbatch's positions; None where this one holds them all. ring: passes sharded K/V
        round among them; None gathers.
    stage: the chunk's number over all pipeline ranks. memory: what is done for its memory in training; None keeps everything.
    host: where OFFLOAD puts activations. sizes: say whether logits wait whole for a B that follows at once; None lets them.
    """

    def __init__(
        self,
        model: Any,
        workload: Workload,
        objective: RowObjective,
        kernel: AttentionKernel,
        cache: KVCache,
        *,
        training: bool,
        tp_group: Any,
        routing: StageRouting | None = None,
        parallel: ContextParallel | None = None,
        ring: RingStep | None = None,
        stage: int = 0,
        memory: MemoryPlan | None = None,
        host: HostArena | None = None,
        sizes: MemoryModel | None = None,
    ) -> None:
        self.model = model
        self.sizes = sizes
        self.parallel = parallel
        self.ring = ring
        self.stage = stage
        self.memory = memory or MemoryPlan()
        self.host = host or HostArena()
        self.config = model.config
        self.routing = routing
        self.workload = workload
        self.kernel = kernel
        self.cache = cache
        self.training = training
        self.device = next(model.parameters()).device
        self.num_computed_tokens = 0
        self.num_recomputed = 0
        self._head = LanguageModelHead(model, objective, tp_group) if model.post_process else None
        self._rotary = RotaryTable(model.rotary_pos_emb)
        self._alive: dict[int, _Alive] = {}
        # Recomputation takes what a microbatch wrote from the cache instead of gathering it again, unless memory is short.
        gathers = parallel is not None and ring is None
        self._reads_own = training and gathers and recomputes_attention(model) and not self.memory
        self._run_again = self.memory.written_again(stage)
        self._parameter_storages = frozenset(p.untyped_storage().data_ptr() for p in model.parameters())
        self._open_readers = Counter(block for m in workload.microbatches for block in self._read_blocks(m))

    def forward(self, m: int, received: Tensor | None, *, keep_logits: bool = False) -> Tensor:
        """F(m): body, cached K/V of written segments, and on the last stage log-probabilities of the rows."""
        microbatch = self.workload.microbatches[m]
        policy = self.memory.activations.get((self.stage, m), ActivationPolicy.KEEP)
        arrays = self._arrays(microbatch)
        context = self._context(microbatch, arrays)
        split = context.split
        routing = None if self.routing is None else self.routing.context(microbatch, arrays, split)
        saved = self._saved_tensors() if self.training and policy is ActivationPolicy.OFFLOAD else None
        gradients: list[Tensor] = []
        with (
            torch.set_grad_enabled(self.training and policy is not ActivationPolicy.RECOMPUTE),
            self._routed(routing, context.operation),
            nullcontext() if saved is None else saved.saving(),
        ):
            hidden = self._body(arrays, context, received, gradients)
        if self.routing is not None and routing is not None:
            self.routing.finish_forward(m, routing)
        self.num_computed_tokens += microbatch.num_tokens
        scored = None
        if self._head is not None:
            keep_logits = keep_logits and self.training and self._keeps_logits(microbatch, arrays.num_rows)
            scored = self._head.score(hidden, arrays, split, keep_logits=keep_logits)
        if not self.training:
            self._release(microbatch)
            return hidden
        alive = _Alive(None, None, hidden.shape, hidden.dtype, context, routing, scored, saved)
        if policy is ActivationPolicy.RECOMPUTE or m in self._run_again:
            alive.received = received
        if policy is not ActivationPolicy.RECOMPUTE:
            alive.graph = _Graph(get_gradient_edge(hidden), gradients)
        if scored is not None and policy is not ActivationPolicy.KEEP:
            rows = scored.rows.take_hidden()
            alive.hidden_rows = self.host.put(rows) if policy is ActivationPolicy.OFFLOAD else None
        self._alive[m] = alive
        return hidden

    def backward(self, m: int, received: Tensor | None) -> Tensor | None:
        """B(m): seed with the next stage's gradient or the rows' loss; gK/gV flow through the cache."""
        alive = self._alive.pop(m)
        alive.context.operation = Operation.BACKWARD
        if alive.graph is None:
            alive.graph = self._recompute(m, alive)
        if alive.scored is not None and alive.hidden_rows is not None:
            alive.scored.rows.put_hidden(self.host.take(alive.hidden_rows))
        grad_hidden = received
        if self._head is not None:
            grad_hidden = self._head.gradient(alive.scored, alive.shape, alive.dtype)
        with self._routed(alive.routing, Operation.BACKWARD):
            torch.autograd.backward(alive.graph.root, grad_hidden)
        self._release(self.workload.microbatches[m])
        for block in self.workload.microbatches[m].writes:
            self.cache.close(block)
        return None if self.model.pre_process else alive.graph.input_gradients[0]

    def _recompute(self, m: int, alive: _Alive) -> _Graph:
        """The graph that F(m) did not make, by the body once more; the rows get their hidden states from it."""
        arrays = self._arrays(self.workload.microbatches[m])
        gradients: list[Tensor] = []
        with torch.enable_grad(), self._routed(alive.routing, Operation.BACKWARD):
            hidden = self._body(arrays, alive.context, alive.received, gradients)
        alive.received = None
        self.num_recomputed += 1
        if self._head is not None and alive.scored is not None:
            alive.scored.rows.put_hidden(self._head.rows(hidden, alive.scored.row_index))
        return _Graph(get_gradient_edge(hidden), gradients)

    def act(self, action: MemoryAction) -> None:
        """Do what the memory plan says between operations."""
        if not self.model.decoder.layers:
            # A stage of the embedding or the head alone has no K/V.
            return
        match action.move:
            case Move.EVICT | Move.FETCH | Move.STREAM:
                assert action.part is not None, f"{action} says not which part"
                moves = {Move.EVICT: self.cache.evict, Move.FETCH: self.cache.fetch, Move.STREAM: self.cache.stream}
                moves[action.move](action.target, action.part)
            case Move.DROP:
                self.cache.drop(action.target)
            case Move.RECOMPUTE:
                self._write_again(action.target)
            case Move.FETCH_ACTIVATIONS:
                self._fetch_activations(action.target)

    @property
    def _experts_are_spread(self) -> bool:
        """True where a forward exchanges tokens with ranks that run other microbatches."""
        config = self.config
        expert_ranks = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or 1)
        return expert_ranks > config.tensor_model_parallel_size * config.context_parallel_size

    def _write_again(self, m: int) -> None:
        """F(m) on this stage once more, from its kept input and without a graph, for the dropped blocks that m wrote.

        Nothing is recorded, counted or scored; routes are those that F took. Nothing reads the output of the last layer.
        """
        alive = self._alive[m]
        microbatch = self.workload.microbatches[m]
        if self.config.num_moe_experts is not None and self._experts_are_spread:
            raise ValueError(
                f"The memory plan recomputes the K/V of microbatch {m}, whose experts lie on several data-parallel ranks that "
                "would all have to run it: expected K/V to be evicted under expert parallelism, not dropped."
            )
        dropped = self.cache.dropped_blocks
        context = replace(
            alive.context,
            operation=Operation.RECOMPUTE,
            writes=tuple((block, tokens) for block, tokens in alive.context.writes if block in dropped),
            keys_only_layer=self.model.decoder.layers[-1].layer_number,
        )
        assert context.writes, f"microbatch {m} wrote no block that was dropped"
        with torch.no_grad(), self._routed(alive.routing, Operation.BACKWARD):
            self._body(self._arrays(microbatch), context, alive.received)

    def _fetch_activations(self, m: int) -> None:
        """Start to bring back what was offloaded of m, whose B comes soon."""
        saved = self._alive[m].saved
        assert saved is not None, f"the activations of microbatch {m} were not offloaded"
        saved.fetch()

    def finish(self) -> None:
        assert not self._alive, f"microbatches {sorted(self._alive)} were never run backward"
        self.cache.assert_empty()

    def _keeps_logits(self, microbatch: Microbatch, num_rows: int) -> bool:
        num_ranks = 1 if self.parallel is None else self.parallel.size
        return self.sizes is None or self.sizes.keeps_logits(microbatch, -(-num_rows // num_ranks), self.stage)

    def _arrays(self, microbatch: Microbatch) -> MicrobatchArrays:
        workload = self.workload
        return microbatch_arrays(workload.forest, microbatch, workload.trajectories, workload.routes)

    def _saved_tensors(self) -> SavedTensors:
        # On the CPU a copy holds up the work, whenever it is made.
        ahead = STORAGES_AHEAD if self.device.type == "cuda" else 0
        return SavedTensors(self.host, self._parameter_storages, storages_ahead=ahead)

    def _routed(self, routing: RoutingContext | None, operation: Operation) -> AbstractContextManager[None]:
        if self.routing is None or routing is None:
            return nullcontext()
        return self.routing.running(routing, operation)

    def _context(self, microbatch: Microbatch, arrays: MicrobatchArrays) -> AttentionContext:
        # Nothing reads the last layer's output where no row is scored; a router's own losses would.
        dead_tail = arrays.num_rows == 0 and self.config.num_moe_experts is None
        keys_only_layer = self.config.num_layers if dead_tail else None
        operation = Operation.FORWARD if self.training else Operation.FORWARD_ONLY
        split = None if self.parallel is None else self.parallel.split(microbatch, self.device)
        if self.ring is not None and split is not None:
            return self.ring.context(
                microbatch,
                split,
                cache=self.cache,
                kernel=self.kernel,
                operation=operation,
                keys_only_layer=keys_only_layer,
            )
        return AttentionContext(
            local=microbatch.local if split is None else split.shard.local_slices(microbatch.local),
            cached=microbatch.cached if split is None else split.shard.cached_slices(microbatch.cached),
            writes=tuple((s, microbatch.span_of(s)) for s in microbatch.writes),
            cache=self.cache,
            kernel=self.kernel,
            operation=operation,
            keys_only_layer=keys_only_layer,
            split=split,
            reads_own=self._reads_own,
        )

    def _body(
        self,
        arrays: MicrobatchArrays,
        context: AttentionContext,
        received: Tensor | None,
        gradients: list[Tensor] | None = None,
    ) -> Tensor:
        """Embedding (first stage) and layers: hidden states [T, 1, h] of this rank's T positions ([T/tp, 1, h] under
        sequence parallelism). A backward leaves the gradient of `received` in `gradients`, where given."""
        index = slice(None) if context.split is None else context.split.index
        positions = self._tensor(arrays.positions[index])
        hidden = None
        if received is None:
            tokens = self._tensor(arrays.tokens[index]).unsqueeze(0)
            hidden = self._embed(tokens, positions.unsqueeze(0))
        else:
            if gradients is not None and torch.is_grad_enabled():
                received = _StageInput.apply(received, received.new_zeros((), requires_grad=True), gradients)
            self.model.set_input_tensor(received)
        num_positions = int(arrays.positions.max()) + 1
        try:
            return self.model.decoder(
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=self._rotary.rows(positions, num_positions),
                packed_seq_params=MicrobatchParams.of(context),
            )
        finally:
            # The decoder would keep it until the next microbatch.
            self.model.set_input_tensor(None)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [T, 1, h] ([T/tp, 1, h] under sequence parallelism) of tokens and positions [1, T]."""
        embedding = self.model.embedding
        inputs = {"input_ids": tokens, "position_ids": positions}
        weight = embedding.word_embeddings.weight
        if weight.is_cuda or weight.dtype in (torch.float32, torch.float64):
            return embedding(**inputs)
        # On the CPU torch sums the gradients of a token's occurrences in the weight's dtype, and a packed microbatch has
        # many of one token: sum them in float32 and round once.
        wide = functional_call(embedding, {"word_embeddings.weight": weight.float()}, kwargs=inputs)
        return wide.to(weight.dtype)

    def _release(self, microbatch: Microbatch) -> None:
        """Drop K/V that no later operation reads: this was the last use for those whose count reaches zero."""
        if not self.model.decoder.layers:
            # A stage of the embedding or the head alone has no K/V.
            return
        for block in self._read_blocks(microbatch):
            self._open_readers[block] -= 1
            if self._open_readers[block] == 0:
                self.cache.release(block)

    def _read_blocks(self, microbatch: Microbatch) -> Iterator[int]:
        """Blocks whose K/V must be there until the last operation on `microbatch`; one may come several times."""
        for cached in microbatch.cached:
            yield from cached.blocks
        if self._reads_own:
            yield from microbatch.writes

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class LanguageModelHead:
    """Log-probabilities of a microbatch's rows on the last stage, and the loss gradient of its output.

    The head runs on the rows that own a log-probability only: gathered under sequence parallelism, selected, scored
    without it, and scattered back in the gradient.
    """

    def __init__(self, model: Any, objective: RowObjective, tp_group: Any) -> None:
        self.model = model
        self.objective = objective
        self.tp_group = tp_group
        self.sequence_parallel = model.config.sequence_parallel

    def score(
        self, hidden: Tensor, arrays: MicrobatchArrays, split: SplitMicrobatch | None, *, keep_logits: bool
    ) -> _Scored | None:
        """Score the rows and record their entries; None where the microbatch has none.

        Under context parallelism each rank scores the rows of its positions and records those of all.
        """
        if arrays.num_rows == 0:
            return None
        device = hidden.device
        own = None if split is None else split.own_rows(arrays.row_index)
        places = arrays.row_index if split is None else split.place[arrays.row_index]
        chosen = slice(None) if own is None else own
        row_index = torch.from_numpy(places[chosen]).to(device)
        rows = RowLogprobs.forward(
            self.rows(hidden, row_index),
            torch.from_numpy(arrays.row_label[chosen]).to(device),
            self._shard(),
            temperature=torch.from_numpy(arrays.row_temperature[chosen]).to(device),
            with_entropy=self.objective.needs_entropy,
            keep=keep_logits,
        )
        logprobs, entropy = rows.logprobs, rows.entropy
        if split is not None:
            logprobs, entropy = split.gather_rows(arrays.row_index, logprobs, entropy)
        entry_row = torch.from_numpy(arrays.entry_row).to(device)
        entry_index = self.objective.entry_index(arrays.entry_trajectory, arrays.entry_token)
        self.objective.record(entry_index, logprobs[entry_row], None if entropy is None else entropy[entry_row])
        own_rows = None if own is None else torch.from_numpy(own).to(device)
        return _Scored(rows, row_index, own_rows, arrays.num_rows, entry_row, entry_index)

    def rows(self, hidden: Tensor, row_index: Tensor) -> Tensor:
        """Hidden states [R, h] at `row_index` of this rank's positions; `hidden` as the body returns it."""
        full = hidden.detach()
        if self.sequence_parallel:
            full = tensor_parallel.gather_from_sequence_parallel_region(
                full, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return full.squeeze(1).index_select(0, row_index)

    def gradient(self, scored: _Scored | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Loss gradient of the output, of `shape` [T/tp, 1, h]; adds the head's own gradient to its weight."""
        weight = self._weight()
        if scored is None:
            return weight.new_zeros(shape, dtype=dtype)
        grads = self.objective.row_gradients(scored.entry_index, scored.entry_row, num_rows=scored.num_rows)
        if scored.own is not None:
            grads = grads.take(scored.own)
        main_grad = getattr(weight, "main_grad", None)
        accumulate = main_grad is not None and main_grad.dtype == scored.rows.dtype
        grad_rows, grad_weight = scored.rows.backward(
            grads.logprobs, grads.entropy, grad_weight_out=main_grad if accumulate else None
        )
        if not accumulate:
            _add_gradient(weight, grad_weight)
        size, rank = (self.tp_group.size(), self.tp_group.rank()) if self.sequence_parallel else (1, 0)
        num_local = shape[0]
        full = grad_rows.new_zeros(num_local * size, grad_rows.shape[1])
        # A position scored at several temperatures has several rows.
        full.index_add_(0, scored.row_index, grad_rows)
        return full[rank * num_local : (rank + 1) * num_local].unsqueeze(1)

    def _weight(self) -> torch.nn.Parameter:
        if self.model.share_embeddings_and_output_weights:
            return self.model.shared_embedding_or_output_weight()
        return self.model.output_layer.weight

    def _shard(self) -> VocabShard:
        weight = self._weight()
        return VocabShard(
            weight=weight.detach(),
            vocab_start=self.tp_group.rank() * weight.shape[0],
            num_valid=self.objective.vocab_size,
            group=self.tp_group,
        )


def _add_gradient(parameter: torch.nn.Parameter, gradient: Tensor) -> None:
    """Add to Megatron's `main_grad` where DDP made one, else to `grad`."""
    target = getattr(parameter, "main_grad", None)
    if target is not None:
        target.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)

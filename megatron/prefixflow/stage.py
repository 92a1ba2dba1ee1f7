"""Run operations of the table on a Megatron model chunk.

All state is keyed by microbatch: what F(m) leaves behind (its output with the graph, its attention context, its rows)
stays until B(m) takes it, in whatever order the table asks. K/V of a segment live in the cache from F of its
microbatch to the last operation that reads them; gK/gV from the first reader's B to its own B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron.prefixflow.params import MicrobatchParams
from megatron.prefixflow.positions import RotaryTable
from prefixflow.forest import Forest
from prefixflow.plan.batch import MicrobatchArrays, microbatch_arrays
from prefixflow.plan.microbatch import Microbatch
from prefixflow.runtime.attention.function import AttentionContext, Operation
from prefixflow.runtime.attention.kernels import AttentionKernel
from prefixflow.runtime.cache import KVCache
from prefixflow.runtime.logprobs import RowLogprobs, VocabShard
from prefixflow.runtime.objective import Objective
from prefixflow.schedule.ops import Kind, Op
from prefixflow.trajectories.types import Trajectory

Observer = Callable[[Op], AbstractContextManager[Any]]
"""Entered around each operation: timers, traces and memory measurements."""


def _unobserved(op: Op) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Workload:
    """What one data-parallel rank runs in one step."""

    forest: Forest
    microbatches: Sequence[Microbatch]
    trajectories: Sequence[Trajectory]


@dataclass(slots=True)
class _Alive:
    """State of a microbatch between its F and its B."""

    hidden: Tensor
    context: AttentionContext
    rows: RowLogprobs | None
    row_index: Tensor
    entry_row: Tensor
    entry_index: Tensor


class StageRunner:
    """Executes F and B of microbatches on one model chunk that has both embedding and LM head.

    model: a `GPTModel` (not its DDP wrapper) built with `megatron.prefixflow.spec.block_spec`.
    training: graphs are kept for B; otherwise F alone runs, without graphs (old-policy and reference passes).
    """

    def __init__(
        self,
        model: Any,
        workload: Workload,
        objective: Objective,
        kernel: AttentionKernel,
        cache: KVCache,
        *,
        training: bool,
        tp_group: Any,
    ) -> None:
        self.model = model
        self.config = model.config
        self.workload = workload
        self.objective = objective
        self.kernel = kernel
        self.cache = cache
        self.training = training
        self.tp_group = tp_group
        self.device = next(model.parameters()).device
        self.num_computed_tokens = 0
        self._rotary = RotaryTable(model.rotary_pos_emb)
        self._alive: dict[int, _Alive] = {}
        self._open_readers = Counter(
            block for microbatch in workload.microbatches for cached in microbatch.cached for block in cached.blocks
        )

    def run(self, row: Sequence[Op], observe: Observer | None = None) -> None:
        """Run the operations in order, each inside `observe(op)` if given; errors name the operation."""
        observe = observe or _unobserved
        for place, op in enumerate(row):
            follows_at_once = place + 1 < len(row) and row[place + 1] == Op(op.stage, Kind.BACKWARD, op.microbatch)
            try:
                with observe(op):
                    if op.kind is Kind.FORWARD:
                        self.forward(op.microbatch, keep_logits=follows_at_once)
                    else:
                        self.backward(op.microbatch)
            except Exception as error:
                error.add_note(f"PrefixFlow: while running operation {op} (number {place}).")
                raise
        assert not self._alive, f"microbatches {sorted(self._alive)} were never run backward"
        self.cache.assert_empty()

    def forward(self, m: int, *, keep_logits: bool = False) -> None:
        """F(m): body, cached K/V of written segments, and log-probabilities of the rows."""
        microbatch = self.workload.microbatches[m]
        arrays = microbatch_arrays(self.workload.forest, microbatch, self.workload.trajectories)
        context = self._context(microbatch, arrays)
        with torch.set_grad_enabled(self.training):
            hidden = self._body(arrays, context)
        self.num_computed_tokens += microbatch.num_tokens
        row_index = self._tensor(arrays.row_index)
        entry_row = self._tensor(arrays.entry_row)
        entry_index = self.objective.entry_index(arrays.entry_trajectory, arrays.entry_token)
        rows = self._score(hidden, row_index, arrays, keep_logits and self.training)
        if rows is not None:
            entropy = None if rows.entropy is None else rows.entropy[entry_row]
            self.objective.record(entry_index, rows.logprobs[entry_row], entropy)
        if self.training:
            self._alive[m] = _Alive(hidden, context, rows, row_index, entry_row, entry_index)
        else:
            self._release(microbatch)

    def backward(self, m: int) -> None:
        """B(m): seed with the rows' loss gradient and run the graph; gK/gV flow through the cache."""
        alive = self._alive.pop(m)
        grad_hidden = self._row_gradient(alive)
        alive.context.operation = Operation.BACKWARD
        torch.autograd.backward(alive.hidden, grad_hidden)
        self._release(self.workload.microbatches[m])
        for block in self.workload.microbatches[m].writes:
            self.cache.close(block)

    def _context(self, microbatch: Microbatch, arrays: MicrobatchArrays) -> AttentionContext:
        writes = tuple((s, microbatch.span_of(s)) for s in microbatch.writes)
        # Nothing reads the last layer's output where no row is scored; a router's own losses would.
        dead_tail = arrays.num_rows == 0 and self.config.num_moe_experts is None
        return AttentionContext(
            local=microbatch.local,
            cached=microbatch.cached,
            writes=writes,
            cache=self.cache,
            kernel=self.kernel,
            operation=Operation.FORWARD if self.training else Operation.FORWARD_ONLY,
            keys_only_layer=self.config.num_layers if dead_tail else None,
        )

    def _body(self, arrays: MicrobatchArrays, context: AttentionContext) -> Tensor:
        """Embedding and layers: hidden states [T, 1, h] ([T/tp, 1, h] under sequence parallelism)."""
        tokens = self._tensor(arrays.tokens).unsqueeze(0)
        positions = self._tensor(arrays.positions)
        hidden = self.model.embedding(input_ids=tokens, position_ids=positions.unsqueeze(0))
        num_positions = int(arrays.positions.max()) + 1
        return self.model.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self._rotary.rows(positions, num_positions),
            packed_seq_params=MicrobatchParams.of(context),
        )

    def _score(self, hidden: Tensor, row_index: Tensor, arrays: MicrobatchArrays, keep: bool) -> RowLogprobs | None:
        if arrays.num_rows == 0:
            return None
        full = hidden.detach()
        if self.config.sequence_parallel:
            full = tensor_parallel.gather_from_sequence_parallel_region(
                full, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return RowLogprobs.forward(
            full.squeeze(1).index_select(0, row_index),
            self._tensor(arrays.row_label),
            self._head(),
            temperature=torch.from_numpy(arrays.row_temperature).to(self.device),
            with_entropy=self.objective.needs_entropy,
            keep=keep,
        )

    def _row_gradient(self, alive: _Alive) -> Tensor:
        """Gradient of the loss with respect to the chunk's output; also adds the LM head's own gradient."""
        if alive.rows is None:
            return torch.zeros_like(alive.hidden)
        grads = self.objective.row_gradients(alive.entry_index, alive.entry_row, num_rows=len(alive.row_index))
        weight = self._head_parameter()
        main_grad = getattr(weight, "main_grad", None)
        accumulate = main_grad is not None and main_grad.dtype == alive.rows.dtype
        grad_rows, grad_weight = alive.rows.backward(
            grads.logprobs, grads.entropy, grad_weight_out=main_grad if accumulate else None
        )
        if not accumulate:
            _add_gradient(weight, grad_weight)
        sequence_parallel = self.config.sequence_parallel
        size = self.tp_group.size() if sequence_parallel else 1
        num_local = alive.hidden.shape[0]
        full = grad_rows.new_zeros(num_local * size, grad_rows.shape[1])
        # A position scored at several temperatures has several rows.
        full.index_add_(0, alive.row_index, grad_rows)
        start = self.tp_group.rank() * num_local if sequence_parallel else 0
        return full[start : start + num_local].unsqueeze(1)

    def _head_parameter(self) -> torch.nn.Parameter:
        if self.model.share_embeddings_and_output_weights:
            return self.model.shared_embedding_or_output_weight()
        return self.model.output_layer.weight

    def _head(self) -> VocabShard:
        weight = self._head_parameter()
        return VocabShard(
            weight=weight.detach(),
            vocab_start=self.tp_group.rank() * weight.shape[0],
            num_valid=self.objective.vocab_size,
            group=self.tp_group,
        )

    def _release(self, microbatch: Microbatch) -> None:
        """Drop K/V that no later operation reads: this was the last use for those whose count reaches zero."""
        for cached in microbatch.cached:
            for block in cached.blocks:
                self._open_readers[block] -= 1
                if self._open_readers[block] == 0:
                    self.cache.release(block)

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _add_gradient(parameter: torch.nn.Parameter, gradient: Tensor) -> None:
    """Add to Megatron's `main_grad` where DDP made one, else to `grad`."""
    target = getattr(parameter, "main_grad", None)
    if target is not None:
        target.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)

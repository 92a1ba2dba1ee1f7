"""Predict the memory of a pipeline rank by walking its row of operations.

Strategy: between operations add up what waits (activations of each microbatch under its policy, the cache by
`prefixflow.schedule.replay`, messages that are posted ahead). Within an operation follow its layers by
`prefixflow.schedule.footprint`; a forward is largest in its last layers, a backward in the first that it reaches (the last
ones) or, where gK/gV are made, in the last. The *state* (weights, gradients, optimizer) comes on top.

K/V that a kept graph holds anyway, because the cache shares their memory, count as K/V and not as activations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.plan import Plan
from prefixflow.schedule.footprint import LayerFootprint, LayerSizes, Ledger
from prefixflow.schedule.memory import ROW_BYTES, SHORTEST_ROTARY_TABLE, Holder, MemoryModel, Phase, Recompute, phase_of
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.replay import CachePoint, replay_cache
from prefixflow.schedule.residency import ActivationPolicy, MemoryPlan, cached_blocks


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Bytes alive at the largest moment of an operation, by what holds them; the state comes on top, the host apart.

    activations: kept for a backward still to come; keys_values, gradients: of the cache; logits; communication: messages
    between stages, and shards of K/V that go round; working: what the operation itself makes and drops. host: in host memory; offloaded: activations that
    this operation sends there.
    """

    op: Op
    phase: Phase
    activations: int
    keys_values: int
    gradients: int
    working: int
    logits: int = 0
    communication: int = 0
    host: int = 0
    offloaded: int = 0

    @property
    def total_bytes(self) -> int:
        return self.activations + self.keys_values + self.gradients + self.logits + self.communication + self.working

    @property
    def by_holder(self) -> dict[Holder, int]:
        return {
            Holder.ACTIVATIONS: self.activations,
            Holder.KEYS_VALUES: self.keys_values,
            Holder.KV_GRADIENTS: self.gradients,
            Holder.LOGITS: self.logits,
            Holder.COMMUNICATION: self.communication,
            Holder.WORKING: self.working,
        }


def memory_curve(
    plan: Plan,
    data_rank: int,
    row: Sequence[Op],
    memory: MemoryModel,
    *,
    rows: Sequence[int] | None = None,
    memory_plan: MemoryPlan | None = None,
    cache: Sequence[CachePoint] | None = None,
    bodies: dict[tuple[int, int], Body] | None = None,
) -> tuple[MemoryPoint, ...]:
    """What is alive during each operation of a rank's row, in the row's order.

    rows: head rows of each segment, by default one at each of its positions. memory_plan: what is done for memory on the way.
    cache: of the row under that plan, where it is known. bodies: by (stage, microbatch), those known from another walk of the
    data-parallel rank with the same `memory` and `rows`; filled on the way.
    """
    if cache is None:
        cache = replay_cache(plan, data_rank, row, memory, memory_plan).points
    walk = _Walk(plan, data_rank, row, memory, rows, memory_plan or MemoryPlan(), {} if bodies is None else bodies)
    return tuple(walk.run(place, op, point) for place, (op, point) in enumerate(zip(row, cache, strict=True)))


def peak_bytes(
    plan: Plan,
    data_rank: int,
    row: Sequence[Op],
    memory: MemoryModel,
    *,
    rows: Sequence[int] | None = None,
    memory_plan: MemoryPlan | None = None,
) -> dict[Phase, int]:
    """Largest bytes alive in each phase of a rank's row; a phase without operations has the state alone."""
    state = memory.state_bytes if not row else sum(memory.state(row[0].stage % memory.pipeline_parallel).values())
    peaks = dict.fromkeys(Phase, state)
    for point in memory_curve(plan, data_rank, row, memory, rows=rows, memory_plan=memory_plan):
        peaks[point.phase] = max(peaks[point.phase], state + point.total_bytes)
    return peaks


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of a microbatch: what a forward leaves, and how far forward and backward rise above what is alive at
    their start. `rerun` fields: of a layer's forward once more inside a backward, before it."""

    saved: int
    forward_rise: int
    forward_only_rise: int
    backward_rise: int
    streamed_rise: int
    rerun_rise: int

    @classmethod
    @functools.lru_cache(maxsize=65_536)
    def of(cls, sizes: LayerSizes, *, selective: bool, takes: bool) -> _Layer:
        """Walked once for microbatches that are alike."""

        def ledger_of(*steps: str, graph: bool = True, streamed: bool = False, keeps: bool = False) -> Ledger:
            ledger = Ledger()
            walk = LayerFootprint(sizes, ledger, is_streamed=streamed)
            for step in steps:
                if step == "forward":
                    walk.forward(graph=graph, keeps_input=keeps, selective=selective)
                else:
                    walk.backward(selective=selective, takes_gradients=takes, keeps_input=keeps)
            return ledger

        forward = ledger_of("forward")
        backward = ledger_of("backward")
        # A backward ends with the input's gradient in place of the output's, and frees all that was saved.
        assert takes or backward.now == -forward.now, (backward.now, forward.now, sizes)
        return cls(
            saved=forward.now,
            forward_rise=forward.peak,
            forward_only_rise=ledger_of("forward", graph=False).peak,
            backward_rise=backward.peak,
            streamed_rise=ledger_of("backward", streamed=True).peak,
            rerun_rise=ledger_of("forward", "backward", keeps=True).peak,
        )


@dataclass(slots=True)
class Body:
    """Layers of a microbatch on one stage: `alike` of them as `layer`, then one as `tail` where the last differs."""

    layer: _Layer
    tail: _Layer | None
    alike: int

    @property
    def saved(self) -> int:
        return self.alike * self.layer.saved + (self.tail.saved if self.tail else 0)


class _Walk:
    def __init__(
        self,
        plan: Plan,
        data_rank: int,
        row: Sequence[Op],
        memory: MemoryModel,
        rows: Sequence[int] | None,
        memory_plan: MemoryPlan,
        bodies: dict[tuple[int, int], Body],
    ) -> None:
        self.plan = plan
        self.microbatches = plan.ranks[data_rank]
        self.block = [plan.ranks[rank] for rank in plan.config.block_of(data_rank)]
        self.row = row
        self.memory = memory
        self.memory_plan = memory_plan
        self.lengths = [len(segment) for segment in plan.forest.segments]
        self.rows = self.lengths if rows is None else rows
        self.kept: dict[tuple[int, int], int] = {}
        self.parked: dict[tuple[int, int], int] = {}
        self.shared: dict[tuple[int, int], int] = {}
        self.gradients = 0
        self.messages = self._next_messages()
        self.fixed = self._rotary_bytes()
        self._bodies = bodies

    def run(self, place: int, op: Op, cache: CachePoint) -> MemoryPoint:
        """What is alive at the largest moment of the operation; what it frees is gone for the next one."""
        m = self.microbatches[op.microbatch]
        run = self._forward if op.kind is Kind.FORWARD else self._backward
        moment = run(place, op, m, cache)
        self.gradients = cache.gradients - self._taken(op, m)
        return moment

    # Sizes

    def _next_messages(self) -> list[int]:
        """Bytes of the messages that are posted while each operation runs: the next one of each direction."""
        waiting: dict[Kind, int] = {}
        sizes = [0] * len(self.row)
        for place in range(len(self.row) - 1, -1, -1):
            op = self.row[place]
            sizes[place] = sum(waiting.values())
            needs = op.stage > 0 if op.kind is Kind.FORWARD else op.stage + 1 < self.memory.num_stages
            if needs:
                waiting[op.kind] = self.memory.message_bytes(self.microbatches[op.microbatch])
        return sizes

    def _rotary_bytes(self) -> int:
        """The table of angles of each model chunk."""
        last = max((s.span.stop for s in self.plan.forest.segments), default=0)
        length = max(SHORTEST_ROTARY_TABLE, 1 << (last - 1).bit_length()) if last else 0
        num_chunks = len({op.stage for op in self.row})
        return num_chunks * length * self.memory.shape.kv_channels * 4

    def _num_rows(self, m: Microbatch) -> int:
        """Head rows of a microbatch on this rank."""
        return -(-sum(self.rows[s] for s in m.segments) // self.memory.context_parallel)

    def _is_last(self, stage: int) -> bool:
        return stage == self.memory.num_stages - 1

    def _body(self, op: Op, m: Microbatch) -> Body:
        key = op.stage, op.microbatch
        if key not in self._bodies:
            peers = [microbatches[op.microbatch].num_physical_tokens for microbatches in self.block]
            sizes = self.memory.layer(m, sum(peers) / len(peers), self.lengths)
            selective = self.memory.recompute is Recompute.SELECTIVE
            takes = bool(m.writes)
            num_layers = self.memory.layers(op.stage)
            layer = _Layer.of(sizes, selective=selective, takes=takes)
            tail = None
            if self._is_last(op.stage) and num_layers and not self._num_rows(m) and not self.memory.shape.is_moe:
                tail = _Layer.of(replace(sizes, dead_tail=True), selective=selective, takes=takes)
            self._bodies[key] = Body(layer, tail, num_layers - bool(tail))
        return self._bodies[key]

    def _x(self, m: Microbatch) -> int:
        return self.memory.message_bytes(m)

    def _saved_input(self, m: Microbatch) -> int:
        """The input of a layer where its norm keeps it as it is."""
        keeps = self.memory.fused or self.memory.element_bytes == self.memory.wide_bytes
        return self._x(m) if keeps or self.memory.recompute is Recompute.FULL else 0

    def _wide_x(self, m: Microbatch) -> int:
        return self._x(m) // self.memory.element_bytes * self.memory.wide_bytes

    def _final_norm(self, op: Op, m: Microbatch) -> int:
        """Kept by the last stage's norm beside its input: nothing reads its output but the head's rows."""
        if not self._is_last(op.stage):
            return 0
        wide = 0 if self.memory.fused else self._wide_x(m)
        return wide if self._norm_keeps_input else 2 * wide

    @property
    def _norm_keeps_input(self) -> bool:
        return self.memory.fused or self.memory.element_bytes == self.memory.wide_bytes

    def _angles(self, m: Microbatch) -> int:
        return self.memory.tokens(m) * self.memory.shape.kv_channels * 4

    def _policy(self, op: Op) -> ActivationPolicy:
        return self.memory_plan.activations.get((op.stage, op.microbatch), ActivationPolicy.KEEP)

    def _kept(self, op: Op, m: Microbatch) -> int:
        """What F leaves for B under Megatron's own recomputation, without the head's rows."""
        body = self._body(op, m)
        if self.memory.recompute is Recompute.FULL:
            inputs = (body.alike + bool(body.tail)) * self._x(m) + self._angles(m)
            return inputs + self._final_norm(op, m) + self._final_input(op, m)
        return self._saved_input(m) + body.saved + self._final_norm(op, m)

    def _final_input(self, op: Op, m: Microbatch) -> int:
        return self._x(m) if self._is_last(op.stage) and self._norm_keeps_input else 0

    def _shared_kv(self, op: Op, m: Microbatch) -> int:
        """K/V that the cache and a kept graph hold in one place: of a microbatch that is one segment, written whole."""
        full = self.memory.recompute is Recompute.FULL
        if full or self._policy(op) is not ActivationPolicy.KEEP or len(m.writes) != 1:
            return 0
        if len(m.segments) != 1 or m.num_tokens != m.num_physical_tokens:
            return 0
        body = self._body(op, m)
        layers = body.alike
        selective = self.memory.recompute is Recompute.SELECTIVE
        per_layer = 2 * m.num_tokens * self.memory.kv_bytes_per_token // 2
        per_layer = per_layer * self.memory.pipeline_parallel // self.memory.shape.num_layers
        return layers * per_layer // (2 if selective else 1)

    def _head_bytes(self, m: Microbatch) -> int:
        """Rows of the last hidden states that wait for the head's backward."""
        return self._num_rows(m) * self.memory.shape.hidden_size * self.memory.element_bytes

    def _head_operands(self, m: Microbatch) -> int:
        """Copies in float32 that the CPU multiplies in place of narrower ones."""
        memory = self.memory
        if memory.fused or self._norm_keeps_input:
            return 0
        return (memory.vocab_rows + min(self._num_rows(m), 256)) * memory.shape.hidden_size * memory.wide_bytes

    # Operations

    def _shards_under_way(self, m: Microbatch, kind: Kind) -> int:
        num_read = sum(self.lengths[block] for block in cached_blocks(m))
        return self.memory.ring_bytes(m.num_physical_tokens + num_read, kind)

    def _point(
        self,
        place: int,
        op: Op,
        m: Microbatch,
        cache: CachePoint,
        *,
        kept: int,
        working: int,
        logits: int,
        gradients: int,
    ) -> MemoryPoint:
        others = sum(self.kept.values()) - sum(self.shared.values())
        return MemoryPoint(
            op=op,
            phase=phase_of(m, op.kind),
            activations=others + kept,
            keys_values=cache.keys_values,
            gradients=gradients,
            working=working + self.fixed,
            logits=logits,
            communication=self.messages[place] + self._shards_under_way(m, op.kind),
            host=cache.host + sum(self.parked.values()),
            offloaded=self.parked.get((op.stage, op.microbatch), 0) if op.kind is Kind.FORWARD else 0,
        )

    def _follows_at_once(self, place: int, op: Op) -> bool:
        following = self.row[place + 1] if place + 1 < len(self.row) else None
        return following == Op(op.stage, Kind.BACKWARD, op.microbatch)

    def _keeps_logits(self, op: Op, m: Microbatch) -> bool:
        return self.memory.keeps_logits(m, self._num_rows(m), op.stage)

    def _forward(self, place: int, op: Op, m: Microbatch, cache: CachePoint) -> MemoryPoint:
        body, policy, x = self._body(op, m), self._policy(op), self._x(m)
        graph = policy is ActivationPolicy.KEEP and self.memory.recompute is not Recompute.FULL
        checkpoints = policy is ActivationPolicy.KEEP and not graph
        last = body.tail or body.layer
        shared = self._shared_kv(op, m)
        has_layers = bool(body.alike or body.tail)
        angles = self._angles(m)
        before = self._saved_input(m) if graph else x
        if graph:
            inner = before + body.saved - last.saved - shared
            rise = last.forward_rise
            if body.tail and body.alike:
                earlier = inner - body.layer.saved + body.layer.forward_rise
                rise = max(rise, earlier - inner)
        else:
            inner = before + ((body.alike + bool(body.tail) - 1) * x if checkpoints else 0)
            rise = max(body.layer.forward_only_rise if body.alike else 0, last.forward_only_rise)
        moments = [(inner, (rise if has_layers else 0) + angles, 0)]
        kept = self._kept(op, m) - shared if policy is ActivationPolicy.KEEP else 0
        rows = 0
        if self._is_last(op.stage):
            final = (kept or 2 * x) + 2 * x
            moments.append((kept, max(0, final - kept) + self._wide_x(m) + angles, 0))
            if self._num_rows(m):
                keeps = self._follows_at_once(place, op) and self._keeps_logits(op, m)
                rows = self._head_bytes(m)
                logits = self.memory.logit_bytes(self._num_rows(m), whole=keeps)
                gathered = x * self.memory.sequence_split if self.memory.sequence_split > 1 else 0
                moments.append(
                    (kept, x + gathered + rows + self._num_rows(m) * ROW_BYTES + self._head_operands(m), logits)
                )
        if op.stage == 0 and not self.memory.fused and not self._norm_keeps_input:
            table = self.memory.vocab_rows * self.memory.shape.hidden_size * self.memory.wide_bytes
            moments.append((0, table + self._wide_x(m), 0))
        kept_now, working, logits = max(moments, key=sum)
        if policy is ActivationPolicy.OFFLOAD:
            self.parked[op.stage, op.microbatch] = self._kept(op, m) + rows
        point = self._point(
            place, op, m, cache, kept=kept_now, working=working, logits=logits, gradients=cache.gradients
        )
        self._keep(op, m, rows)
        return point

    def _keep(self, op: Op, m: Microbatch, rows: int) -> None:
        policy = self._policy(op)
        key = op.stage, op.microbatch
        kept = self._num_rows(m) * ROW_BYTES if self._is_last(op.stage) else 0
        if policy is ActivationPolicy.KEEP:
            kept += self._kept(op, m) + rows
            self.shared[key] = self._shared_kv(op, m)
        elif policy is ActivationPolicy.RECOMPUTE and op.stage > 0:
            kept += self._x(m)
        self.kept[key] = kept

    def _backward(self, place: int, op: Op, m: Microbatch, cache: CachePoint) -> MemoryPoint:
        key = op.stage, op.microbatch
        del self.kept[key]
        self.shared.pop(key, None)
        body, policy, x = self._body(op, m), self._policy(op), self._x(m)
        is_last = self._is_last(op.stage)
        new = max(0, cache.gradients - self.gradients)
        num_layers = body.alike + bool(body.tail)
        per_layer = new // max(1, num_layers)
        rows = self._head_bytes(m) + self._num_rows(m) * ROW_BYTES if is_last else 0
        whole = self._kept(op, m)
        if policy is ActivationPolicy.OFFLOAD:
            whole = 0
        full = self.memory.recompute is Recompute.FULL
        moments: list[tuple[int, int, int, int]] = []
        if is_last and self._num_rows(m):
            followed = self.row[place - 1] == Op(op.stage, Kind.FORWARD, op.microbatch)
            logits = self.memory.logit_bytes(self._num_rows(m), whole=followed and self._keeps_logits(op, m))
            sums = self._num_rows(m) * self.memory.shape.hidden_size * self.memory.wide_bytes
            moments.append((whole, rows + sums + self._head_operands(m), logits, 0))
            gathered = x * self.memory.sequence_split
            moments.append((whole, rows + sums + gathered, 0, 0))
        if is_last:
            # The final norm; the gradient that it starts from is held on.
            moments.append((whole, rows + x + 5 * self._wide_x(m), 0, 0))
            whole -= self._final_norm(op, m) if policy is not ActivationPolicy.OFFLOAD else 0
            if full and policy is not ActivationPolicy.OFFLOAD:
                whole -= self._final_input(op, m)
        held = x
        order = ([body.tail] if body.tail else []) + [body.layer] * body.alike
        remaining = whole
        for done, layer in enumerate(order):
            if full:
                rise = layer.rerun_rise
                freed = x if policy is not ActivationPolicy.OFFLOAD else 0
            elif policy is ActivationPolicy.OFFLOAD:
                rise, freed = layer.streamed_rise, 0
            else:
                rise, freed = layer.backward_rise, layer.saved
            own = held + (x if is_last or done else 0)
            moments.append((remaining, rows + own + rise, 0, (done + 1) * per_layer))
            remaining -= freed
        if op.stage == 0:
            table = self.memory.vocab_rows * self.memory.shape.hidden_size * self.memory.element_bytes
            moments.append((remaining, rows + 2 * x + table, 0, new))
        kept, working, logits, gradients = max(moments, key=sum)
        point = self._point(
            place, op, m, cache, kept=kept, working=working, logits=logits, gradients=cache.gradients - new + gradients
        )
        self.parked.pop(key, None)
        return point

    def _taken(self, op: Op, m: Microbatch) -> int:
        """gK/gV that leave the cache with an operation."""
        if op.kind is Kind.FORWARD:
            return 0
        per_token = (
            self.memory.kv_gradient_bytes_per_token * self.memory.pipeline_parallel // self.memory.shape.num_layers
        )
        return sum(self.lengths[b] for b in m.writes) * per_token * self.memory.layers(op.stage)

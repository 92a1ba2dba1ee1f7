"""What one layer of a microbatch allocates and frees, in the order of its operations.

Strategy: a `Ledger` follows the tensors of Megatron's layer with our core attention, forward and backward, as they come
and go; its largest sum is what the layer needs at once, and what is left after a forward is what waits for the
backward. Nothing is fitted: each line is one tensor, with the place that makes it. Sizes are bytes on one rank.

Two sets of kernels. *Plain*: torch's own operations one by one, as on the CPU (no fused norm, gate, rotary embedding or
weight gradient; attention gradients of K/V before they are summed over the heads of a group). *Fused*: as on a GPU.

Not covered: tensors of less than a number per token and layer, memory inside a kernel, dropout masks, biases.
"""

from __future__ import annotations

from dataclasses import dataclass

FP32_BYTES = 4


class Ledger:
    """Bytes alive now and at most."""

    def __init__(self, now: int = 0) -> None:
        self.now = self.peak = now

    def take(self, *sizes: int) -> None:
        """Allocate, one after the other."""
        self.now += sum(sizes)
        self.peak = max(self.peak, self.now)

    def free(self, *sizes: int) -> None:
        self.now -= sum(sizes)


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """One slice: queries and keys on this rank; blocks: cached segments that are joined, 0 where keys are the microbatch's own."""

    queries: int
    keys: int
    causal: bool
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Widths of one layer on one rank, and what runs in it.

    tokens: positions of the microbatch that the rank works on; normed_tokens: those that norms and residuals see (fewer under
    sequence parallelism); key_tokens: positions whose K/V it holds (all of the microbatch under gathering context
    parallelism). query, key: heads times channels of Q and of K. ffn: of a dense layer; experts: routed positions that come
    here, as (rows, experts, width), None in a dense layer.
    """

    element: int
    tokens: int
    normed_tokens: int
    key_tokens: int
    hidden: int
    query: int
    key: int
    channels: int
    heads: int
    ffn: int
    gated: bool = True
    parts: tuple[AttentionPart, ...] = ()
    gathers_keys: bool = False
    writes_part: bool = False
    experts: tuple[int, int, int] | None = None
    router: int = 0
    dead_tail: bool = False
    fused: bool = False

    @property
    def wide(self) -> int:
        """Bytes of a number in sums."""
        return max(self.element, FP32_BYTES)

    @property
    def x(self) -> int:
        """Hidden states as norms and residuals see them."""
        return self.normed_tokens * self.hidden * self.element

    @property
    def full_x(self) -> int:
        """Hidden states as linear layers see them."""
        return self.tokens * self.hidden * self.element

    @property
    def is_scattered(self) -> bool:
        return self.normed_tokens < self.tokens

    @property
    def q(self) -> int:
        return self.tokens * self.query * self.element

    @property
    def kv(self) -> int:
        """K, or V, of the rank's own positions."""
        return self.tokens * self.key * self.element

    @property
    def all_kv(self) -> int:
        """K, or V, that attention reads."""
        return self.key_tokens * self.key * self.element

    @property
    def mixed(self) -> int:
        return self.q + 2 * self.kv

    @property
    def lse(self) -> int:
        return self.tokens * self.heads * self.wide

    @property
    def angle(self) -> int:
        return self.tokens * self.channels * self.element

    @property
    def gate(self) -> int:
        return self.tokens * self.ffn * self.element

    def weight(self, inputs: int, outputs: int) -> int:
        """A weight gradient before it is added to the main one; a fused kernel adds at once."""
        return 0 if self.fused else inputs * outputs * self.element

    @property
    def is_one_slice(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].causal and not self.gathers_keys


class LayerFootprint:
    """Walks one layer; `graph` False frees what only a backward would read.

    Every method adds to the ledger what it makes and takes off what it drops. `saved` of each is what it leaves for the
    backward.
    """

    def __init__(self, sizes: LayerSizes, ledger: Ledger, *, is_streamed: bool = False) -> None:
        """is_streamed: what the forward saved is elsewhere, and comes back tensor by tensor as the backward asks for it."""
        self.s = sizes
        self.ledger = ledger
        self.is_streamed = is_streamed

    def _fetch(self, *sizes: int) -> None:
        """A backward is about to use what the forward saved."""
        if self.is_streamed:
            self.ledger.take(*sizes)

    # Forward

    def forward(self, *, graph: bool, keeps_input: bool = False, selective: bool = False) -> None:
        """From the layer's input (alive) to its output, the next one's input.

        keeps_input: somebody else holds the input on (a checkpoint of the layer).
        """
        s, ledger = self.s, self.ledger
        self._norm_forward(graph=graph)
        self._attention_forward(graph=graph, selective=selective)
        ledger.take(s.x)
        ledger.free(s.x)
        if not (keeps_input or (graph and self.norm_keeps_input)):
            ledger.free(s.x)
        if s.dead_tail:
            return
        self._norm_forward(graph=graph)
        if s.experts is None:
            self._mlp_forward(graph=graph)
        else:
            self._experts_forward(graph=graph)
        ledger.take(s.x)
        ledger.free(s.x)
        if not graph:
            ledger.free(2 * s.x)
        elif not self.norm_keeps_input:
            ledger.free(s.x)

    @property
    def norm_keeps_input(self) -> bool:
        """torch's RMSNorm computes in float32 from a copy, which it saves in place of a narrower input."""
        return self.s.fused or self.s.element == self.s.wide

    @property
    def _wide_x(self) -> int:
        return self.s.normed_tokens * self.s.hidden * self.s.wide

    @property
    def norm_saved(self) -> int:
        """Of one norm, its input left out where it is kept as it is."""
        s = self.s
        if s.fused:
            return s.x
        return self._wide_x + s.x + (0 if self.norm_keeps_input else self._wide_x)

    def _norm_forward(self, *, graph: bool) -> None:
        s, ledger = self.s, self.ledger
        if s.fused:
            ledger.take(s.x)
            return
        wide = self._wide_x
        copy = 0 if self.norm_keeps_input else wide
        ledger.take(copy, wide)  # squares
        ledger.free(wide)
        ledger.take(wide)  # normalised, before the weight
        ledger.take(*((wide, s.x) if copy else (s.x,)))
        ledger.free(copy)
        if not graph:
            ledger.free(wide, copy)

    def _rotate(self, size: int) -> None:
        """Rotary embedding of Q or of K: x cos + rotated x sin, and a copy."""
        s, ledger = self.s, self.ledger
        if s.fused:
            ledger.take(size)
            return
        ledger.take(2 * s.angle, size, size // 2, size)
        ledger.free(size // 2)
        ledger.take(size)
        ledger.free(size)
        ledger.take(size)
        ledger.free(size, size)
        ledger.take(size)
        ledger.free(size)

    def _attention_forward(self, *, graph: bool, selective: bool) -> None:
        s, ledger = self.s, self.ledger
        if s.is_scattered:
            ledger.take(s.full_x)
        ledger.take(s.mixed)
        if s.is_scattered:
            ledger.free(s.full_x)
        query_copy = 0 if s.fused else s.q
        ledger.take(query_copy)
        self._rotate(s.q)
        self._rotate(s.kv)
        self._core_inputs_forward(graph=graph)
        if s.dead_tail:
            ledger.take(s.q)
        else:
            self._core_forward()
        if selective and graph:
            self._drop_core_inputs()
            ledger.free(s.lse if not s.dead_tail else 0)
        ledger.take(s.full_x)
        if s.is_scattered:
            ledger.take(s.x)
            ledger.free(s.full_x)
        # Python lets go of Q before its rotation, and of the projection that V is a view of.
        ledger.free(query_copy)
        if not (selective and graph):
            ledger.free(s.mixed)
        angles = 0 if s.fused else 4 * s.angle
        if not graph:
            ledger.free(s.q, s.q, angles, s.x, s.kv)
            self._drop_core_inputs()
            ledger.free(0 if s.dead_tail else s.lse)
        elif s.dead_tail and not selective:
            # `Root` saves nothing: Q, K and V go.
            ledger.free(s.q, s.kv)
            self._drop_core_inputs()
        elif s.gathers_keys and not selective:
            ledger.free(s.kv)

    def _core_inputs_forward(self, *, graph: bool) -> None:
        """V in memory of its own; under gathering context parallelism K and V of the whole microbatch."""
        s, ledger = self.s, self.ledger
        if s.gathers_keys:
            ledger.take(s.kv, 2 * s.kv, 2 * s.all_kv, 2 * s.all_kv)
            ledger.free(2 * s.all_kv, 2 * s.kv)
            ledger.take(2 * s.all_kv)
            ledger.free(2 * s.all_kv, s.kv)
        else:
            ledger.take(s.kv)

    def _drop_core_inputs(self) -> None:
        s = self.s
        if s.gathers_keys:
            self.ledger.free(2 * s.all_kv)
        else:
            self.ledger.free(s.kv)

    def _core_forward(self) -> None:
        """Output and logsumexp; slices are merged in the precision of sums."""
        s, ledger = self.s, self.ledger
        if s.is_one_slice:
            ledger.take(s.q, s.lse, s.lse)
            ledger.free(s.lse)
            return
        merges = any(not part.causal for part in s.parts)
        out = s.q // s.element * s.wide if merges else s.q
        ledger.take(out, s.lse)
        for part in s.parts:
            part_out = part.queries * s.query * s.element
            part_lse = part.queries * s.heads * s.wide
            joined = 2 * part.keys * s.key * s.element if part.blocks > 1 else 0
            wide_out = part.queries * s.query * s.wide if not part.causal and s.element < s.wide else 0
            ledger.take(joined, part_out, 2 * part_lse)
            ledger.free(part_lse)
            ledger.take(wide_out, 2 * part_lse)
            ledger.free(joined, part_out, part_lse, wide_out, 2 * part_lse)
        if out != s.q:
            ledger.take(s.q)
            ledger.free(out)

    def _mlp_forward(self, *, graph: bool) -> None:
        s, ledger = self.s, self.ledger
        if s.is_scattered:
            ledger.take(s.full_x)
        ledger.take(self._up(s.gate))
        if s.is_scattered:
            ledger.free(s.full_x)
        self._activation_forward(s.gate)
        if not graph:
            self.ledger.free(self._activation_saved(s.gate) - s.gate)
        ledger.take(s.full_x)
        if s.is_scattered:
            ledger.take(s.x)
            ledger.free(s.full_x)
        if not graph:
            ledger.free(s.gate)

    def _up(self, gate: int) -> int:
        return 2 * gate if self.s.gated else gate

    def _activation_forward(self, gate: int) -> None:
        """silu(a) * (b + 0): three tensors beside the projection, or one from a fused kernel."""
        self.ledger.take(*((gate,) if self.s.fused or not self.s.gated else (gate, gate, gate)))

    def _activation_saved(self, gate: int) -> int:
        """With the projection that it reads."""
        return self._up(gate) + (gate if self.s.fused or not self.s.gated else 3 * gate)

    def _experts_forward(self, *, graph: bool) -> None:
        """Routed rows, permuted; each expert's MLP with its probabilities; rows put back."""
        s, ledger = self.s, self.ledger
        rows, width, router = self._expert_bytes()
        ledger.take(router, rows)
        ledger.take(self._up(width), *((2 * width,) if s.fused else (4 * width,)), rows)
        ledger.take(rows)
        ledger.free(rows)
        ledger.take(s.full_x)
        ledger.free(rows)
        if s.is_scattered:
            ledger.take(s.x)
            ledger.free(s.full_x)
        if not graph:
            ledger.free(router, rows, self._experts_saved(width))

    def _expert_bytes(self) -> tuple[int, int, int]:
        s = self.s
        assert s.experts is not None
        rows, _, ffn = s.experts
        # Logits, scores and maps of the router, and positions of the permuted rows.
        router = s.tokens * s.router * s.wide + 3 * 8 * rows
        return rows * s.hidden * s.element, rows * ffn * s.element, router

    def _experts_saved(self, width: int) -> int:
        """With the projections and their products with the probabilities."""
        return self._up(width) + (2 * width if self.s.fused else 4 * width)

    # Backward: the gradient of the output is alive before, that of the input after.

    def backward(self, *, selective: bool = False, takes_gradients: bool = False, keeps_input: bool = False) -> None:
        """takes_gradients: gK/gV of readers are added (`Inject`); keeps_input: see `forward`."""
        s, ledger = self.s, self.ledger
        if not s.dead_tail:
            if s.is_scattered:
                ledger.take(s.full_x)
            if s.experts is None:
                self._mlp_backward()
            else:
                self._experts_backward()
            self._norm_backward(frees_input=True)
        self._attention_backward(selective=selective, takes_gradients=takes_gradients)
        self._norm_backward(frees_input=not keeps_input)

    def _linear_backward(self, saved_input: int, gradient: int, made: int, weight: int) -> None:
        """Gradients of input and weight; the output's gradient and the saved input go."""
        ledger = self.ledger
        self._fetch(saved_input)
        ledger.take(made, weight)
        ledger.free(gradient, saved_input, weight)

    def _mlp_backward(self) -> None:
        s, ledger = self.s, self.ledger
        self._linear_backward(s.gate, s.full_x if s.is_scattered else 0, s.gate, s.weight(s.ffn, s.hidden))
        self._activation_backward(s.gate)
        if s.is_scattered:
            ledger.take(s.full_x)
        self._input_gradient(s.x, self._up(s.gate), s.weight(s.hidden, self._up(s.ffn)))

    def _input_gradient(self, normed: int, gradient: int, weight: int) -> None:
        """Of a linear layer behind a norm: under sequence parallelism its gathered input stands beside, its gradient is scattered."""
        s, ledger = self.s, self.ledger
        self._fetch(normed)
        ledger.take(s.full_x, weight)
        if s.is_scattered:
            ledger.take(s.x)
            ledger.free(s.full_x, s.full_x)
        ledger.free(gradient, normed, weight)

    def _activation_backward(self, gate: int) -> None:
        """From the gradient of the product to that of the projection."""
        s, ledger = self.s, self.ledger
        if s.fused or not s.gated:
            self._fetch(self._up(gate))
            ledger.take(self._up(gate))
            ledger.free(gate, self._up(gate))
            return
        self._fetch(2 * gate)
        ledger.take(gate, gate)
        ledger.free(gate, 2 * gate)
        self._fetch(2 * gate)
        ledger.take(gate)
        ledger.free(gate, 2 * gate)
        ledger.take(2 * gate)
        ledger.free(gate, gate)

    def _experts_backward(self) -> None:
        """One expert after the other, so that only one's temporaries are alive, beside the rows' gradients."""
        s, ledger = self.s, self.ledger
        assert s.experts is not None
        rows, width, router = self._expert_bytes()
        _, num_experts, ffn = s.experts
        one, one_rows = width // num_experts, rows // num_experts
        ledger.take(rows)
        if s.is_scattered:
            ledger.free(s.full_x)
        for _ in range(num_experts):
            self._linear_backward(one, 0, one, s.weight(ffn, s.hidden))
            self._fetch(one if s.fused else 2 * one)
            if not s.fused:
                ledger.take(one, one)  # of the probabilities and of what they multiply
                ledger.free(one, one)
            ledger.free(0 if s.fused else one)
            self._activation_backward(one)
            self._linear_backward(0, self._up(one), one_rows, s.weight(s.hidden, self._up(ffn)))
        if s.fused:
            ledger.free(width)
        ledger.take(rows)  # joined
        ledger.free(rows, rows, rows)
        ledger.take(s.full_x)
        ledger.free(rows, router)
        if s.is_scattered:
            ledger.take(s.x)
            ledger.free(s.full_x)
        ledger.take(s.x)  # of the router
        ledger.free(s.x, s.x)

    def _norm_backward(self, *, frees_input: bool) -> None:
        """The gradients of the normed input (alive) and of the residual become one; both are replaced."""
        s, ledger = self.s, self.ledger
        if s.fused:
            self._fetch(s.x if frees_input else 0)
            ledger.take(s.x)
            ledger.free(s.x)
            ledger.take(s.x)
            ledger.free(s.x, s.x)
            if frees_input:
                ledger.free(s.x)
            return
        wide = self._wide_x
        copy = 0 if self.norm_keeps_input else wide
        self._fetch(wide)
        if copy:
            ledger.take(wide)
            ledger.free(s.x)
        gradient = wide if copy else s.x
        ledger.take(wide, wide)
        ledger.free(wide, wide, gradient)
        ledger.take(wide, wide)
        ledger.free(wide, wide)
        total = wide
        if not copy:
            ledger.take(s.x)
            ledger.free(s.x, wide)
            total = s.x
        if copy or frees_input:
            self._fetch(copy or s.x)
        ledger.take(wide, wide, wide, wide)
        ledger.free(wide, wide, wide)
        if copy or frees_input:
            ledger.free(copy or s.x)
        ledger.take(total)
        ledger.free(total, wide)
        if copy:
            ledger.take(s.x)
            ledger.free(wide)
            ledger.take(s.x)
            ledger.free(s.x, s.x)

    def _attention_backward(self, *, selective: bool, takes_gradients: bool) -> None:
        s, ledger = self.s, self.ledger
        if s.is_scattered:
            ledger.take(s.full_x)
        # The output is saved by attention too (not in selective recomputation), and goes with it.
        saved_output = s.q if selective or s.dead_tail else 0
        gathered = s.full_x if s.is_scattered else 0
        self._linear_backward(saved_output, gathered, s.q, s.weight(s.query, s.hidden))
        if selective:
            self._core_inputs_forward(graph=True)
            if s.dead_tail:
                ledger.take(s.q)
            else:
                self._core_forward()
        self._core_backward()
        if selective and s.dead_tail:
            ledger.free(s.q, s.q)
            self._drop_core_inputs()
            ledger.free(0 if s.gathers_keys else s.kv)
        if takes_gradients:
            wide_kv = s.all_kv // s.element * s.wide
            ledger.take(wide_kv, wide_kv)
            if s.element < s.wide:
                ledger.take(s.all_kv, s.all_kv)
                ledger.free(wide_kv, wide_kv)
            ledger.free(2 * s.all_kv)
        if s.gathers_keys:
            self._gather_backward()
            ledger.free(s.kv if selective else 0)
        if selective:
            ledger.free(s.mixed)
        self._rotate_backward(s.kv)
        self._rotate_backward(s.q)
        ledger.take(s.mixed)
        ledger.free(s.mixed)
        if s.is_scattered:
            ledger.take(s.full_x)
        self._input_gradient(s.x, s.mixed, s.weight(s.hidden, s.query + 2 * s.key))

    def _gather_backward(self) -> None:
        """Partial sums of all ranks' queries, in the precision of sums, to this rank's gradient."""
        s, ledger = self.s, self.ledger
        wide = 2 * s.all_kv // s.element * s.wide
        ledger.take(2 * s.all_kv)
        ledger.free(2 * s.all_kv)
        ledger.take(2 * s.all_kv)
        if s.element < s.wide:
            ledger.take(wide)
        own = 2 * s.kv // s.element * s.wide
        ledger.take(own)
        ledger.free(2 * s.all_kv, 2 * s.all_kv, wide if s.element < s.wide else 0)
        if s.element < s.wide:
            ledger.take(2 * s.kv)
            ledger.free(own)

    def _core_backward(self) -> None:
        """The gradient of the output (alive) becomes those of Q, K and V; what the forward saved goes."""
        s, ledger = self.s, self.ledger
        kv = 2 * s.all_kv
        if not s.dead_tail:
            self._fetch(2 * s.q, s.lse, kv)
        if s.dead_tail:
            ledger.take(s.q, kv)
            ledger.free(s.q)
            return
        if s.is_one_slice:
            self._kernel_backward(s.tokens, s.tokens)
            ledger.take(s.q, kv // s.element * s.wide)
            self._end_kernel(s.tokens, s.tokens)
            if s.element < s.wide:
                ledger.take(kv)
                ledger.free(kv // s.element * s.wide)
        else:
            self._parts_backward()
        # The output's gradient, then what was saved.
        ledger.free(s.q)
        ledger.free(2 * s.q, s.lse)
        self._drop_core_inputs()
        ledger.free(0 if s.gathers_keys else s.kv)

    def _key_gradient(self, keys: int) -> int:
        """dK, or dV, as the kernel makes it: the plain one for every query head."""
        s = self.s
        return keys * (s.key if s.fused else s.query) * s.element

    def _kernel_backward(self, queries: int, keys: int) -> None:
        self.ledger.take(queries * self.s.query * self.s.element, 2 * self._key_gradient(keys))

    def _end_kernel(self, queries: int, keys: int) -> None:
        self.ledger.free(queries * self.s.query * self.s.element, 2 * self._key_gradient(keys))

    def _parts_backward(self) -> None:
        s, ledger = self.s, self.ledger
        merges = any(not part.causal for part in s.parts)
        in_graph = any(not part.causal and not part.blocks for part in s.parts)
        dq = s.q // s.element * (s.wide if merges else s.element)
        dkv = 2 * s.all_kv // s.element * (s.wide if in_graph else s.element)
        ledger.take(dq, dkv)
        for part in s.parts:
            joined = 2 * part.keys * s.key * s.element if part.blocks > 1 else 0
            summed = 2 * part.keys * s.key * s.wide
            rows = part.queries * s.query * s.element
            ledger.take(joined)
            self._kernel_backward(part.queries, part.keys)
            ledger.take(rows, summed)
            self._end_kernel(part.queries, part.keys)
            ledger.free(joined)
            if part.blocks and not s.fused:
                # The sums over heads are transposed: what gK/gV become, or are added to them from, is a copy.
                ledger.take(summed)
                ledger.free(summed)
            ledger.free(rows, summed)
        for now, then in ((dq, s.q), (dkv, 2 * s.all_kv)):
            if now != then:
                ledger.take(then)
                ledger.free(now)

    def _rotate_backward(self, size: int) -> None:
        s, ledger = self.s, self.ledger
        if s.fused:
            ledger.take(size)
            ledger.free(size)
            return
        self._fetch(2 * s.angle)
        ledger.take(size)
        ledger.free(s.angle)
        ledger.take(size // 2, size)
        ledger.free(size, size // 2)
        ledger.take(size)
        ledger.free(s.angle)
        ledger.take(size)
        ledger.free(size, size)
        ledger.take(size)
        ledger.free(size)
        ledger.take(size)
        ledger.free(size, size)

"""Slice attention against every path replayed whole, and what must not go unnoticed."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import prefixflow.runtime.attention.function as function
from prefixflow.plan.slices import CachedSlice, LocalSlice
from prefixflow.ranges import Range
from prefixflow.runtime.attention.function import AttentionContext, Operation, segment_attention
from prefixflow.runtime.attention.kernels import (
    AtenCpuKernel,
    AttentionKernel,
    EinsumKernel,
    select_kernel,
)
from prefixflow.runtime.cache import CacheError, KVCache
from tests.runtime.attention_cases import (
    Tree,
    largest_error,
    plain_attention,
    random_tensors,
    random_tree,
    shared,
    unshared,
)

CPU = torch.device("cpu")
FLOAT64_LIMIT = 1e-12
FLOAT32_LIMIT = 2e-5
HEADS = [(8, 2, 16), (4, 4, 20), (3, 1, 7)]
FAN = Tree((None, *[0] * 8), (40, *range(20, 28)), ((0,), (1, 2, 3, 4), (5, 6, 7, 8)))


@pytest.mark.parametrize("kernel", [AtenCpuKernel(), EinsumKernel()], ids=lambda k: k.name)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_float64_equals_unshared(seed: int, heads: tuple[int, int, int], kernel: AttentionKernel) -> None:
    tree = random_tree(seed)
    tensors = random_tensors(tree, *heads)
    got = shared(tree, tensors, 0.3, kernel, KVCache())
    assert largest_error(got, unshared(tree, tensors, 0.3)) < FLOAT64_LIMIT


def test_random_trees_cover_every_mix() -> None:
    trees = [random_tree(seed) for seed in range(12)]
    contexts = [c for t in trees for c in t.contexts(KVCache(), AtenCpuKernel())]
    assert max(len(t.path(leaf)) for t in trees for leaf in t.leaves) == 4
    assert any(t.num_padding for t in trees)
    assert any(1 in t.lengths for t in trees)
    in_graph = [c for c in contexts if any(not s.causal for s in c.local)]
    assert any(c.cached for c in in_graph)
    assert any(not c.cached for c in in_graph)
    assert any(c.cached and c not in in_graph for c in contexts)
    assert any(len(s.blocks) > 1 for c in contexts for s in c.cached)
    assert any(c.cached and c.writes for c in contexts)


def test_one_wide_slice_serves_all_suffixes() -> None:
    cache = KVCache()
    shared(FAN, random_tensors(FAN, 4, 2, 8), 0.3, AtenCpuKernel(), cache)
    # Two suffix microbatches, read once forward and once backward each.
    assert (cache.num_writes, cache.num_reads, cache.num_gradient_adds) == (1, 4, 2)


@pytest.mark.parametrize("seed", range(4))
def test_float32(seed: int) -> None:
    tree = random_tree(seed)
    tensors = random_tensors(tree, 8, 2, 16).to(torch.float32)
    got = shared(tree, tensors, 0.3, AtenCpuKernel(), KVCache())
    exact = unshared(tree, tensors.to(torch.float64), 0.3)
    assert got[0][0].dtype == got[2][0].dtype == torch.float32
    assert largest_error(got, exact) < FLOAT32_LIMIT


def flash_path(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("tree", [FAN, random_tree(2, 12, 60), random_tree(5, 12, 60)])
def test_bfloat16_error_at_most_twice_the_naive_one(tree: Tree) -> None:
    tensors = random_tensors(tree, 8, 2, 32).to(torch.bfloat16)
    exact = unshared(tree, tensors.to(torch.float64), 0.2)
    naive = unshared(tree, tensors, 0.2, flash_path)
    got = shared(tree, tensors, 0.2, AtenCpuKernel(), KVCache())
    assert got[0][0].dtype == got[1][0].dtype == got[2][0].dtype == torch.bfloat16
    for name, ours, theirs, truth in zip(("out", "dq", "dk", "dv"), got, naive, exact, strict=True):
        assert distance(ours, truth) <= 2 * distance(theirs, truth), name


def test_bfloat16_sums_over_slices_are_float32() -> None:
    """64 suffixes in one microbatch with their prefix, or in another: 64 terms, one rounding."""
    in_graph = Tree((None, *[0] * 64), (9, *[3] * 64), (tuple(range(65)),))
    cached = Tree(in_graph.parents, in_graph.lengths, ((0,), *((s,) for s in range(1, 65))))
    tensors = random_tensors(in_graph, 4, 4, 16).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tensors.dout[:] = [torch.rand(x.shape, generator=generator).to(x) for x in tensors.dout]
    exact = unshared(in_graph, tensors.to(torch.float64), 0.2)
    naive = unshared(in_graph, tensors, 0.2, flash_path)
    for tree in (in_graph, cached):
        got = shared(tree, tensors, 0.2, AtenCpuKernel(), KVCache())
        for ours, theirs, truth in zip(got[2:], naive[2:], exact[2:], strict=True):
            # The naive path rounds 64 times.
            assert distance(ours[:1], truth[:1]) < 0.3 * distance(theirs[:1], truth[:1])


def distance(got: list[Tensor], exact: list[Tensor]) -> float:
    differences = [(a.double() - b).norm() for a, b in zip(got, exact, strict=True)]
    return float(torch.stack(differences).norm())


@pytest.mark.parametrize("changed", range(1, 9))
def test_canary_a_suffix_moves_no_other(changed: int) -> None:
    tensors = random_tensors(FAN, 4, 2, 8)
    before = shared(FAN, tensors, 0.3, AtenCpuKernel(), KVCache())
    for xs in (tensors.q, tensors.k, tensors.v):
        xs[changed] = xs[changed] + 50.0
    after = shared(FAN, tensors, 0.3, AtenCpuKernel(), KVCache())
    for segment in range(9):
        same = torch.equal(before[0][segment], after[0][segment])
        assert same == (segment != changed), segment


def test_canary_later_tokens_move_no_earlier_ones() -> None:
    tree = random_tree(3)
    tensors = random_tensors(tree, 4, 2, 8)
    before = shared(tree, tensors, 0.3, AtenCpuKernel(), KVCache())
    tensors.k[2][-1] += 50.0
    after = shared(tree, tensors, 0.3, AtenCpuKernel(), KVCache())
    assert torch.equal(before[0][2][:-1], after[0][2][:-1])
    assert not torch.equal(before[0][2][-1], after[0][2][-1])


class Mutant:
    """The CPU kernel, broken in one place."""

    name = "mutant"

    def __init__(self, own_lse: bool = False, base_two: bool = False) -> None:
        self.inner = AtenCpuKernel()
        self.own_lse = own_lse
        self.lse_factor = 1 / math.log(2) if base_two else 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        out, lse = self.inner.forward(q, k, v, causal, scale)
        return out, lse * self.lse_factor

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> Any:
        lse = lse / self.lse_factor
        if self.own_lse:
            lse = self.inner.forward(q, k, v, causal, scale)[1]
        return self.inner.backward(dout, q, k, v, out, lse, causal, scale)

    def describe(self) -> str:
        return self.name


class Forgetful(KVCache):
    """Loses every gK/gV, without a word."""

    def take_gradient(self, layer: int, block: int) -> None:
        super().take_gradient(layer, block)


@pytest.mark.parametrize(
    ("kernel", "cache_type"),
    [
        (Mutant(own_lse=True), KVCache),
        (Mutant(base_two=True), KVCache),
        (AtenCpuKernel(), Forgetful),
    ],
    ids=["own lse in backward", "lse to base two", "gK and gV dropped"],
)
@pytest.mark.parametrize("tree", [FAN, random_tree(4), random_tree(6)])
def test_mutants_are_caught(tree: Tree, kernel: AttentionKernel, cache_type: type[KVCache]) -> None:
    tensors = random_tensors(tree, 8, 2, 16)
    exact = unshared(tree, tensors, 0.3)
    assert largest_error(shared(tree, tensors, 0.3, Mutant(), KVCache()), exact) < FLOAT64_LIMIT
    assert largest_error(shared(tree, tensors, 0.3, kernel, cache_type()), exact) > 1e-3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_cpu_kernel_equals_einsum_on_views(heads: tuple[int, int, int], causal: bool) -> None:
    """Views of a fused projection, and a gradient with stride 0, as `sum()` makes one."""
    num_heads, num_kv_heads, head_size = heads
    fused = torch.randn(30, num_heads + 2 * num_kv_heads, 2 * head_size, dtype=torch.float64)
    q, k, v = fused[..., ::2].split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if not causal:
        k, v = k[:11], v[:11]
    out, lse = EinsumKernel().forward(q, k, v, causal, 0.3)
    dout = torch.ones((), dtype=torch.float64).expand(q.shape)
    expected = EinsumKernel().backward(dout, q, k, v, out, lse, causal, 0.3)
    got_out, got_lse = AtenCpuKernel().forward(q, k, v, causal, 0.3)
    torch.testing.assert_close(got_out, out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got_lse, lse, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        AtenCpuKernel().backward(dout, q, k, v, got_out, got_lse, causal, 0.3),
        expected,
        rtol=1e-12,
        atol=1e-12,
    )


def test_select_kernel() -> None:
    assert select_kernel("auto", CPU).name == select_kernel("aten", CPU).name == "aten-cpu"
    assert select_kernel("einsum", torch.device("meta")).name == "einsum"
    assert select_kernel("aten", torch.device("cuda")).name == "aten-cuda"
    with pytest.raises(ValueError, match="'triton' is unknown; expected one of auto, aten"):
        select_kernel("triton", CPU)
    with pytest.raises(ValueError, match="'flash-attn' does not run on device 'cpu'"):
        select_kernel("flash-attn", CPU)


class FlashAttnStub:
    """Stands in for flash_attn.flash_attn_interface: its layouts and keywords, our arithmetic."""

    def _flash_attn_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, None, None]:
        assert q.shape[-1] % 8 == 0
        out, lse = EinsumKernel().forward(q[0], k[0], v[0], causal, softmax_scale)
        return out.unsqueeze(0), lse.T.unsqueeze(0), None, None

    def _flash_attn_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
    ) -> None:
        lse = softmax_lse[0].T
        grads = EinsumKernel().backward(dout[0], q[0], k[0], v[0], out[0], lse, causal, softmax_scale)
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer[0].copy_(grad)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_flash_attn_layouts_and_padding(heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: FlashAttnStub())
    kernel = select_kernel("flash-attn", torch.device("cuda"))
    tree = random_tree(4)
    tensors = random_tensors(tree, *heads)
    got = shared(tree, tensors, 0.3, kernel, KVCache())
    assert largest_error(got, unshared(tree, tensors, 0.3)) < FLOAT64_LIMIT


def test_aten_cuda_calls_fit_the_operators() -> None:
    """Arguments and shapes only, on meta tensors; head size 20 is padded to 24."""
    q = torch.empty(6, 4, 20, dtype=torch.bfloat16, device="meta")
    k = torch.empty(9, 2, 20, dtype=torch.bfloat16, device="meta")
    kernel = select_kernel("aten", torch.device("cuda"))
    out, lse = kernel.forward(q, k, k, False, 0.3)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (6, 4), torch.float32)
    dq, dk, dv = kernel.backward(out, q, k, k, out, lse, False, 0.3)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)


def test_missing_flash_attn_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ValueError, match=r"flash_attn cannot be imported.*ask for 'aten'"):
        select_kernel("flash-attn", torch.device("cuda"))


def test_shapes_that_do_not_fit_are_refused() -> None:
    context = AttentionContext((LocalSlice(Range(0, 5), Range(0, 5), True),), (), (), KVCache(), AtenCpuKernel())
    short, whole = torch.ones(4, 2, 8), torch.ones(5, 2, 8)
    with pytest.raises(ValueError, match=r"layer 3: .* T = 5 .* q \(4, 2, 8\)"):
        segment_attention(short, short, short, context, 3, 1.0)
    with pytest.raises(ValueError, match="multiple of n_kv"):
        segment_attention(torch.ones(5, 3, 8), whole, whole, context, 3, 1.0)


def test_inject_leaves_the_incoming_gradient_alone() -> None:
    """It may be someone else's: here dk and dv are one tensor, which must not be added to twice."""
    cache = KVCache()
    tokens = Range(1, 3)
    own = (LocalSlice(Range(0, 4), Range(0, 4), True),)
    context = AttentionContext(own, (), ((0, tokens),), cache, AtenCpuKernel())
    k, v = (torch.zeros(4, 2, 8, requires_grad=True) for _ in range(2))
    outs = function.Inject.apply(k, v, context, 0)
    cache.add_gradient(0, (0,), torch.full((2, 2, 8), 10.0), torch.full((2, 2, 8), 100.0))
    incoming = torch.ones(4, 2, 8)
    dk, dv = torch.autograd.grad(outs, (k, v), (incoming, incoming))
    assert dk[:, 0, 0].tolist() == [1.0, 11.0, 11.0, 1.0]
    assert dv[:, 0, 0].tolist() == [1.0, 101.0, 101.0, 1.0]
    assert incoming.unique().tolist() == [1.0]


def test_slices_may_come_in_any_order() -> None:
    tree = random_tree(6)
    context = tree.contexts(KVCache(), AtenCpuKernel())[1]
    assert len(context.causal) > 1
    backwards = AttentionContext(context.local[::-1], context.cached[::-1], (), context.cache, context.kernel)
    assert backwards.causal == context.causal
    assert backwards.num_tokens == context.num_tokens


def test_uncovered_tokens_are_refused() -> None:
    pieces = tuple(LocalSlice(r, r, True) for r in (Range(0, 2), Range(3, 4)))
    with pytest.raises(AssertionError, match="token 2 is followed by 3:4"):
        AttentionContext(pieces, (), (), KVCache(), AtenCpuKernel())


# A small model, for what only shows with several layers: recomputation, and the dead last layer.

NUM_LAYERS, HIDDEN, HEADS_TOY, KV_HEADS_TOY, HEAD_SIZE = 3, 12, 4, 2, 6
PREFIX = ((0, 7), (1, 5))  # (segment, tokens): a chain of two chunks
SUFFIXES = ((2, 4), (3, 1), (4, 6))
Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]
Recompute = Callable[..., Any]


class Toy(torch.nn.Module):
    """Attention and a nonlinearity per layer with residuals; x [T, HIDDEN] float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = (HEADS_TOY + 2 * KV_HEADS_TOY) * HEAD_SIZE
        self.embedding = torch.nn.Parameter(torch.randn(40, HIDDEN))
        self.project = torch.nn.ParameterList(torch.randn(HIDDEN, widths) / 3 for _ in range(NUM_LAYERS))
        self.output = torch.nn.ParameterList(torch.randn(HEADS_TOY * HEAD_SIZE, HIDDEN) / 3 for _ in range(NUM_LAYERS))
        self.double()

    def layer(self, x: Tensor, index: int, attention: Attention) -> Tensor:
        fused = (x @ self.project[index]).unflatten(1, (-1, HEAD_SIZE))
        q, k, v = fused.split([HEADS_TOY, KV_HEADS_TOY, KV_HEADS_TOY], dim=1)
        return x + torch.tanh(attention(q, k, v, index).flatten(1) @ self.output[index])

    def forward(self, ids: Tensor, attention: Attention, recompute: Recompute) -> Tensor:
        x = self.embedding[ids]
        for index in range(NUM_LAYERS):
            x = recompute(self.layer, x, index, attention)
        return x


def call(layer: Callable[..., Any], *args: Any) -> Any:
    return layer(*args)


def reentrant(layer: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(layer, *args, use_reentrant=True)


def non_reentrant(layer: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(layer, *args, use_reentrant=False)


def ids_of(segment: int, num_tokens: int) -> Tensor:
    return (torch.arange(num_tokens) * 7 + segment * 11) % 40


def weights_of(segment: int, num_tokens: int) -> Tensor:
    """Loss weights of a suffix, [T, HIDDEN]."""
    generator = torch.Generator().manual_seed(segment)
    return torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)


def toy_reference() -> list[Tensor]:
    model = Toy()
    for segment, num_tokens in SUFFIXES:
        path = (*PREFIX, (segment, num_tokens))
        x = model(
            torch.cat([ids_of(*part) for part in path]),
            lambda q, k, v, _: plain_attention(q, k, v, 0.4),
            call,
        )
        (x[-num_tokens:] * weights_of(segment, num_tokens)).sum().backward()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def toy_contexts(cache: KVCache) -> list[AttentionContext]:
    """Each prefix chunk alone, then all suffixes in one microbatch."""
    kernel = AtenCpuKernel()
    contexts = []
    for (segment, num_tokens), ancestors in zip(PREFIX, ((), (0,)), strict=True):
        tokens = Range(0, num_tokens)
        cached = (CachedSlice(tokens, ancestors),) if ancestors else ()
        local = (LocalSlice(tokens, tokens, True),)
        contexts.append(AttentionContext(local, cached, ((segment, tokens),), cache, kernel))
        contexts[-1].keys_only_layer = NUM_LAYERS - 1
    starts = [sum(n for _, n in SUFFIXES[:i]) for i in range(4)]
    ranges = [Range(a, b) for a, b in pairwise(starts)]
    suffixes = tuple(LocalSlice(r, r, True) for r in ranges)
    shared_keys = (CachedSlice(Range(0, starts[-1]), (0, 1)),)
    return [*contexts, AttentionContext(suffixes, shared_keys, (), cache, kernel)]


def toy_shared(recompute: Recompute, cache: KVCache) -> list[Tensor]:
    model = Toy()
    contexts = toy_contexts(cache)
    batches = [torch.cat([ids_of(*part)]) for part in PREFIX]
    batches.append(torch.cat([ids_of(*part) for part in SUFFIXES]))
    outs = [
        model(ids, lambda q, k, v, i, c=c: segment_attention(q, k, v, c, i, 0.4), recompute)
        for ids, c in zip(batches, contexts, strict=True)
    ]
    weights = torch.cat([weights_of(*part) for part in SUFFIXES])
    for out, context in zip(reversed(outs), reversed(contexts), strict=True):
        context.operation = Operation.BACKWARD
        out.backward(weights if not context.writes else torch.zeros_like(out))
        for block, _ in context.writes:
            cache.release(block)
            cache.close(block)
    cache.assert_empty()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def toy_error(got: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, toy_reference(), strict=True))


@pytest.mark.parametrize("recompute", [call, reentrant, non_reentrant])
def test_parameter_gradients_with_and_without_recomputation(recompute: Recompute) -> None:
    cache = KVCache()
    assert toy_error(toy_shared(recompute, cache)) < FLOAT64_LIMIT
    assert cache.num_writes == 2 * NUM_LAYERS
    assert cache.num_gradient_adds == NUM_LAYERS + (NUM_LAYERS - 1)  # the dead layer adds none


class Unrooted:
    """Skips the dead layer's attention and forgets that its K and V owe gradients."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.zeros_like(q)


@pytest.mark.parametrize("recompute", [call, reentrant, non_reentrant])
def test_without_root_the_last_layer_loses_its_gradients(recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "Root", Unrooted)
    with pytest.raises(CacheError, match=r"close of block 1: .* gradients of layers \[2\] are left"):
        toy_shared(recompute, KVCache())


def test_recomputation_that_claims_to_be_a_forward_is_refused() -> None:
    tokens = Range(0, 4)
    context = AttentionContext((LocalSlice(tokens, tokens, True),), (), ((0, tokens),), KVCache(), AtenCpuKernel())
    q = torch.randn(4, 2, 8, requires_grad=True)
    out = reentrant(lambda x: segment_attention(x, x, x, context, 0, 1.0), q)
    with pytest.raises(CacheError, match="already written"):
        out.sum().backward()


def test_forward_only_stores_and_builds_no_graph() -> None:
    tree = FAN
    tensors = random_tensors(tree, 4, 2, 8)
    cache = KVCache()
    contexts = tree.contexts(cache, AtenCpuKernel())
    outs = []
    with torch.no_grad():
        for group, context in zip(tree.microbatches, contexts, strict=True):
            context.operation = Operation.FORWARD_ONLY
            q, k, v = (torch.cat([xs[s] for s in group]) for xs in (tensors.q, tensors.k, tensors.v))
            outs.append(segment_attention(q, k, v, context, 0, 0.3))
    expected = unshared(tree, tensors, 0.3)[0]
    torch.testing.assert_close(torch.cat(outs), torch.cat(expected), rtol=1e-12, atol=1e-12)
    assert cache.live_blocks == (0,)
    assert not outs[-1].requires_grad


def test_fused_projection_is_not_kept_alive() -> None:
    """v is a view of the fused projection in Megatron: the graph must save v alone."""
    tokens = Range(0, 4)
    context = AttentionContext((LocalSlice(tokens, tokens, True),), (), (), KVCache(), AtenCpuKernel())
    fused = torch.randn(4, 8, 8, requires_grad=True)
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.untyped_storage().nbytes() // (x.numel() * x.element_size()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        q, k, v = fused.split([4, 2, 2], dim=1)
        segment_attention(q, k, v, context, 0, 1.0)
    assert saved == [1] * 5

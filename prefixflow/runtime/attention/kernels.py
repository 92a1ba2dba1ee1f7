"""Attention kernels behind one small interface: forward and backward of one slice.

Shapes
    q, out, dout, dq   [T_q, n, d]
    k, v, dk, dv       [T_k, n_kv, d]   n a multiple of n_kv; query head i reads i // (n / n_kv)
    lse                [T_q, n]         natural logarithm; float64 for float64 inputs, else float32

A causal slice has T_q == T_k, so that top-left and bottom-right alignment of the mask agree.

The backward takes out and lse *after* merging: the probabilities are then exp(scale q.k - lse) over
all keys of the query, not over this slice's, and dq, dk, dv are this slice's exact share (Dao et
al., arXiv 2205.14135: the backward of a block needs of the rest of the row only out and lse).
"""

from __future__ import annotations

import importlib
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from prefixflow.runtime.cache import accumulation_dtype

KERNEL_NAMES = ("auto", "aten", "flash-attn", "einsum")


class AttentionKernel(Protocol):
    """See the module for shapes. dk and dv may come in a higher precision than k and v."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

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
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def describe(self) -> str: ...


class AtenCpuKernel:
    """PyTorch's CPU flash attention: float64, float32, bfloat16, float16; any head size.

    Source: `aten::_scaled_dot_product_flash_attention_for_cpu` and its backward, which follow
    strides and want equal numbers of heads. The query heads of a group therefore stand in the batch
    dimension, over K/V expanded there with stride 0: no input is copied; dk and dv are summed over
    the group afterwards.
    """

    name = "aten-cpu"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        num_kv_heads = k.shape[1]
        group_size = q.shape[1] // num_kv_heads
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _split_heads(q, num_kv_heads),
            _expand_heads(k, group_size),
            _expand_heads(v, group_size),
            0.0,
            causal,
            scale=scale,
        )
        return _join_heads(out), lse.permute(2, 1, 0).reshape(q.shape[:2])

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_kv_heads = k.shape[1]
        group_size = q.shape[1] // num_kv_heads
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _split_heads(dout, num_kv_heads),
            _split_heads(q, num_kv_heads),
            _expand_heads(k, group_size),
            _expand_heads(v, group_size),
            _split_heads(out, num_kv_heads),
            _split_heads(lse.unsqueeze(-1), num_kv_heads).squeeze(-1),
            0.0,
            causal,
            scale=scale,
        )
        return _join_heads(dq), _sum_groups(dk), _sum_groups(dv)

    def describe(self) -> str:
        return "aten CPU flash attention"


class AtenCudaKernel:
    """PyTorch's CUDA flash attention for float16 and bfloat16; other dtypes go to einsum.

    Source: `aten::_flash_attention_forward` and `_backward` (torch 2.13): [batch, T, heads, d],
    grouped heads natively, natural logsumexp [batch, n, T], head sizes in multiples of 8 up to 256
    (padded here with zeros). Einsum holds a T_q x T_k matrix per head: for checks only.
    Not yet run: no machine with a GPU was at hand.
    """

    name = "aten-cuda"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if q.dtype not in (torch.float16, torch.bfloat16):
            return EinsumKernel().forward(q, k, v, causal, scale)
        head_size = q.shape[-1]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(_batched(x) for x in (q, k, v)),
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out[0, ..., :head_size], lse[0].transpose(0, 1)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.dtype not in (torch.float16, torch.bfloat16):
            return EinsumKernel().backward(dout, q, k, v, out, lse, causal, scale)
        # Without dropout the kernel reads no random state, but the operator wants the tensors.
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.zeros((), dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            *(_batched(x) for x in (dout, q, k, v, out)),
            _heads_first(lse),
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            causal,
            random_state,
            unused,
            scale=scale,
        )
        dq, dk, dv = (grad[0, ..., : q.shape[-1]] for grad in grads)
        return dq, dk, dv

    def describe(self) -> str:
        return "aten CUDA flash attention (float16, bfloat16; other dtypes: einsum)"


class FlashAttnKernel:
    """The flash-attn package (2.7 or later), asked for by name; float16 and bfloat16 only.

    Source: `flash_attn.flash_attn_interface._flash_attn_forward` and `_flash_attn_backward`.
    Not yet run: no machine with a GPU was at hand.
    """

    name = "flash-attn"

    def __init__(self) -> None:
        try:
            self._interface: Any = importlib.import_module("flash_attn.flash_attn_interface")
        except ImportError as error:
            raise ValueError(
                f"attention kernel 'flash-attn': the package flash_attn cannot be imported ({error}); "
                "install flash-attn 2.7 or later, or ask for 'aten', which needs nothing"
            ) from error

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        head_size = q.shape[-1]
        out, lse, *_ = self._interface._flash_attn_forward(
            *(_batched(x) for x in (q, k, v)),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return out[0, ..., :head_size], lse[0].transpose(0, 1)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = [_batched(x) for x in (dout, q, k, v, out)]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[1:4]]
        self._interface._flash_attn_backward(
            *inputs,
            _heads_first(lse),
            *grads,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        dq, dk, dv = (grad[0, ..., : q.shape[-1]] for grad in grads)
        return dq, dk, dv

    def describe(self) -> str:
        version = importlib.import_module("flash_attn").__version__
        return f"flash-attn {version} (float16, bfloat16)"


class EinsumKernel:
    """The formulas written out, on any device: the oracle of tests. Holds a T_q x T_k matrix per head.

    Computes in float64 for float64 inputs and in float32 below.
    """

    name = "einsum"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        scores = _scores(q, k, causal, scale)
        lse = scores.logsumexp(dim=-1)
        out = torch.einsum("hgts,shd->thgd", (scores - lse.unsqueeze(-1)).exp(), _raised(v))
        return out.reshape(q.shape).to(q.dtype), lse.permute(2, 0, 1).reshape(q.shape[:2])

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        grouped = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
        dout_grouped = _raised(dout).reshape(grouped)
        row_lse = lse.reshape(grouped[:3]).permute(1, 2, 0).unsqueeze(-1)
        probabilities = (_scores(q, k, causal, scale) - row_lse).exp()
        row_sum = (_raised(dout) * _raised(out)).sum(-1).reshape(grouped[:3]).permute(1, 2, 0)
        dprobabilities = torch.einsum("thgd,shd->hgts", dout_grouped, _raised(v))
        dscores = probabilities * (dprobabilities - row_sum.unsqueeze(-1)) * scale
        dq = torch.einsum("hgts,shd->thgd", dscores, _raised(k)).reshape(q.shape)
        dk = torch.einsum("hgts,thgd->shd", dscores, _raised(q).reshape(grouped))
        dv = torch.einsum("hgts,thgd->shd", probabilities, dout_grouped)
        return dq.to(q.dtype), dk, dv

    def describe(self) -> str:
        return "einsum attention (an oracle for checks: slow, quadratic memory)"


def select_kernel(name: str, device: torch.device) -> AttentionKernel:
    """The kernel of that name for a device; 'auto' is 'aten'.

    Raises ValueError for an unknown name, a device without the kernel, or a package that is missing.
    """
    if name not in KERNEL_NAMES:
        raise ValueError(f"attention kernel {name!r} is unknown; expected one of {', '.join(KERNEL_NAMES)}")
    if name == "einsum":
        return EinsumKernel()
    if name == "flash-attn" and device.type == "cuda":
        return FlashAttnKernel()
    if name != "flash-attn" and device.type == "cuda":
        return AtenCudaKernel()
    if name != "flash-attn" and device.type == "cpu":
        return AtenCpuKernel()
    raise ValueError(
        f"attention kernel {name!r} does not run on device '{device}'; use 'aten' on cpu or cuda, 'einsum' elsewhere"
    )


def _split_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """[T, n, d] -> [group, n_kv, T, d], a view."""
    return _last_contiguous(x).unflatten(1, (num_kv_heads, -1)).permute(2, 1, 0, 3)


def _join_heads(x: Tensor) -> Tensor:
    """[group, n_kv, T, d] -> [T, n, d]; a view where the kernel kept the layout of `_split_heads`."""
    return x.permute(2, 1, 0, 3).flatten(1, 2)


def _expand_heads(x: Tensor, group_size: int) -> Tensor:
    """[T, n_kv, d] -> [group, n_kv, T, d], a view with stride 0 over the group."""
    return _last_contiguous(x).transpose(0, 1).unsqueeze(0).expand(group_size, -1, -1, -1)


def _sum_groups(x: Tensor) -> Tensor:
    """[group, n_kv, T, d] -> [T, n_kv, d], summed over the group in the accumulation precision."""
    if x.shape[0] == 1:
        return x[0].transpose(0, 1)
    return x.sum(0, dtype=accumulation_dtype(x.dtype)).transpose(0, 1)


def _last_contiguous(x: Tensor) -> Tensor:
    """The kernels follow every stride but the last: a gradient of `sum()`, say, has stride 0 there."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _batched(x: Tensor) -> Tensor:
    """[T, n, d] -> [1, T, n, d'], d padded with zeros to a multiple of 8: no score changes."""
    missing = -x.shape[-1] % 8
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else _last_contiguous(x)
    return padded.unsqueeze(0)


def _heads_first(lse: Tensor) -> Tensor:
    return lse.transpose(0, 1).unsqueeze(0).contiguous()


def _raised(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Scaled, masked scores [n_kv, group, T_q, T_k]."""
    grouped = _raised(q).reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    scores = torch.einsum("thgd,shd->hgts", grouped, _raised(k)) * scale
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -math.inf)

"""Log-probabilities and entropies of rows from vocabulary-parallel logits.

The logits are never gathered, and held whole only on request.

Shapes: R rows, h hidden size, V vocabulary entries held by this rank (padding included), r rows
of one chunk.

    z = hidden @ weight.T / temperature            [r, V]   one chunk at a time
    lse = log sum_j exp(z_j)                       [R]      over the vocabularies of all ranks
    logprob = z_label - lse                        [R]
    entropy = lse - sum_j p_j z_j                  [R]      p = exp(z - lse)

    d logprob / d z_j = [j = label] - p_j
    d entropy / d z_j = -p_j (log p_j + entropy)

The arithmetic after the matrix product is float64 for a float64 model and float32 for every other
one. A pass costs two collectives forward (a maximum [R], a sum [R, 3]) and one backward (the
gradient of the hidden rows [R, h]), whatever the number of chunks; none when R is 0, which is so on
all ranks of a tensor-parallel group or on none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

DEFAULT_CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's part of the LM head.

    weight: [V, h], rows `vocab_start .. vocab_start + V` of the padded output matrix, a plain
        tensor or a parameter.
    num_valid: vocabulary entries that exist, over all ranks; later rows are padding and have
        probability zero. None: all of them exist.
    group: ranks that hold the other parts; None when this rank holds everything.
    """

    weight: Tensor
    vocab_start: int = 0
    num_valid: int | None = None
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise ValueError(
                "LM head weight: expected this rank's output matrix [vocabulary, hidden], got "
                f"shape {tuple(self.weight.shape)}."
            )
        if self.num_valid is not None and self.num_valid < 1:
            raise ValueError(
                f"LM head: expected at least one vocabulary entry, got num_valid={self.num_valid}; "
                "pass the size of the vocabulary before padding."
            )

    @property
    def num_valid_here(self) -> int:
        """Rows of `weight` that are vocabulary entries; 0 where a rank holds padding only."""
        num_rows = self.weight.shape[0]
        if self.num_valid is None:
            return num_rows
        return min(num_rows, max(0, self.num_valid - self.vocab_start))

    @property
    def is_split(self) -> bool:
        return self.group is not None and dist.get_world_size(self.group) > 1


def row_logprobs(
    hidden: Tensor,
    labels: Tensor,
    shard: VocabShard,
    *,
    temperature: float | Tensor = 1.0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [R] and entropies [R] (None unless asked for), for a pass without backward.

    Arguments and errors as `RowLogprobs.forward`.
    """
    rows = RowLogprobs.forward(
        hidden,
        labels,
        shard,
        temperature=temperature,
        chunk_rows=chunk_rows,
        with_entropy=with_entropy,
    )
    return rows.logprobs, rows.entropy


class RowLogprobs:
    """The log-probabilities of R rows, and their backward, called once and at any later time.

    With `keep` the forward leaves the exponentials [R, V] in place for a backward that follows at
    once; without it only [R] vectors and the hidden rows stay alive and the backward computes the
    logits again, chunk by chunk. Both give the same gradients up to rounding. Nothing here is seen
    by autograd: the caller feeds `grad_hidden` to the model's graph and adds `grad_weight` to the
    parameter's gradient. The weight must not change between the two.

    logprobs: [R], float64 or float32, the same on all ranks of the group.
    entropy: [R] likewise, None unless asked for.
    """

    __slots__ = (
        "_chunk_rows",
        "_done",
        "_factor",
        "_hidden",
        "_kept",
        "_labels",
        "_max",
        "_shard",
        "_temperature",
        "entropy",
        "logprobs",
    )

    logprobs: Tensor
    entropy: Tensor | None

    def __init__(
        self,
        hidden: Tensor,
        labels: Tensor,
        shard: VocabShard,
        temperature: float | Tensor,
        chunk_rows: int,
        keep: bool,
    ) -> None:
        _check_rows(hidden, labels, shard, chunk_rows)
        self._hidden = hidden.detach()
        self._labels = labels
        self._shard = shard
        self._temperature = _temperature_column(temperature, hidden)
        # Kept exponentials exist whole anyway, and one large product is quicker than several.
        self._chunk_rows = max(1, hidden.shape[0]) if keep else chunk_rows
        self._kept: Tensor | None = self._new_logits(hidden.shape[0]) if keep else None
        self._done = False

    @classmethod
    @torch.no_grad()
    def forward(
        cls,
        hidden: Tensor,
        labels: Tensor,
        shard: VocabShard,
        *,
        temperature: float | Tensor = 1.0,
        chunk_rows: int = DEFAULT_CHUNK_ROWS,
        with_entropy: bool = False,
        keep: bool = False,
    ) -> RowLogprobs:
        """Scores `labels` [R] (global vocabulary ids, int64) from `hidden` [R, h].

        hidden, labels: the same on all ranks of the group; so are the other arguments.
        temperature: a number, or [R] for one per row; it divides the logits, and so changes the
            entropy too.
        chunk_rows: rows whose logits exist at once, chunk_rows * V * 4 bytes (8 in float64), twice
            that with entropy; with `keep` it is all of them.

        Raises ValueError for shapes that disagree, a temperature that is not positive and, on the
        CPU, a label outside the vocabulary (on a GPU the check would wait for the device; ids are
        checked where they are read).
        """
        rows = cls(hidden, labels, shard, temperature, chunk_rows, keep)
        rows._forward(with_entropy)
        return rows

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the log-probabilities and of the gradients' accumulation."""
        return _compute_dtype(self._hidden)

    def take_hidden(self) -> Tensor:
        """Give away the hidden rows [R, h]; `put_hidden` must bring them back before `backward`."""
        hidden = self._hidden
        del self._hidden
        return hidden

    def put_hidden(self, hidden: Tensor) -> None:
        """The hidden rows [R, h] that the forward had, again."""
        self._hidden = hidden.detach()

    def _forward(self, with_entropy: bool) -> None:
        num_rows = self._hidden.shape[0]
        # With e = exp(z - max): sum of e, sum of e * (z - max), and the label's z.
        sums = torch.zeros((num_rows, 3), dtype=self.dtype, device=self._hidden.device)
        maxima = torch.full_like(sums[:, 0], -torch.inf)
        if self._shard.num_valid_here:
            for rows, z in self._logit_chunks():
                maxima[rows] = _exponentiate(z, self._labels_here(rows), sums[rows], with_entropy)
        self._max = maxima
        top = self._combine(maxima, sums) if self._shard.is_split and num_rows else maxima
        # p = exp(z - own maximum) * factor
        self._factor = (maxima - top).exp() / sums[:, 0]
        log_sum = sums[:, 0].log()
        self.logprobs = (sums[:, 2] - top) - log_sum
        self.entropy = log_sum - sums[:, 1] / sums[:, 0] if with_entropy else None

    def _combine(self, maxima: Tensor, sums: Tensor) -> Tensor:
        """Turns this rank's `sums` [R, 3] into those of all ranks.

        Returns the common maximum [R] to which they are relative.
        """
        top = maxima.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self._shard.group)
        if self._shard.num_valid_here:
            shift = maxima - top
            sums[:, 1] += shift * sums[:, 0]
            sums[:, :2] *= shift.exp().unsqueeze(1)
        dist.all_reduce(sums, group=self._shard.group)
        return top

    @torch.no_grad()
    def backward(
        self,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None = None,
        *,
        grad_weight_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of sum(grad_logprobs * logprobs) + sum(grad_entropy * entropy).

        grad_logprobs: [R]; grad_entropy: [R], only after `with_entropy`.
        grad_weight_out: [V, h] of `dtype`, to which the weight's gradient is added in place (a
            `main_grad`); by default a new tensor is made.

        Returns grad_hidden [R, h] in the dtype of `hidden`, summed over the group, and grad_weight
        [V, h] of this rank in `dtype` (float32 for half precision), zero in padding rows:
        `grad_weight_out` where given.
        """
        if self._done:
            raise RuntimeError(
                f"backward of {self._labels.shape[0]} log-probability rows was called twice: "
                "expected one call, since it gives its state away; run the forward again."
            )
        self._check_grads(grad_logprobs, grad_entropy, grad_weight_out)
        self._done = True
        weight = self._shard.weight
        grad_hidden = torch.zeros_like(self._hidden, dtype=self.dtype)
        grad_weight = grad_weight_out
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight, dtype=self.dtype, requires_grad=False)
        if self._shard.num_valid_here and self._hidden.shape[0]:
            self._backward(grad_logprobs, grad_entropy, grad_hidden, grad_weight)
        self._kept = None
        if self._shard.is_split and self._hidden.shape[0]:
            dist.all_reduce(grad_hidden, group=self._shard.group)
        return grad_hidden.to(self._hidden.dtype), grad_weight

    def _backward(
        self,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        grad_hidden: Tensor,
        grad_weight: Tensor,
    ) -> None:
        num_valid = self._shard.num_valid_here
        weight = _operand(self._shard.weight[:num_valid])
        grad_weight = grad_weight[:num_valid]
        for rows, exps in self._exp_chunks():
            scale = self._per_logit(grad_logprobs[rows], rows)
            factor = self._factor[rows, None]
            if grad_entropy is None:
                grad_z = exps.mul_(-scale * factor)
            else:
                assert self.entropy is not None
                p = exps.mul_(factor)
                slope = torch.special.xlogy(p, p).addcmul_(p, self.entropy[rows, None])
                slope.mul_(self._per_logit(grad_entropy[rows], rows))
                grad_z = p.mul_(-scale).sub_(slope)
            index, is_here = self._labels_here(rows)
            grad_z.scatter_add_(1, index, scale * is_here)
            grad_operand = grad_z.to(weight.dtype)
            _matmul(grad_operand, weight, out=grad_hidden[rows])
            _add_matmul(grad_weight, grad_operand.t(), _operand(self._hidden[rows]))

    def _logit_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows and tempered logits [r, valid entries here] by chunk, to be overwritten."""
        weight = _operand(self._shard.weight[: self._shard.num_valid_here]).t()
        num_rows = self._hidden.shape[0]
        kept = self._kept
        buffer = self._new_logits(min(self._chunk_rows, num_rows)) if kept is None else kept
        for rows in self._chunks():
            z = buffer[: rows.stop - rows.start] if kept is None else kept[rows]
            _matmul(_operand(self._hidden[rows]), weight, out=z)
            if self._temperature is not None:
                z.div_(self._temperature[rows])
            yield rows, z

    def _exp_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows and exp(z - own maximum) by chunk, kept or computed again; as above."""
        if self._kept is None:
            for rows, z in self._logit_chunks():
                yield rows, z.sub_(self._max[rows, None]).exp_()
            return
        for rows in self._chunks():
            yield rows, self._kept[rows]

    def _chunks(self) -> Iterator[slice]:
        num_rows = self._hidden.shape[0]
        for start in range(0, num_rows, self._chunk_rows):
            yield slice(start, min(start + self._chunk_rows, num_rows))

    def _new_logits(self, num_rows: int) -> Tensor:
        shape = (num_rows, self._shard.num_valid_here)
        return torch.empty(shape, dtype=self.dtype, device=self._hidden.device)

    def _labels_here(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Columns [r, 1] of the labels in this rank's part, and whether they are in it (else 0)."""
        index = self._labels[rows].unsqueeze(1) - self._shard.vocab_start
        is_here = (index >= 0) & (index < self._shard.num_valid_here)
        return index * is_here, is_here

    def _per_logit(self, grad: Tensor, rows: slice) -> Tensor:
        """A gradient [r] by tempered logits as a column [r, 1] by raw ones."""
        column = grad.to(self.dtype).unsqueeze(1)
        return column if self._temperature is None else column / self._temperature[rows]

    def _check_grads(self, grad_logprobs: Tensor, grad_entropy: Tensor | None, grad_weight_out: Tensor | None) -> None:
        shape = self._labels.shape
        for name, grad in (("grad_logprobs", grad_logprobs), ("grad_entropy", grad_entropy)):
            if grad is not None and grad.shape != shape:
                raise ValueError(
                    f"{name}: expected one number for each of the {shape[0]} rows, got shape "
                    f"{tuple(grad.shape)}; sum the coefficients of trajectories that share a row."
                )
        if grad_entropy is not None and self.entropy is None:
            raise ValueError(
                "grad_entropy was given but the forward computed no entropy; call it with with_entropy=True."
            )
        if grad_weight_out is None:
            return
        if grad_weight_out.shape != self._shard.weight.shape or grad_weight_out.dtype != self.dtype:
            raise ValueError(
                f"grad_weight_out: expected {tuple(self._shard.weight.shape)} of {self.dtype}, got "
                f"{tuple(grad_weight_out.shape)} of {grad_weight_out.dtype}; leave it out and add "
                "the returned gradient."
            )


def _exponentiate(z: Tensor, label: tuple[Tensor, Tensor], sums: Tensor, with_entropy: bool) -> Tensor:
    """Overwrites `z` [r, V] with exp(z - max), fills `sums` [r, 3], returns the maxima [r]."""
    index, is_here = label
    sums[:, 2:] = torch.where(is_here, z.gather(1, index), 0.0)
    maxima = z.amax(dim=1)
    z.sub_(maxima.unsqueeze(1))
    shifted = z.clone() if with_entropy else None
    torch.sum(z.exp_(), dim=1, out=sums[:, 0])
    if shifted is not None:
        torch.sum(shifted.mul_(z), dim=1, out=sums[:, 1])
    return maxima


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _operand(matrix: Tensor) -> Tensor:
    """A matrix as it enters a product: a GPU takes half precision and accumulates in float32."""
    matrix = matrix.detach()
    return matrix if matrix.is_cuda else matrix.to(_compute_dtype(matrix))


def _matmul(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b, not rounded to half precision on the way."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(torch.mm(a, b, out_dtype=out.dtype))


def _add_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, not rounded to half precision on the way."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out.add_(torch.mm(a, b, out_dtype=out.dtype))


def _temperature_column(temperature: float | Tensor, hidden: Tensor) -> Tensor | None:
    """The temperature as a column [R, 1], or None where it is 1 everywhere."""
    num_rows = hidden.shape[0]
    if not isinstance(temperature, Tensor):
        if not 0.0 < temperature < float("inf"):
            raise ValueError(f"temperature: expected a positive finite number, got {temperature}.")
        if temperature == 1.0:
            return None
        temperature = torch.full((num_rows,), temperature, dtype=torch.float64)
    if temperature.dim() == 0:
        temperature = temperature.expand(num_rows)
    if temperature.shape != (num_rows,):
        raise ValueError(
            f"temperature: expected one number or one for each of the {num_rows} rows, got shape "
            f"{tuple(temperature.shape)}."
        )
    if not temperature.is_cuda and not bool((temperature > 0).all()):
        raise ValueError(f"temperature: expected positive numbers, got {float(temperature.min())}.")
    return temperature.to(device=hidden.device, dtype=_compute_dtype(hidden)).unsqueeze(1)


def _check_rows(hidden: Tensor, labels: Tensor, shard: VocabShard, chunk_rows: int) -> None:
    weight = shard.weight
    if hidden.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden rows: expected [rows, {weight.shape[1]}] of {weight.dtype}, as the LM head's "
            f"weight, got {tuple(hidden.shape)} of {hidden.dtype}; flatten the selected rows."
        )
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels: expected {hidden.shape[0]} token ids of torch.int64, one for each hidden "
            f"row, got shape {tuple(labels.shape)} of {labels.dtype}."
        )
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1 row at a time, got {chunk_rows}.")
    if labels.is_cuda or labels.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(labels))
    num_valid = shard.num_valid
    if num_valid is None and not shard.is_split:
        num_valid = weight.shape[0]
    if low < 0 or (num_valid is not None and high >= num_valid):
        raise ValueError(
            f"labels: expected token ids from 0 up to the vocabulary size {num_valid}, got {low} "
            f"to {high}; the trajectories were made with another tokenizer, or the vocabulary is "
            "too small."
        )

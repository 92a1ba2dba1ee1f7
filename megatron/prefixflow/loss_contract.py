"""What Megatron's schedules make of a loss function: scales, token counts and the list that they return.

The scales are Megatron's own, taken from `forward_step_calc_loss`:

    loss function returns     calculate_per_token_loss   loss
    (loss, data)              either                     loss * cp / num_microbatches
    (loss, tokens, data)      off                        loss / max(tokens, 1) / num_microbatches * cp
    (loss, tokens, data)      on                         loss * cp, with the tokens counted cp times

The factor cp of a triple is ours: there Megatron's context-parallel ranks sum up losses of their own tokens, while here each
calls the loss on whole sequences and carries a part of its gradient. The gradients of both are the same sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from torch import Tensor

from megatron.prefixflow.doors import LossCall


class LossContract:
    """Calls loss functions on the last stage, each once.

    config: of the model. num_tokens (attribute): int [], of all calls so far.
    """

    def __init__(
        self,
        loss_calls: tuple[LossCall, ...],
        config: Any,
        *,
        num_microbatches: int,
        context_size: int,
        device: torch.device,
        training: bool,
        collect_non_loss_data: bool,
    ) -> None:
        self._loss_calls = loss_calls
        self._config = config
        self._num_microbatches = num_microbatches
        self._context_size = context_size
        self._training = training
        self._collects = collect_non_loss_data
        self._results: dict[int, Any] = {}
        self.num_tokens = torch.zeros([], dtype=torch.int, device=device)

    @property
    def results(self) -> list[Any]:
        """What a schedule returns, in the order of the loss calls; empty where none was called."""
        return [self._results[number] for number in sorted(self._results)]

    def call_those_without_sequences(self) -> None:
        """Calls that no sequence has asked for."""
        for number, call in enumerate(self._loss_calls):
            if not call.sequences:
                self(number, [], None)

    def __call__(self, number: int, logprobs: Sequence[Tensor], entropies: Sequence[Tensor] | None) -> Tensor:
        """The scaled loss of one call; log-probabilities and entropies of its sequences, [n] each."""
        output, loss_func = self._loss_calls[number].forward(logprobs, entropies)
        triples: list[bool] = []
        measured = None if loss_func is None else _noting(loss_func, triples)
        store: list[Any] = []
        if self._config.timers is not None:
            self._config.timers("forward-compute", log_level=2).start()
        try:
            loss, num_tokens = forward_step_calc_loss(
                None,
                output,
                measured,
                self._config,
                None,
                self._collects,
                self._num_microbatches,
                store,
                cp_group_size=self._context_size,
                is_last_stage=True,
            )
        except BaseException:
            # Megatron stops it after the loss; running, it could not be started again.
            if self._config.timers is not None:
                self._config.timers("forward-compute").stop()
            raise
        (self._results[number],) = store
        self.num_tokens += num_tokens
        if not self._training:
            return loss
        if any(triples):
            loss = loss * self._context_size
        return loss if self._config.grad_scale_func is None else self._config.grad_scale_func(loss)


def _noting(loss_func: Callable[..., Any], triples: list[bool]) -> Callable[..., Any]:
    """`loss_func`, which leaves in `triples` whether it returned three values as its loss."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        outputs = loss_func(*args, **kwargs)
        triples.append(not kwargs and len(outputs) == 3)
        return outputs

    return measured

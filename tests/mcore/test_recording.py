"""Forward steps of a framework, recorded: which sequences they mean, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.prefixflow.adapter import SequenceInput
from megatron.prefixflow.items import own_items
from megatron.prefixflow.recording import Part, Reading, Recording, TokenLosses, merged, read, record, replay

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
LABELS = torch.tensor([[2, 3, 4, 9], [6, 7, 8, 0]])
"""The second row ends with token 8, which stands in its labels only, then padding."""
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
LOGPROBS = (torch.tensor([0.0, -1, -2, -3, -4]), torch.tensor([0.0, -5, -6, -7]))


class Inner(torch.nn.Module):
    tag = "inner"

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs


class Wrapper(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = Inner()


def reading(training: bool = True, **changes: Any) -> Reading:
    given = {"input_ids": TOKENS, "position_ids": None, "attention_mask": None, "labels": LABELS, "loss_mask": MASK}
    recording = Recording((), {**given, **changes}, None)
    return read(Part.of(recording, "Microbatch 3"), "Microbatch 3", training=training)


def sequences(found: Reading) -> list[tuple[list[int], list[bool]]]:
    return [(s.tokens.tolist(), s.scored.tolist()) for s in found.sequences if s.scored is not None]


def causal(size: int) -> torch.Tensor:
    return torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)


def test_a_row_ends_with_the_label_of_its_last_position_that_is_read() -> None:
    found = reading()
    assert sequences(found) == [
        ([1, 2, 3, 4, 9], [False, True, True, True, True]),
        ([5, 6, 7, 8], [False, True, True, True]),
    ]
    assert found.num_tokens == 8


def test_losses_stand_where_megatron_puts_them_and_are_0_elsewhere() -> None:
    losses = TokenLosses(reading(), "Microbatch 3", torch.device("cpu"))(LOGPROBS)
    assert losses.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]


def packed(lengths: tuple[int, ...], room: tuple[int, ...]) -> PackedSeqParams:
    bounds = [torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32) for sizes in (lengths, room)]
    return PackedSeqParams("thd", bounds[0], bounds[0], bounds[1], bounds[1])


def test_packed_sequences_with_room_between_them() -> None:
    tokens = torch.tensor([[1, 2, 0, 0, 3, 4, 5, 0, 0]])
    labels = torch.tensor([[2, 8, 0, 0, 4, 5, 9, 0, 0]])
    found = reading(
        input_ids=tokens, labels=labels, loss_mask=None, packed_seq_params=packed((2, 3), (4, 4)), position_ids=tokens
    )
    assert sequences(found) == [([1, 2, 8], [False, True, True]), ([3, 4, 5, 9], [False, True, True, True])]
    losses = TokenLosses(found, "", torch.device("cpu"))((torch.tensor([0.0, -1, -2]), torch.tensor([0.0, -3, -4, -5])))
    assert losses.tolist() == [[1, 2, 0, 0, 3, 4, 5, 0, 0]]


def test_what_the_loss_does_not_read_may_have_any_label() -> None:
    labels = LABELS.clone()
    labels[0, 1] = 77
    assert sequences(reading(labels=labels, loss_mask=None))[0] == ([1, 2, 3, 4, 9], [False, True, False, True, True])
    assert sequences(reading(labels=LABELS - 100 * (1 - MASK)))[1] == ([5, 6, 7, 8], [False, True, True, True])
    nothing = reading(loss_mask=torch.zeros_like(MASK))
    assert sequences(nothing) == [([1], [False]), ([5], [False])]


def test_a_loss_that_reads_what_was_not_scored_is_an_error_that_names_the_place() -> None:
    leaves = [values.clone().requires_grad_() for values in LOGPROBS]
    losses = TokenLosses(reading(), "Microbatch 3", torch.device("cpu"))
    torch.autograd.grad((losses(leaves) * MASK).sum(), leaves)
    with pytest.raises(
        ValueError, match=r"Microbatch 3: the loss reads row 1, position 3, .* to the model as loss_mask="
    ):
        torch.autograd.grad(losses(leaves).sum(), leaves)


def test_masks_and_positions_of_padding_on_the_right_are_read_over() -> None:
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]])
    mask = causal(4).repeat(2, 1, 1, 1)
    mask[1, 0, 3] = True
    assert len(reading(position_ids=positions, attention_mask=mask).sequences) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": None}, "without labels on every pipeline stage.* Pass labels"),
        ({"input_ids": None}, "without input_ids"),
        ({"labels": LABELS[:, :3]}, r"shape \[2, 4\] and labels \[2, 3\]"),
        ({"input_ids": TOKENS[0], "labels": LABELS[0]}, r"have the shape \[4\], expected \[batch, sequence\]"),
        ({"loss_mask": MASK[:, 1:]}, r"loss_mask has the shape \[2, 3\], expected that of the labels, \[2, 4\]"),
        ({"input_ids": TOKENS - 3}, r'sequence 0, field "input_ids": expected token ids of 0 or more'),
        ({"position_ids": torch.tensor([0, 0, 1, 2])}, "row 0: position_ids are not 0"),
        ({"position_ids": torch.tensor([[0, 0, 1, 2]])}, "row 0: position_ids are not 0, 1, 2"),
        ({"attention_mask": ~causal(4)}, "row 0: the attention mask is not causal over the 4 positions"),
        ({"attention_mask": causal(4).triu(2)}, "not causal"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask is torch.float32 of shape"),
        ({"decoder_input": TOKENS}, "called with decoder_input"),
        ({"surprise": 1}, "in another way than GPTModel.forward"),
        ({"packed_seq_params": packed((2, 3), (1, 4))}, "leave less room"),
        ({"packed_seq_params": packed((2, 3), (2, 3))}, "expected one row"),
        ({"packed_seq_params": packed((2, -1), (2, 3))}, "cu_seqlens_q fall"),
        (
            {"labels": LABELS + 1, "loss_mask": None, "training": False},
            "sequence 0: labels are not the tokens that follow",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"Microbatch 3.*{words}"):
        reading(**changes)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_an_adapter_may_give_tensors(kind: Callable[[Any], Any]) -> None:
    routes = kind([[[0], [1]]] * 2) if kind is not list else None
    given = SequenceInput(kind([1, 2, 3]), kind([0, 0, 1]), routes=routes)
    assert (given.tokens.tolist(), np.asarray(given.scored).tolist()) == ([1, 2, 3], [False, False, True])
    assert given.routes is None or given.routes.tolist() == [[[0], [1]]] * 2
    with pytest.raises(
        ValueError, match=r'field "SequenceInput.scored": expected one entry per token, 3 of them, got 2'
    ):
        SequenceInput(kind([1, 2, 3]), kind([0, 1]))
    with pytest.raises(ValueError, match=r'"SequenceInput.scored": expected 0 for the first token'):
        SequenceInput(kind([1, 2]), torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r'"SequenceInput.tokens": expected an array \[n\]|a list of integers'):
        SequenceInput(kind([[1, 2]]))


def test_stages_put_together_what_they_know() -> None:
    first, last = Part(tokens=TOKENS.numpy()), Part(labels=LABELS.numpy(), loss_mask=MASK.numpy().astype(bool))
    both = read(merged([first, Part(), last]), "", training=True)
    assert sequences(both) == sequences(reading())


def step(change: Callable[[Any], Any], data: Any, model: Any) -> tuple[Any, Any]:
    return change(model(next(data), None, attention_mask=None)), print


def test_a_recording_answers_like_the_model_and_runs_it_later() -> None:
    def unwrapping(data: Any, model: Any) -> tuple[Any, Any]:
        while isinstance(model, Wrapper):
            model = model.module
        assert model.tag == "inner"
        assert isinstance(model, Inner)
        output = model(next(data), None, labels=LABELS)
        assert output.shape == TOKENS.shape
        return output, print

    (recording,) = record(unwrapping, iter([TOKENS]), Wrapper(), 1)
    output, loss = replay(iter([recording]), Inner())
    assert loss is print
    assert output == ((TOKENS, None), {"labels": LABELS})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda output: output * 2, r"uses the model's output before it returns it \(mul\)"),
        (lambda output: output.float().mean(), r"\(float\)"),
        (lambda output: (output, None), "Microbatch 0: the forward step returns a tuple"),
    ],
)
def test_an_output_that_is_used_too_early(change: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        record(partial(step, change), iter([TOKENS]), Inner(), 1)


def test_a_forward_step_that_calls_no_model() -> None:
    with pytest.raises(ValueError, match="called the model 0 times, expected once"):
        record(lambda data, model: (next(data), None), iter([TOKENS]), Inner(), 1)


def refilling(holder: str) -> Callable[[Any, Any], Any]:
    """A forward step that copies each microbatch into one buffer, which the model or the loss function is given."""
    static = torch.zeros_like(TOKENS)

    def forward_step(data: Any, model: Any) -> Any:
        tokens = next(data)
        static.copy_(tokens)
        output = model(static if holder == "the model" else tokens, None, None, labels=LABELS)
        return output, {
            "the model": None,
            "the loss function": partial(torch.add, static),
            "a closure": lambda losses: losses + static,
        }[holder]

    return forward_step


@pytest.mark.parametrize("holder", ["the model", "the loss function", "a closure"])
def test_tensors_that_a_later_forward_step_writes_to_are_refused(holder: str) -> None:
    named = "the loss function" if holder == "a closure" else holder
    with pytest.raises(
        ValueError, match=f"Microbatch 0: a tensor that the forward step gave to {named} was written to"
    ):
        record(refilling(holder), iter([TOKENS, TOKENS]), Inner(), 2)
    assert len(record(refilling(holder), iter([TOKENS]), Inner(), 1)) == 1


def test_items_are_copied_as_they_are_read() -> None:
    buffer: dict[str, Any] = {"tokens": torch.zeros(2), "more": [np.zeros(1), (torch.zeros(1), "name")]}

    def refill() -> Any:
        for value in (1.0, 2.0):
            buffer["tokens"].fill_(value)
            buffer["more"][0].fill(value)
            buffer["more"][1][0].fill_(value)
            yield buffer

    first, second = own_items(refill())
    for item, value in ((first, 1.0), (second, 2.0)):
        assert item["tokens"].tolist() == [value, value]
        assert item["more"][0].tolist() == [value]
        assert (item["more"][1][0].item(), item["more"][1][1]) == (value, "name")
    listed = [TOKENS]
    assert next(own_items(iter(listed))) is TOKENS

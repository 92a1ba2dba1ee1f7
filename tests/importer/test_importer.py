"""`prefixflow import`: both source forms, both modes, three tokenizers, and the recorded traces."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from itertools import groupby, pairwise

import numpy as np
import pytest

from prefixflow.importer import (
    Advantage,
    ImportOptions,
    Mode,
    add_import_arguments,
    import_trajectories,
    run_import,
)
from prefixflow.importer.encoders import ByteEncoder, load_encoder
from prefixflow.trajectories import Trajectory, TrajectoryError, read_trajectories

BYTES = ByteEncoder()
CALL = {"id": "call_9", "type": "function", "function": {"name": "look", "arguments": '{"at": 7}'}}
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Où?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "look", "tool_call_id": "call_9", "content": "here"},
    {"role": "assistant", "content": "Here."},
    {"role": "user", "content": "Bye"},
]
CALL_TEXT = '<tool_call>\n{"name": "look", "arguments": {"at": 7}}\n</tool_call>'


def prompt_line(group="g", prompt="2+2=", response="4", reward=1.0, **extra) -> dict:
    return {"group": group, "prompt": prompt, "response": response, "reward": reward, **extra}


def message_line(group="g", messages=None, reward=1.0, **extra) -> dict:
    return {"group": group, "messages": messages or CONVERSATION, "reward": reward, **extra}


@pytest.fixture
def write(tmp_path):
    def write_lines(*records: dict | str):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
        return path

    return write_lines


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    add_import_arguments(parser)
    return run_import(parser.parse_args([str(arg) for arg in argv]))


def trained_tokens(item: Trajectory) -> list[int]:
    return item.tokens[item.loss_mask].tolist()


def test_prompt_form_trains_the_response_and_its_end(write):
    item = import_trajectories(write(prompt_line()), BYTES).trajectories[0]
    assert item.tokens.tolist() == [256, *b"2+2=", *b"4", 257]
    assert item.loss_mask.tolist() == [False] * 5 + [True] * 2
    assert (item.id, item.group, item.reward) == ("1", "g", 1.0)
    assert item.advantages.tolist() == [1.0] * 7


def test_an_empty_prompt_or_response_still_has_something_to_predict_from(write):
    items = import_trajectories(
        write(prompt_line(prompt="", response="x"), prompt_line(response="")), BYTES
    ).trajectories
    assert items[0].tokens.tolist() == [256, *b"x", 257]
    assert trained_tokens(items[1]) == [257]


def test_message_form_trains_the_assistants_turns_alone(write):
    item = import_trajectories(write(message_line()), BYTES).trajectories[0]
    turns = [
        [256, 259, *b"Be kind.", 258],
        [260, *"Où?".encode(), 258],
        [261, *CALL_TEXT.encode(), 258],
        [262, *b"here", 258],
        [261, *b"Here.", 258],
        [260, *b"Bye", 258],
    ]
    assert item.tokens.tolist() == [token for turn in turns for token in turn]
    assert trained_tokens(item) == turns[2][1:] + turns[4][1:]
    assert max(item.tokens) < 512
    assert not item.loss_mask[0]


def test_steps_are_prefixes_of_which_the_newest_turn_is_trained(write):
    path = write("", message_line())
    whole = import_trajectories(path, BYTES).trajectories[0]
    steps = import_trajectories(path, BYTES, ImportOptions(mode=Mode.STEPS)).trajectories
    assert whole.id == "2"
    assert [item.id for item in steps] == ["2/1", "2/2"]
    for item in steps:
        np.testing.assert_array_equal(item.tokens, whole.tokens[: len(item)])
        assert item.loss_mask[-1]
        assert item.tokens[-1] == ByteEncoder.END_OF_TURN
    assert trained_tokens(steps[0]) == [*CALL_TEXT.encode(), 258]
    assert trained_tokens(steps[1]) == [*b"Here.", 258]
    assert not steps[1].loss_mask[: len(steps[0])].any()
    assert sum(item.num_trained for item in steps) == whole.num_trained


def test_a_prompt_line_is_one_step(write):
    options = ImportOptions(mode=Mode.STEPS)
    items = import_trajectories(write(prompt_line()), BYTES, options).trajectories
    assert [item.id for item in items] == ["1/1"]


@pytest.mark.parametrize("mode", Mode)
def test_conversations_without_a_trained_turn_are_refused(write, mode):
    path = write(message_line(), message_line(messages=[{"role": "user", "content": "hm"}]))
    with pytest.raises(TrajectoryError, match=r'line 2, field "messages": .*only messages of user'):
        import_trajectories(path, BYTES, ImportOptions(mode=mode))


def test_content_variants(write):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [CALL, {"name": "f", "arguments": "x"}],
        },
        {"role": "assistant", "content": None},
    ]
    item = import_trajectories(write(message_line(messages=messages)), BYTES).trajectories[0]
    other = '<tool_call>\n{"name": "f", "arguments": "x"}\n</tool_call>'
    assert item.tokens.tolist() == [
        *(256, 259, *b"ab", 258),
        *(261, *f"so\n{CALL_TEXT}\n{other}".encode(), 258),
        *(261, 258),
    ]


def test_half_a_surrogate_pair_becomes_bytes(write):
    item = import_trajectories(write(prompt_line(response="\ud83d!")), BYTES).trajectories[0]
    assert trained_tokens(item) == [0xED, 0xA0, 0xBD, *b"!", 257]


def test_call_ids_do_not_reach_the_tokens(write):
    renamed = json.loads(json.dumps(CONVERSATION).replace("call_9", "call_other"))
    first, second = import_trajectories(write(message_line(), message_line(messages=renamed)), BYTES).trajectories
    np.testing.assert_array_equal(first.tokens, second.tokens)


def test_groups_stand_together_in_order_of_first_appearance(write):
    path = write(*(prompt_line(group=group) for group in ("b", "a", "b", "c", "a")))
    items = import_trajectories(path, BYTES).trajectories
    assert [(item.group, item.id) for item in items] == [
        ("b", "1"),
        ("b", "3"),
        ("a", "2"),
        ("a", "5"),
        ("c", "4"),
    ]
    items = import_trajectories(path, BYTES, ImportOptions(max_groups=2)).trajectories
    assert [item.id for item in items] == ["1", "3", "2", "5"]


def test_group_key(write):
    path = write(prompt_line(task=7), prompt_line(task=8), prompt_line(task=7))
    items = import_trajectories(path, BYTES, ImportOptions(group_key="task")).trajectories
    assert [item.group for item in items] == ["7", "7", "8"]


def test_grpo_advantages_are_over_source_lines(write):
    long = CONVERSATION * 3
    path = write(
        message_line(reward=1.0),
        message_line(reward=100.0, messages=long),
        message_line(reward=10.0),
        message_line(group="lone", reward=5.0),
        message_line(group="same", reward=0.1),
        message_line(group="same", reward=0.1),
        message_line(group="same", reward=0.1),
    )
    options = ImportOptions(mode=Mode.STEPS, advantage=Advantage.GRPO)
    items = import_trajectories(path, BYTES, options).trajectories
    # Mean 37, unbiased variance (36^2 + 63^2 + 27^2) / 2 = 2997.
    std = 2997.0**0.5 + 1e-6
    expected = {"1": -36.0 / std, "2": 63.0 / std, "3": -27.0 / std, "4": 0, "5": 0, "6": 0, "7": 0}
    assert len(items) == 2 + 6 + 2 + 2 + 3 * 2
    for item in items:
        wanted = expected[item.id.split("/")[0]]
        np.testing.assert_allclose(item.advantages, wanted, rtol=1e-15, atol=0)
        assert item.reward in (1.0, 100.0, 10.0, 5.0, 0.1)


def test_max_length_drops_and_never_cuts(write):
    path = write(prompt_line(response="4"), prompt_line(response="44", reward=50.0))
    options = ImportOptions(max_length_tokens=7, advantage=Advantage.GRPO)
    result = import_trajectories(path, BYTES, options)
    assert [item.id for item in result.trajectories] == ["1"]
    assert result.num_dropped == 1
    assert result.trajectories[0].advantages[0] == pytest.approx(-(0.5**0.5))
    with pytest.raises(ValueError, match="2 trajectories are longer"):
        import_trajectories(path, BYTES, ImportOptions(max_length_tokens=3))


MALFORMED = [
    ("{", "", "no JSON"),
    (["x"], "", "a list of 1"),
    ({"prompt": "a", "response": "b", "reward": 1}, "group", "--group-key"),
    (prompt_line(group=None), "group", "null"),
    (prompt_line(group=1.5), "group", "1.5"),
    ({"group": "g", "prompt": "a", "response": "b"}, "reward", "no such field"),
    (prompt_line(reward=None), "reward", "null"),
    (prompt_line(reward=float("nan")), "reward", "nan"),
    (prompt_line(prompt=3), "prompt", "got 3"),
    ({"group": "g", "prompt": "a", "reward": 1}, "response", "null"),
    ({"group": "g", "reward": 1}, "messages", "neither"),
    (prompt_line(messages=CONVERSATION), "messages", "both"),
    (message_line(messages="hi"), "messages", "'hi'"),
    ({"group": "g", "messages": [], "reward": 1}, "messages", "a list of 0"),
    (message_line(messages=["hi"]), "messages[0]", "'hi'"),
    (message_line(messages=[{"content": "x"}]), "messages[0]", "null"),
    (message_line(messages=[{"role": "judge", "content": "x"}]), "messages", "'judge'"),
    (
        message_line(messages=[*CONVERSATION, {"role": "user", "content": 3}]),
        "messages[6]",
        "got 3",
    ),
    (
        message_line(messages=[{"role": "user", "content": [{"type": "image"}]}]),
        "messages[0]",
        "Im",
    ),
    (message_line(messages=[{"role": "assistant", "tool_calls": 3}]), "messages[0]", "got 3"),
    (message_line(messages=[{"role": "assistant", "tool_calls": [{}]}]), "messages[0]", '"name"'),
]


@pytest.mark.parametrize(("bad", "field", "got"), MALFORMED)
def test_malformed_lines_name_file_line_and_field(write, bad, field, got):
    path = write(prompt_line(), json.dumps(bad) if not isinstance(bad, str) else bad)
    with pytest.raises(TrajectoryError) as caught:
        import_trajectories(path, BYTES)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 2")
    assert (f'field "{field}"' in message) == bool(field)
    assert got in message


def test_command_line(write, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    path = write(message_line(), message_line(group="h", reward=-2.0), prompt_line(group="i"))
    argv = (path, out, "--tokenizer", "bytes", "--mode", "steps", "--limit", 2, "--max-length", 96)
    assert run(*argv) == 0
    output = capsys.readouterr()
    assert "2 trajectories in 2 groups from 2 lines" in output.out
    assert "dropped 2 longer than 96 tokens" in output.out
    assert output.err == ""
    items = read_trajectories(out, vocab_size=512)
    assert [(item.id, item.group, item.reward) for item in items] == [
        ("1/1", "g", 1.0),
        ("2/1", "h", -2.0),
    ]


def test_command_line_failures_are_sentences_and_write_nothing(write, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    path = write(prompt_line(), "{")
    for argv, sentence in [
        ((path, out, "--tokenizer", "bytes"), f"{path}, line 2"),
        ((path, path, "--tokenizer", "bytes"), "is the source as well"),
        ((tmp_path / "absent", out, "--tokenizer", "bytes"), "no such file"),
        ((path, out, "--tokenizer", tmp_path / "absent"), "no such folder"),
        ((path, out, "--tokenizer", tmp_path), "no tokenizer could be loaded"),
    ]:
        assert run(*argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("prefixflow import: ")
        assert sentence in error
        assert not out.exists()
    for flag in ("--limit", "--max-length"):
        with pytest.raises(SystemExit):
            run(path, out, "--tokenizer", "bytes", flag, "0")
        assert "1 or more" in capsys.readouterr().err


def save_tokenizer(folder, special: list[str], chat_template: str | None = None, **tokens):
    """A byte-level Hugging Face tokenizer without merges, so that ids are easy to tell apart."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, [])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast


def test_chatml_tokenizer(write, tmp_path):
    folder = tmp_path / "chatml"
    fast = save_tokenizer(folder, ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    encoder = load_encoder(str(folder))
    path = write(message_line(), prompt_line())
    item, plain = import_trajectories(path, encoder).trajectories
    assert fast.decode(item.tokens) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nOù?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL_TEXT}<|im_end|>\n<|im_start|>tool\nhere<|im_end|>\n"
        "<|im_start|>assistant\nHere.<|im_end|>\n<|im_start|>user\nBye<|im_end|>"
    )
    assert fast.decode(trained_tokens(item)) == f"{CALL_TEXT}<|im_end|>Here.<|im_end|>"
    assert fast.decode(plain.tokens) == "2+2=4<|im_end|>"
    assert fast.decode(trained_tokens(plain)) == "4<|im_end|>"
    steps = import_trajectories(path, encoder, ImportOptions(mode=Mode.STEPS)).trajectories
    for step in steps[:2]:
        np.testing.assert_array_equal(step.tokens, item.tokens[: len(step)])
    assert fast.decode(trained_tokens(steps[1])) == "Here.<|im_end|>"


def test_special_tokens_typed_by_a_user_are_text(write, tmp_path):
    fast = save_tokenizer(tmp_path / "t", ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    sly = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "no"}]
    encoder = load_encoder(str(tmp_path / "t"))
    item = import_trajectories(write(message_line(messages=sly)), encoder).trajectories[0]
    end = fast.convert_tokens_to_ids("<|im_end|>")
    assert item.tokens.tolist().count(end) == 2


def test_half_a_surrogate_pair_becomes_a_replacement_character(write, tmp_path):
    fast = save_tokenizer(tmp_path / "t", ["<|im_start|>", "<|im_end|>"])
    encoder = load_encoder(str(tmp_path / "t"))
    item = import_trajectories(write(prompt_line(response="\ud83d!")), encoder).trajectories[0]
    assert fast.decode(trained_tokens(item)) == "\ufffd!"


def test_a_prompt_without_any_token_before_it_is_refused(write, tmp_path):
    save_tokenizer(tmp_path / "t", ["<|im_start|>", "<|im_end|>"])
    with pytest.raises(TrajectoryError, match='line 1, field "prompt"'):
        import_trajectories(write(prompt_line(prompt="")), load_encoder(str(tmp_path / "t")))


TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
REWRITING = TEMPLATE.replace("{% for", "{{ messages | length }}{% for")
REFUSING = "{{ raise_exception('roles must alternate') }}"


def test_other_tokenizers_use_their_template(write, tmp_path):
    fast = save_tokenizer(tmp_path / "t", ["<s>", "</s>"], TEMPLATE, bos_token="<s>", eos_token="</s>")
    encoder = load_encoder(str(tmp_path / "t"))
    path = write(message_line())
    item = import_trajectories(path, encoder).trajectories[0]
    assert fast.decode(item.tokens) == (
        f"<s>[system]Be kind.</s>[user]Où?</s>[assistant]{CALL_TEXT}</s>[tool]here</s>[assistant]Here.</s>[user]Bye</s>"
    )
    assert fast.decode(trained_tokens(item)) == f"{CALL_TEXT}</s>Here.</s>"
    steps = import_trajectories(path, encoder, ImportOptions(mode=Mode.STEPS)).trajectories
    for step in steps:
        np.testing.assert_array_equal(step.tokens, item.tokens[: len(step)])


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "a tokenizer with ChatML tokens or a chat template"),
        (REWRITING, "another beginning once message 2 is there"),
        (REFUSING, "roles must alternate"),
    ],
)
def test_templates_that_cannot_be_used(write, tmp_path, template, sentence):
    save_tokenizer(tmp_path / "t", ["<s>", "</s>"], template, bos_token="<s>", eos_token="</s>")
    with pytest.raises(TrajectoryError) as caught:
        import_trajectories(write(message_line()), load_encoder(str(tmp_path / "t")))
    assert 'line 1, field "messages"' in str(caught.value)
    assert sentence in str(caught.value)


def computed_positions(items: list[Trajectory]) -> int:
    """Distinct (tokens through t, token t+1) pairs, by comparing neighbours in sorted order."""
    total, previous = 0, np.array([], np.int64)
    for tokens in sorted((item.tokens for item in items), key=lambda tokens: tokens.tolist()):
        shared = min(len(tokens), len(previous))
        differing = np.flatnonzero(tokens[:shared] != previous[:shared])
        common = int(differing[0]) if differing.size else shared
        total += len(tokens) - 1 - max(0, common - 1)
        previous = tokens
    return total


def reuse_ratio(items: tuple[Trajectory, ...]) -> float:
    groups = defaultdict(list)
    for item in items:
        groups[item.group].append(item)
    logical = sum(item.num_positions for item in items)
    return logical / sum(map(computed_positions, groups.values()))


@pytest.mark.parametrize(
    ("name", "mode", "num_trajectories", "num_groups", "low", "high"),
    [
        ("tau_bench_airline", "whole", 200, 50, 1.4, 1.6),
        ("game24_samples_g16", "whole", 352, 22, 4.2, 4.5),
        ("crosswords_tree_search", "whole", 800, 8, 13.0, 14.0),
        ("crosswords_tree_search", "steps", 4357, 8, 60.0, 61.0),
        ("xquad_articles", "whole", 322, 12, 16.0, 17.0),
    ],
)
def test_recorded_traces(traces, tmp_path, name, mode, num_trajectories, num_groups, low, high):
    out = tmp_path / "out.jsonl"
    source = traces / f"{name}.jsonl"
    assert run(source, out, "--tokenizer", "bytes", "--mode", mode, "--advantage", "grpo") == 0
    items = read_trajectories(out, vocab_size=512, max_positions=65_536)
    assert len(items) == num_trajectories
    assert len([group for group, _ in groupby(item.group for item in items)]) == num_groups
    assert all(item.num_trained for item in items)
    assert any(item.advantages[0] > 0 for item in items) == (name != "xquad_articles")
    assert low < reuse_ratio(items) < high


def test_recorded_agent_steps(traces, tmp_path):
    source = traces / "tau_bench_airline.jsonl"
    options = ImportOptions(mode=Mode.STEPS, max_groups=3)
    items = import_trajectories(source, BYTES, options).trajectories
    for left, right in pairwise(items):
        if left.id.split("/")[0] == right.id.split("/")[0]:
            np.testing.assert_array_equal(left.tokens, right.tokens[: len(left)])
    assert reuse_ratio(items) > 9


@pytest.mark.slow
def test_recorded_traces_with_a_real_tokenizer(traces, smollm2_dir):
    encoder = load_encoder(str(smollm2_dir))
    source = traces / "tau_bench_airline.jsonl"
    whole = import_trajectories(source, encoder).trajectories
    steps = import_trajectories(source, encoder, ImportOptions(mode=Mode.STEPS)).trajectories
    assert reuse_ratio(whole) == pytest.approx(1.30, abs=0.005)
    assert reuse_ratio(steps) == pytest.approx(12.4, abs=0.05)

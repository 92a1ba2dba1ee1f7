"""From text to tokens for `prefixflow import`: a conversation becomes turns, each with its
untrained and trained part.

Invariants:

1. The tokens of a conversation's first k messages are a prefix of the tokens of the whole
   conversation: every message is encoded on its own and the parts are joined, so step-wise samples
   share exactly.
2. The trained part of an assistant turn is what a policy would have sampled: its content and its
   end-of-turn token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from prefixflow.trajectories.types import TrajectoryError, describe

ROLE_ALIASES = {"developer": "system", "function": "tool"}
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One message, its content and tool calls already rendered to text."""

    role: str
    content: str

    @property
    def is_trained(self) -> bool:
        return self.role == "assistant"


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens of one message: `context` is not trained; `trained` is the assistant's alone."""

    context: tuple[int, ...]
    trained: tuple[int, ...]


class Encoder(Protocol):
    """What the importer asks of a tokenizer."""

    def encode_prompt(self, prompt: str, response: str) -> Turn:
        """Plain text and its continuation, trained, with the end-of-text token if there is one."""
        ...

    def encode_messages(self, messages: Sequence[Message]) -> list[Turn]:
        """One turn for each message, in order."""
        ...


def load_encoder(name: str) -> Encoder:
    """The built-in tokenizer for `bytes`, else the Hugging Face one in a folder, or ValueError."""
    if name == "bytes":
        return ByteEncoder()
    return load_hf_encoder(Path(name))


class ByteEncoder:
    """UTF-8 bytes as ids 0 to 255, and a few special ids above them, all below 512.

    A conversation is BOS, then for each message its role marker, the bytes of its content and
    END_OF_TURN. A prompt is BOS and bytes; its response is bytes and END_OF_TEXT.
    """

    BOS = 256
    END_OF_TEXT = 257
    END_OF_TURN = 258
    ROLE_IDS: ClassVar[dict[str, int]] = {"system": 259, "user": 260, "assistant": 261, "tool": 262}
    VOCAB_SIZE = 263

    def encode_prompt(self, prompt: str, response: str) -> Turn:
        return Turn((self.BOS, *_utf8(prompt)), (*_utf8(response), self.END_OF_TEXT))

    def encode_messages(self, messages: Sequence[Message]) -> list[Turn]:
        return [self._encode(message, is_first=i == 0) for i, message in enumerate(messages)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes among `tokens`; special ids are left out."""
        return bytes(token for token in tokens if token < self.BOS).decode("utf-8", "replace")

    def _encode(self, message: Message, *, is_first: bool) -> Turn:
        if message.role not in self.ROLE_IDS:
            raise TrajectoryError("messages", f"a role among {', '.join(ROLES)}", describe(message.role))
        header = (*((self.BOS,) if is_first else ()), self.ROLE_IDS[message.role])
        body = (*_utf8(message.content), self.END_OF_TURN)
        return Turn(header, body) if message.is_trained else Turn(header + body, ())


def _utf8(text: str) -> bytes:
    # JSON can escape half of a surrogate pair; it still has to become some bytes.
    return text.encode("utf-8", "surrogatepass")


def load_hf_encoder(folder: Path) -> Encoder:
    """The tokenizer saved in `folder`: as ChatML where it knows ChatML's tokens, else by template.

    Raises ValueError where the folder or the package `transformers` is missing or the tokenizer
    does not load.
    """
    if not folder.is_dir():
        raise ValueError(f'--tokenizer {folder}: expected "bytes" or a folder with a tokenizer, got no such folder.')
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"--tokenizer {folder}: Hugging Face tokenizers need the package transformers,"
            f' which cannot be imported ({error}). Install the extra "hf", or use bytes.'
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ValueError(f"--tokenizer {folder}: no tokenizer could be loaded ({error}).") from None
    vocabulary = tokenizer.get_vocab()
    if ChatMLEncoder.START in vocabulary and ChatMLEncoder.END in vocabulary:
        return ChatMLEncoder(tokenizer)
    return TemplateEncoder(tokenizer)


class _HFEncoder:
    """Plain text by a Hugging Face tokenizer, as the base of the two chat layouts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[tuple[str, bool], tuple[int, ...]] = {}
        lead = tokenizer("")["input_ids"][:1]
        self._lead = tuple(lead) if lead == [tokenizer.bos_token_id] else ()
        end = tokenizer.eos_token_id
        self._end = () if end is None else (end,)

    def encode_prompt(self, prompt: str, response: str) -> Turn:
        return Turn(self._lead + self._encode(prompt), self._encode(response) + self._end)

    def _encode(self, text: str, *, markup: bool = False) -> tuple[int, ...]:
        """The ids of `text`; special tokens spelt out in it count as such only with `markup`.

        What a user typed is text. System prompts and the like recur in every line, so results are
        kept.
        """
        key = (text, markup)
        if key not in self._cache:
            # JSON can escape half of a surrogate pair, which these tokenizers refuse.
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self._tokenizer(whole, add_special_tokens=False, split_special_tokens=not markup)
            self._cache[key] = tuple(ids["input_ids"])
        return self._cache[key]


class ChatMLEncoder(_HFEncoder):
    """ChatML: `<|im_start|>role\\ncontent<|im_end|>\\n`.

    The system prompt that some templates add unasked is not added. The assistant's header is
    encoded apart from its content, as in sampling. The line feed after a message opens the next
    one, so that a sample ends with its end-of-turn token.
    """

    START = "<|im_start|>"
    END = "<|im_end|>"

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._start = tokenizer.convert_tokens_to_ids(self.START)
        self._stop = tokenizer.convert_tokens_to_ids(self.END)

    def encode_messages(self, messages: Sequence[Message]) -> list[Turn]:
        return [self._turn(message, is_first=i == 0) for i, message in enumerate(messages)]

    def _turn(self, message: Message, *, is_first: bool) -> Turn:
        opening = (*(() if is_first else self._encode("\n")), self._start)
        header = f"{message.role}\n"
        if message.is_trained:
            return Turn(opening + self._encode(header), (*self._encode(message.content), self._stop))
        return Turn((*opening, *self._encode(header + message.content), self._stop), ())


class TemplateEncoder(_HFEncoder):
    """The tokenizer's own chat template, rendered message by message.

    Each rendering must begin with the one before it, or step-wise samples would not be prefixes of
    each other; a template that rewrites history (drops earlier reasoning, say) is an error.
    """

    def encode_messages(self, messages: Sequence[Message]) -> list[Turn]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise TrajectoryError(
                "messages",
                "a tokenizer with ChatML tokens or a chat template",
                "one with neither",
                "Give the prompt form, or another --tokenizer.",
            )
        turns, text = [], ""
        for count, message in enumerate(messages, start=1):
            context = ""
            if message.is_trained:
                header = self._render(messages[: count - 1], True)
                context, text = self._after(text, header, count), header
            rendered = self._render(messages[:count], False)
            body, text = self._after(text, rendered, count), rendered
            turns.append(self._turn(context, body, message.is_trained))
        return turns

    def _turn(self, context: str, body: str, is_trained: bool) -> Turn:
        tokens = self._encode(body, markup=True)
        if is_trained:
            return Turn(self._encode(context, markup=True), tokens)
        return Turn(tokens, ())

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            raise TrajectoryError(
                "messages",
                "a conversation that the tokenizer's chat template accepts",
                f"its refusal of the first {len(plain)} messages ({error})",
            ) from None

    def _after(self, before: str, rendered: str, count: int) -> str:
        if not rendered.startswith(before):
            raise TrajectoryError(
                "messages",
                "a chat template under which the beginning of a conversation is a prefix of it",
                f"another beginning once message {count} is there",
                "Use a tokenizer with ChatML tokens, or --tokenizer bytes.",
            )
        return rendered[len(before) :]


def parse_messages(value: Any) -> list[Message]:
    """The `messages` field of a line; TrajectoryError where it is no list of text messages."""
    if not isinstance(value, list) or not value:
        raise TrajectoryError("messages", "a list of messages that is not empty", describe(value))
    return [_in_message(number, _parse_message, item) for number, item in enumerate(value, start=1)]


def _in_message(number: int, parse: Callable[[Any], Message], item: Any) -> Message:
    try:
        return parse(item)
    except TrajectoryError as error:
        raise TrajectoryError(f"messages[{number - 1}]", error.expected, error.got, error.way_out) from None


def _parse_message(item: Any) -> Message:
    if not isinstance(item, dict):
        raise TrajectoryError("", 'an object with "role" and "content"', describe(item))
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise TrajectoryError("", 'a "role" that is a string', describe(role))
    parts = [_content_text(item.get("content")), *_tool_call_texts(item.get("tool_calls"))]
    return Message(ROLE_ALIASES.get(role, role), "\n".join(part for part in parts if part))


def _content_text(content: Any) -> str:
    """Text as it stands, null as nothing, and a list of text parts joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    raise TrajectoryError(
        "",
        'a "content" that is text, null or a list of text parts',
        describe(content),
        "Images are not supported.",
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _tool_call_texts(calls: Any) -> list[str]:
    """Each call as `<tool_call>` around its name and arguments.

    Call ids are drawn by the serving engine, not by the policy, and are left out.
    """
    if calls is None:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise TrajectoryError("", '"tool_calls" that are a list of objects', describe(calls))
    return [f"<tool_call>\n{_call_json(call)}\n</tool_call>" for call in calls]


def _call_json(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TrajectoryError("", 'a tool call with a "name"', json.dumps(call)[:80])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json_or_text(arguments)
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def _json_or_text(text: str) -> Any:
    """Arguments come as JSON in a string; a policy may also have written what is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text

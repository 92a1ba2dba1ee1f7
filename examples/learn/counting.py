"""A task with a verifiable reward that a small model learns from nothing in minutes: count up to nine, then stop.

    python examples/learn/counting.py prompts.jsonl        # write the prompts

A prompt is a text that is the same for all digits but for its greeting, and a digit; the answer is the digits after it up to 9,
and a full stop. The reward is the share of tokens that rightly follow the one before them. Tokens are letters of an alphabet of its
own (`ALPHABET`), so no tokenizer is needed.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ALPHABET = "0123456789.abcdefghijklmnopqrstuvwxyz ,:"
STOP = ALPHABET.index(".")
TEXT = (
    "{greeting}, you are asked to count up to nine, one digit after the other, and to end with a stop, "
    "say nothing else, count on from: {digit}"
)
GREETINGS = ("hello", "good day", "dear reader", "my friend")


def encode(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text]


def reward(sample: Any) -> float:
    """From 0 to 1, of a `prefixflow.trajectories.rewards.Sample`: what is missing and what is too much count as wrong."""
    digit = sample.fields["digit"]
    given = sample.response_tokens.tolist()
    num_right = sum(token <= STOP and token == before + 1 for before, token in pairwise([digit, *given]))
    return num_right / max(len(given), STOP - digit)


def prompts(seed: int = 0) -> list[dict[str, Any]]:
    """Lines of a prompt file: every greeting with every digit, shuffled."""
    lines: list[dict[str, Any]] = [
        {
            "id": f"{greeting}, {digit}",
            "tokens": encode(TEXT.format(greeting=greeting, digit=digit)),
            "digit": digit,
        }
        for greeting in GREETINGS
        for digit in range(10)
    ]
    random.Random(seed).shuffle(lines)
    return lines


def main(path: str) -> None:
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in prompts()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

"""A task with a verifiable reward that a small model learns from nothing in minutes: count on from the digit asked for.

    python examples/learn/counting.py prompts.jsonl        # write the prompts
    pretrain_rl.py --rollout sample --trajectories prompts.jsonl --reward-function examples/learn/counting.py:reward ...

A prompt is a text about counting, the same for all responses of a group, and a digit; the answer is the next LENGTH digits, 0
after 9, and then a full stop. The reward is the share of its tokens that are right, place by place. Tokens are letters of an
alphabet of its own (`ALPHABET`), so no tokenizer is needed.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

ALPHABET = "0123456789.:abcdefghijklmnopqrstuvwxyz ,?"
STOP = ALPHABET.index(".")
LENGTH = 4
TEXT = (
    "{greeting}, you are asked to count on, one digit after the other. after nine comes zero. say nothing else, "
    "and end with a full stop when four digits are said. count on from {digit}:"
)
GREETINGS = ("hello", "good day", "dear reader", "my friend")


def encode(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text]


def answer(digit: int) -> list[int]:
    """The tokens of the right answer."""
    return [(digit + place) % 10 for place in range(1, LENGTH + 1)] + [STOP]


def reward(sample: Any) -> float:
    """The share of places at which the response (a `prefixflow.trajectories.rewards.Sample`) is right, from 0 to 1."""
    right = answer(sample.fields["digit"])
    given = sample.response_tokens.tolist()
    num_right = sum(a == b for a, b in zip(given, right, strict=False))
    return num_right / max(len(given), len(right))


def prompts(seed: int = 0) -> list[dict[str, Any]]:
    """One line of a prompt file for each greeting and digit, shuffled."""
    lines = [
        {
            "id": f"{greeting}, {digit}",
            "tokens": encode(TEXT.format(greeting=greeting, digit=digit).replace("full stop", "stop")),
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

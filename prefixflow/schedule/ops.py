"""One operation of the schedule and its grammar.

    operation := STAGE KIND MICROBATCH        for example 0F3, 2B0
    KIND      := F (forward) | B (backward)

A stage is a global model chunk (virtual stage): with p pipeline ranks, rank r holds stages r, r + p, ... The same text
names the operation in tables, log lines, errors, profiler ranges and drawings.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Kind(enum.Enum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Op:
    """`kind` of `microbatch` on global model chunk `stage`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Inverse of `str`."""
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text.strip())
        if match is None:
            raise ValueError(f"Operation {text!r} is not STAGE KIND MICROBATCH, such as 0F3 or 2B0.")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


def forward(microbatch: int, stage: int = 0) -> Op:
    return Op(stage, Kind.FORWARD, microbatch)


def backward(microbatch: int, stage: int = 0) -> Op:
    return Op(stage, Kind.BACKWARD, microbatch)

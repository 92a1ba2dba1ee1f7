"""Where cached K/V, their gradients and dormant activations are between the operations of one rank's row (pure).

A *block* is one shared segment; on each stage its K/V and its gK/gV are two *entries*, with uses of their own:

    operation   K/V                                        gK/gV
    F(m)        reads those of m's path, writes m's own    -
    B(m)        reads those of m's path                    adds to those of m's path, takes m's own

K/V are freed after the B of their last reader, gK/gV when the B of their writer has taken them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class ActivationPolicy(enum.Enum):
    """What becomes of a microbatch's activations between its F and its B on one stage."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class Part(enum.Enum):
    """The two entries of a cached block."""

    KEYS_VALUES = "kv"
    GRADIENTS = "gkv"


class Move(enum.Enum):
    """EVICT, FETCH: a part of a block to the host, and back. DROP: K/V of a block are forgotten; RECOMPUTE: the forward of the
    microbatch that wrote them, on this stage, writes the dropped ones anew. FETCH_ACTIVATIONS: an offloaded microbatch's,
    before its B.
    """

    EVICT = "evict"
    FETCH = "fetch"
    DROP = "drop"
    RECOMPUTE = "recompute"
    FETCH_ACTIVATIONS = "fetch activations"


@dataclass(frozen=True, slots=True)
class MemoryAction:
    """`move` of `target` on a global stage: a block with `part` for EVICT and FETCH, a block for DROP, else a microbatch."""

    move: Move
    stage: int
    target: int
    part: Part | None = None

    def __str__(self) -> str:
        what = f" {self.part.value}" if self.part else ""
        return f"{self.move.value} {self.stage}:{self.target}{what}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one pipeline rank does for its memory during its row; an empty one does nothing.

    activations: by (stage, microbatch); KEEP where there is none. before, after: actions by an operation's index in the row,
    done in their order before it receives, and after it is done.
    """

    activations: Mapping[tuple[int, int], ActivationPolicy] = field(default_factory=dict)
    before: Mapping[int, tuple[MemoryAction, ...]] = field(default_factory=dict)
    after: Mapping[int, tuple[MemoryAction, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.activations or self.before or self.after)

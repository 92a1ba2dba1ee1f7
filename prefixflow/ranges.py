"""Half-open integer ranges: the one value type for token and row intervals, so that no index arithmetic leaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """The integers `start, start + 1, ..., stop - 1`; `0 <= start <= stop`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, f"not a half-open range: [{self.start}, {self.stop})"

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, item: int) -> bool:
        return self.start <= item < self.stop

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def shift(self, offset: int) -> Range:
        return Range(self.start + offset, self.stop + offset)

    def joins(self, other: Range) -> bool:
        """True when `other` begins where this range ends."""
        return self.stop == other.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

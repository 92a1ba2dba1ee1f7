"""Random microbatch graphs, and a simulation of a table on several ranks."""

from __future__ import annotations

from hypothesis import strategies as st

from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.table import OpTable

Reads = list[tuple[int, ...]]


@st.composite
def forests(draw: st.DrawFn, max_size: int = 24) -> Reads:
    """`reads` of a forest in depth-first pre-order; m reads its whole root path, or its parent and some of it."""
    reads: Reads = []
    open_path: list[int] = []
    for m in range(draw(st.integers(0, max_size))):
        open_path = open_path[: draw(st.integers(0, len(open_path)))]
        above = [a for a in open_path[:-1] if draw(st.booleans())]
        reads.append((*above, *open_path[-1:]))
        open_path.append(m)
    return reads


def depth(reads: Reads) -> int:
    depths: list[int] = []
    for read in reads:
        depths.append(1 + max((depths[m] for m in read), default=0))
    return max(depths, default=0)


def is_deadlock_free(table: OpTable) -> bool:
    """Run all ranks, each waiting for what the neighbour sends: F from the stage before, B from the one after."""
    done: set[Op] = set()
    place = [0] * len(table.rows)
    last = len(table.rows) - 1

    def ready(op: Op) -> bool:
        if op.kind is Kind.FORWARD:
            return op.stage == 0 or Op(op.stage - 1, op.kind, op.microbatch) in done
        return op.stage == last or Op(op.stage + 1, op.kind, op.microbatch) in done

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table.rows):
            while place[rank] < len(row) and ready(row[place[rank]]):
                done.add(row[place[rank]])
                place[rank] += 1
                moved = True
    return all(at == len(row) for at, row in zip(place, table.rows, strict=True))

"""Build the forest: sort each group's trajectories, and let adjacent longest common prefixes make the trie.

Steps: (1) trajectories of one group are sorted by their tokens; (2) the longest common prefix of neighbours, in
positions, is one less than in tokens, since a position is a (token, next token) pair: the last common token predicts
different successors and so falls into each branch; (3) one pass with a stack turns sorted neighbours into a
compressed trie; (4) children stand in order of first appearance. Linear in tokens but for the sort.

With routing replay a position's routes belong to its symbol: where trajectories that share it by tokens have several, each
distinct route gets a number, which joins the token as what is sorted and compared.

Only trajectories of the same group *and* with equal tokens share: the group id decides the tree, unless groups with a
long common start are merged (`merged_labels`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixflow.forest.forest import Forest, renumber
from prefixflow.ranges import Range
from prefixflow.trajectories.types import Trajectory


@dataclass(slots=True)
class _Node:
    """Trie node under construction: positions up to `stop`; its start is the parent's stop."""

    stop: int
    ends: list[int] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)
    members: tuple[int, ...] = ()


def build_forest(
    trajectories: Sequence[Trajectory],
    *,
    dense_trees: Collection[int] | None = (),
    omit: Collection[int] = (),
    labels: Sequence[str] | None = None,
    routes: Sequence[np.ndarray] | None = None,
) -> Forest:
    """The forest of `trajectories`; tree i is the i-th group in order of first appearance.

    `labels[i]` stands for the group of trajectory i where groups are merged (`merged_labels`). In `dense_trees` (None: in all) every trajectory has its own root: the dense problem, run by the same code.
    `omit` are indices of trajectories that are counted but not run. `routes[i]`, [positions, moe layers, top-k]: a position
    is shared only where they agree too, whatever the order of the top-k.
    """
    lengths = tuple(len(t.tokens) - 1 for t in trajectories)
    omitted = frozenset(omit) | {i for i, length in enumerate(lengths) if length < 1}
    groups: dict[str, list[int]] = {}
    for index, label in enumerate(labels or [t.group for t in trajectories]):
        groups.setdefault(label, []).append(index)
    rows: list[tuple[int | None, int, Range, tuple[int, ...]]] = []
    for tree, indices in enumerate(groups.values()):
        run = [i for i in indices if i not in omitted]
        if dense_trees is not None and tree not in dense_trees:
            symbols = {i: trajectories[i].tokens for i in run}
            nodes = _trie(symbols)
            if routes is not None and _distinguish(nodes, symbols, routes):
                nodes = _trie(symbols)
            _emit(nodes, tree, rows)
        else:
            rows.extend((None, tree, Range(0, lengths[i]), (i,)) for i in run)
    return Forest(renumber(rows), len(groups), lengths, omitted)


def merged_labels(
    trajectories: Sequence[Trajectory], min_tokens: int, *, omit: Collection[int] = ()
) -> tuple[str, ...] | None:
    """A common label for groups whose first trajectories agree on `min_tokens` tokens; None where no two groups do.

    Only a proposal of what may stand in one tree: the trie decides what is shared.
    """
    label_of: dict[str, str] = {}
    first_group: dict[bytes, str] = {}
    for index, trajectory in enumerate(trajectories):
        if index in omit or trajectory.group in label_of:
            continue
        label_of[trajectory.group] = trajectory.group
        if len(trajectory.tokens) > min_tokens:
            start = np.ascontiguousarray(trajectory.tokens[:min_tokens]).tobytes()
            label_of[trajectory.group] = first_group.setdefault(start, trajectory.group)
    if all(group == label for group, label in label_of.items()):
        return None
    return tuple(label_of.get(t.group, t.group) for t in trajectories)


def may_share(trajectories: Sequence[Trajectory], *, omit: Collection[int] = ()) -> bool:
    """Whether two trajectories of a group begin with the same pair of tokens; if not, nothing is shared."""
    seen: set[tuple[str, int, int]] = set()
    for index, trajectory in enumerate(trajectories):
        if len(trajectory.tokens) < 2 or index in omit:
            continue
        first = (trajectory.group, int(trajectory.tokens[0]), int(trajectory.tokens[1]))
        if first in seen:
            return True
        seen.add(first)
    return False


def common_positions(left: np.ndarray, right: np.ndarray) -> int:
    """Number of leading (token, next token) pairs on which two token arrays agree."""
    return max(0, common_tokens(left, right) - 1)


def common_tokens(left: np.ndarray, right: np.ndarray) -> int:
    """Number of leading tokens on which two arrays agree."""
    length = min(len(left), len(right))
    differing = left[:length] != right[:length]
    return int(differing.argmax()) if differing.any() else length


def _distinguish(nodes: Sequence[_Node], symbols: dict[int, np.ndarray], routes: Sequence[np.ndarray]) -> bool:
    """Number the distinct routes in the symbols of shared positions; whether any position has several."""
    vocabulary = 1 + max((int(tokens.max()) for tokens in symbols.values()), default=0)
    found = False
    stack = [(node, 0) for node in nodes]
    while stack:
        node, start = stack.pop()
        stack.extend((child, node.stop) for child in node.children)
        number = first_equal([routes[m][start : node.stop] for m in node.members])
        for member, numbers in zip(node.members, number, strict=True):
            if numbers.any():
                found = True
                symbols[member] = symbols[member].copy()
                # Position t is the pair of tokens t and t + 1, so its routes can stand in symbol t + 1.
                symbols[member][start + 1 : node.stop + 1] += vocabulary * numbers
    return found


def first_equal(rows: Sequence[np.ndarray]) -> np.ndarray:
    """For each of k arrays [T, layers, top-k] and each t the first array with the same experts there: int64 [k, T]."""
    num_positions = len(rows[0])
    first = np.full((len(rows), num_positions), -1)
    for j, own in enumerate(rows):
        places = np.flatnonzero(first[j] < 0)
        if not len(places):
            continue
        first[j, places] = j
        for i in range(j + 1, len(rows)):
            open_places = places[first[i, places] < 0]
            if len(open_places) == num_positions and np.array_equal(own, rows[i]):
                first[i] = j
            elif len(open_places):
                first[i, open_places[_agree(own[open_places], rows[i][open_places])]] = j
    return first


def _agree(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Positions with the same experts in every layer: bool [T]. Only rows that differ as they stand are sorted."""
    agree = (left == right).all(axis=(1, 2))
    differing = np.flatnonzero(~agree)
    agree[differing] = (np.sort(left[differing]) == np.sort(right[differing])).all(axis=(1, 2))
    return agree


def _trie(tokens: dict[int, np.ndarray]) -> list[_Node]:
    # Big-endian bytes compare like the integers they hold, so the sort runs in memcmp.
    keys = {i: array.astype(">u8").tobytes() for i, array in tokens.items()}
    order = sorted(tokens, key=lambda i: (keys[i], i))
    root = _Node(0)
    stack = [root]
    for previous, index in zip([None, *order], order, strict=False):
        shared = 0 if previous is None else common_positions(tokens[previous], tokens[index])
        _close(stack, shared)
        if len(tokens[index]) - 1 > stack[-1].stop:
            stack.append(_Node(len(tokens[index]) - 1))
        stack[-1].ends.append(index)
    _close(stack, 0)
    _set_members(root)
    return root.children


def _close(stack: list[_Node], depth: int) -> None:
    """Pop finished nodes until the top of the stack ends at `depth`, splitting a node that passes over it."""
    while stack[-1].stop > depth:
        finished = stack.pop()
        if stack[-1].stop < depth:
            stack.append(_Node(depth))
        stack[-1].children.append(finished)


def _set_members(root: _Node) -> None:
    """Fill members bottom-up and order children by first appearance (iteratively: chains can be deep)."""
    order = [root]
    for node in order:
        order.extend(node.children)
    for node in reversed(order):
        members = [*node.ends, *(m for child in node.children for m in child.members)]
        node.members = tuple(sorted(members))
        node.children.sort(key=lambda child: child.members[0])


def _emit(roots: list[_Node], tree: int, rows: list[tuple[int | None, int, Range, tuple[int, ...]]]) -> None:
    stack: list[tuple[_Node, int | None, int]] = [(node, None, 0) for node in reversed(roots)]
    while stack:
        node, parent, start = stack.pop()
        index = len(rows)
        rows.append((parent, tree, Range(start, node.stop), node.members))
        stack.extend((child, index, node.stop) for child in reversed(node.children))

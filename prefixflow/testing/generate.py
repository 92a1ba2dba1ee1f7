"""Seeded trajectories of every shape that reuse has to get right, so that tests need no files.

The shapes: groups that share a prompt, step-wise chains, trees of depth 3 and more, and the edge
cases (identical trajectories, strict prefixes, empty responses, lone members, one token, nothing
trained). Each function returns valid trajectories, those of a group side by side, and the same ones
for the same arguments. Advantages spread over five orders of magnitude with both signs: a lost or
doubled contribution then shows in any tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prefixflow.forest import build_forest
from prefixflow.trajectories import RouteShape, Trajectory

Length = int | tuple[int, int]
"""A number of tokens: fixed, or drawn from the closed interval (low, high)."""


@dataclass(frozen=True, slots=True)
class Style:
    """What all shapes have in common.

    vocab_size: token ids are below it.
    per_token_advantages: draw one advantage per token rather than one per trajectory.
    logprobs: also draw `old_logprobs`, `ref_logprobs` and `rollout_logprobs`.
    """

    vocab_size: int = 512
    per_token_advantages: bool = False
    logprobs: bool = False


def two_level_groups(
    num_groups: int = 3,
    group_size: int = 4,
    prefix_tokens: Length = (8, 16),
    suffix_tokens: Length = (3, 9),
    *,
    seed: int = 0,
    style: Style = Style(),
) -> tuple[Trajectory, ...]:
    """`num_groups` prompts with `group_size` responses each; the responses are trained."""
    rng = np.random.default_rng(seed)
    result = []
    for group in range(num_groups):
        prompt = _tokens(rng, prefix_tokens, style)
        for member in range(group_size):
            parts = (prompt, _tokens(rng, suffix_tokens, style))
            result.append(_trajectory(rng, style, f"g{group}-{member}", f"g{group}", parts, (1,)))
    return tuple(result)


def stepwise_chains(
    num_chains: int = 2,
    num_turns: int = 4,
    prompt_tokens: Length = (6, 12),
    turn_tokens: Length = (2, 6),
    *,
    seed: int = 0,
    style: Style = Style(),
) -> tuple[Trajectory, ...]:
    """Cumulative samples of agent conversations: sample k is all up to response k, which it trains.

    A response of one sample is context of the next, so shared positions own losses of one only.
    """
    rng = np.random.default_rng(seed)
    result = []
    for chain in range(num_chains):
        parts: list[np.ndarray] = []
        for turn in range(num_turns):
            length = turn_tokens if parts else prompt_tokens
            parts += [_tokens(rng, length, style), _tokens(rng, turn_tokens, style)]
            name = f"c{chain}/{turn + 1}"
            result.append(_trajectory(rng, style, name, f"c{chain}", parts, (len(parts) - 1,)))
    return tuple(result)


def trees(
    num_trees: int = 2,
    depth: int = 3,
    branching: int = 2,
    segment_tokens: Length = (2, 7),
    *,
    prompt_tokens: Length | None = None,
    seed: int = 0,
    style: Style = Style(),
) -> tuple[Trajectory, ...]:
    """Tree search: one trajectory per leaf, `depth` branchings below an untrained prompt.

    prompt_tokens: None draws the prompt's length like that of a branch. Inner segments own losses of several trajectories with different advantages.
    """
    rng = np.random.default_rng(seed)
    result = []
    for tree in range(num_trees):
        paths: list[tuple[np.ndarray, ...]] = [(_tokens(rng, prompt_tokens or segment_tokens, style),)]
        for _ in range(depth):
            paths = [(*path, _tokens(rng, segment_tokens, style)) for path in paths for _ in range(branching)]
        trained = tuple(range(1, depth + 1))
        for leaf, path in enumerate(paths):
            result.append(_trajectory(rng, style, f"t{tree}-{leaf}", f"t{tree}", path, trained))
    return tuple(result)


def edge_cases(*, seed: int = 0, style: Style = Style()) -> tuple[Trajectory, ...]:
    """One group for each case that broke somebody's trainer; ids and groups name the case."""
    rng = np.random.default_rng(seed)

    def tokens(length: Length) -> np.ndarray:
        return _tokens(rng, length, style)

    def make(name: str, parts: Sequence[np.ndarray], trained: Sequence[int] = (1,)) -> Trajectory:
        return _trajectory(rng, style, name, name.rsplit("-", 1)[0], parts, trained)

    prompt, response = tokens(7), tokens(5)
    identical = [make(f"identical-{member}", (prompt, response)) for member in range(3)]
    prompt, response = tokens(6), tokens(8)
    prefixes = [make(f"prefix-{size}", (prompt, response[:size])) for size in (8, 3, 5)]
    prompt = tokens(9)
    empty = [make("empty-0", (prompt, tokens(4))), make("empty-1", (prompt, tokens(0)))]
    one_token = tokens(1)
    single = [make("one-token-0", (one_token,)), make("one-token-1", (one_token, tokens(3)))]
    prompt = tokens(5)
    masked = [make("masked-0", (prompt, tokens(4)), ()), make("masked-1", (prompt, tokens(4)))]
    all_masked = [make(f"all-masked-{member}", (prompt, tokens(3)), ()) for member in range(2)]
    zero = [make(f"zero-advantage-{member}", (prompt, tokens(4))) for member in range(2)]
    zero = [replace(item, advantages=np.zeros(len(item))) for item in zero]
    # Nothing in common but the group; and only the first token in common, so no pair of tokens.
    apart = [make(f"apart-{member}", (tokens(4), tokens(3))) for member in range(2)]
    first = [make(f"first-only-{end}", (one_token, np.array([end, 1, 2]))) for end in (3, 4)]
    lone = [make("lone-0", (tokens(6), tokens(4)))]
    return tuple(identical + prefixes + empty + single + masked + all_masked + zero + apart + first + lone)


def mixed_workload(*, seed: int = 0, style: Style = Style()) -> tuple[Trajectory, ...]:
    """All shapes at once: groups, chains, trees and edge cases."""
    return (
        two_level_groups(seed=seed, style=style)
        + stepwise_chains(seed=seed + 1, style=style)
        + trees(seed=seed + 2, style=style)
        + edge_cases(seed=seed + 3, style=style)
    )


def with_routes(
    trajectories: Sequence[Trajectory],
    shape: RouteShape,
    *,
    seed: int = 0,
    missing: float = 0.0,
    conflicting: float = 0.0,
) -> tuple[Trajectory, ...]:
    """`trajectories` with random routes, unlike any router's; `write_trajectories` puts them beside the file.

    Trajectories have equal routes where they share a position, but for `conflicting` of the shared positions, where one of
    them has others in every layer. Of each trajectory's positions about `missing` are unknown.
    Raises ValueError where every expert is chosen always, so that routes cannot conflict.
    """
    if shape.topk >= shape.num_experts:
        raise ValueError(f"top-{shape.topk} of {shape.num_experts} experts leaves no choice; take more experts.")
    rng = np.random.default_rng(seed)
    routes = [np.zeros((len(t) - 1, shape.num_layers, shape.topk), np.int16) for t in trajectories]
    shared: list[tuple[int, tuple[int, ...]]] = []
    for segment in build_forest(trajectories).segments:
        drawn = rng.random((len(segment), shape.num_layers, shape.num_experts)).argsort()[..., : shape.topk]
        for member in segment.members:
            routes[member][segment.span.slice] = drawn
        if segment.is_shared:
            shared += [(position, segment.members) for position in range(segment.span.start, segment.span.stop)]
    for place in rng.choice(len(shared), round(conflicting * len(shared)), replace=False) if shared else ():
        position, members = shared[place]
        other = routes[rng.choice(members)]
        other[position] = (other[position] + 1) % shape.num_experts
    for array in routes:
        array[rng.random(len(array)) < missing] = -1
    return tuple(replace(t, routes=array) for t, array in zip(trajectories, routes, strict=True))


def _tokens(rng: np.random.Generator, length: Length, style: Style) -> np.ndarray:
    if isinstance(length, tuple):
        low, high = length
        length = int(rng.integers(low, high, endpoint=True))
    return rng.integers(style.vocab_size, size=length)


def _trajectory(
    rng: np.random.Generator,
    style: Style,
    name: str,
    group: str,
    parts: Sequence[np.ndarray],
    trained: Sequence[int],
) -> Trajectory:
    """Join `parts`; those with an index in `trained` own losses."""
    tokens = np.concatenate(parts)
    mask = np.repeat([part in trained for part in range(len(parts))], [len(p) for p in parts])
    advantages = _advantages(rng, tokens.size if style.per_token_advantages else 1)
    logprobs: dict[str, Any] = {}
    if style.logprobs:
        old = -rng.exponential(2.0, tokens.size)
        logprobs = {
            "old_logprobs": old,
            # Near the old policy, so that ratios fall on both sides of a clip range of 0.2.
            "ref_logprobs": np.minimum(old + rng.normal(0.0, 0.3, tokens.size), 0.0),
            "rollout_logprobs": np.minimum(old + rng.normal(0.0, 0.2, tokens.size), 0.0),
        }
    return Trajectory(
        id=name,
        group=group,
        tokens=tokens,
        loss_mask=mask,
        advantages=np.broadcast_to(advantages, tokens.shape),
        reward=float(advantages[0]),
        **logprobs,
    )


def _advantages(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], count) * 10.0 ** rng.uniform(-3.0, 2.0, count)

"""Where a step's trajectories come from.

* `FileBatches`: files that are all there, epoch after epoch (without `--rollout`).
* `FollowedBatches`: files that another process writes, each used once (`--rollout trace`).
* `SampledBatches`: responses of the policy that is being trained (`--rollout sample`).

Invariants:

1. `take` gives every rank the same trajectories; rank 0 reads files, data- and context-parallel ranks share the sampling.
2. A source that is restored from `state()` (JSON-able, the same on all ranks) goes on with what the other would have taken next.
3. A sampled batch depends on weights, seed and how many prompts were used before, not on the layout, as far as rounding allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megatron.prefixflow.arguments import Arguments
from megatron.prefixflow.data import load_trajectories, step_batches
from megatron.prefixflow.errors import TrainingError
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.sampler import Prompt, Response, Sampler, SamplingConfig
from prefixflow.runtime.failures import doing
from prefixflow.trajectories.advantages import with_advantages
from prefixflow.trajectories.filters import without_overlong, without_zero_variance
from prefixflow.trajectories.inbox import Inbox
from prefixflow.trajectories.prompts import PromptRecord
from prefixflow.trajectories.rewards import RewardFunction, Sample
from prefixflow.trajectories.types import Trajectory, TrajectoryError

# Ranks that wait for rank 0 do so in a collective, which has a time limit of its own.
_ROUND_S = 20.0
_POLL_S = 0.5
# DAPO samples until a batch is full of groups that teach something; a policy that has nothing to learn would never fill it.
_MAX_DRAWS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """Trajectories of a step, and sentences that the user should hear.

    reward_mean: of all responses that were sampled, also those that a filter left out; None where nothing was sampled.
    """

    trajectories: tuple[Trajectory, ...]
    warnings: tuple[str, ...] = ()
    reward_mean: float | None = None


class BatchSource(Protocol):
    """Gives batches in order; all methods are collective."""

    def take(self) -> Batch:
        """The next batch. Raises TrainingError, on every rank, where there is none."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able; what the batches so far have used."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


class FileBatches:
    """The same batches again in every epoch."""

    def __init__(self, batches: Sequence[tuple[Trajectory, ...]]) -> None:
        self.batches = tuple(batches)
        self._num_taken = 0

    def take(self) -> Batch:
        epoch, index = divmod(self._num_taken, len(self.batches))
        self._num_taken += 1
        starts_again = epoch > 0 and index == 0
        warnings = (f"epoch {epoch + 1} starts: the trajectories are used again.",) if starts_again else ()
        return Batch(self.batches[index], warnings)

    def state(self) -> dict[str, Any]:
        return {"num_taken": self._num_taken}

    def restore(self, state: dict[str, Any]) -> None:
        self._num_taken = state["num_taken"]


class FollowedBatches:
    """Batches of the files of an inbox; no batch mixes two files.

    read: the batches of a file.
    """

    def __init__(
        self, inbox: Inbox, read: Callable[[Path], Sequence[tuple[Trajectory, ...]]], *, timeout_s: float
    ) -> None:
        self._inbox = inbox
        self._read = read
        self._timeout_s = timeout_s
        self._batches: Sequence[tuple[Trajectory, ...]] | None = None
        # What the user has still to hear; on rank 0.
        self._unsaid: list[str] = []
        self._state = inbox.state()

    def take(self) -> Batch:
        begin = time.monotonic()
        while True:
            batch, self._state = _from_first_rank(self._look)
            if batch is not None:
                return batch
            _from_first_rank(lambda: self._refuse_longer_wait(begin))

    def state(self) -> dict[str, Any]:
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        self._inbox.restore(state)
        self._state = self._inbox.state()
        self._batches = None

    def _look(self) -> tuple[Batch | None, dict[str, Any]]:
        """On rank 0: the next batch, or None after a while without one, and the state after it."""
        deadline = time.monotonic() + min(_ROUND_S, self._timeout_s)
        while (found := self._next()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found, self._inbox.state()

    def _refuse_longer_wait(self, begin: float) -> None:
        if time.monotonic() - begin > self._timeout_s:
            raise ValueError(
                f"--rollout trace: no new trajectories in {self._inbox.path} for {self._timeout_s / 60:g} minutes. Is the "
                f"sampler running? --rollout-timeout-minutes sets how long to wait. {' '.join(self._unsaid)}"
            )

    def _next(self) -> Batch | None:
        if self._batches is None:
            # What a restored run was using comes first.
            file = self._inbox.reopen()
            self._batches = self._read(file) if file else ()
            if file is None and self._inbox.num_done:
                self._unsaid.append(
                    "--rollout trace: the file of the batches before is gone; what it still held is left out."
                )
        while self._inbox.num_done >= len(self._batches):
            file = self._inbox.open_next()
            if file is None:
                return None
            batches = self._read(file)
            # A file that was replaced while it was read is new, and what was read may be of either.
            self._batches = batches if self._inbox.is_current(file) else ()
            if not batches:
                self._unsaid.append(
                    f"--rollout trace: {file} is skipped: it is empty, or --filter leaves nothing of it to train on."
                )
        batch = self._batches[self._inbox.num_done]
        self._inbox.finish_batch()
        warnings, self._unsaid = tuple(self._unsaid), []
        return Batch(batch, warnings)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What is sampled for a step.

    num_prompts: of a step, each with `config.num_samples` responses.
    filters: of `prefixflow.trajectories.filters`.
    """

    config: SamplingConfig
    num_prompts: int
    estimator: str
    filters: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class _Scored:
    """A response as a trajectory without its advantage; is_stopped as in `Response`."""

    trajectory: Trajectory
    is_stopped: bool


class SampledBatches:
    """Prompts in order, over and over; responses of the model as it is when a batch is taken.

    With the filter `zero-variance` further prompts are sampled until the batch is full.
    """

    def __init__(
        self,
        sampler: Sampler,
        groups: Groups,
        prompts: Sequence[PromptRecord],
        reward: RewardFunction,
        plan: SamplingPlan,
    ) -> None:
        self._sampler = sampler
        self._groups = groups
        self._prompts = tuple(prompts)
        self._reward = reward
        self._plan = plan
        self._num_used = 0

    def take(self) -> Batch:
        size, all_rewards = self._plan.num_prompts, []
        kept: list[tuple[_Scored, ...]] = []
        groups: list[tuple[_Scored, ...]] = []
        for _ in range(_MAX_DRAWS):
            groups = self._draw(size - len(kept))
            all_rewards += [s.trajectory.reward or 0.0 for group in groups for s in group]
            kept += [group for group in groups if self._teaches(group)]
            if len(kept) == size:
                break
        warnings = []
        if not kept:
            kept = groups
            warnings.append("WARNING: every group of this step has equal rewards; there is nothing to learn from it.")
        trajectories, dropped = self._finished([s for group in kept for s in group])
        warnings += dropped
        return Batch(trajectories, tuple(warnings), sum(all_rewards) / len(all_rewards))

    def state(self) -> dict[str, Any]:
        return {"num_used": self._num_used}

    def restore(self, state: dict[str, Any]) -> None:
        self._num_used = state["num_used"]

    def _teaches(self, group: Sequence[_Scored]) -> bool:
        if "zero-variance" not in self._plan.filters:
            return True
        return bool(without_zero_variance([s.trajectory for s in group]))

    def _finished(self, scored: Sequence[_Scored]) -> tuple[tuple[Trajectory, ...], list[str]]:
        """With advantages, and without what was cut off where that was asked for."""
        try:
            made = with_advantages([s.trajectory for s in scored], self._plan.estimator)
        except TrajectoryError as error:  # of the same rewards on every rank
            raise TrainingError(str(error)) from error
        if "overlong" not in self._plan.filters:
            return made, []
        stopped = [s.trajectory.id for s in scored if s.is_stopped]
        whole = without_overlong(made, self._plan.config.max_response_tokens, stopped)
        if whole:
            return whole, []
        return made, ["WARNING: every response of this step was cut off; --filter overlong keeps them this time."]

    def _draw(self, num_prompts: int) -> list[tuple[_Scored, ...]]:
        """Scored responses to the next prompts, in their order, the same on every rank."""
        numbers = range(self._num_used, self._num_used + num_prompts)
        self._num_used += num_prompts
        ranks = self._groups.data_context
        mine = numbers[ranks.rank() :: ranks.size()]
        with doing("sampling responses"):
            found = self._sample(mine)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found if self._groups.tensor_rank == 0 else {})
        _raise_first(parts)
        everything = {number: group for part in parts for number, group in part.items()}
        return [everything[number] for number in numbers]

    def _sample(self, numbers: Sequence[int]) -> dict[int, tuple[_Scored, ...]] | str:
        """Scored responses to prompts by their running number, or what the reward function did wrong."""
        if not numbers:
            return {}
        records = [self._prompts[n % len(self._prompts)] for n in numbers]
        # A prompt that comes again has other random numbers.
        prompts = [Prompt(f"{r.id}@{n // len(self._prompts)}", r.tokens) for r, n in zip(records, numbers, strict=True)]
        responses = self._sampler.sample(prompts, self._plan.config)
        if self._groups.tensor_rank:
            return {}
        try:
            return {
                number: tuple(self._scored(record, response) for response in group)
                for number, record, group in zip(numbers, records, responses, strict=True)
            }
        except ValueError as error:  # of the user's function: every rank must hear of it, or the others wait
            return " ".join(str(error).split())

    def _scored(self, record: PromptRecord, response: Response) -> _Scored:
        sample = Sample(record.id, record.tokens, response.tokens, response.is_stopped, record.fields)
        temperature = self._plan.config.scored_temperature
        made = response.trajectory(advantage=0.0, reward=self._reward(sample), temperature=temperature)
        return _Scored(made, response.is_stopped)


def _raise_first(parts: Sequence[Any]) -> None:
    problem = next((part for part in parts if isinstance(part, str)), None)
    if problem is not None:
        raise TrainingError(problem)


def _from_first_rank(action: Callable[[], T]) -> T:
    """What `action` gives on rank 0, on every rank; TrainingError on all of them where it fails."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [(action(), None)]
        except (ValueError, OSError) as error:
            found = [(None, " ".join(str(error).split()))]
    dist.broadcast_object_list(found, src=0)
    result, problem = found[0]
    if problem is not None:
        raise TrainingError(problem)
    return result


def followed_batches(args: Arguments) -> FollowedBatches:
    """The source of `--rollout trace`."""

    def read(file: Path) -> Sequence[tuple[Trajectory, ...]]:
        return step_batches(args, load_trajectories(args.replace(trajectories=str(file))))

    return FollowedBatches(Inbox(args.trajectories), read, timeout_s=60 * args.rollout_timeout_minutes)


def sampling_plan(args: Arguments, stop_tokens: Sequence[int]) -> SamplingPlan:
    """The plan of `--rollout sample`."""
    config = SamplingConfig(
        args.max_response_length,
        num_samples=args.group_size,
        temperature=1.0 if args.temperature is None else args.temperature,
        top_p=1.0 if args.top_p is None else args.top_p,
        stop_tokens=frozenset(stop_tokens),
        seed=args.seed,
    )
    num_prompts = args.global_batch_size // args.group_size
    return SamplingPlan(config, num_prompts, args.advantage_estimator or "grpo", frozenset(args.filter))

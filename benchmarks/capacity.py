"""The longest sequence that a step can train within a fixed number of bytes, dense and with reuse.

    python benchmarks/capacity.py [--budget-mib 128] [--settings NAME,...]

One group of 8 trajectories, the first 0.833 of each shared, forward and backward; every microbatch may have the tokens of one
whole trajectory, on both sides. The budget covers live tensors but for weights, gradients, optimizer and host memory
(`prefixflow.runtime.memory.LiveBytes`). A length counts when the step really ran within the budget, and the next one (a step
of `--step-tokens` longer) must be refused: by the plan where it has to fit the budget (`--memory-budget-gib`), else while it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.prefixflow.arguments import memory_settings
from megatron.prefixflow.bench import Bench, Cell, Job
from prefixflow.runtime.memory import LiveBytes, MemoryBudgetError
from prefixflow.runtime.world import World
from prefixflow.schedule.residency import GIB

MIB = 1 << 20
PREFIX_RATIO = 0.833
GROUP_SIZE = 8
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. is_fitted: the plan may choose smaller microbatches and more to stay within the budget."""

    name: str
    reuse: str
    recompute: str
    prefix_memory: str
    is_fitted: bool = False

    def argv(self, budget_bytes: int | None) -> tuple[str, ...]:
        flags = f"--recompute {self.recompute} --prefix-memory {self.prefix_memory}"
        if budget_bytes is not None:
            flags += f" --memory-budget-gib {budget_bytes / GIB!r}"
        return tuple(flags.split())


SETTINGS = (
    Setting("dense", "off", "none", "keep"),
    Setting("dense-full", "off", "full", "keep"),
    Setting("keep", "on", "none", "keep"),
    Setting("offload", "on", "none", "offload"),
    Setting("recompute", "on", "none", "recompute"),
    Setting("keep-full", "on", "full", "keep"),
    Setting("offload-full", "on", "full", "offload"),
    Setting("recompute-full", "on", "full", "recompute"),
    Setting("fitted-keep", "on", "none", "keep", is_fitted=True),
    Setting("fitted-offload", "on", "none", "offload", is_fitted=True),
    Setting("fitted-recompute", "on", "none", "recompute", is_fitted=True),
    Setting("fitted-auto-full", "on", "full", "auto", is_fitted=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one attempt: the peak of live tensors, or why it was refused."""

    num_tokens: int
    peak_bytes: int | None
    host_bytes: int = 0
    microbatches: int = 0
    refusal: str = ""


class Search:
    """Attempts of one setting in this process."""

    def __init__(self, setting: Setting, model: str, budget_bytes: int, step_tokens: int) -> None:
        self.setting = setting
        self.model = model
        self.budget_bytes = budget_bytes
        self.step_tokens = step_tokens
        self.bench = self._bench()

    def frontier(self) -> tuple[Outcome, Outcome]:
        """The longest length that runs, and the refusal of the next."""
        best = self._attempt(self._guess())
        while best.peak_bytes is None:
            refused, best = best, self._attempt(best.num_tokens - self.step_tokens)
            if best.peak_bytes is not None:
                return best, refused
        while True:
            longer = self._attempt(best.num_tokens + self.step_tokens)
            if longer.peak_bytes is None:
                return best, longer
            best = longer

    def _guess(self) -> int:
        """The longest that the plan takes where it fits the budget; else a straight line through two short ones."""
        steps = self.step_tokens
        if self.setting.is_fitted:
            low, high = 4, 8
            while self._is_planned(high * steps):
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._is_planned(middle * steps) else (low, middle)
            return low * steps
        short, long = (self._attempt(count * steps, is_free=True) for count in (8, 16))
        assert short.peak_bytes is not None
        assert long.peak_bytes is not None
        slope = (long.peak_bytes - short.peak_bytes) / (long.num_tokens - short.num_tokens)
        tokens = short.num_tokens + (self.budget_bytes - short.peak_bytes) / slope
        return max(steps, round(tokens / steps) * steps)

    def _is_planned(self, num_tokens: int) -> bool:
        try:
            self.bench.plan(self._trajectories(num_tokens), self.setting.reuse, num_tokens - 1)
        except ValueError:
            return False
        return True

    def _attempt(self, num_tokens: int, *, is_free: bool = False) -> Outcome:
        trajectories = self._trajectories(num_tokens)
        try:
            plan = self.bench.plan(trajectories, self.setting.reuse, num_tokens - 1)
            with LiveBytes(budget_bytes=None if is_free else self.budget_bytes) as live:
                self.bench.step(plan, trajectories)
        except (MemoryBudgetError, ValueError) as error:
            # A step that was broken off leaves its state behind.
            self.bench = self._bench()
            return Outcome(num_tokens, None, refusal=str(error).partition(". ")[0])
        return Outcome(num_tokens, live.peak, self.bench.runner.arena.peak_bytes, plan.num_microbatches)

    def _trajectories(self, num_tokens: int) -> tuple:
        args = self.bench.args
        return Cell(PREFIX_RATIO, GROUP_SIZE, num_tokens, 1).trajectories(args.vocab_size, args.seed)

    def _bench(self) -> Bench:
        model = ("--model", self.model)
        fixed = Job((*model, *self.setting.argv(None)), None, (), 1, 1)
        if not self.setting.is_fitted:
            return Bench(fixed)
        state = memory_settings(fixed.arguments, Bench(fixed).layout).model.state_bytes
        return Bench(Job((*model, *self.setting.argv(state + self.budget_bytes)), None, (), 1, 1))


def search(setting: Setting, model: str, budget_bytes: int, step_tokens: int) -> tuple[Outcome, Outcome]:
    return Search(setting, model, budget_bytes, step_tokens).frontier()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-mib", type=int, default=128)
    parser.add_argument("--step-tokens", type=int, default=24)
    parser.add_argument("--model", default="small")
    parser.add_argument("--settings", default=",".join(s.name for s in SETTINGS), help="names, comma separated")
    options = parser.parse_args(argv)
    chosen = options.settings.split(",")
    print("| setting | longest | peak MiB | host MiB | microbatches | over dense | next length |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    dense: dict[str, int] = {}
    with World(1) as world:
        for setting in (s for s in SETTINGS if s.name in chosen):
            limits = (options.budget_mib * MIB, options.step_tokens)
            best, refused = world.run(search, setting, options.model, *limits, timeout_s=TIMEOUT_S)[0]
            dense.setdefault(setting.recompute, best.num_tokens)
            assert best.peak_bytes is not None
            cells = [
                setting.name,
                str(best.num_tokens),
                f"{best.peak_bytes / MIB:.1f}",
                f"{best.host_bytes / MIB:.1f}",
                str(best.microbatches),
                f"{best.num_tokens / dense[setting.recompute]:.2f}",
                f"{refused.num_tokens}: {refused.refusal}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Worlds of processes: results by rank, failures with their story, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prefixflow.runtime.world import World, WorldError, Worlds, destroy_subgroups, run_world

ROOT = Path(__file__).resolve().parents[2]


def identity_of_rank() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def weighted_sum(base: torch.Tensor, scale: float) -> torch.Tensor:
    """Sum over ranks of base * scale^rank: each rank's part is told from the others' by its size."""
    total = base * scale ** dist.get_rank()
    dist.all_reduce(total)
    return total


def settings() -> tuple[int, str | None, str | None]:
    return (
        torch.get_num_threads(),
        os.environ.get("OMP_NUM_THREADS"),
        os.environ.get("TORCHDYNAMO_DISABLE"),
    )


def raise_on(rank: int) -> None:
    """One rank raises, the others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise KeyError("the-broken-rank")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on(rank: int) -> int:
    if dist.get_rank() == rank:
        time.sleep(60)
    return dist.get_rank()


def say_and_sleep() -> None:
    print("asleep", flush=True)
    time.sleep(60)


def unpicklable_result() -> object:
    return lambda: None


def make_subgroup() -> int:
    dist.new_group(list(range(dist.get_world_size())))
    return len(dist.distributed_c10d._world.pg_map)


def drop_subgroups() -> int:
    destroy_subgroups()
    dist.barrier()
    return len(dist.distributed_c10d._world.pg_map)


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def own_world() -> Iterator[World]:
    """A world for the tests that break it."""
    with World(2) as world:
        yield world


def test_results_come_by_rank_from_kept_processes(worlds: Worlds) -> None:
    first = worlds[2].run(identity_of_rank)
    assert [(rank, size) for rank, size, _ in first] == [(0, 2), (1, 2)]
    assert len({os.getpid(), *(process_id for _, _, process_id in first)}) == 3
    assert worlds[2].run(identity_of_rank) == first


def test_tensors_travel_by_value(worlds: Worlds) -> None:
    base = torch.tensor([1.0, 10.0], dtype=torch.float64)
    for result in worlds[2].run(partial(weighted_sum, scale=1000.0), base):
        assert result.tolist() == [1001.0, 10010.0]
    assert base.tolist() == [1.0, 10.0]


def test_processes_have_one_thread_and_no_compiler(worlds: Worlds) -> None:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    assert worlds[2].run(settings) == [(1, "1", "1")] * 2
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before


def test_subgroups_are_kept_until_destroyed(worlds: Worlds) -> None:
    assert worlds[2].run(make_subgroup) == [2, 2]
    assert worlds[2].run(make_subgroup) == [3, 3]
    assert worlds[2].run(drop_subgroups) == [1, 1]


def test_world_of_one_process() -> None:
    assert [result[:2] for result in run_world(1, identity_of_rank)] == [(0, 1)]


def test_a_rank_that_raises_fails_the_call_at_once(own_world: World) -> None:
    before = [process_id for _, _, process_id in own_world.run(identity_of_rank)]
    begin = time.monotonic()
    with pytest.raises(WorldError, match="the-broken-rank") as caught:
        own_world.run(raise_on, 1, timeout_s=60)
    assert time.monotonic() - begin < 30
    assert "Rank 1 of 2 failed in" in str(caught.value)
    assert "in raise_on" in caught.value.failures[1]
    assert not any(is_alive(process_id) for process_id in before)
    after = own_world.run(identity_of_rank)
    assert [rank for rank, _, _ in after] == [0, 1]
    assert not set(before) & {process_id for _, _, process_id in after}


def test_a_rank_that_dies_is_named(own_world: World) -> None:
    with pytest.raises(WorldError, match="Rank 1 of 2 failed in ") as caught:
        own_world.run(die_on, 1, timeout_s=60)
    assert "SIGKILL" in caught.value.failures[1]


def test_a_silent_rank_is_named_with_its_stack(own_world: World) -> None:
    own_world.run(identity_of_rank)
    begin = time.monotonic()
    with pytest.raises(WorldError, match=r"Rank 1 of 2 did not answer within 1 s") as caught:
        own_world.run(sleep_on, 1, timeout_s=1)
    assert time.monotonic() - begin < 30
    assert list(caught.value.failures) == [1]
    assert "in sleep_on" in caught.value.failures[1]


def test_what_cannot_be_pickled_is_said(own_world: World) -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        own_world.run(lambda: None)
    with pytest.raises(WorldError, match=r"[Pp]ickle"):
        own_world.run(unpicklable_result)


def test_world_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size is 0"):
        World(0)


SCRIPT = """
    import os, sys, time
    from prefixflow.runtime.world import World
    from tests.distributed.test_world import identity_of_rank, say_and_sleep

    if __name__ == "__main__":
        world = World(2)
        print(*(process_id for _, _, process_id in world.run(identity_of_rank)), flush=True)
        if sys.argv[1] == "killed":
            world.run(say_and_sleep)
"""


@pytest.mark.parametrize("end", ["forgotten", "killed"])
def test_no_process_outlives_its_parent(tmp_path: Path, end: str) -> None:
    """Neither when a script ends without `close` nor when it is killed in the middle of a call."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script), end], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        ranks = [int(word) for word in parent.stdout.readline().split()]
        assert len(ranks) == 2
        if end == "killed":
            assert [parent.stdout.readline() for _ in ranks] == ["asleep\n"] * 2
            parent.kill()
        try:
            parent.wait(timeout=60)
        finally:
            parent.kill()
    deadline = time.monotonic() + 20
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, ranks))

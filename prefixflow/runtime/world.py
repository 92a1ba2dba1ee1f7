"""Worlds: processes on this machine, joined by torch.distributed and kept for many calls.

    with World(4) as world:
        norms = world.run(function, argument, timeout_s=60)  # one result per rank, in rank order

Strategy:

1. The processes are started once, at the first call (method *spawn*: nothing is inherited but the
   environment and `sys.path`). They meet at a store that this process hosts on a port of the
   system's choice, so worlds that start at the same time cannot collide.
2. A call sends (function, arguments) to every rank and gathers one answer from each. All of them
   are pickled here, so tensors travel by value.
3. A rank that raises, dies or stays silent fails the call. All its processes are then killed,
   since the others may wait for that rank in a collective for ever; the next call starts anew.

Process groups made by a function survive the call, so that later calls may use them;
`destroy_subgroups` drops them. A script that makes worlds needs the `if __name__ == "__main__"`
guard, like all users of multiprocessing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_HOST = "127.0.0.1"
# Importing torch takes seconds, on a loaded machine minutes.
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 5.0
# How long the other ranks may take to fail as well: their tracebacks often tell more.
_GRACE_S = 3.0
_STACK_SIGNAL = signal.SIGUSR1


class WorldError(RuntimeError):
    """A call failed. `failures` maps each rank that raised, died or did not answer to its story."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(frozen=True, slots=True)
class _Start:
    """What a process needs to become a rank."""

    rank: int
    world_size: int
    port: int
    backend: str
    num_threads: int
    stack_file: Path
    parent_id: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """Reply of one rank: a result, or the traceback of what it raised."""

    value: Any = None
    error: str | None = None
    died: bool = False


class World:
    """`world_size` processes that run functions together.

    world_size: number of ranks, at least 1.
    backend: of the default process group; with "nccl" in it, rank r uses CUDA device r.
    num_threads: of torch and OpenMP in each process.
    """

    def __init__(self, world_size: int, *, backend: str = "gloo", num_threads: int = 1) -> None:
        if world_size < 1:
            raise ValueError(f"World: world_size is {world_size}, expected at least 1.")
        self.world_size = world_size
        self.backend = backend
        self.num_threads = num_threads
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._store: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return bool(self._processes)

    def run(self, function: Callable[..., T], *args: Any, timeout_s: float = 300.0) -> list[T]:
        """Run `function(*args)` on every rank; the results, by rank.

        function: importable by name (a module-level function or a `functools.partial` of one).
        timeout_s: limit of this call; starting the processes is not counted.

        Raises WorldError if a rank raises (with its traceback), dies, or has not answered in time
        (with the stack where it stands); ValueError if function or arguments cannot be pickled.
        """
        name = _name_of(function)
        payload = _pickle_call(function, args, name)
        try:
            if not self.is_running:
                self._start()
            for connection in self._connections:
                # A rank that has died is reported by `_gather`.
                with contextlib.suppress(OSError):
                    connection.send_bytes(payload)
            return self._gather(name, timeout_s)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Let the processes end by themselves; kill those that do not. A later `run` starts anew."""
        for connection in self._connections:
            # Closing is the signal to leave.
            connection.close()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        atexit.register(self.close)
        self._folder = tempfile.TemporaryDirectory(prefix="prefixflow-world-")
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn")
        with _child_environment(self.num_threads):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                start = self._start_of(rank)
                process = context.Process(target=_serve, args=(start, theirs), name=f"prefixflow-rank-{rank}")
                process.start()
                # Ours only: the end of the process must show as the end of the connection.
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        self._gather("start-up", _START_TIMEOUT_S)

    def _start_of(self, rank: int) -> _Start:
        return _Start(
            rank=rank,
            world_size=self.world_size,
            port=self._store.port,
            backend=self.backend,
            num_threads=self.num_threads,
            stack_file=self._stack_file(rank),
            parent_id=os.getpid(),
        )

    def _stack_file(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"rank-{rank}.txt"

    def _gather(self, name: str, timeout_s: float) -> list[Any]:
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.world_size and time.monotonic() < deadline:
            failed_before = _has_failure(answers)
            self._receive(answers, deadline - time.monotonic())
            if _has_failure(answers) and not failed_before:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        failures = _failures(answers)
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        if failures:
            raise WorldError(self._failure_message(name, failures, silent), failures)
        if silent:
            stacks = self._stacks_of(silent)
            raise WorldError(self._silence_message(name, timeout_s, stacks), stacks)
        return [answers[rank].value for rank in range(self.world_size)]

    def _receive(self, answers: dict[int, _Answer], timeout_s: float) -> None:
        """Add the answers that have arrived; wait for one if there is none."""
        ranks = {self._connections[r]: r for r in range(self.world_size) if r not in answers}
        for connection in wait(list(ranks), timeout=max(0.0, timeout_s)):
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            try:
                answers[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                answers[rank] = _Answer(error=self._death_of(rank), died=True)
            except Exception as error:
                answers[rank] = _Answer(error=f"Its result cannot be unpickled here: {error!r}")

    def _death_of(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        if code is not None and code < 0:
            return f"The process was killed by {signal.Signals(-code).name}."
        return f"The process ended with exit code {code}."

    def _stacks_of(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ask processes for the stacks of their threads, also while they are inside C++."""
        for rank in ranks:
            process_id = self._processes[rank].pid
            # Before a process has got to `faulthandler.register`, the signal ends it.
            if process_id is not None and self._stack_file(rank).exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, _STACK_SIGNAL)
        time.sleep(0.5)
        return {rank: self._read_stack(rank) for rank in ranks}

    def _read_stack(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return self._stack_file(rank).read_text() or "(no stack)"
        return "(no stack: still importing)"

    def _failure_message(self, name: str, failures: dict[int, str], silent: list[int]) -> str:
        (first, story), *others = failures.items()
        lines = [f"Rank {first} of {self.world_size} failed in {name}:", story.rstrip()]
        is_explained = "\n" in story.rstrip()
        for rank, other in others:
            # A process that died says nothing: who waited for it tells where.
            told = other.rstrip().splitlines()[-1] if is_explained else "\n" + other.rstrip()
            lines.append(f"Rank {rank} failed after it: {told}")
            is_explained = True
        if silent:
            lines.append(f"{_ranks(silent)} had not answered {_GRACE_S:g} s later.")
        return "\n".join(lines)

    def _silence_message(self, name: str, timeout_s: float, stacks: dict[int, str]) -> str:
        head = (
            f"{_ranks(list(stacks))} of {self.world_size} did not answer within {timeout_s:g} s in "
            f"{name}; the world was killed. If the work is only slow, raise timeout_s. Stacks:"
        )
        return "\n".join([head, *(f"rank {r}:\n{s.rstrip()}" for r, s in stacks.items())])

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        atexit.unregister(self.close)


class Worlds:
    """One world per size, started when first asked for and kept: `worlds[4].run(function)`."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __getitem__(self, world_size: int) -> World:
        if world_size not in self._worlds:
            self._worlds[world_size] = World(world_size)
        return self._worlds[world_size]

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


def run_world(world_size: int, function: Callable[..., T], *args: Any, timeout_s: float = 300.0) -> list[T]:
    """Run one function in a world of its own; arguments, results and errors as `World.run`."""
    with World(world_size) as world:
        return world.run(function, *args, timeout_s=timeout_s)


def destroy_subgroups() -> None:
    """Destroy every process group of this rank but the default one (called inside a world).

    Gloo keeps threads and sockets per group, so a world that runs many layouts must drop the groups
    of the last one. All ranks have to be done with them. Whoever holds them (Megatron's
    `parallel_state`) must forget them first.
    """
    default = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not default:
            dist.destroy_process_group(group)


def _serve(start: _Start, connection: Connection) -> None:
    """Life of one rank: join the group, answer calls until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(start.parent_id,), daemon=True).start()
    with open(start.stack_file, "w") as stack_file:
        faulthandler.register(_STACK_SIGNAL, file=stack_file, all_threads=True)
        connection.send_bytes(_answer(_join, start))
        while True:
            try:
                payload = connection.recv_bytes()
            except (EOFError, OSError):
                break
            connection.send_bytes(_answer(_call, payload))
        # The file closes next; the default action would end the process, which is right by now.
        faulthandler.unregister(_STACK_SIGNAL)
    if dist.is_initialized():
        dist.destroy_process_group()


def _exit_with_parent(parent_id: int) -> None:
    """End this process when its parent is gone, even if it waits in a collective."""
    while os.getppid() == parent_id:
        time.sleep(1.0)
    os._exit(1)


def _join(start: _Start) -> None:
    torch.set_num_threads(start.num_threads)
    if "nccl" in start.backend:
        torch.cuda.set_device(start.rank)
    dist.init_process_group(
        start.backend,
        store=dist.TCPStore(_HOST, start.port, is_master=False),
        rank=start.rank,
        world_size=start.world_size,
    )


def _call(payload: bytes) -> Any:
    function, args = pickle.loads(payload)
    # Models hold their groups in reference cycles, and gloo's threads end with the last reference to a group. What stays
    # between calls are modules: frozen, they are not searched again at the next call.
    gc.collect()
    gc.freeze()
    return function(*args)


def _answer(function: Callable[[Any], Any], argument: Any) -> bytes:
    try:
        return pickle.dumps(_Answer(value=function(argument)))
    except BaseException:
        return pickle.dumps(_Answer(error=traceback.format_exc()))


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], name: str) -> bytes:
    try:
        return pickle.dumps((function, args))
    except Exception as error:
        raise ValueError(
            f"World.run: {name} or its arguments cannot be pickled ({error}). Pass a function "
            "defined at the top level of a module, and plain data."
        ) from error


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)
    return f"{function.__module__}.{function.__qualname__}"


def _has_failure(answers: dict[int, _Answer]) -> bool:
    return any(answer.error is not None for answer in answers.values())


def _failures(answers: dict[int, _Answer]) -> dict[int, str]:
    """Failures in the order of cause: a death breaks the connections of the ranks that lived on."""
    ordered = sorted(answers.items(), key=lambda item: not item[1].died)
    return {rank: answer.error for rank, answer in ordered if answer.error is not None}


def _ranks(ranks: Sequence[int]) -> str:
    noun = "Rank" if len(ranks) == 1 else "Ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def _child_environment(num_threads: int) -> Iterator[None]:
    """Variables that must be there before a child imports torch; ours are restored afterwards."""
    wanted = {
        "OMP_NUM_THREADS": str(num_threads),
        # Megatron's jit fusions would be compiled in each process.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if Path("/sys/class/net/lo").exists():
        # All ranks are on this machine; its host name need not resolve.
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

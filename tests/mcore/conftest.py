"""Parity runs for test modules with many of them: files, and one runner that keeps reference results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from megatron.prefixflow.parity import Runner
    from prefixflow.runtime.world import Worlds

TIMEOUT_S = 300.0
Compare = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name to path of every file of `tests.mcore.parity_files`."""
    from tests.mcore.parity_files import write_files

    return write_files(tmp_path_factory.mktemp("trajectories"))


@pytest.fixture(scope="session")
def parity_runner(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    from megatron.prefixflow.parity import Runner

    with Runner(tmp_path_factory.mktemp("parity"), TIMEOUT_S, worlds=worlds) as kept:
        yield kept


@pytest.fixture
def compare(parity_runner: Runner, worlds: Worlds, files: dict[str, str]) -> Iterator[Compare]:
    """`compare(file, arguments, dtype="float64", mutant=None)` is the result of a comparison with reuse.

    The processes are left without a mutant.
    """
    from megatron.prefixflow.arguments import parallel_layout
    from megatron.prefixflow.parity import Case
    from tests.mcore.faults import Setup, restore

    planted: set[int] = set()

    def run(file: str, text: str, dtype: str = "float64", mutant: Callable[[], None] | None = None) -> dict[str, Any]:
        case = Case(files[file], ("--prefix-reuse", "on", *text.split(), "--dtype", dtype))
        parity_runner.setup = Setup(mutant)
        if mutant is not None:
            planted.add(parallel_layout(case.arguments).world_size)
        return parity_runner.run(case)

    yield run
    parity_runner.setup = None
    for size in planted:
        worlds[size].run(restore)

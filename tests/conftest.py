"""Options and fixtures shared by all tests.

The environment is set here, before any test module can import torch: one thread a process,
because distributed tests start several, and no dynamo, because Megatron's jit fusions would be
compiled on the CPU (about 20 s in each process).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from prefixflow.runtime.world import Worlds

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--traces",
        metavar="DIR",
        type=Path,
        default=None,
        help="folder of recorded trajectories (*.jsonl); tests that need one skip without it",
    )


@pytest.fixture(scope="session")
def traces(request: pytest.FixtureRequest) -> Path:
    """Folder of recorded trajectories; tests that need it are skipped when none was given."""
    folder: Path | None = request.config.getoption("--traces")
    if folder is None:
        pytest.skip("needs recorded trajectories, pass --traces DIR")
    if not folder.is_dir():
        raise pytest.UsageError(f"--traces {folder}: no such folder")
    return folder.resolve()


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct, as `make model` writes it."""
    folder = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"
    if not folder.is_dir():
        pytest.skip("needs the SmolLM2 model, run `make model`")
    return folder


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """One gloo world per size, kept for the session: `worlds[4].run(function, *args)`."""
    from prefixflow.runtime.world import Worlds

    kept = Worlds()
    yield kept
    kept.close()

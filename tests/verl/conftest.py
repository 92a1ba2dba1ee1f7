"""Folders for verl to read. Run by `make test-verl`, in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_harness.models import KINDS, save_tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of model to its Hugging Face folder."""
    return {kind: save_tiny(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}

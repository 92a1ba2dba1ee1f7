"""A rank that fails under torchrun takes the others with it, and the output says which rank and which operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixflow.testing.generate import Style, two_level_groups
from prefixflow.trajectories import write_trajectories

SHAPE = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--ffn-hidden-size",
    "128",
    "--num-attention-heads",
    "4",
    "--max-position-embeddings",
    "512",
    "--vocab-size",
    "512",
    "--position-embedding-type",
    "rope",
    "--disable-bias-linear",
    "--normalization",
    "RMSNorm",
    "--swiglu",
]
STEP = [
    "--global-batch-size",
    "12",
    "--train-iters",
    "1",
    "--lr",
    "1e-3",
    "--prefix-reuse",
    "on",
    "--max-tokens-per-microbatch",
    "64",
]
SECONDS = 120
"""Start-up, one step and 30 seconds to end in."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("1:B2:raise", ("planted failure", "rank 1 of 2, in operation 1B2", ">1B2<")),
        ("0:F3:kill", ("SIGKILL", "rank 1 of 2, in operation 1F3", "1F3 waits for a message of rank 0", "[0F3]")),
    ],
)
def test_all_ranks_end(tmp_path: Path, broken: str, expected: tuple[str, ...]) -> None:
    file = tmp_path / "t.jsonl"
    write_trajectories(file, two_level_groups(3, 4, (40, 60), (8, 16), seed=5, style=Style(vocab_size=512)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("broken_rank.py"))
    run = subprocess.run(
        [*launch, script, *SHAPE, *STEP, "--trajectories", str(file), "--pipeline-model-parallel-size", "2"],
        env={**os.environ, "BROKEN": broken, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode != 0
    for words in expected:
        assert words in run.stderr, run.stderr
    assert "Root Cause" in run.stderr

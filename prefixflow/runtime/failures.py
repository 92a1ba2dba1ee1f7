"""Say which process was doing what when it failed: a peer that is gone shows as a broken connection somewhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


def this_process() -> str:
    """`rank 1 of 4, ` in a process group, empty outside."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}, " if dist.is_initialized() else ""


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Note on an error that leaves this block: which process was doing `what`."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"PrefixFlow: {this_process()}while {what}. If a connection broke, another rank failed or is gone: its own "
            "message, if it left one, says why."
        )
        raise

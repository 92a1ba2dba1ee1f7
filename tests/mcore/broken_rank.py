"""`pretrain_rl.py` with one rank that fails in an operation: `BROKEN=RANK:OPERATION:raise|kill` in the environment."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from megatron.prefixflow.stage import StageRunner
from megatron.prefixflow.training import main


def break_operation(rank: str, operation: str, how: str) -> None:
    """Make `operation` (F3 or B2, on whatever stage) of the process with this rank raise, or kill the process."""
    name = {"F": "forward", "B": "backward"}[operation[0]]
    original = getattr(StageRunner, name)

    def broken(self: StageRunner, m: int, *args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == rank and m == int(operation[1:]):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("planted failure")
        return original(self, m, *args, **kwargs)

    setattr(StageRunner, name, broken)


if __name__ == "__main__":
    break_operation(*os.environ["BROKEN"].split(":"))
    sys.exit(main(sys.argv[1:]))

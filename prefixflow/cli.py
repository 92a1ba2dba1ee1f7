"""The `prefixflow` command.

`import` and `plan` are pure and run here. `parity`, `bench` and `convert` need Megatron, which nothing under `prefixflow/` imports:
they run `python -m megatron.prefixflow.<command>` in a process of its own, which starts the world (`convert` is alone in its own).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from prefixflow.importer import add_import_arguments, run_import
from prefixflow.report import add_plan_arguments, run_plan

BINDING_COMMANDS = {
    "parity": "compare gradients with the independent full-sequence reference",
    "bench": "time dense against reuse, next to the FLOPs bound",
    "convert": "Hugging Face folders to Megatron checkpoints and back",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in BINDING_COMMANDS:
        _run_binding(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(prog="prefixflow", description="Train with each shared prefix computed once.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    importing = commands.add_parser("import", help="turn prompts or messages into a trajectory file")
    add_import_arguments(importing)
    importing.set_defaults(run=run_import)
    planning = commands.add_parser("plan", help="what sharing there is and what it is worth")
    add_plan_arguments(planning)
    planning.set_defaults(run=run_plan)
    for name, text in BINDING_COMMANDS.items():
        commands.add_parser(name, help=text)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


def _run_binding(command: str, arguments: Sequence[str]) -> NoReturn:
    environment = {
        # Megatron's jit fusions would be compiled on the CPU, about 20 s a process.
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
        **os.environ,
    }
    module = f"megatron.prefixflow.{command}"
    # Replaces this process, so that a signal reaches the one that holds the world.
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)


if __name__ == "__main__":
    sys.exit(main())

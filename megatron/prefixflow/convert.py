"""`prefixflow convert`: Hugging Face folders to Megatron checkpoints and back, on the command line."""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron.prefixflow.arguments_result import DTYPES

PROGRAM = "prefixflow convert"


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status: 0, or 2 after one sentence on stderr."""
    options, rest = _parser().parse_known_args(list(argv))
    if rest and options.direction != "hf-to-megatron":
        print(f"{PROGRAM}: unknown argument {rest[0]}.", file=sys.stderr)
        return 2
    # So that an end by a batch system's signal, too, leaves no half checkpoint.
    signal.signal(signal.SIGTERM, _leave)
    try:
        with _bar(options.direction) as progress:
            backend = _convert(options, rest, progress)
    except (ValueError, OSError, ImportError) as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    target = options.save if options.direction == "hf-to-megatron" else options.output_dir
    print(f"{options.direction}: wrote {target}, tensors named by {backend}")
    return 0


def _convert(options: argparse.Namespace, layout: Sequence[str], progress: Progress) -> str:
    warnings.filterwarnings("ignore", module=r"megatron|mbridge")
    # Late, since Megatron takes seconds to import, which a question for help need not wait for.
    from megatron.prefixflow.conversion import hf_to_megatron, megatron_to_hf

    task = progress.add_task(options.direction, total=None)

    def advance(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)

    if options.direction == "hf-to-megatron":
        return hf_to_megatron(options.hf_checkpoint, options.save, layout, dtype=options.dtype, progress=advance)
    return megatron_to_hf(
        options.load,
        options.output_dir,
        hf_dir=options.hf_checkpoint,
        iteration=options.ckpt_step,
        dtype=options.dtype,
        progress=advance,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, allow_abbrev=False)
    directions = parser.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    there = directions.add_parser(
        "hf-to-megatron",
        allow_abbrev=False,
        help="a Hugging Face folder to a Megatron checkpoint",
        epilog="Further arguments are those of pretrain_rl.py: the layout that is checked and noted in the checkpoint, such as "
        "--tensor-model-parallel-size. Any layout reads the checkpoint.",
    )
    there.add_argument("--hf-checkpoint", required=True, metavar="DIR", help="the Hugging Face folder")
    there.add_argument("--save", required=True, metavar="DIR", help="new folder for the checkpoint")
    back = directions.add_parser(
        "megatron-to-hf", allow_abbrev=False, help="a Megatron checkpoint to a Hugging Face folder"
    )
    back.add_argument("--load", required=True, metavar="DIR", help="folder of checkpoints, or one checkpoint")
    back.add_argument("--output-dir", required=True, metavar="DIR", help="new folder for the model")
    back.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to take; default: the latest")
    back.add_argument(
        "--hf-checkpoint", metavar="DIR", help="configuration and tokenizer; default: those that the checkpoint carries"
    )
    for direction in (there, back):
        direction.add_argument("--dtype", choices=tuple(DTYPES), help="round the weights; default: keep every bit")
    return parser


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("parameters"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

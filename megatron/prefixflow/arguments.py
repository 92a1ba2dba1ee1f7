"""The command line of `pretrain_rl.py`.

Steps of `parse_arguments`:

1. Every argument is one `Argument` (`arguments_spec`, `arguments_table`).
2. `argparse` reads the command line with all defaults suppressed, so that what was given is known.
   An unknown name is an error that names the nearest known one.
3. Refused arguments and values are errors with a way out.
4. Defaults are filled in, dependent values derived and everything validated (`arguments_checks`).

`configs` turns the result into Megatron-Core's configurations. Nothing here reads environment
variables or keeps global state.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megatron.prefixflow.arguments_checks import derive, validate
from megatron.prefixflow.arguments_docs import arguments_markdown, refused_markdown
from megatron.prefixflow.arguments_result import CHECKPOINT_DESTS, Arguments, arguments_for_shape, shape_of
from megatron.prefixflow.arguments_spec import Argument, ArgumentsError, all_arguments, shown
from megatron.prefixflow.arguments_table import Arity, Effect, Refusal
from megatron.prefixflow.configs import (
    ddp_config,
    gpt_model_kwargs,
    loss_config,
    memory_settings,
    optimizer_config,
    padded_vocab_size,
    parallel_layout,
    plan_config,
    scheduler_options,
    startup_lines,
    transformer_config,
)
from prefixflow.plan.layout import ParallelLayout
from prefixflow.plan.shapes import ModelShape

__all__ = [
    "Arguments",
    "ArgumentsError",
    "ParallelLayout",
    "arguments_for_shape",
    "build_parser",
    "ddp_config",
    "gpt_model_kwargs",
    "loss_config",
    "memory_settings",
    "optimizer_config",
    "padded_vocab_size",
    "parallel_layout",
    "parse_arguments",
    "plan_config",
    "scheduler_options",
    "shape_of",
    "startup_lines",
    "transformer_config",
]

DEFAULT_SHAPE = "tiny"
"""The model of `prefixflow` commands where the command line describes none."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(f"{message}.")


@functools.cache
def build_parser() -> argparse.ArgumentParser:
    """A parser of every argument, all defaults suppressed."""
    parser = _Parser(
        prog="pretrain_rl.py",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="RL post-training with prefix reuse, with Megatron-LM's argument names.",
    )
    groups: dict[str, Any] = {}
    for argument in all_arguments():
        title = argument.source if argument.effect is Effect.EFFECTIVE else argument.effect.value
        group = groups.setdefault(title, None) or parser.add_argument_group(title)
        groups[title] = group
        _add_to(group, argument)
    return parser


def _add_to(group: Any, argument: Argument) -> None:
    shown = argument.meaning.replace("%", "%%")
    if argument.arity is Arity.FLAG:
        constant = not argument.default if isinstance(argument.default, bool) else True
        group.add_argument(*argument.flags, dest=argument.dest, action="store_const", const=constant, help=shown)
        return
    options: dict[str, Any] = {"dest": argument.dest, "type": argument.kind, "help": shown}
    if argument.choices:
        options["choices"] = argument.choices
    if argument.arity is Arity.LIST:
        options["nargs"] = argument.num_values or "*"
    elif argument.effect is Effect.REFUSED:
        # A refused name without its value still gets the refusal.
        options["nargs"] = "?"
    if argument.arity is not Arity.LIST:
        options["metavar"] = argument.dest.upper() if not argument.choices else None
    group.add_argument(*argument.flags, **options)


def parse_arguments(argv: Sequence[str], *, training: bool = False) -> Arguments:
    """Parse a command line.

    training: what a training run needs must be there. Without it (the `prefixflow` commands) the
    defaults are those of `prefixflow`: the `tiny` shape where no model is described, expert tensor
    parallelism 1, sequence parallelism on for MoE with tensor parallelism.

    Raises:
        ArgumentsError: see the module docstring.
    """
    given = _read(argv)
    model = given.get("model")
    if model is None and not training and not given.keys() & {"hidden_size", "use_checkpoint_args"}:
        model = DEFAULT_SHAPE
    if model is not None:
        given = _read([*arguments_for_shape(_load_shape(model)), *argv])
    if given.get("use_checkpoint_args"):
        given = {**_of_checkpoint(given), **given}
    _refuse(given)
    values = {a.dest: a.default for a in all_arguments() if a.effect is Effect.EFFECTIVE}
    values |= {dest: value for dest, value in given.items() if dest in values}
    warnings: list[str] = []
    derive(values, given, training, warnings)
    validate(values, given, training)
    no_effect = tuple(a.flags[0] for a in all_arguments() if a.effect is Effect.NO_EFFECT and a.dest in given)
    return Arguments(values, frozenset(given), no_effect, tuple(warnings))


def _read(argv: Sequence[str]) -> dict[str, Any]:
    namespace, rest = build_parser().parse_known_args(list(argv))
    if rest:
        raise ArgumentsError(_unknown(rest))
    return vars(namespace)


def _unknown(rest: Sequence[str]) -> str:
    names = [token.split("=")[0] for token in rest if token.startswith("-")]
    if not names:
        return f"{rest[0]!r} stands where an argument name was expected."
    known = [flag for argument in all_arguments() for flag in argument.flags]
    sentences = []
    for name in names:
        near = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.5)
        hint = f" The nearest known one is {near[0]}." if near else ""
        sentences.append(f"unknown argument {name}.{hint}")
    return "\n".join(sentences)


def _load_shape(name: str) -> ModelShape:
    try:
        return ModelShape.load(name)
    except ValueError as error:
        raise ArgumentsError(f"--model: {error}") from error


def _of_checkpoint(given: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments that a checkpoint was written with."""
    from megatron.prefixflow.checkpoint import CheckpointError, checkpoint_args

    folder = given.get("load") or given.get("pretrained_checkpoint")
    if folder is None:
        raise ArgumentsError("--use-checkpoint-args needs --load or --pretrained-checkpoint.")
    try:
        saved = checkpoint_args(folder, given.get("ckpt_step") if "load" in given else None)
    except CheckpointError as error:
        raise ArgumentsError(f"--use-checkpoint-args: {error}") from error
    default = {argument.dest: argument.default for argument in all_arguments()}
    wanted = {dest: saved[dest] for dest in CHECKPOINT_DESTS if saved.get(dest) is not None}
    return {dest: value for dest, value in wanted.items() if value != default[dest]}


def _refuse(given: Mapping[str, Any]) -> None:
    sentences = []
    for argument in all_arguments():
        if argument.dest in given and argument.refusal is not None:
            value = given[argument.dest]
            if _is_refused(argument, argument.refusal, value):
                text = "" if argument.arity is Arity.FLAG or value is None else f" {shown(value)}"
                sentences.append(
                    f"{argument.flags[0]}{text} is refused: {argument.refusal.reason}. "
                    f"Way out: {argument.refusal.way_out}."
                )
    if sentences:
        raise ArgumentsError("\n".join(sentences))


def _is_refused(argument: Argument, refusal: Refusal, value: Any) -> bool:
    if argument.arity is Arity.FLAG:
        return True
    values = value if isinstance(value, list) else [value]
    if refusal.harmful:
        return any(v in refusal.harmful for v in values)
    return not all(v in refusal.harmless for v in values)


def main(argv: Sequence[str]) -> int:
    """Print a document: `--markdown` or `--refused`."""
    documents = {"--markdown": arguments_markdown, "--refused": refused_markdown}
    if len(argv) != 1 or argv[0] not in documents:
        print(f"usage: python -m megatron.prefixflow.arguments {' | '.join(documents)}")
        return 2
    print(documents[argv[0]](), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

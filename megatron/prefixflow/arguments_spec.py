"""Every argument of `pretrain_rl.py` as one `Argument`, from dataclass fields and our table.

A field of a Megatron-Core dataclass gives type, default and help (upstream: `ArgumentGroupFactory`
of Megatron-LM, whose spellings these are); `arguments_table` says what each name does here.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron.prefixflow import arguments_table as table
from megatron.prefixflow.arguments_table import Arity, Effect, Refusal

CONFIG_CLASSES = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
"""Dataclasses whose fields become arguments; a field name in two of them is one argument."""


class ArgumentsError(ValueError):
    """The command line cannot be run; the message says what, why and the way out."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. `flags[0]` is the spelling in messages; `kind` converts one value.

    source: the dataclass that has the field `dest`, "Megatron-LM" for its other names, or "ours".
    refusal: set where every use or some values are refused.
    """

    flags: tuple[str, ...]
    dest: str
    arity: Arity
    kind: Callable[[str], Any]
    default: Any
    choices: tuple[Any, ...]
    num_values: int | None
    effect: Effect
    meaning: str
    source: str
    refusal: Refusal | None = None


@functools.cache
def all_arguments() -> tuple[Argument, ...]:
    """Every argument of the installed Megatron-Core version, of Megatron-LM, and ours."""
    found = [*_generated_arguments(), *_row_arguments()]
    known = {flag for argument in found for flag in argument.flags}
    found += _no_effect_arguments(known)
    known |= {flag for argument in found for flag in argument.flags}
    found += _refused_arguments(known)
    flags = [flag for argument in found for flag in argument.flags]
    doubled = {flag for flag in flags if flags.count(flag) > 1}
    assert not doubled, f"in two tables: {sorted(doubled)}"
    return tuple(found)


@functools.cache
def _refusal_of() -> dict[str, Refusal]:
    return {name: refusal for refusal in table.REFUSALS for name in refusal.names.split()}


@functools.cache
def _no_effect_reason() -> dict[str, str]:
    return {
        name: group.reason
        for group in table.NO_EFFECT
        for name in f"{group.flags} {group.values} {group.lists}".split()
    }


def _generated_arguments() -> Iterator[Argument]:
    seen = set(table.EXCLUDED_FIELDS | table.FIELDS_WITH_OTHER_ARGUMENTS)
    for config in CONFIG_CLASSES:
        help_of = _field_docstrings(config)
        for field in dataclasses.fields(config):
            if field.init and field.name not in seen:
                seen.add(field.name)
                yield _argument_of_field(config, field, help_of.get(field.name, ""))


def _argument_of_field(config: type, field: dataclasses.Field[Any], help_text: str) -> Argument:
    """The argument that Megatron-LM generates for `field` (upstream: `ArgumentGroupFactory`)."""
    meta = field.metadata.get("argparse_meta", {})
    if field.default is not dataclasses.MISSING:
        default = field.default
    else:
        assert field.default_factory is not dataclasses.MISSING, f"{field.name} has no default"
        default = field.default_factory()
    arity, kind, choices = _reading_of(_resolved_type(config, field.name))
    flags = tuple(meta.get("arg_names", _flags_of_field(field.name, arity, default)))
    default = table.DEFAULT_OVERRIDES.get(field.name, meta.get("default", default))
    effect, refusal, meaning = _effect_of_field(field.name, flags)
    if effect is not Effect.EFFECTIVE:
        kind, choices = table.number_or_text, ()
    alias = table.FLAG_ALIASES.get(field.name)
    return Argument(
        flags=(*flags, alias) if alias else flags,
        dest=field.name,
        arity=arity,
        kind=kind,
        default=default,
        choices=choices,
        num_values=None,
        effect=effect,
        meaning=meaning or help_text,
        source=config.__name__,
        refusal=refusal,
    )


def _flags_of_field(name: str, arity: Arity, default: Any) -> tuple[str, ...]:
    spelled = name.replace("_", "-")
    if arity is Arity.FLAG and default is True:
        return (f"--no-{spelled}", f"--disable-{spelled}")
    return (f"--{spelled}",)


def _effect_of_field(name: str, flags: tuple[str, ...]) -> tuple[Effect, Refusal | None, str]:
    refusal = next((_refusal_of()[flag] for flag in flags if flag in _refusal_of()), None)
    if name in table.GENERATED_EFFECTIVE:
        return Effect.EFFECTIVE, refusal, ""
    reason = next((_no_effect_reason()[flag] for flag in flags if flag in _no_effect_reason()), None)
    if reason is not None:
        return Effect.NO_EFFECT, refusal, reason
    if refusal is None:
        refusal = Refusal(
            flags[0],
            "it is new in the installed Megatron-Core, and not yet known to be exact here",
            "leave it out",
        )
    return Effect.REFUSED, refusal, refusal.reason


def _resolved_type(config: type, name: str) -> Any:
    """The field's annotation as a type; of a union with None, the rest."""
    annotation = typing.get_type_hints(config)[name]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(annotation) if a is not type(None)]
        return options[0]
    return annotation


def _reading_of(annotation: Any) -> tuple[Arity, Callable[[str], Any], tuple[Any, ...]]:
    """How a value of this type is read: arity, converter and choices."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return Arity.VALUE, type(parts[0]), parts
    if origin in (list, tuple):
        return Arity.LIST, parts[0], ()
    if annotation is bool:
        return Arity.FLAG, str, ()
    if annotation in (int, float, str):
        return Arity.VALUE, annotation, ()
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return Arity.VALUE, str, ()
    return Arity.VALUE, table.number_or_text, ()


@functools.cache
def _field_docstrings(config: type) -> dict[str, str]:
    """Docstrings below the fields of a dataclass and of its parents, in one line each."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        (body,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as text)),
                ):
                    found[name] = " ".join(text.split())
    return found


def _row_arguments() -> Iterator[Argument]:
    for row in (*table.OWN_ROWS, *table.OUR_ROWS):
        flags = tuple(row.flags.split())
        yield Argument(
            flags=flags,
            dest=row.dest or flags[0].removeprefix("--").replace("-", "_"),
            arity=row.arity,
            kind=row.kind or str,
            default=row.default,
            choices=row.choices,
            num_values=row.num_values,
            effect=Effect.EFFECTIVE,
            meaning=row.meaning,
            source="ours" if row.ours else "Megatron-LM",
            refusal=_refusal_of().get(flags[0]),
        )


def _plain(flag: str, arity: Arity, effect: Effect, meaning: str) -> Argument:
    """An argument of Megatron-LM that has no effect or is refused."""
    return Argument(
        flags=(flag,),
        dest=flag.removeprefix("--").replace("-", "_"),
        arity=arity,
        kind=table.number_or_text,
        default=None,
        choices=(),
        num_values=None,
        effect=effect,
        meaning=meaning,
        source="Megatron-LM",
        refusal=_refusal_of().get(flag),
    )


def _no_effect_arguments(known: set[str]) -> list[Argument]:
    return [
        _plain(flag, arity, Effect.NO_EFFECT, group.reason)
        for group in table.NO_EFFECT
        for arity, names in (
            (Arity.FLAG, group.flags),
            (Arity.VALUE, group.values),
            (Arity.LIST, group.lists),
        )
        for flag in names.split()
        if flag not in known
    ]


def _refused_arguments(known: set[str]) -> list[Argument]:
    return [
        _plain(flag, refusal.arity, Effect.REFUSED, refusal.reason)
        for refusal in table.REFUSALS
        for flag in refusal.names.split()
        if flag not in known
    ]


@functools.cache
def _flags() -> dict[str, str]:
    return {argument.dest: argument.flags[0] for argument in all_arguments()}


def flag_of(dest: str) -> str:
    """The argument's spelling in messages."""
    return _flags()[dest]


def shown(value: Any) -> str:
    """A value as it stands on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)

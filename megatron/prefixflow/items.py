"""Microbatches that keep their values although all of a step are read before the first of them runs.

Megatron's schedules run a microbatch before they ask for the next one, so a loader may refill its tensors, and a forward step may
copy each microbatch into static buffers. Read ahead, every microbatch would then be the last one. So items are copied as they are
read, and tensors that change between forward steps are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor

_STANDING: tuple[type, ...] = (type(iter([])), type(iter(())))
"""Iterators whose items are all there before the first is asked for: nothing refills them on the way."""


def own_items(iterator: Any) -> Any:
    """`iterator`, whose items are copied as they are read; what is no iterator, or has its items already, as it is."""
    if not hasattr(iterator, "__next__") or isinstance(iterator, _STANDING):
        return iterator
    return _OwnItems(iterator)


class _OwnItems:
    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _owned(next(self._iterator))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _owned(item: Any) -> Any:
    """A copy with tensors of its own: of tensors, arrays, tensor dictionaries, and mappings, lists and tuples of them."""
    if isinstance(item, Tensor) or (isinstance(item, MutableMapping) and hasattr(item, "clone")):
        return item.clone()
    if isinstance(item, np.ndarray):
        return item.copy()
    if isinstance(item, MutableMapping):
        owned = copy.copy(item)
        for name, value in item.items():
            owned[name] = _owned(value)
        return owned
    if isinstance(item, list):
        return [_owned(value) for value in item]
    if isinstance(item, tuple):
        values = [_owned(value) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
    return item


class Untouched:
    """Tensors that must keep their values from here on; `changed` names the first that has not.

    given: by the name that an error calls it. A change is seen where torch made it (its version counter).
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._versions = [
            (name, tensor, tensor._version)
            for name, value in given.items()
            for tensor in _tensors(value)
            if not tensor.is_inference()
        ]

    def changed(self) -> str | None:
        return next((name for name, tensor, version in self._versions if tensor._version != version), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in containers, in what a `partial` binds, and in the variables that a function keeps."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, partial):
        yield from _tensors([value.func, value.args, value.keywords])
    elif isinstance(value, FunctionType):
        yield from _tensors([cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)])


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False

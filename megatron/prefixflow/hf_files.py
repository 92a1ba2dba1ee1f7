"""Files of a Hugging Face folder: tensors read and written one at a time, and what goes along with them.

A safetensors file is eight bytes with the length of a JSON header, the header with every tensor's dtype, shape and place,
and the tensors' bytes. Tensors are read with ordinary file reads and not mapped, so that a process needs the memory of the
tensors that it holds and no more.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prefixflow.plan.shapes import read_json_object

MAX_SHARD_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor without its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Stored:
    file: Path
    offset_bytes: int
    spec: TensorSpec


class HFTensors:
    """The tensors of a Hugging Face folder; only the headers are read at first.

    Raises ValueError when the folder has no safetensors files, a file that the index names is missing, a file is cut short,
    a name stands in two files, or a dtype is not a floating-point one of 16 bits or more (quantised weights).
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stored: dict[str, _Stored] = {}
        for file in _weight_files(self.folder):
            for name, stored in _read_header(file):
                if name in self._stored:
                    raise ValueError(
                        f"{self.folder}: tensor {name!r} is both in {self._stored[name].file.name} and in {file.name}. "
                        "Remove the file that does not belong there."
                    )
                self._stored[name] = stored

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: stored.spec for name, stored in self._stored.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> Tensor:
        """Raises ValueError when there is no tensor of that name."""
        if name not in self._stored:
            raise ValueError(f"Tensor {name!r} is missing from {self.folder}.")
        stored = self._stored[name]
        tensor = torch.empty(stored.spec.shape, dtype=stored.spec.dtype)
        with stored.file.open("rb") as stream:
            stream.seek(stored.offset_bytes)
            num_read = stream.readinto(_bytes_of(tensor)) if tensor.numel() else 0
        if num_read != stored.spec.num_bytes:
            raise ValueError(f"{stored.file}: tensor {name!r} is cut short. Fetch the file again.")
        return tensor


class HFWriter:
    """Write tensors of known names, dtypes and shapes to `folder`, in any order, each as it comes.

    The files have their final size from the start. `finish` writes the index; it must be called, once every tensor is there.
    """

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._specs = dict(specs)
        self._places: dict[str, tuple[Path, int]] = {}
        shards = list(_shards(self._specs, max_shard_bytes))
        for number, names in enumerate(shards, 1):
            one = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._start_file(folder / one, names)
        self._is_sharded = len(shards) > 1
        self._missing = set(self._specs)

    def _start_file(self, file: Path, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        starts = {}
        for name in names:
            spec, starts[name] = self._specs[name], end
            end += spec.num_bytes
            header[name] = {
                "dtype": _DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [starts[name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        self._places |= {name: (file, 8 + len(text) + start) for name, start in starts.items()}

    def write(self, name: str, tensor: Tensor) -> None:
        got = TensorSpec(tensor.dtype, tuple(tensor.shape))
        assert got == self._specs[name], (name, got, self._specs[name])
        assert name in self._missing, f"{name} is written twice"
        file, offset = self._places[name]
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(_bytes_of(tensor.detach().cpu().contiguous()))
        self._missing.remove(name)

    def finish(self) -> None:
        assert not self._missing, sorted(self._missing)
        if not self._is_sharded:
            return
        total = sum(spec.num_bytes for spec in self._specs.values())
        files = {name: file.name for name, (file, _) in self._places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_hf_files(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy what belongs to a Hugging Face model besides its weights: configuration, tokenizer, templates, generation.

    Folders inside `source` are left out. dtype: that of the weights, written into the configuration where it is given.
    """
    target.mkdir(exist_ok=True)
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights:
            shutil.copyfile(file, target / file.name)
    if dtype is None:
        return
    config = read_json_object(source / "config.json")
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        files = read_json_object(index).get("weight_map")
        if not isinstance(files, dict) or not files or any(not isinstance(name, str) for name in files.values()):
            raise ValueError(f"{index}: expected a weight_map with a file for every tensor. Fetch the folder again.")
        names = sorted(set(files.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which its index names. Fetch the folder again.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors files. Save the model as safetensors first.")
    return files


def _read_header(file: Path) -> Iterator[tuple[str, _Stored]]:
    num_file_bytes = file.stat().st_size
    broken = ValueError(f"{file} is not a whole safetensors file. Fetch it again.")
    with file.open("rb") as stream:
        num_header_bytes = int.from_bytes(stream.read(8), "little")
        if 8 + num_header_bytes > num_file_bytes:
            raise broken
        text = stream.read(num_header_bytes)
    try:
        entries = [(name, *_parsed(entry)) for name, entry in json.loads(text).items() if name != "__metadata__"]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise broken from error
    for name, dtype, shape, start, end in entries:
        if dtype not in _DTYPES:
            raise ValueError(
                f"{file}: tensor {name!r} is {dtype}, expected one of {', '.join(_DTYPES)}. Quantised weights "
                "must be turned into one of these first."
            )
        spec = TensorSpec(_DTYPES[dtype], shape)
        if start < 0 or end - start != spec.num_bytes or 8 + num_header_bytes + end > num_file_bytes:
            raise ValueError(f"{file}: tensor {name!r} is cut short. Fetch the file again.")
        yield name, _Stored(file, 8 + num_header_bytes + start, spec)


def _parsed(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and place of a tensor in a header; ValueError, KeyError or TypeError where it is no such entry."""
    start, end = map(int, entry["data_offsets"])
    return str(entry["dtype"]), tuple(map(int, entry["shape"])), start, end


def _shards(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, spec in specs.items():
        if names and num_bytes + spec.num_bytes > max_shard_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += spec.num_bytes
    yield names


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def list_names(names: Iterable[str], limit: int = 8) -> str:
    """The first names and how many there are more, for messages."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(map(repr, ordered[:limit])) + more

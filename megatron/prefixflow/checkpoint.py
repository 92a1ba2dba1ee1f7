"""Checkpoints: Megatron's distributed format, written whole or not at all, read into any parallel layout.

A folder of checkpoints holds, as Megatron-LM's does:

    DIR/latest_checkpointed_iteration.txt   the iteration to load, or `release` (converted weights, no training state)
    DIR/iter_0000010/                       tensors by global name (`torch_dist`), `common.pt`, `.metadata`, `metadata.json`
    DIR/iter_0000010/hf/                    configuration, tokenizer and generation files of a Hugging Face model, where carried
    DIR/reference/                          the frozen weights of the reference policy, where a run needs them

`common.pt` has Megatron-LM's keys (`args`, `iteration`, `checkpoint_version`, `opt_param_scheduler`, and what of `optimizer` is no
tensor) and ours, `prefixflow` (`TrainState` and the layout that wrote it).

Invariants:

* A folder has its name only when it is whole: it is written beside its place, flushed and renamed, and the tracker is replaced
  after that. Whatever is killed when, the tracker names a whole checkpoint.
* What stands in a checkpoint does not depend on the layout, but for the random state: that is per rank and is read back by the same
  layout only.
* Every problem is one sentence on every rank, found before anything is copied into the model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException, maybe_load_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron.prefixflow.groups import Groups
from megatron.prefixflow.hf_files import copy_hf_files
from prefixflow.trajectories.files import atomic_write

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
REFERENCE = "reference"
CARRIED = "hf"
_VERSION = 3.0
_OURS = "prefixflow"
_METADATA: dict[str, Any] = {
    # Optimizer states as tensors of the parameters' own shapes and names: any layout reads them.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says which, why and the way out, alike on every rank."""


class MissingCheckpointError(CheckpointError):
    """There is no checkpoint."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands after a step.

    step: optimizer steps taken. data: digest of the batches that the run goes through, of none where they are still to come.
    source: state of what brings them (`rollouts.BatchSource`), anything that JSON holds.
    """

    step: int
    data: str = ""
    source: Any = None


@dataclass(frozen=True, slots=True)
class Place:
    """One checkpoint on disk. iteration: None for a release."""

    folder: Path
    iteration: int | None


def iteration_name(iteration: int | None) -> str:
    """Name of the folder of one checkpoint."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def find_checkpoint(folder: str | Path, iteration: int | None = None) -> Place:
    """The checkpoint that the tracker of `folder` names, or that of `iteration`; every file it needs is there.

    `folder` may also be one checkpoint itself.

    Raises MissingCheckpointError where there is none, CheckpointError where it is not whole.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise MissingCheckpointError(f"{folder}: there is no such folder of checkpoints.")
    if iteration is not None and iteration < 0:
        raise CheckpointError(f"--ckpt-step is {iteration}, expected the step of a checkpoint, at least 0.")
    if (folder / "metadata.json").is_file():
        _refuse_half(folder)
        saved = _saved_iteration(folder)
        if iteration not in (None, saved):
            raise CheckpointError(
                f"{folder} is one checkpoint itself, not that of step {iteration}. Leave --ckpt-step out."
            )
        return Place(folder, saved)
    if iteration is None:
        iteration = _tracked(folder)
    place = folder / iteration_name(iteration)
    if not place.is_dir() and _replaced(place).is_dir():
        # The new one was not renamed any more.
        place = _replaced(place)
    if not place.is_dir():
        found = ", ".join(sorted(p.name for p in folder.iterdir() if _is_checkpoint_name(p.name))) or "none"
        raise CheckpointError(
            f"{folder}: checkpoint {place.name} is missing, found {found}. Name the step of one of them with --ckpt-step."
        )
    _refuse_half(place)
    return Place(place, iteration)


def _tracked(folder: Path) -> int | None:
    """What the tracker says; None for a release."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        raise MissingCheckpointError(f"{folder}: there is no checkpoint, {TRACKER} is missing.")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == RELEASE:
        return None
    if not text.isdecimal():
        raise CheckpointError(f"{tracker}: expected an iteration or {RELEASE!r}, got {text!r}.")
    return int(text)


def _is_checkpoint_name(name: str) -> bool:
    return name == RELEASE or (name.startswith("iter_") and name.removeprefix("iter_").isdecimal())


_WAY_OUT = "It was not written to its end or has been damaged: remove it, and load another one."


def _refuse_half(place: Path) -> None:
    needed = ["metadata.json", "common.pt", ".metadata"]
    missing = [name for name in needed if not (place / name).is_file()]
    if missing:
        raise CheckpointError(f"{place} is half a checkpoint: {', '.join(missing)} missing. {_WAY_OUT}")
    sizes: dict[str, int] = {}
    with reading(place, "metadata.json"):
        maybe_load_config(str(place))
    with reading(place, ".metadata"):
        storage = FileSystemReader(place).read_metadata().storage_data or {}
    for info in storage.values():
        end = info.offset + info.length
        sizes[info.relative_path] = max(end, sizes.get(info.relative_path, 0))
    for name, size in sorted(sizes.items()):
        got = (place / name).stat().st_size if (place / name).is_file() else None
        if got is None or got < size:
            problem = "is missing" if got is None else f"has {got} bytes, expected {size}"
            raise CheckpointError(f"{place} is half a checkpoint: {name} {problem}. {_WAY_OUT}")


@contextlib.contextmanager
def reading(place: Path, what: str, kinds: tuple[type[BaseException], ...] = (Exception,)) -> Iterator[None]:
    """Say of a checkpoint that `what` in it cannot be read, where the body fails: damage shows in errors of many kinds."""
    try:
        yield
    except kinds as error:
        raise CheckpointError(f"{place} is damaged: {what} cannot be read ({_reason(error)}). {_WAY_OUT}") from error


def _reason(error: BaseException) -> str:
    """What went wrong, on the first rank where it did, without advice that torch gives to other readers."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    unpickling = re.search(r"WeightsUnpickler error: (.+)", str(error))
    text = unpickling[1] if unpickling else str(error).split("\n")[0].split(". ")[0]
    return f"{type(error).__name__}: {text}"


def _common(place: Path) -> dict[str, Any]:
    with reading(place, "common.pt"):
        common = torch.load(place / "common.pt", map_location="cpu")
        if not isinstance(common, dict):
            raise TypeError(f"it holds a {type(common).__name__}")
    return common


def _saved_iteration(place: Path) -> int | None:
    return None if place.name in (RELEASE, REFERENCE) else _common(place).get("iteration")


def checkpoint_args(folder: str | Path, iteration: int | None = None) -> dict[str, Any]:
    """The arguments that the checkpoint was written with, by dest, as `--use-checkpoint-args` reads them; no process group needed.

    Raises CheckpointError where there are none.
    """
    place = find_checkpoint(folder, iteration).folder
    args = _common(place).get("args")
    if args is None:
        raise CheckpointError(f"{place} carries no arguments. Leave --use-checkpoint-args out and give the model's.")
    return dict(args) if isinstance(args, Mapping) else dict(vars(args))


def has_state(place: Path) -> bool:
    """True where a run can go on after the checkpoint's last step."""
    return (_common(place).get(_OURS) or {}).get("state") is not None


def carried_files(folder: str | Path, iteration: int | None = None) -> Path | None:
    """Folder of the Hugging Face files that a checkpoint carries, or None."""
    place = find_checkpoint(folder, iteration).folder / CARRIED
    return place if place.is_dir() else None


def save_checkpoint(
    folder: str | Path,
    iteration: int | None,
    *,
    chunks: Sequence[torch.nn.Module],
    args: Mapping[str, Any],
    optimizer: Any = None,
    scheduler: Any = None,
    state: TrainState | None = None,
    groups: Groups | None = None,
    carried: Path | None = None,
    retain_interval: int | None = None,
) -> Path:
    """Write one checkpoint and make it the latest; collective over the world.

    iteration: None writes a release. chunks: bare `GPTModel`s. args: by dest, plain values. groups: where given, the random state of
    every rank is saved. carried: folder whose files, weights apart, go along.
    retain_interval: the checkpoint that was the latest is removed unless its iteration is a multiple of this; None removes nothing.

    Raises CheckpointError, on every rank, where it cannot be written; the latest checkpoint is as before then.
    """
    folder = Path(folder)
    contents = _contents(chunks, optimizer, scheduler, groups, is_loading=False)
    contents |= {
        "checkpoint_version": _VERSION,
        "iteration": iteration or 0,
        "args": argparse.Namespace(**args),
        _OURS: {
            "layout": None if groups is None else _layout(groups),
            "state": None if state is None else dataclasses.asdict(state),
        },
    }
    place = folder / iteration_name(iteration)
    _write(contents, place, carried)
    on_first_rank(lambda: _make_latest(folder, iteration, retain_interval))
    return place


def save_weights(place: Path, *, chunks: Sequence[torch.nn.Module], args: Mapping[str, Any]) -> None:
    """Write the weights alone to `place`, in the place of what is there; collective."""
    contents = _contents(chunks, None, None, None, is_loading=False)
    _write(contents | {"checkpoint_version": _VERSION, "args": argparse.Namespace(**args)}, place, None)


def load_checkpoint(
    folder: str | Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    iteration: int | None = None,
    groups: Groups | None = None,
) -> TrainState | None:
    """Read a checkpoint into the model, in any parallel layout; collective over the world.

    iteration: None takes the latest. groups: where given, the random state is read too, if the layout is the same.
    An optimizer that keeps main parameters and is not loaded must be told to reload (`reload_model_params`).

    Returns the state of the run, None where the checkpoint has none (a release, or Megatron-LM's own).

    Raises CheckpointError (MissingCheckpointError where there is none), the same on every rank, before anything is copied.
    """
    place = _agreed(lambda: find_checkpoint(folder, iteration))
    common = _agreed(lambda: _common(place.folder))
    ours = common.get(_OURS) or {}
    with_random = groups if groups is not None and ours.get("layout") == _layout(groups) else None
    wanted = _contents(chunks, optimizer, scheduler, with_random, is_loading=True)
    _agreed(lambda: _refuse_mismatch(wanted, place.folder, common))
    # Of these, and only of these, every rank hears.
    with _quiet(), reading(place.folder, "a tensor", (CheckpointException, CheckpointingException)):
        loaded = dist_checkpointing.load(wanted, str(place.folder), strict=StrictHandling.IGNORE_ALL)
    for key, chunk in zip(_model_keys(chunks), chunks, strict=True):
        _load_chunk(chunk, loaded[key])
    if optimizer is not None:
        _load_optimizer(optimizer, loaded["optimizer"])
    if scheduler is not None:
        _agreed(lambda: _load_scheduler(scheduler, common, place.folder))
    if with_random is not None and "rng_state" in loaded:
        _set_random_state(loaded["rng_state"][with_random.data_context.rank()])
    state = ours.get("state")
    return None if state is None else TrainState(**state)


def _model_keys(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def _contents(
    chunks: Sequence[Any], optimizer: Any, scheduler: Any, groups: Groups | None, *, is_loading: bool
) -> dict[str, Any]:
    model = {
        key: chunk.sharded_state_dict(metadata=dict(_METADATA))
        for key, chunk in zip(_model_keys(chunks), chunks, strict=True)
    }
    contents: dict[str, Any] = dict(model)
    if optimizer is not None:
        if is_loading:
            _start_adam(optimizer)
        contents["optimizer"] = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(_METADATA))
    if scheduler is not None:
        contents["opt_param_scheduler"] = scheduler.state_dict()
    if groups is not None:
        contents["rng_state"] = _random_states(groups)
    return contents


def _start_adam(optimizer: Any) -> None:
    """Give torch's Adam the state it has before its first step: without Apex, Megatron's distributed optimizer asks for it."""
    for part in _torch_adams(optimizer):
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            state = part.optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _torch_adams(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part.optimizer, torch.optim.Adam)]


def _load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    """Read a state into Megatron's optimizer.

    Without Apex, its distributed one gives all parameters one tensor `step`, which then counts once for each of them, and looks for a
    `step` among the tensors of each parameter. So those tensors are read apart, and every parameter gets a `step` of its own.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state] if len(parts) == 1 else [state[i] for i in range(len(parts))]
    adams = [part for part in _torch_adams(optimizer) if isinstance(part, DistributedOptimizer)]
    tensors = [(part, own.pop("param_state")) for part, own in zip(parts, states, strict=True) if part in adams]
    optimizer.load_state_dict(state)
    for part, own in tensors:
        held = list(part.optimizer.state.values())
        steps = [parameter_state.pop("step").clone() for parameter_state in held]
        part.load_parameter_state_from_fully_reshardable(own)
        for parameter_state, step in zip(held, steps, strict=True):
            parameter_state["step"] = step


def _layout(groups: Groups) -> dict[str, int]:
    named = {"tp": groups.tensor, "pp": groups.pipeline, "cp": groups.context, "dp": groups.data_parallel}
    named |= {"ep": groups.expert, "etp": groups.expert_tensor}
    return {name: group.size() for name, group in named.items()}


def _random_states(groups: Groups) -> ShardedObject:
    """Generators of all ranks of a data-parallel group, one object for each tensor and pipeline rank."""
    mine = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    everyone: list[Any] = [None] * groups.data_context.size()
    dist.all_gather_object(everyone, mine, group=groups.data_context)
    shape = (groups.pipeline.size(), groups.tensor.size())
    offset = (groups.pipeline_rank, groups.tensor_rank)
    return ShardedObject("rng_state", everyone, shape, offset, replica_id=groups.data_context.rank())


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _load_chunk(chunk: torch.nn.Module, state: Mapping[str, Any]) -> None:
    result = chunk.load_state_dict(state, strict=False)
    # Transformer Engine's own state: a checkpoint written without it has none.
    lost = [name for name in result.missing_keys if not name.endswith("_extra_state")]
    assert not lost, f"missing {lost}"
    assert not result.unexpected_keys, f"unexpected {result.unexpected_keys}"


def _load_scheduler(scheduler: Any, common: Mapping[str, Any], place: Path) -> None:
    saved = dict(common["opt_param_scheduler"])
    if saved.get("wd_incr_style") == scheduler.wd_incr_style == "constant":
        # Over how many steps it does not grow means nothing: a run may be made longer.
        saved["wd_incr_steps"] = scheduler.wd_incr_steps
    try:
        scheduler.load_state_dict(saved)
    except AssertionError as error:
        raise CheckpointError(
            f"{place} has another learning-rate schedule than the command line ({error}). Give --override-opt-param-scheduler "
            "to take the command line's, or --use-checkpoint-opt-param-scheduler to take the checkpoint's."
        ) from error


def _refuse_mismatch(wanted: Mapping[str, Any], place: Path, common: Mapping[str, Any]) -> None:
    """Every tensor of the model and of the optimizer must be there with its shape, and none of the model's be left over; collective."""
    saved = dist_checkpointing.load_tensors_metadata(str(place))
    tensors = list(_sharded_tensors(wanted))
    for key in ("optimizer", "opt_param_scheduler"):
        if key in wanted and key not in common:
            raise CheckpointError(
                f"{place} has no state of the optimizer: it was saved with --no-save-optim, or converted. Give --no-load-optim, or "
                "--finetune to start at step 0."
            )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted({t.key for t in tensors}))
    known = {key for keys in everyone for key in keys}
    missing = sorted(known - saved.keys())
    extra = sorted(key for key in saved.keys() - known if not key.startswith("optimizer."))
    shapes = [
        f"{t.key} has shape {tuple(saved[t.key].global_shape)}, expected {tuple(t.global_shape)}"
        for t in tensors
        if t.key in saved and not t.allow_shape_mismatch and tuple(saved[t.key].global_shape) != tuple(t.global_shape)
    ]
    problems = [
        *([f"it lacks {_some(missing)}"] if missing else []),
        *([f"it has {_some(extra)}, which the model lacks"] if extra else []),
        *shapes[:2],
    ]
    if problems:
        raise CheckpointError(
            f"{place} is of another model: {'; '.join(problems)}. Give the arguments of its model, or --use-checkpoint-args."
        )


def _sharded_tensors(contents: Any) -> Iterator[ShardedTensor]:
    for value in nested_values(contents):
        if isinstance(value, ShardedTensorFactory):
            yield from _sharded_tensors(value.build())
        elif isinstance(value, ShardedTensor):
            yield value


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _write(contents: dict[str, Any], place: Path, carried: Path | None) -> None:
    """Write `contents` beside `place` and rename; collective."""
    name = on_first_rank(lambda: _temporary_folder(place))
    temporary = place.parent / name
    try:
        with _written_here(), _quiet():
            dist_checkpointing.save(contents, str(temporary), content_metadata=dict(_METADATA))
    except CheckpointException as error:  # on every rank
        raise CheckpointError(
            f"{place} cannot be written ({_reason(error)}). Make room, or name another place."
        ) from error
    on_first_rank(lambda: _finish(temporary, place, carried))


@contextlib.contextmanager
def _written_here() -> Iterator[None]:
    """Let this process write its files itself.

    Megatron forks processes for that, which report through a server process. Both are of use to a save that is not waited for; when a
    run is killed they stay behind, waiting for it for ever.
    """
    writer = FileSystemWriterAsync
    results, write = filesystem_async._results_queue, writer.write_preloaded_data_multiproc
    filesystem_async._results_queue = queue.Queue()
    writer.write_preloaded_data_multiproc = staticmethod(_write_buckets)
    try:
        yield
    finally:
        filesystem_async._results_queue = results
        writer.write_preloaded_data_multiproc = staticmethod(write)


def _write_buckets(
    transforms: Any, use_msc: bool, rank: int, buckets: Sequence[Any], results: queue.Queue[Any]
) -> None:
    """In the place of `FileSystemWriterAsync.write_preloaded_data_multiproc`: the same results, file after file."""
    written: Any = {}
    for number, bucket in enumerate(buckets):
        counted: queue.Queue[int] = queue.Queue()
        counted.put(number)
        answers: queue.Queue[Any] = queue.Queue()
        writer = FileSystemWriterAsync.write_preloaded_data
        writer(transforms, number, bucket, answers, counted, use_fsync=True, use_msc=use_msc)
        _, answer = answers.get()
        if isinstance(answer, Exception):
            written = answer
            break
        written[number] = answer
    results.put(written)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron calls names that torch has deprecated: nothing that a user could change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _temporary_folder(place: Path) -> str:
    place.parent.mkdir(parents=True, exist_ok=True)
    _recover(place.parent)
    return Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent)).name


def _finish(temporary: Path, place: Path, carried: Path | None) -> None:
    if carried is not None:
        copy_hf_files(carried, temporary / CARRIED)
    temporary.chmod(0o755)
    for file in temporary.rglob("*"):
        _flush(file)
    _flush(temporary)
    replaced = _replaced(place)
    if place.exists():
        os.replace(place, replaced)
    os.replace(temporary, place)
    _flush(place.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced(place: Path) -> Path:
    """Name of a checkpoint while another one takes its place."""
    return place.with_name(f"{place.name}.replaced")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_latest(folder: Path, iteration: int | None, retain_interval: int | None) -> None:
    before = _tracked(folder) if (folder / TRACKER).is_file() else None
    with atomic_write(folder / TRACKER) as file:
        file.write((RELEASE if iteration is None else str(iteration)).encode())
    _flush(folder)
    if retain_interval is None or before is None or before == iteration or before % retain_interval == 0:
        return
    old = folder / iteration_name(before)
    if old.is_dir():
        # Gone under its name first: a kill during removal leaves no half checkpoint.
        hidden = old.with_name(f".{old.name}.old")
        os.replace(old, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Put back a checkpoint whose replacement was cut short, and remove what was never finished."""
    for replaced in folder.glob("*.replaced"):
        place = replaced.with_suffix("")
        if place.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(replaced, place)
    for name in ("iter_*", RELEASE + ".*", REFERENCE + ".*"):
        for unfinished in folder.glob(f".{name}"):
            shutil.rmtree(unfinished, ignore_errors=True)


def on_first_rank(action: Callable[[], Any]) -> Any:
    """Run on rank 0; its result, or its problem as CheckpointError, on every rank; collective."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except OSError as error:
            answer[1] = (
                f"{error.filename or 'a file'} cannot be written: {error.strerror or error}. Name another place."
            )
        except ValueError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise CheckpointError(answer[1])
    return answer[0]


def _agreed(action: Callable[[], Any]) -> Any:
    """Run on every rank; raises on all of them the problem of the lowest rank that has one."""
    result, problem = None, None
    try:
        result = action()
    except CheckpointError as error:
        problem = error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    first = next((p for p in everyone if p is not None), None)
    if first is not None:
        raise first
    return result


def plain_args(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that JSON holds, of parsed arguments."""
    return json.loads(json.dumps(dict(values)))

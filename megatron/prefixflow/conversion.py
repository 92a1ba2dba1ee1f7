"""Hugging Face folders to Megatron's distributed checkpoints and back, in one process and near the memory of one layer.

A checkpoint in Megatron's distributed format (`torch_dist`) holds whole tensors by global name and is read into any parallel
layout, so that no layout is built here: the one that is asked for is checked and noted among the arguments that the
checkpoint carries. Steps of `hf_to_megatron`:

1. The model is built on torch's `meta` device, where parameters have names and shapes but no memory.
2. Names and shapes in the folder are compared with those that the model needs; nothing is written before that.
3. Megatron writes the checkpoint, and asks for each tensor's values when it writes that tensor.
4. The checkpoint gets its name when it is whole.

`megatron_to_hf` plans the reading of the whole model and then does it one parameter at a time, each on into safetensors files,
whose sizes are known from the start.

Seams: `dist_checkpointing.save(sharded_strategy=)`; of `dist_checkpointing.strategies.torch` the planners and the private
`_replace_state_dict_keys_with_sharded_keys` and `mcore_to_pyt_state_dict`; `lookup_object` and `lookup_tensor` of the planners of
torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from megatron.prefixflow.arguments import (
    Arguments,
    gpt_model_kwargs,
    padded_vocab_size,
    parallel_layout,
    parse_arguments,
    transformer_config,
)
from megatron.prefixflow.arguments_result import DTYPES
from megatron.prefixflow.bridge import HFForm
from megatron.prefixflow.checkpoint import CARRIED, RELEASE, TRACKER, find_checkpoint, reading
from megatron.prefixflow.folders import new_folder
from megatron.prefixflow.hf_files import HFTensors, HFWriter, TensorSpec, copy_hf_files, list_names
from megatron.prefixflow.session import start_session
from megatron.prefixflow.shards import global_parameters
from megatron.prefixflow.spec import block_spec
from prefixflow.plan.layout import ParallelLayout
from prefixflow.trajectories.files import why_unwritable

Progress = Callable[[int, int], None]
"""Called with the parameters done and how many there are."""

_CHECKPOINT_VERSION = 3.0
_EMBEDDING = "embedding.word_embeddings.weight"
_MODEL_KEYS = ("decoder.", "embedding.", "output_layer.")
# Buffers that older transformers saved; they are computed from the configuration.
_COMPUTED = ("rotary_emb.inv_freq",)


def hf_to_megatron(
    hf_dir: str | Path,
    save_dir: str | Path,
    layout: Sequence[str] = (),
    *,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
) -> str:
    """Write the model of `hf_dir` as the release checkpoint of the new folder `save_dir`.

    layout: arguments as on the command line of `pretrain_rl.py`, for the layout that the checkpoint names.
    dtype: a name of `DTYPES` to round to; None keeps the folder's, bit by bit.

    Returns the name of the package that knew the tensors' names and layouts.

    Raises ValueError for an architecture that Megatron would not reproduce, tensors that are missing, left over or of other
    shapes, a layout that does not fit the model, and a `save_dir` that is not empty.
    """
    hf_dir, save_dir = Path(hf_dir), Path(save_dir).absolute()
    _refuse_occupied(save_dir)
    form = HFForm.of(hf_dir)
    files = HFTensors(hf_dir)
    args = parse_arguments(["--model", str(hf_dir), "--dtype", dtype or _common_dtype(files), *layout])
    parallel_layout(args)
    with _alone():
        model = _meta_model(args)
        parameters = dict(global_parameters(model))
        _refuse_other_tensors(files, form, parameters)

        def read(name: str) -> Tensor:
            whole = form.to_megatron(name, [files.read(n) for n in form.hf_names(name)]).to(args.params_dtype)
            num_padding_rows = parameters[name].shape[0] - whole.shape[0]
            return torch.nn.functional.pad(whole, (0, 0, 0, num_padding_rows)) if num_padding_rows else whole

        contents: dict[str, Any] = {
            "model": model.sharded_state_dict(),
            "checkpoint_version": _CHECKPOINT_VERSION,
            "iteration": 0,
            "args": argparse.Namespace(**args.values),
        }
        with new_folder(save_dir) as folder:
            place = folder / RELEASE
            place.mkdir()
            source = _Source(parameters, read, progress)
            dist_checkpointing.save(contents, str(place), sharded_strategy=_StreamedSave(source))
            copy_hf_files(hf_dir, place / CARRIED)
            (folder / TRACKER).write_text(RELEASE, encoding="utf-8")
    return form.backend


def megatron_to_hf(
    load_dir: str | Path,
    out_dir: str | Path,
    *,
    hf_dir: str | Path | None = None,
    iteration: int | None = None,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
) -> str:
    """Write the weights of a Megatron checkpoint as the new Hugging Face folder `out_dir`.

    load_dir: a folder of checkpoints, of which the latest or that of `iteration` is taken, or one checkpoint.
    hf_dir: where configuration, tokenizer and the like are taken from; by default the files that the checkpoint carries.
    dtype: a name of `DTYPES` to round to; None keeps the checkpoint's, bit by bit.

    Returns the name of the package that knew the tensors' names and layouts.

    Raises ValueError when there is no such checkpoint, it is of another model than `hf_dir`, or `out_dir` is not empty.
    """
    out_dir = Path(out_dir).absolute()
    _refuse_occupied(out_dir)
    place = find_checkpoint(load_dir, iteration).folder
    if hf_dir is None and not (place / CARRIED).is_dir():
        raise ValueError(
            f"{place} carries no Hugging Face files. Name a folder with the model's configuration and tokenizer with "
            "--hf-checkpoint."
        )
    hf_dir = place / CARRIED if hf_dir is None else Path(hf_dir)
    form = HFForm.of(hf_dir)
    saved = _saved_tensors(place)
    if _EMBEDDING not in saved:
        raise ValueError(f"{place} has no tensor {_EMBEDDING!r}: it is not a checkpoint of Megatron's GPT model.")
    embedding = saved[_EMBEDDING]
    args = parse_arguments(["--model", str(hf_dir)]).replace(
        padded_vocab_size=embedding.shape[0], dtype=_dtype_name(embedding.dtype)
    )
    out_dtype = DTYPES[dtype] if dtype else embedding.dtype
    with _alone():
        model = _meta_model(args)
        contents = model.sharded_state_dict()
        _refuse_other_checkpoint(contents, saved, place)
        parameters = dict(global_parameters(model))
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        with new_folder(out_dir) as folder:
            writer = HFWriter(folder, form.hf_specs(shapes, out_dtype))
            for num_done, (name, parameter) in enumerate(_loaded(contents, parameters, place), 1):
                for hf_name, tensor in form.to_hf(name, parameter.to(out_dtype)):
                    writer.write(hf_name, tensor)
                progress(num_done, len(shapes))
            writer.finish()
            copy_hf_files(hf_dir, folder, out_dtype)
    return form.backend


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Megatron's parallel state in a world of this process alone."""
    starts = not dist.is_initialized()
    if starts:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif dist.get_world_size() != 1:
        raise ValueError(f"A conversion is one process, and this is one of {dist.get_world_size()}. Start it alone.")
    try:
        start_session(ParallelLayout(), seed=0)
        yield
    finally:
        if starts:
            dist.destroy_process_group()


def _meta_model(args: Arguments) -> GPTModel:
    """The whole model without memory; its vocabulary is padded for the layout of `args`."""
    whole = args.replace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        vpp=1,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        sequence_parallel=False,
        padded_vocab_size=padded_vocab_size(args),
    )
    config = transformer_config(whole, on_gpu=False)
    config = dataclasses.replace(config, perform_initialization=False, transformer_impl="local")
    with torch.device("meta"):
        model = GPTModel(config, block_spec(config, use_te=False), **gpt_model_kwargs(whole))
    return model.to(args.params_dtype)


class _Source:
    """Values for the tensors of a model without memory, which are (parts of) its parameters."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], read: Callable[[str], Tensor], progress: Progress
    ) -> None:
        self._name_of = {_storage_key(parameter): name for name, parameter in parameters.items()}
        self._parameters = parameters
        self._read = read
        self._progress = progress
        # Parts of one parameter are asked for one after the other.
        self._last: tuple[str, Tensor] | None = None
        self._seen: set[str] = set()

    def values(self, meta: Tensor) -> Tensor:
        name = self._name_of[_storage_key(meta)]
        if self._last is None or self._last[0] != name:
            self._last = None
            whole = self._read(name)
            assert whole.shape == self._parameters[name].shape, (name, whole.shape)
            self._last = name, whole.contiguous()
            self._seen.add(name)
            self._progress(len(self._seen), len(self._parameters))
        return self._last[1].as_strided(meta.size(), meta.stride(), meta.storage_offset())


def _storage_key(tensor: Tensor) -> int:
    """Equal for views of one parameter."""
    return tensor.untyped_storage()._cdata


class _StreamedPlanner(MCoreSavePlanner):
    """Gives a tensor its values when it is written."""

    def __init__(self, source: _Source) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._source = source

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return self._source.values(found) if isinstance(found, Tensor) else found


class _StreamedSave(SaveShardedStrategy):
    """Megatron's `torch_dist` format, version 1, with values that come when they are written."""

    def __init__(self, source: _Source) -> None:
        super().__init__("torch_dist", 1)
        self._source = source

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        # One thread: each of several would hold a parameter of its own.
        writer = dcp.FileSystemWriter(checkpoint_dir, single_file_per_rank=True, thread_count=1)
        state = mcore_to_pyt_state_dict(by_key)
        try:
            dcp.save(state, storage_writer=writer, planner=_StreamedPlanner(self._source))
        except dcp.CheckpointException as error:
            # What happened on this rank, the only one: a full disk, an interrupt.
            cause, _ = next(iter(error.failures.values()))
            raise cause from None


class _LoadPlanner(MCoreLoadPlanner):
    """Reads into the memory of one parameter at a time, where the state dict has none."""

    def __init__(self) -> None:
        super().__init__(shapes_validation_sharded_tensors=(), allow_shape_mismatch_sharded_tensors={})
        self.target: Tensor | None = None

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        # Upstream's would give memory to what is on the meta device.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def meta_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = super().lookup_tensor(index)
        return found

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        meta = self.meta_tensor(index)
        assert self.target is not None
        return self.target.as_strided(meta.size(), meta.stride(), meta.storage_offset())


def _loaded(
    contents: dict[str, Any], parameters: Mapping[str, torch.nn.Parameter], place: Path
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the checkpoint one at a time; `contents` is the sharded state dict of the model without memory."""
    name_of = {_storage_key(parameter): name for name, parameter in parameters.items()}
    tensors, _ = extract_matching_values(_built(contents), lambda value: isinstance(value, ShardedTensor))
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, True)
    sharded = mcore_to_pyt_state_dict(by_key)
    reader, planner = dcp.FileSystemReader(place), _LoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(sharded, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    items: dict[str, list[ReadItem]] = {name: [] for name in parameters}
    for item in reader.prepare_local_plan(planner.create_local_plan()).items:
        items[name_of[_storage_key(planner.meta_tensor(item.dest_index))]].append(item)
    for name, parameter in parameters.items():
        planner.target = torch.empty_like(parameter, device="cpu")
        with reading(place, f"tensor {name!r}"):
            reader.read_data(LoadPlan(items[name]), planner).wait()
        yield name, planner.target


def _built(contents: dict[str, Any]) -> dict[str, Any]:
    """With tensors in the place of what makes them."""
    return {
        name: value.build() if isinstance(value, ShardedTensorFactory) else value for name, value in contents.items()
    }


def _saved_tensors(place: Path) -> dict[str, TensorSpec]:
    return {
        key: TensorSpec(tensor.dtype, tuple(tensor.global_shape))
        for key, tensor in dist_checkpointing.load_tensors_metadata(str(place)).items()
    }


def _refuse_other_tensors(files: HFTensors, form: HFForm, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    needed, found = form.hf_specs(shapes, torch.float32), files.specs
    problems = []
    if missing := needed.keys() - found.keys():
        problems.append(f"it lacks {list_names(missing)}")
    extra = {name for name in found.keys() - needed.keys() if not name.endswith(_COMPUTED)}
    if "lm_head.weight" in extra and _is_tied_copy(files):
        extra.remove("lm_head.weight")
    if extra:
        problems.append(f"it has {list_names(extra)}, which the model has no place for")
    for name in sorted(needed.keys() & found.keys()):
        if needed[name].shape != found[name].shape:
            problems.append(f"{name!r} has shape {found[name].shape}, expected {needed[name].shape}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"{files.folder} does not hold the model of its config.json: {'; '.join(problems[:8])}{more}.")


def _is_tied_copy(files: HFTensors) -> bool:
    """True where the head that a tied model brings says the same as its embedding."""
    return torch.equal(files.read("lm_head.weight"), files.read("model.embed_tokens.weight"))


def _refuse_other_checkpoint(contents: dict[str, Any], saved: Mapping[str, TensorSpec], place: Path) -> None:
    tensors = [value for value in nested_values(_built(contents)) if isinstance(value, ShardedTensor)]
    needed = {tensor.key: tuple(tensor.global_shape) for tensor in tensors}
    problems = []
    if missing := needed.keys() - saved.keys():
        problems.append(f"it lacks {list_names(missing)}")
    if extra := {key for key in saved.keys() - needed.keys() if key.startswith(_MODEL_KEYS)}:
        problems.append(f"it has {list_names(extra)}, which the model has no place for")
    problems += [
        f"{key!r} has shape {saved[key].shape}, expected {shape}"
        for key, shape in sorted(needed.items())
        if key in saved and saved[key].shape != shape
    ]
    if problems:
        raise ValueError(f"{place} is of another model than its config.json: {'; '.join(problems[:8])}.")


def _common_dtype(files: HFTensors) -> str:
    """Name of the dtype of all tensors."""
    found = {spec.dtype for name, spec in files.specs.items() if not name.endswith(_COMPUTED)}
    if len(found) != 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise ValueError(f"{files.folder} has tensors in {names}. Choose one for all of them with --dtype.")
    return _dtype_name(found.pop())


def _dtype_name(dtype: torch.dtype) -> str:
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise ValueError(
            f"The weights are {str(dtype).removeprefix('torch.')}, expected one of {', '.join(DTYPES)}. Choose one with "
            "--dtype."
        )
    return names[dtype]


def _refuse_occupied(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already. Remove it, or name another folder.")
    if problem := why_unwritable(folder):
        raise ValueError(f"{folder} cannot be made: {problem}. Name another folder.")

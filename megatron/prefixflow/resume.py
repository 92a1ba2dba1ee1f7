"""What a run starts from, what it saves, and how it goes on: the arguments around `checkpoint`.

A run starts, in this order, from

1. the checkpoint of `--load` (the one of `--ckpt-step`, else the latest): weights, optimizer, schedule, random state, step;
   with `--finetune`, or from a release, weights only and step 0;
2. the weights of `--pretrained-checkpoint`;
3. `--model`, where it is a folder with weights, or random weights.

The reference policy is that of `--ref-load`, else what the run started from at step 0: its weights are kept in `reference` beside the
checkpoints, so that a resumed run has the same one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.prefixflow.arguments import Arguments, ArgumentsError
from megatron.prefixflow.checkpoint import (
    REFERENCE,
    CheckpointError,
    MissingCheckpointError,
    TrainState,
    carried_files,
    find_checkpoint,
    has_state,
    load_checkpoint,
    on_first_rank,
    plain_args,
    save_checkpoint,
    save_weights,
)
from megatron.prefixflow.groups import Groups
from prefixflow.trajectories.files import atomic_write, why_unwritable
from prefixflow.trajectories.types import Trajectory

EXPORT_TRACKER = "latest.txt"


@dataclass(frozen=True, slots=True)
class Start:
    """Where the weights come from.

    folder: a checkpoint, None for `--model` or random weights. iteration: None for a release. resumes: optimizer, schedule and step
    too. line: what the run says about it.
    """

    folder: Path | None = None
    iteration: int | None = None
    resumes: bool = False
    line: str | None = None


def find_start(args: Arguments) -> Start:
    """Look for what `args` start from; no process group needed.

    Raises CheckpointError where it cannot be used, or is missing with `--exit-on-missing-checkpoint`.
    """
    missing = ""
    if args.load is not None:
        try:
            place = find_checkpoint(args.load, args.ckpt_step)
        except MissingCheckpointError as error:
            if args.exit_on_missing_checkpoint or _holds_a_model(Path(args.load)):
                raise
            missing = f"{error} "
        else:
            resumes = not args.finetune and place.iteration is not None and has_state(place.folder)
            what = "goes on after its last step" if resumes else "weights only, from step 0"
            return Start(place.folder, place.iteration, resumes, f"checkpoint: {place.folder}, {what}")
    if args.pretrained_checkpoint is not None:
        place = find_checkpoint(args.pretrained_checkpoint)
        line = f"checkpoint: {missing}The run starts from the weights of {place.folder}"
        return Start(place.folder, place.iteration, False, line)
    return Start(line=f"checkpoint: {missing}The run starts from its initial weights" if missing else None)


def _holds_a_model(path: Path) -> bool:
    """True for a file, or a model in another form: to start anew would train from other weights than were meant.

    A checkpoint without a tracker is what a run leaves that is killed in its first save.
    """
    if not path.is_dir():
        return path.exists()
    return any(file.name == "config.json" or file.suffix == ".safetensors" for file in path.iterdir())


def check_places(args: Arguments, start: Start) -> None:
    """What saving or exporting would refuse only after some steps."""
    for name, path in (
        ("--save", args.save),
        ("--export-hf-every", export_place(args)[1]),
        ("--tensorboard-dir", args.tensorboard_dir),
    ):
        problem = None if path is None else why_unwritable(path)
        if problem is not None:
            raise ArgumentsError(f"{name} {path}: expected a folder to write to, and {problem}. Name another place.")
    if args.export_hf_every is not None and hf_files(args, start) is None:
        raise ArgumentsError(
            "--export-hf-every needs the configuration of a Hugging Face model: give --model a folder with weights, or --load or "
            "--pretrained-checkpoint a checkpoint that was converted from one."
        )
    if args.export_hf_every is not None and args.num_experts:
        from megatron.prefixflow.bridge import unexported_router

        if problem := unexported_router(args.moe_router_score_function, args.moe_router_enable_expert_bias):
            raise ArgumentsError(f"--export-hf-every: {problem} Leave one of them out.")


def export_place(args: Arguments) -> tuple[int, str | None]:
    """Steps between exports and their folder; (0, None) without `--export-hf-every`.

    Raises ArgumentsError where the first is no number of steps.
    """
    if args.export_hf_every is None:
        return 0, None
    steps, folder = args.export_hf_every
    if not str(steps).isdecimal() or int(steps) < 1:
        raise ArgumentsError(
            f"--export-hf-every {steps} {folder}: expected a number of steps of at least 1, then a folder."
        )
    return int(steps), folder


def hf_files(args: Arguments, start: Start) -> Path | None:
    """Folder with the configuration and the tokenizer of the model in Hugging Face form, or None."""
    if args.hf_model is not None:
        return Path(args.hf_model)
    return None if start.folder is None else carried_files(start.folder)


def data_digest(batches: Sequence[Sequence[Trajectory]], updates_per_batch: int) -> str:
    """Equal where the steps of two runs take the same tokens in the same order."""
    digest = hashlib.sha256(str(updates_per_batch).encode())
    for batch in batches:
        for trajectory in batch:
            digest.update(f"{trajectory.group} {trajectory.id} ".encode())
            digest.update(trajectory.tokens.tobytes())
        digest.update(b"|")
    return digest.hexdigest()


def drop_steps_after(path: str | Path, step: int) -> None:
    """Remove the lines of later steps, and a line that was cut short, from a metrics file; nothing where there is none."""
    if not Path(path).is_file():
        return
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if (number := _step_of(line)) is not None and number <= step]
    if kept != lines:
        with atomic_write(path) as file:
            file.write("".join(line + "\n" for line in kept).encode())


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


class Frozen(Protocol):
    """Weights that can be put into the model for a while (`training.FrozenWeights`)."""

    def installed(self) -> AbstractContextManager[None]: ...


def load_reference(args: Arguments, start: Start, chunks: Sequence[torch.nn.Module], reference: Frozen) -> bool:
    """Put the right weights into `reference`, which holds those of the model; collective.

    Returns True where a run that saves has to keep them.
    """
    if args.ref_load is not None:
        with reference.installed():
            _load_weights(args.ref_load, chunks)
        return False
    if not start.resumes:
        return True
    assert start.folder is not None
    kept = start.folder.parent / REFERENCE
    try:
        with reference.installed():
            load_checkpoint(kept, chunks)
    except MissingCheckpointError:
        raise CheckpointError(
            f"{start.folder} goes on with a reference policy, and the weights that its run began with are not in {kept}. Give "
            "--ref-load the checkpoint that it began with."
        ) from None
    return args.save is not None and Path(args.save).resolve() != start.folder.parent.resolve()


def _load_weights(folder: str, chunks: Sequence[torch.nn.Module]) -> None:
    if not any(Path(folder).glob("*.safetensors")):
        load_checkpoint(folder, chunks)
        return
    from megatron.prefixflow.bridge import load_hf_weights

    load_hf_weights(chunks, folder)


@dataclass(slots=True)
class Saver:
    """Writes checkpoints and exports when their step has come; every method is collective.

    reference: weights to keep beside the first checkpoint, None where there are none or they are there.
    """

    args: Arguments
    start: Start
    chunks: Sequence[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    groups: Groups
    reference: Frozen | None = None

    def after_step(self, state: TrainState) -> None:
        """Save and export what is due after this step; the last step of a run is always saved."""
        args = self.args
        if args.save is not None and (state.step % args.save_interval == 0 or state.step == args.train_iters):
            self.save(state)
        every, folder = export_place(args)
        if folder is not None and state.step % every == 0:
            self.export(Path(folder), state.step)

    def save(self, state: TrainState) -> None:
        """Write a checkpoint to `--save` and make it the latest."""
        args, plain = self.args, plain_args(self.args.values)
        if self.reference is not None:
            with self.reference.installed():
                save_weights(Path(args.save) / REFERENCE, chunks=self.chunks, args=plain)
            self.reference = None
        save_checkpoint(
            args.save,
            state.step,
            chunks=self.chunks,
            args=plain,
            optimizer=None if args.no_save_optim else self.optimizer,
            scheduler=self.scheduler,
            state=state,
            groups=None if args.no_save_rng else self.groups,
            carried=hf_files(args, self.start),
            retain_interval=args.save_retain_interval,
        )

    def export(self, folder: Path, step: int) -> None:
        """Write the weights as a Hugging Face folder `step_N`, whole or not at all, and its name to `latest.txt`."""
        from megatron.prefixflow.bridge import export_hf_weights

        source = hf_files(self.args, self.start)
        assert source is not None, "checked before the run"
        place = folder / f"step_{step:07d}"
        on_first_rank(lambda: _make_room(place))
        export_hf_weights(self.chunks, place, source)
        on_first_rank(lambda: _name_latest(folder, place.name))


def _make_room(place: Path) -> None:
    """A resumed run writes its steps again."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        hidden = place.with_name(f".{place.name}.old")
        os.replace(place, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _name_latest(folder: Path, name: str) -> None:
    with atomic_write(folder / EXPORT_TRACKER) as file:
        file.write(f"{name}\n".encode())

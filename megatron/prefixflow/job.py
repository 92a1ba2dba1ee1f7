"""A run of `pretrain_rl.py` before it starts: parsed, read and checked, without a process group.

What a later step would refuse is refused here, so that nothing is half done: arguments, packages that were asked for by
name, output files, the learning-rate schedule, every line of the trajectory files, and what the loss and the plan need.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megatron.prefixflow.arguments import (
    Arguments,
    ArgumentsError,
    build_parser,
    loss_config,
    memory_settings,
    parallel_layout,
    parse_arguments,
    plan_config,
    scheduler_options,
    startup_lines,
    transformer_config,
)
from megatron.prefixflow.calibration import check_calibration
from megatron.prefixflow.configs import has_transformer_engine
from megatron.prefixflow.data import group_batches, load_trajectories, step_batches
from megatron.prefixflow.device import torch_device
from megatron.prefixflow.hf_files import HFTensors
from megatron.prefixflow.logs import check_log_packages
from megatron.prefixflow.planning import MemorySettings, dense_config, dense_memory, zero_weight
from megatron.prefixflow.resume import Start, check_places, find_start
from megatron.prefixflow.router import has_router_terms
from megatron.prefixflow.routing import RoutingReplay
from megatron.prefixflow.sampler import refuse_unsupported
from prefixflow.plan.layout import ParallelLayout
from prefixflow.plan.plan import PlanConfig, build_plan
from prefixflow.plan.shapes import read_json_object
from prefixflow.runtime.attention.kernels import AttentionKernel, select_kernel
from prefixflow.runtime.loss import LossConfig
from prefixflow.trajectories import trajectory_files
from prefixflow.trajectories.files import why_unwritable
from prefixflow.trajectories.prompts import PromptRecord, read_prompts
from prefixflow.trajectories.rewards import RewardFunction
from prefixflow.trajectories.types import Trajectory


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """What `--rollout sample` samples from, and what scores the responses."""

    prompts: tuple[PromptRecord, ...]
    reward: RewardFunction
    stop_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A run that has passed every check that needs no process group.

    trajectories: of the files; none with `--rollout trace`, where steps bring them; with `--rollout sample`, stand-ins for the
        largest batch that a step can bring. sampling: with `--rollout sample` only.
    """

    args: Arguments
    layout: ParallelLayout
    kernel: AttentionKernel
    trajectories: tuple[Trajectory, ...]
    warnings: tuple[str, ...]
    start: Start = field(default_factory=Start)
    memory: str | None = None
    sampling: SamplingInputs | None = None

    @property
    def batches(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The batches of an epoch; scoring takes no part of the file away, and without a batch size all at once."""
        if self.args.rollout is not None:
            return (self.trajectories,) if self.trajectories else ()
        if self.args.logprobs_only:
            return group_batches(self.trajectories, self.args.global_batch_size or len(self.trajectories))
        return step_batches(self.args, self.trajectories)

    @property
    def lines(self) -> tuple[str, ...]:
        """What the start of a run prints."""
        return (
            *startup_lines(self.args, self.layout),
            f"attention: {self.kernel.describe()}",
            f"packages: {', '.join(_package_states(self.kernel))}",
            *_data_lines(self),
            *([] if self.memory is None else [self.memory]),
            *([] if self.start.line is None else [self.start.line]),
            *(f"warning: {warning}" for warning in (*self.warnings, *_model_warnings(self.args, self.start))),
        )


def prepare(argv: Sequence[str], world_size: int) -> Job:
    """Parse, read and check; nothing is written and no process group is needed.

    Raises:
        ArgumentsError, TrajectoryError, ValueError, OSError, ImportError: with a sentence for the user.
    """
    args = parse_arguments(argv, training=True)
    _check_packages(argv)
    layout = parallel_layout(args, world_size)
    kernel = select_kernel(args.attention_kernel, torch_device())
    if args.hf_model:
        importlib.import_module("megatron.prefixflow.bridge")
    _check_outputs(args)
    start = find_start(args)
    if args.hf_model and start.folder is None:
        # Its headers are read, and each file is there and whole.
        HFTensors(args.hf_model)
    check_places(args, start)
    check_calibration(args, layout)
    if not args.logprobs_only:
        _check_schedule(args)
    check_log_packages(args)
    if args.rollout == "sample":
        return replace(_sampling_job(args, layout, kernel), start=start)
    if args.rollout == "trace":
        return Job(args, layout, kernel, (), (), start)
    trajectories = load_trajectories(args)
    _check_trajectories(args, layout, trajectories)
    job = Job(args, layout, kernel, trajectories, tuple(_data_warnings(args, trajectories)), start)
    if not job.batches:
        raise ArgumentsError(f"--filter {' '.join(args.filter)} leaves nothing of {args.trajectories} to train on.")
    return replace(job, memory=_fitted_memory(job))


def _sampling_job(args: Arguments, layout: ParallelLayout, kernel: AttentionKernel) -> Job:
    refuse_unsupported(transformer_config(args))
    room = args.seq_length + 1 - args.max_response_length
    if room < 1:
        raise ArgumentsError(
            f"--max-response-length {args.max_response_length} leaves no room for a prompt: with --seq-length "
            f"{args.seq_length} it is at most {args.seq_length}. Lower it, or raise --seq-length."
        )
    prompts = read_prompts(args.trajectories, vocab_size=args.vocab_size, max_prompt_tokens=room)
    num_prompts = args.global_batch_size // args.group_size
    if num_prompts > len(prompts):
        raise ArgumentsError(
            f"a step samples from {num_prompts} prompts (--global-batch-size {args.global_batch_size} / --group-size "
            f"{args.group_size}), and {args.trajectories} has {len(prompts)}. Add prompts, or lower --global-batch-size."
        )
    largest = _largest_batch(args, prompts)
    build_plan(largest[:1], replace(plan_config(args, layout), route_mismatch=None))
    stops = tuple(args.stop_tokens) or stop_tokens_of(args.hf_model)
    inputs = SamplingInputs(prompts, RewardFunction(args.reward_function), stops)
    warnings = [] if stops else ["no --stop-tokens: every response is as long as --max-response-length."]
    job = Job(args, layout, kernel, largest, tuple(warnings), sampling=inputs)
    return replace(job, memory=_fitted_memory(job))


def _largest_batch(args: Arguments, prompts: Sequence[PromptRecord]) -> tuple[Trajectory, ...]:
    """Responses of full length to the longest prompts, which differ from their first token on."""
    longest = sorted(prompts, key=lambda prompt: -len(prompt.tokens))[: args.global_batch_size // args.group_size]
    made = []
    for prompt in longest:
        num_prompt, length = len(prompt.tokens), args.max_response_length
        for number in range(args.group_size):
            tokens = [*prompt.tokens.tolist(), *[number % args.vocab_size] * length]
            mask = [0] * num_prompt + [1] * length
            made.append(Trajectory(f"{prompt.id}/{number}", prompt.id, tokens, mask, 1.0))
    return tuple(made)


def stop_tokens_of(folder: str | None) -> tuple[int, ...]:
    """Token ids that end a text, by the generation settings or the configuration of a Hugging Face folder."""
    for name in ("generation_config.json", "config.json"):
        file = Path(folder or "") / name
        if folder is None or not file.is_file():
            continue
        found = read_json_object(file).get("eos_token_id")
        if found is None:
            continue
        tokens = found if isinstance(found, list) else [found]
        if any(type(token) is not int for token in tokens):
            raise ValueError(f"{file}: eos_token_id is {found!r}, expected token ids. Mend it, or give --stop-tokens.")
        return tuple(tokens)
    return ()


def _check_packages(argv: Sequence[str]) -> None:
    """An implementation that was asked for by name must be there."""
    asked = getattr(build_parser().parse_known_args(list(argv))[0], "transformer_impl", None)
    if asked == "transformer_engine" and not has_transformer_engine():
        raise ArgumentsError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed. Install it, or use "
            "--transformer-impl local."
        )


def _check_outputs(args: Arguments) -> None:
    """Output files must be writable places, and never a file that is read."""
    # A followed folder may still be empty.
    inputs = set() if args.rollout == "trace" else {file.resolve() for file in trajectory_files(args.trajectories)}
    for name, path in (
        ("--metrics-file", args.metrics_file),
        ("--logprobs-only", args.logprobs_only),
        ("--trace-file", args.trace_file),
        ("--calibrate", args.calibrate),
        ("--reward-curve", args.reward_curve),
    ):
        if path is None:
            continue
        if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
            raise ArgumentsError(
                f"{name} {path}: expected the name of a file in a folder that exists. Create the folder, or "
                "name another file."
            )
        if problem := why_unwritable(Path(path).absolute().parent):
            raise ArgumentsError(f"{name} {path}: {problem}. Name another file.")
        if Path(path).resolve() in inputs:
            raise ArgumentsError(f"{name} {path} is a trajectory file that is read; name another file.")


def _check_schedule(args: Arguments) -> None:
    """What Megatron's scheduler would only assert."""
    options = scheduler_options(args)
    warmup, decay = options["lr_warmup_steps"], options["lr_decay_steps"]
    if args.train_iters < 1:
        raise ArgumentsError(f"--train-iters is {args.train_iters}, expected at least 1.")
    if args.updates_per_batch < 1:
        raise ArgumentsError(f"--updates-per-batch is {args.updates_per_batch}, expected at least 1.")
    if warmup >= decay:
        raise ArgumentsError(
            f"the learning rate warms up over {warmup:g} trajectories and decays over {decay:g}; the warm-up must "
            "be shorter. Lower --lr-warmup-iters (or its other forms), or raise --lr-decay-iters."
        )
    if args.lr_decay_style == "WSD" and options["wsd_decay_steps"] is None:
        raise ArgumentsError("--lr-decay-style WSD needs --lr-wsd-decay-iters.")
    if args.lr_warmup_init > args.lr:
        raise ArgumentsError(f"--lr-warmup-init {args.lr_warmup_init} is more than --lr {args.lr}.")


def _check_trajectories(args: Arguments, layout: ParallelLayout, trajectories: Sequence[Trajectory]) -> None:
    """What the loss or the plan of a later step would refuse is refused here."""
    if loss_config(args).tis_cap is not None:
        for trajectory in trajectories:
            if trajectory.rollout_logprobs is None:
                raise ArgumentsError(
                    f"--tis-cap needs rollout_logprobs, and trajectory {trajectory.id!r} of {args.trajectories} "
                    "brings none. Leave --tis-cap out, or write them into the file."
                )
    # Without reuse a trajectory longer than the token budget has no plan, so the longest one tells.
    longest = max(trajectories, key=len)
    build_plan([longest], plan_config(args, layout))


def _fitted_memory(job: Job) -> str | None:
    """How the batches fit the budgets; ValueError where one does not: a step would refuse its own only after those before it."""
    settings, args = memory_settings(job.args, job.layout), job.args
    if settings.budget_bytes is None and settings.kv_budget_bytes is None:
        return None
    config, chosen = plan_config(args, job.layout), []
    if job.sampling is not None:
        # Stand-ins have no routes.
        config = replace(config, route_mismatch=None)
    skips = args.skip_zero_advantage and not has_router_terms(transformer_config(args))
    for number, batch in enumerate(job.batches):
        omit = zero_weight(batch, loss_config(args)) if skips else frozenset()
        plan, fitted = settings.fitted(batch, config, omit)
        if number * args.updates_per_batch < args.verify_steps:
            _check_dense(dense_memory(settings), batch, dense_config(config, batch), omit)
        fitted.plan_row(plan, 0, 0, training=not args.logprobs_only)
        chosen.append(
            f"at most {plan.config.max_tokens_per_microbatch} tokens a microbatch, {fitted.choice.describe()}"
        )
    budget = "" if args.memory_budget_gib is None else f"budget {args.memory_budget_gib:g} GiB; "
    return f"memory: {budget}{'; '.join(dict.fromkeys(chosen))}"


def _check_dense(
    settings: MemorySettings, batch: Sequence[Trajectory], config: PlanConfig, omit: Collection[int]
) -> None:
    try:
        settings.fitted(batch, config, omit)
    except ValueError as error:
        raise ArgumentsError(f"--verify-steps: a step cannot be run dense. {error}") from error


def _model_warnings(args: Arguments, start: Start) -> Iterator[str]:
    if args.model is not None and Path(args.model).is_dir() and args.hf_model is None and start.folder is None:
        yield f"--model {args.model} has no safetensors files: the run starts from random weights."


def _data_warnings(args: Arguments, trajectories: Sequence[Trajectory]) -> Iterator[str]:
    if not any(t.num_trained for t in trajectories):
        yield f"no token of {args.trajectories} is trained: all gradients will be zero."
    if args.skip_zero_advantage and has_router_terms(transformer_config(args)):
        yield "--skip-zero-advantage has no effect: the routers' losses or biases need every trajectory."
    if args.routing_replay != RoutingReplay.OFF.value and args.num_experts is None:
        yield f"--routing-replay {args.routing_replay} has no effect: the model has no experts."
    size = args.global_batch_size
    if size is not None and size > len(trajectories):
        yield (
            f"--global-batch-size is {size}, but there are {len(trajectories)} trajectories: every step takes all of "
            "them."
        )


def _data_lines(job: Job) -> Iterator[str]:
    args = job.args
    yield _describe_data(job)
    yield (f"plan: prefix reuse {args.prefix_reuse}, at most {args.max_tokens_per_microbatch} tokens a microbatch")
    if not args.logprobs_only:
        yield f"loss: {_describe_loss(loss_config(args))}"


def _describe_data(job: Job) -> str:
    args, trajectories = job.args, job.trajectories
    if args.rollout == "trace":
        return f"data: trajectory files as they come, {args.trajectories}"
    if job.sampling is not None:
        return (
            f"data: {args.group_size} responses of at most {args.max_response_length} tokens to each of "
            f"{args.global_batch_size // args.group_size} of {len(job.sampling.prompts)} prompts a step, scored by "
            f"{job.sampling.reward.name}"
        )
    batches = job.batches
    num_groups = len({t.group for t in trajectories})
    num_tokens = sum(len(t) for t in trajectories)
    sizes = sorted({len(batch) for batch in batches})
    per_batch = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return (
        f"data: {len(trajectories)} trajectories in {num_groups} groups, {num_tokens} tokens; an epoch is "
        f"{len(batches)} x {per_batch} trajectories"
    )


def _describe_loss(loss: LossConfig) -> str:
    text = f"{loss.policy_loss.value}, {loss.aggregation.value}, clip {loss.clip_low:g} and {loss.clip_high:g}"
    if loss.needs_reference:
        text += f", KL {loss.kl_estimator.value} x {loss.kl_coef:g}"
    return text + (f", entropy x {loss.entropy_coef:g}" if loss.needs_entropy else "")


def _package_states(kernel: AttentionKernel) -> Iterator[str]:
    flash_attn_used = "flash-attn" in kernel.describe()
    for name, module, is_used in (
        ("Transformer Engine", "transformer_engine", has_transformer_engine()),
        ("Apex", "apex", torch.cuda.is_available()),
        ("flash-attn", "flash_attn", flash_attn_used),
    ):
        is_there = importlib.util.find_spec(module) is not None
        state = "used" if is_used else "installed, not used"
        yield f"{name} {state if is_there else 'not installed'}"

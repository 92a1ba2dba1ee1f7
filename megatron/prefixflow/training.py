"""The training loop of `pretrain_rl.py`.

Steps of `main`:

1. `job.prepare` parses the command line, reads the trajectories and checks what can be checked without a process group.
   A problem on any rank is one sentence on rank 0 and exit 2 on all of them, before anything is written.
2. `Trainer` builds model, gradient buffers, optimizer and schedule, in Megatron's own classes.
3. Each step plans a batch (or keeps the plan of the last one, `--updates-per-batch`), fills in missing
   log-probabilities by the same plan, runs forward and backward, reduces, clips, updates, and writes one line of metrics.

`--logprobs-only` scores all trajectories instead and writes no metrics.

Invariants:

* Every rank takes part in every collective of a step, however few trees it has.
* `--train-iters` counts optimizer steps; `--updates-per-batch k` takes k of them on each batch.
* The learning-rate schedule advances by `--global-batch-size` a step, whatever the true size of the batch, so that decay
  and warm-up given in steps mean steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from rich.console import Console
from rich.progress import Progress

from megatron.prefixflow.arguments import (
    Arguments,
    ArgumentsError,
    ddp_config,
    gpt_model_kwargs,
    loss_config,
    memory_settings,
    optimizer_config,
    plan_config,
    scheduler_options,
    transformer_config,
)
from megatron.prefixflow.calibration import OperationTimer, describe, fit_calibration, is_measuring
from megatron.prefixflow.checkpoint import CheckpointError, TrainState, load_checkpoint
from megatron.prefixflow.dense import DenseRun, Outcome, problems_of, with_peers_logprobs
from megatron.prefixflow.errors import TrainingError
from megatron.prefixflow.gradients import clip_gradients, gradient_norm, reduce_gradients, reduced_gradients
from megatron.prefixflow.job import Job, prepare
from megatron.prefixflow.logs import TrainingLog
from megatron.prefixflow.metrics import (
    OpTimes,
    RankSums,
    RouterFacts,
    StepMetrics,
    UpdateFacts,
    largest,
    step_metrics,
)
from megatron.prefixflow.model import build_model, wrap_data_parallel
from megatron.prefixflow.overlap import EarlyReduction
from megatron.prefixflow.peaks import MeasuredMemory, measured_memory, predicted_memory, state_bytes
from megatron.prefixflow.planning import MemorySettings, dense_config, dense_memory
from megatron.prefixflow.resume import Saver, Start, data_digest, drop_steps_after, load_reference
from megatron.prefixflow.rollouts import BatchSource, FileBatches, SampledBatches, followed_batches, sampling_plan
from megatron.prefixflow.router import has_router_terms, router_loss_config
from megatron.prefixflow.routing import RouteStore, RoutingReplay, moe_layer_numbers
from megatron.prefixflow.sampler import Sampler
from megatron.prefixflow.session import start_session
from megatron.prefixflow.step import StepRunner, complete_logprobs, spread_logprobs
from megatron.prefixflow.verify import Snapshot, compare_gradients, copied, gradient_limit
from prefixflow.plan.calibrate import Measurement
from prefixflow.plan.plan import Plan
from prefixflow.runtime.failures import doing
from prefixflow.runtime.objective import Objective
from prefixflow.runtime.trace import OperationTrace, together, write_trace
from prefixflow.trajectories.files import atomic_write
from prefixflow.trajectories.types import Trajectory

PROGRAM = "pretrain_rl.py"


def main(argv: Sequence[str]) -> int:
    """Run `pretrain_rl.py` on this rank; returns the exit status, the same on all ranks.

    Joins the process group that the environment of torchrun describes (a world of one without it), unless one is there.
    """
    job, problem = _attempt(lambda: prepare(argv, _world_size()))
    with _process_group(job.args if job else None) as is_first:
        return _run(job, problem, is_first)


def _run(job: Job | None, problem: str | None, is_first: bool) -> int:
    problem = _agreed(problem)
    if job is None or problem is not None:
        _say(str(problem), is_first)
        # torchrun ends the other ranks when the first one leaves: the sentence must be out by then.
        dist.barrier()
        return 2
    console = Console(soft_wrap=True, markup=False, highlight=False, quiet=not is_first)
    for line in job.lines:
        console.print(line)
    run = score if job.args.logprobs_only else train
    try:
        run(job, console)
    except (TrainingError, CheckpointError) as error:
        _say(str(error), is_first)
        return 1
    except ArgumentsError as error:
        _say(str(error), is_first)
        # Only ranks that read the weights have seen it: the others wait for them, and end when this one does.
        raise SystemExit(2) from None
    return 0


def _say(problem: str, is_first: bool) -> None:
    if is_first:
        print(f"{PROGRAM}: {problem}", file=sys.stderr, flush=True)


def _attempt(action: Callable[[], Job]) -> tuple[Job | None, str | None]:
    try:
        return action(), None
    except (ValueError, OSError, ImportError) as error:
        return None, " ".join(str(error).split())


def _agreed(problem: str | None) -> str | None:
    """The problem of the lowest rank that has one, or None on all ranks."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((p for p in problems if p is not None), None)


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def _process_group(args: Arguments | None) -> Iterator[bool]:
    """Join the world, unless that has happened; gives whether this is rank 0.

    After an error in the body the group is left as it is: others may wait in a collective, and only the end of this process
    tells them.
    """
    if dist.is_initialized():
        yield dist.get_rank() == 0
        return
    # Without arguments there is only an error to agree on, which needs no GPU.
    on_gpu = torch.cuda.is_available() and args is not None
    backend = args.distributed_backend if args and on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = "RANK" not in os.environ
    if alone and Path("/sys/class/net/lo").exists():
        # A world of one talks to nobody, and the name of this machine need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    minutes = args.distributed_timeout_minutes if args else 10
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=minutes), **where)
    yield dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class BatchWork:
    """One batch with its plan; log-probabilities that the loss needs and the file lacks are filled in.

    routes: that the first update took, for the later ones; None where there is only one.
    memory: how the plan is run. reward_mean: of all responses that were sampled for it; None where nothing was sampled.
    dense: the same batch planned without reuse, in a step that is verified.
    """

    plan: Plan
    trajectories: tuple[Trajectory, ...]
    routes: RouteStore | None
    memory: MemorySettings | None
    reward_mean: float | None = None
    dense: BatchWork | None = None

    def keep_old_logprobs(self, objective: Objective) -> BatchWork:
        """The work of the next update on this batch: the policy that the first update has seen is its old policy.

        The first update scores every row it trains before its weights move, so no pass of its own is needed.
        """
        kept = list(self.trajectories)
        for index, values in objective.trajectory_logprobs().items():
            if kept[index].old_logprobs is None:
                old = spread_logprobs(kept[index], values)
                kept[index] = dataclasses.replace(kept[index], old_logprobs=old)
        return dataclasses.replace(self, trajectories=tuple(kept))


@dataclass(slots=True)
class FrozenWeights:
    """A copy of a model's weights, routers' biases among them, at one time: the reference policy."""

    parameters: list[torch.Tensor]
    values: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, chunks: Sequence[torch.nn.Module]) -> FrozenWeights:
        parameters: list[torch.Tensor] = [p for chunk in chunks for p in chunk.parameters()]
        parameters += [b for chunk in chunks for name, b in chunk.named_buffers() if name.endswith(".expert_bias")]
        return cls(parameters, [p.detach().clone() for p in parameters])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The model has these weights inside the block, for passes without gradients."""
        present = [p.data for p in self.parameters]
        self._set(self.values)
        try:
            yield
        finally:
            self._set(present)

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value


class Scorer:
    """Model, process groups and plan runner of this rank.

    resumes: the weights of a checkpoint that the run goes on from are read later, with its optimizer.
    """

    def __init__(self, job: Job, *, resumes: bool = False) -> None:
        args = job.args
        self.job = job
        self.loss = loss_config(args)
        self.groups = start_session(job.layout, args.seed)
        self.chunks = build_model(transformer_config(args), self.groups, **gpt_model_kwargs(args))
        if args.hf_model and job.start.folder is None:
            self._load(args.hf_model)
        if job.start.folder is not None and not (resumes and job.start.resumes):
            load_checkpoint(job.start.folder, self.chunks)
        self.device = next(self.chunks[0].parameters()).device
        self.runner = StepRunner(
            self.chunks,
            self.groups,
            job.kernel,
            vocab_size=args.vocab_size,
            max_response_tokens=args.max_response_length,
            routing_replay=RoutingReplay(args.routing_replay),
            memory=memory_settings(args, job.layout),
        )

    def _load(self, folder: str) -> None:
        from megatron.prefixflow.bridge import load_hf_weights

        try:
            load_hf_weights(self.chunks, folder)
        except (ValueError, OSError) as error:
            raise ArgumentsError(f"--model {folder}: {error}") from error

    @property
    def is_counted(self) -> bool:
        """True on the one rank of each model that speaks for it: it scores, and no other rank speaks for its rows."""
        return self.groups.tensor_rank == 0 and self.groups.context_rank == 0 and self.runner.has_head

    def plan(self, trajectories: Sequence[Trajectory], *, skip_zero_advantage: bool, is_dense: bool = False) -> Plan:
        """Raises TrainingError, on every rank, where nothing is shared and `--require-sharing` is given."""
        config = plan_config(self.job.args, self.job.layout)
        if is_dense:
            config = dense_config(config, trajectories)
        skip_zero_advantage &= not has_router_terms(self.chunks[0].config)
        plan = self.runner.plan(trajectories, config, self.loss, skip_zero_advantage=skip_zero_advantage)
        if self.job.args.require_sharing and not is_dense and not plan.forest.num_shared_segments:
            raise TrainingError(_unshared(plan, trajectories))
        return plan

    def logprobs(self, trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
        """Log-probabilities [tokens] of every trajectory by id, on every rank; 0 where a token is not trained."""
        plan = self.plan(trajectories, skip_zero_advantage=False)
        mine = self.runner.score(plan, trajectories).trajectory_logprobs()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine if self.is_counted else {})
        scored = {i: values for part in everyone for i, values in part.items()}
        return {
            t.id: spread_logprobs(t, scored[i]) if i in scored else np.zeros(len(t)) for i, t in enumerate(trajectories)
        }


def _unshared(plan: Plan, trajectories: Sequence[Trajectory]) -> str:
    """Of `--require-sharing`: what a batch that shares nothing looks like, and the way out."""
    groups = {t.group for t in trajectories}
    return (
        f"--require-sharing: nothing is shared among {len(trajectories)} trajectories in {len(groups)} groups. Do members of a "
        "group begin with the same tokens, and have the same `group`? --prefix-reuse on also shares what --prefix-reuse auto "
        "takes for too short to pay; leave --require-sharing out to run such batches in full."
    )


def score(job: Job, console: Console) -> None:
    """`--logprobs-only`: one line {"id", "logprobs"} for each trajectory, in the order of the files.

    `logprobs` has one number per token, like the arrays of the trajectory file, 0 where the token is not trained. The file
    appears whole or not at all.
    """
    scorer = Scorer(job)
    found: dict[str, np.ndarray] = {}
    for batch in job.batches:
        found |= scorer.logprobs(batch)
    if dist.get_rank() == 0:
        with atomic_write(job.args.logprobs_only) as file:
            for trajectory in job.trajectories:
                line = {"id": trajectory.id, "logprobs": found[trajectory.id].tolist()}
                file.write((json.dumps(line) + "\n").encode())
    dist.barrier()
    console.print(f"log-probabilities of {len(found)} trajectories written to {job.args.logprobs_only}")


@dataclass(frozen=True, slots=True)
class StepPass:
    """Forward and backward of a step. norm: of the reduced gradients. measured: memory, where it is counted."""

    objective: Objective
    norm: float
    measured: MeasuredMemory | None


class Trainer(Scorer):
    """Model, gradient buffers, optimizer and schedule of this rank; `step` takes optimizer steps in order.

    Every public method is collective.

    is_dense (attribute): a step has differed from its dense run, and from then on nothing is shared. A start forgets that, as
        it forgets what was verified: it may run another layout, on other machines.
    """

    def __init__(self, job: Job) -> None:
        args = job.args
        super().__init__(job, resumes=not args.no_load_optim)
        # Our norm sees what Megatron's check would, in the same step and with a sentence.
        buffers = dataclasses.replace(ddp_config(args), check_for_nan_in_grad=False)
        self.ddp = wrap_data_parallel(self.chunks, buffers)
        self.runner.reduction = EarlyReduction.of(self.ddp, self.groups)
        for chunk in self.ddp:
            chunk.broadcast_params()
        config = dataclasses.replace(optimizer_config(args), clip_grad=0.0)
        self.optimizer = get_megatron_optimizer(config, list(self.ddp))
        self.scheduler = OptimizerParamScheduler(self.optimizer, **scheduler_options(args))
        self.source = self._source()
        self.num_steps = 0
        self._data = data_digest(job.batches, args.updates_per_batch)
        self.warnings: list[str] = []
        self.trace = OperationTrace(self.groups.data_rank)
        self.measurements: list[Measurement] = []
        self.calibrates = is_measuring(args)
        self.is_dense = False
        self._num_verified = 0
        self._work: BatchWork | None = None
        if job.start.resumes:
            self._resume(job.start)
        lacks_reference = args.rollout is not None or any(t.ref_logprobs is None for t in job.trajectories)
        needs_reference = self.loss.needs_reference and lacks_reference
        self._reference = FrozenWeights.of(self.chunks) if needs_reference else None
        keeps = self._reference is not None and load_reference(args, job.start, self.chunks, self._reference)
        self.saver = Saver(
            args,
            job.start,
            self.chunks,
            self.optimizer,
            self.scheduler,
            self.groups,
            self._reference if keeps else None,
        )

    def _resume(self, start: Start) -> None:
        args = self.job.args
        assert start.folder is not None
        rates = [(group["max_lr"], group["min_lr"]) for group in self.optimizer.param_groups]
        state = load_checkpoint(
            start.folder,
            self.chunks,
            None if args.no_load_optim else self.optimizer,
            self.scheduler,
            groups=None if args.no_load_rng else self.groups,
        )
        assert state is not None, "looked up before the run"
        self.num_steps = state.step
        if args.override_opt_param_scheduler:
            # The optimizer's groups bring the bounds of the run that saved them.
            for group, (max_lr, min_lr) in zip(self.optimizer.param_groups, rates, strict=True):
                group["max_lr"], group["min_lr"] = max_lr, min_lr
            self.scheduler.step(increment=0)
        # Other trajectories than those of the checkpoint are taken from the first.
        if state.data == self._data:
            self.source.restore(state.source)

    @property
    def state(self) -> TrainState:
        """Where the run stands."""
        return TrainState(self.num_steps, self._data, self.source.state())

    def step(self) -> StepMetrics:
        """One optimizer step. `warnings` holds what the user should hear about it.

        Raises TrainingError, on every rank, where the gradient is not finite, where nothing is shared although that is
        required, or where the gradient differs from the dense run's; weights are as before then.
        """
        begin = time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        self.warnings = []
        times = OpTimes()
        self.trace.step = self.num_steps + 1
        self.runner.observe = together(times, self.trace.observe) if self.job.args.trace_file else times
        self.trace.is_training = False
        work = self._prepared()
        self.trace.is_training = True
        dense, dense_s = self._dense_run(work)
        done = self._run(work)
        error = None if dense is None else self._verify(dense, work, done)
        if dense is not None and work.dense is not None and self.is_dense:
            dense.routers.restore()
            work = work.dense
            done = self._run(work)
        lr = self._learning_rate()
        self._update(done.norm)
        self._work = self._kept(work, done.objective)
        self.num_steps += 1
        sums = RankSums.of(
            done.objective.terms,
            times,
            self.runner,
            is_counted=self.is_counted,
        ).reduce(self.device)
        # The reduction above has waited for every rank and every device.
        held = (
            self._peak_bytes(done.measured),
            self._predicted_bytes(work),
            self.runner.cache_totals.peak_bytes,
            self.runner.arena.peak_bytes,
        )
        seconds, *peaks = largest([time.perf_counter() - begin - dense_s, *held], self.device)
        facts = UpdateFacts(self.num_steps, done.norm, lr, seconds, *map(round, peaks))
        metrics = step_metrics(facts, sums, work.plan, work.trajectories, self._router_facts())
        return dataclasses.replace(metrics, **self._corrections(work), verify_rel_err=error)

    def _corrections(self, work: BatchWork) -> dict[str, Any]:
        """Metrics that the plan and the trajectories do not tell."""
        found: dict[str, Any] = {}
        if work.reward_mean is not None:
            # A filter leaves out what earned alike, so the mean of what is trained would not be the policy's.
            found["reward_mean"] = work.reward_mean
        if self.is_dense:
            found["fallback"] = len({t.group for t in work.trajectories})
        return found

    def _run(self, work: BatchWork, *, is_kept: bool = True) -> StepPass:
        """Forward and backward of a batch up to reduced gradients.

        is_kept: False for a run that is compared with the step's and then forgotten: it is not measured.
        """
        self.runner.memory = work.memory
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with contextlib.ExitStack() as stack:
            is_measured = is_kept and self.job.args.measure_memory and self.device.type == "cpu"
            measured = stack.enter_context(measured_memory(self.runner, work.plan)) if is_measured else None
            objective = self._forward_backward(work, is_kept=is_kept)
        with doing("reducing gradients"):
            reduce_gradients(self.ddp)
            norm = gradient_norm(self.ddp, self.groups)
        return StepPass(objective, norm, measured)

    def _dense_run(self, work: BatchWork) -> tuple[DenseRun | None, float]:
        """The dense run of a step that is verified, and its seconds; the model and its routers are as before.

        Its gradients are held in host memory until they are compared.
        """
        if work.dense is None:
            return None, 0.0
        begin = time.perf_counter()
        routers = Snapshot(self.chunks, with_gradients=False)
        observe, self.runner.observe = self.runner.observe, None
        with doing("running the step dense, to verify it"):
            done = self._run(work.dense, is_kept=False)
            outcome = Outcome.of(done.objective, done.norm, is_counted=self.is_counted)
            dense = DenseRun(outcome, copied(reduced_gradients(self.ddp, self.groups)), routers)
        routers.restore()
        self.runner.observe = observe
        torch.cuda.reset_peak_memory_stats()
        return dense, time.perf_counter() - begin

    def _verify(self, dense: DenseRun, work: BatchWork, done: StepPass) -> float:
        """Compare a step with its dense run; gives the error that is judged.

        After a mismatch the run goes on dense, or TrainingError is raised on every rank (`--on-verify-mismatch`).
        """
        with doing("comparing the step with its dense run"):
            outcome = Outcome.of(done.objective, done.norm, is_counted=self.is_counted)
            errors = compare_gradients(list(reduced_gradients(self.ddp, self.groups)), dense.gradients)
        dtype, has_experts = self.job.args.params_dtype, self.chunks[0].config.num_moe_experts is not None
        problems = problems_of(outcome, dense.outcome, errors, work.trajectories, dtype, has_experts=has_experts)
        self._num_verified += 1
        error = errors.judged(dtype)
        if problems:
            self._mismatched("; ".join(problems))
        else:
            limit = gradient_limit(dtype, has_experts=has_experts)
            self.warnings.append(
                f"step {self.num_steps + 1} agrees with the same step run dense: gradient error {error:.3g}, limit {limit:g} "
                "(--verify-steps)"
            )
        return error

    def _mismatched(self, problem: str) -> None:
        sentence = f"step {self.num_steps + 1} differs from the same step run dense (--verify-steps): {problem}"
        if self.job.args.on_verify_mismatch == "stop":
            raise TrainingError(
                f"{sentence}. Nothing was updated. --on-verify-mismatch fallback goes on without reuse, --prefix-reuse off "
                "starts without it; please report this, with the trajectories of the step."
            )
        self.warnings.append(
            f"WARNING: {sentence}. This step and all that follow run every trajectory in full (--on-verify-mismatch fallback)."
        )
        self.is_dense = True

    def _peak_bytes(self, measured: MeasuredMemory | None) -> int:
        """Of this rank in this step: live tensors where they were counted, else what device or process held at most."""
        if measured is None:
            return torch.cuda.max_memory_allocated()
        return state_bytes(self.ddp, self.optimizer) + measured.peak_bytes

    def _predicted_bytes(self, work: BatchWork) -> int:
        settings, groups = self.runner.memory, self.groups
        assert settings is not None
        curve = predicted_memory(settings, work.plan, work.trajectories, groups.data_rank, groups.pipeline_rank)
        state = sum(settings.model.state(groups.pipeline_rank).values())
        return state + max((point.total_bytes for point in curve), default=0)

    def _forward_backward(self, work: BatchWork, *, is_kept: bool) -> Objective:
        """Forward and backward of the step; its operations are measured where `--calibrate` has still to write its file."""
        if not self.calibrates or not is_kept:
            return self.runner.forward_backward(work.plan, work.trajectories, self.loss, routes=work.routes)
        timer = OperationTimer(work.plan, self.groups.data_rank, work.trajectories)
        assert self.runner.observe is not None
        self.runner.observe = together(self.runner.observe, timer)
        objective = self.runner.forward_backward(work.plan, work.trajectories, self.loss, routes=work.routes)
        if self.num_steps == 1:
            # The first step pays for what is done once; it counts only where there is no other.
            self.measurements.clear()
        self.measurements += timer.measurements
        return objective

    def write_calibration(self, path: str) -> str:
        """Write what the operations of all ranks cost; rank 0 writes, and all get a line that says what was found."""
        calibration = fit_calibration(self.measurements, self.job.args, self.job.layout)
        if dist.get_rank() == 0:
            calibration.save(path)
        return describe(calibration)

    def _source(self) -> BatchSource:
        args, sampling = self.job.args, self.job.sampling
        if args.rollout == "trace":
            return followed_batches(args)
        if sampling is None:
            return FileBatches(self.job.batches)
        sampler = Sampler(
            self.chunks[0],
            self.groups,
            self.job.kernel,
            vocab_size=args.vocab_size,
            max_positions=args.max_position_embeddings,
        )
        plan = sampling_plan(args, sampling.stop_tokens)
        return SampledBatches(sampler, self.groups, sampling.prompts, sampling.reward, plan)

    def _prepared(self) -> BatchWork:
        """The work of this step: kept from the update before on the same batch, else planned."""
        if self.num_steps % self.job.args.updates_per_batch:
            assert self._work is not None, "the update before this one kept nothing"
            self._warn_unshared(self._work.plan)
            return self._with_dense(self._work)
        batch = self.source.take()
        self.warnings += batch.warnings
        work = self._planned(batch.trajectories, is_dense=self.is_dense)
        self._warn_unshared(work.plan)
        completed = self._completed(work.plan, batch.trajectories)
        return self._with_dense(dataclasses.replace(work, trajectories=completed, reward_mean=batch.reward_mean))

    def _planned(self, trajectories: Sequence[Trajectory], *, is_dense: bool) -> BatchWork:
        if is_dense and self.runner.memory is not None:
            self.runner.memory = dense_memory(self.runner.memory)
        skips = self.job.args.skip_zero_advantage
        try:
            plan = self.plan(trajectories, skip_zero_advantage=skips, is_dense=is_dense)
        except ValueError as error:
            if not is_dense:
                raise
            raise TrainingError(f"step {self.num_steps + 1} cannot be run dense, to verify it: {error}") from error
        routes = RouteStore() if self.job.args.updates_per_batch > 1 else None
        return BatchWork(plan, tuple(trajectories), routes, self.runner.memory)

    def _with_dense(self, work: BatchWork) -> BatchWork:
        """With the same batch planned without reuse, where this step is verified.

        A later update on the batch takes the plan of the first, and the routes that its dense run took.
        """
        args = self.job.args
        if self.is_dense or args.prefix_reuse == "off" or self._num_verified >= args.verify_steps:
            return dataclasses.replace(work, dense=None)
        trajectories = with_peers_logprobs(work.plan, work.trajectories, self.groups.data_parallel)
        if work.dense is not None:
            dense = dataclasses.replace(work.dense, trajectories=trajectories)
        else:
            dense = self._planned(trajectories, is_dense=True)
            dense = dataclasses.replace(dense, reward_mean=work.reward_mean)
            self.runner.memory = work.memory
        return dataclasses.replace(work, dense=dense)

    def _kept(self, work: BatchWork, objective: Objective) -> BatchWork | None:
        """For the next update on the batch; None where there is none."""
        if self.job.args.updates_per_batch == 1:
            return None
        # Only the last stage scores; the others never read log-probabilities.
        return work.keep_old_logprobs(objective) if self.runner.has_head else work

    def _router_facts(self) -> RouterFacts | None:
        config = self.chunks[0].config
        if config.num_moe_experts is None:
            return None
        return RouterFacts(len(moe_layer_numbers(config)), router_loss_config(config))

    def _warn_unshared(self, plan: Plan) -> None:
        is_wanted = self.job.args.prefix_reuse == "on" and not self.is_dense
        if is_wanted and not plan.forest.num_shared_segments:
            self.warnings.append(
                "WARNING: --prefix-reuse on, but nothing is shared in this batch; every trajectory is run in full."
            )

    def _completed(self, plan: Plan, trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """Fill in missing reference log-probabilities by the reference policy."""
        if self._reference is None:
            return tuple(trajectories)
        with self._reference.installed():
            return complete_logprobs(self.runner, plan, trajectories, self.loss)

    def _update(self, norm: float) -> None:
        args = self.job.args
        if not math.isfinite(norm):
            sentence = f"step {self.num_steps + 1}: the gradient norm is {norm}"
            if args.check_for_nan_in_loss_and_grad:
                raise TrainingError(
                    f"{sentence}, expected a finite number; nothing was updated. Lower the learning rate or check the "
                    "advantages; --no-check-for-nan-in-loss-and-grad leaves such updates out and goes on."
                )
            self.warnings.append(f"WARNING: {sentence}; this update is left out.")
        else:
            clip_gradients(self.ddp, args.clip_grad, norm)
            self.optimizer.step()
        self.scheduler.step(increment=args.global_batch_size)

    def write_trace(self, path: str) -> None:
        """Write the operations of all steps and ranks; rank 0 writes."""
        everyone: list[Any] = [None] * dist.get_world_size()
        is_first = self.groups.tensor_rank == 0 and self.groups.context_rank == 0
        dist.all_gather_object(everyone, self.trace.events if is_first else [])
        if dist.get_rank() == 0:
            write_trace(path, (event for events in everyone for event in events))

    def _learning_rate(self) -> float:
        """The rate of the next update, of the parameters without a rate of their own (`--decoupled-lr`)."""
        groups: list[Mapping[str, Any]] = self.optimizer.param_groups
        return float(next(g["lr"] for g in groups if g.get("default_config", True)))


def train(job: Job, console: Console) -> None:
    """All steps of a run; rank 0 prints a line for each and writes its metrics wherever they are wanted."""
    args = job.args
    trainer = Trainer(job)
    if args.load is not None and not args.finetune and args.metrics_file is not None and dist.get_rank() == 0:
        # What was run after the checkpoint, and was lost, is run again.
        drop_steps_after(args.metrics_file, trainer.num_steps)
    if trainer.num_steps >= args.train_iters:
        console.print(f"step {trainer.num_steps} of {args.train_iters} is done: nothing is left to train.")
    bar = Progress(console=console, disable=not console.is_terminal or console.quiet)
    with bar as progress, TrainingLog(args, is_first=dist.get_rank() == 0) as log:
        task = progress.add_task("training", total=args.train_iters, completed=trainer.num_steps)
        while trainer.num_steps < args.train_iters:
            with doing(f"running step {trainer.num_steps + 1}"):
                metrics = trainer.step()
            for warning in trainer.warnings:
                progress.console.print(warning)
            progress.console.print(metrics.summary(args.train_iters))
            log.write(metrics)
            with doing(f"saving step {trainer.num_steps}"):
                trainer.saver.after_step(trainer.state)
            progress.advance(task)
    if args.trace_file is not None:
        trainer.write_trace(args.trace_file)
    if trainer.calibrates:
        console.print(trainer.write_calibration(args.calibrate))

"""`forward_backward` against Megatron's own schedules on the very same microbatches and model."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from torch import Tensor

from megatron.prefixflow import enable_prefix_reuse, forward_backward
from megatron.prefixflow.adapter import SequenceInput
from megatron.prefixflow.attach_checks import accept_core_attention
from megatron.prefixflow.model import bare_model
from megatron.prefixflow.step import StepRunner
from prefixflow.plan.layout import ParallelLayout
from prefixflow.runtime.world import Worlds
from tests.mcore import foreign
from tests.mcore.faults import patch, restore
from tests.mcore.foreign import Adapter, Model, Sample

WIDTH = 32
NUM_MICROBATCHES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """door: how microbatches look and who reads them. settings: of `enable_prefix_reuse`."""

    model: Model = field(default_factory=Model)
    door: str = "dense"
    loss: str = "pair"
    settings: dict[str, Any] = field(default_factory=lambda: {"prefix_reuse": "on"})


@dataclass(slots=True, eq=False)
class Outcome:
    """Of one call: what it returned, gradients by name, and what was given to `finalize_model_grads_func`, each time."""

    results: list[Any]
    gradients: dict[str, Tensor]
    num_tokens: list[int | None]


class Framework:
    """Runs steps of a case, with reuse or by Megatron's own schedule."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.chunks = case.model.build()
        self.model = self.chunks if len(self.chunks) > 1 else self.chunks[0]
        self.config = bare_model(self.chunks[0]).config
        self.data_rank = (
            torch.distributed.get_rank() // (case.model.layout.tp * case.model.layout.cp) % case.model.layout.dp
        )
        self.group_size = 4
        self._finalize = self.config.finalize_model_grads_func
        self._num_tokens: list[int | None] = []
        if self._finalize is not None:
            self.config.finalize_model_grads_func = self._finalized

    def samples(self, step: int) -> list[list[Sample]]:
        found = foreign.samples(step, self.data_rank, num_groups=12 // self.group_size, group_size=self.group_size)
        return foreign.split(found, NUM_MICROBATCHES)

    def original(self, step: int, **keywords: Any) -> Outcome:
        # Megatron's own attention runs packed sequences on no CPU.
        door = {"packed": "dense"}.get(self.case.door, self.case.door)
        return self._run(get_forward_backward_func(), door, self.samples(step), keywords)

    def ours(self, step: int, **keywords: Any) -> Outcome:
        if self.case.door == "adapter":
            keywords["adapter"] = Adapter(self.case.loss)
        return self._run(forward_backward, self.case.door, self.samples(step), keywords)

    def _run(self, function: Any, door: str, microbatches: list[list[Sample]], keywords: dict[str, Any]) -> Outcome:
        self.zero_gradients()
        self._num_tokens = []
        forward_step, items = self._data(door, microbatches)
        iterators = [iter(items) for _ in self.chunks]
        results = function(
            forward_step_func=forward_step,
            data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
            model=self.model,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=WIDTH,
            micro_batch_size=len(microbatches[0]),
            **keywords,
        )
        assert all(not list(iterator) for iterator in iterators)
        return Outcome(results, self.gradients(), self._num_tokens)

    def _data(self, door: str, microbatches: list[list[Sample]]) -> tuple[Any, list[Any]]:
        loss = self.case.loss
        if door == "adapter":
            return partial(foreign.sample_step, loss, WIDTH), microbatches
        if door == "staged":
            return partial(foreign.staged_forward_step, loss), [foreign.dense(m, WIDTH) for m in microbatches]
        if door == "packed":
            return partial(foreign.forward_step, loss, False), [foreign.packed(m) for m in microbatches]
        return partial(foreign.forward_step, loss, door == "masked"), [foreign.dense(m, WIDTH) for m in microbatches]

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            if self.case.model.ddp is not None:
                chunk.zero_grad_buffer()
            else:
                chunk.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for number, chunk in enumerate(self.chunks):
            for name, parameter in bare_model(chunk).named_parameters():
                gradient = getattr(parameter, "main_grad", parameter.grad)
                found[f"{number}.{name}"] = (
                    torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()
                )
        return found

    def update(self, gradients: dict[str, Tensor]) -> None:
        for number, chunk in enumerate(self.chunks):
            for name, parameter in bare_model(chunk).named_parameters():
                parameter.data.sub_(0.1 * gradients[f"{number}.{name}"])

    def _finalized(self, model: Any, num_tokens: Tensor | None = None, **keywords: Any) -> None:
        assert set(keywords) == {"pg_collection", "force_all_reduce"}
        assert [id(chunk) for chunk in model] == [id(chunk) for chunk in self.chunks]
        self._num_tokens.append(None if num_tokens is None else int(num_tokens))
        self._finalize(model, num_tokens, **keywords)


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative error of a gradient."""
    assert got.keys() == expected.keys()
    floor = 1e-3 * max((float(g.norm()) for g in expected.values()), default=1.0)
    return max((float((got[n] - g).norm()) / max(float(g.norm()), floor) for n, g in expected.items()), default=0.0)


def largest(results: list[Any], expected: list[Any]) -> float:
    """Largest difference of two lists of equal structure."""
    assert len(results) == len(expected)
    worst = 0.0
    for got, wanted in zip(results, expected, strict=True):
        pairs = [(got, wanted)] if isinstance(wanted, Tensor) else [(got[name], wanted[name]) for name in wanted]
        assert isinstance(wanted, Tensor) or got.keys() == wanted.keys()
        worst = max(worst, *(float((a.double() - b.double()).abs().max()) for a, b in pairs))
    return worst


def is_same(got: Outcome, expected: Outcome) -> bool:
    """To the bit."""
    gradients = all(torch.equal(got.gradients[name], g) for name, g in expected.gradients.items())
    return gradients and largest(got.results, expected.results) == 0 and got.num_tokens == expected.num_tokens


def compare(case: Case) -> dict[str, Any]:
    """Two steps both ways, and one more without reuse after it was switched off."""
    framework = Framework(case)
    report: dict[str, Any] = {"gradients": 0.0, "results": 0.0, "num_tokens": []}
    for step in range(2):
        expected = framework.original(step)
        with enable_prefix_reuse(framework.model, **case.settings) as handle:
            got = framework.ours(step)
            report["metrics"] = handle.metrics
        report["gradients"] = max(report["gradients"], difference(got.gradients, expected.gradients))
        report["results"] = max(report["results"], largest(got.results, expected.results))
        report["num_tokens"].append((got.num_tokens, expected.num_tokens))
        again = framework.original(step)
        report["restored"] = is_same(again, expected)
        framework.update(expected.gradients)
    restore()
    return report


def compare_context_parallel(case: Case) -> dict[str, Any]:
    """Two ranks that share sequences against two that have the same ones, since Megatron's own attention on the CPU does not share."""
    dense = Framework(replace(case, model=replace(case.model, layout=ParallelLayout(dp=2), attention=None)))
    dense.data_rank = 0
    expected = dense.original(0)
    weights = [chunk.state_dict() for chunk in dense.chunks]
    restore()
    framework = Framework(case)
    for chunk, state in zip(framework.chunks, weights, strict=True):
        chunk.load_state_dict(state)
    accept_core_attention(foreign.UnusedAttention)
    with enable_prefix_reuse(framework.model, **case.settings):
        got = framework.ours(0)
    restore()
    return {
        "gradients": difference(got.gradients, expected.gradients),
        "results": largest(got.results, expected.results),
        "num_tokens": (got.num_tokens, expected.num_tokens),
    }


class Timers:
    """As Megatron's: started and stopped by name."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running: set[str] = set()

    def __call__(self, name: str, log_level: int = 0) -> Timers:
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        assert self._name not in self.running, "timer has already been started"
        self.running.add(self._name)
        self.events.append(f"{self._name} starts")

    def stop(self) -> None:
        self.running.remove(self._name)
        self.events.append(f"{self._name} stops")


def other_calls() -> dict[str, bool]:
    """What is not a training step that shares something, on one process."""
    framework = Framework(Case(Model(options={"calculate_per_token_loss": True}), loss="pair"))
    checks: dict[str, bool] = {}
    scored = {"forward_only": True}
    collected = {**scored, "collect_non_loss_data": True}
    trained, scores, data = (framework.original(0, **keywords) for keywords in ({}, scored, collected))
    with enable_prefix_reuse(framework.model, prefix_reuse="on") as handle:
        got = framework.ours(0, **scored)
        checks["scores"] = largest(got.results, scores.results) < 1e-12 and not got.num_tokens
        checks["no gradients"] = not any(g.any() for g in got.gradients.values())
        checks["scored by reuse"] = handle.metrics["prefixflow/fallback"] == 0
        with torch.no_grad():
            got = framework.ours(0, **collected)
        checks["collected"] = largest(got.results, data.results) < 1e-12
        framework.config.timers = Timers()
        framework.ours(0)
        events, framework.config.timers = framework.config.timers.events, None
        checks["timed"] = [e for e in events if "forward-backward" in e] == [events[0], "forward-backward stops"]
        checks["losses timed"] = events.count("forward-compute starts") == events.count("forward-compute stops") == 4
    with enable_prefix_reuse(framework.model, prefix_reuse="off") as handle:
        checks["off: the original"] = is_same(framework.ours(0), trained)
        checks["off: counted"] = handle.metrics["prefixflow/fallback"] == 1
    framework.group_size = 1
    lone = framework.original(0)
    with enable_prefix_reuse(framework.model) as handle:
        checks["nothing shared: the original"] = is_same(framework.ours(0), lone)
        checks["nothing shared: counted"] = handle.metrics["prefixflow/fallback"] == 1
    with enable_prefix_reuse(framework.model, require_sharing=True):
        checks["may score without sharing"] = bool(framework.ours(0, **scored).results)
        checks["must share in training"] = "Nothing is shared in this step (12 sequences" in error_of(framework)
    restore()
    return checks


def error_of(framework: Framework) -> str:
    try:
        framework.ours(0)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def after_an_error() -> dict[str, bool]:
    """A loss fails in the middle of a step whose activations and K/V lie on the host; the step after it."""
    ddp = {"overlap_grad_reduce": True, "bucket_size": 5000}
    framework = Framework(Case(Model(ddp=ddp), door="adapter"))
    expected = framework.original(1)
    framework.config.timers = Timers()
    calls = []

    def failing(losses: Tensor, weights: Tensor) -> Tensor:
        calls.append(losses)
        if len(calls) == 3:
            raise RuntimeError("this loss is not to be had")
        return foreign_loss(losses, weights)

    foreign_loss = foreign.joint_loss
    with enable_prefix_reuse(framework.model, prefix_reuse="on", prefix_memory="offload") as handle:
        patch(foreign, "joint_loss", failing)
        checks = {"the loss's own error": error_of(framework) == "this loss is not to be had"}
        patch(foreign, "joint_loss", foreign_loss)
        got = framework.ours(1)
        checks["right after it"] = difference(got.gradients, expected.gradients) < 1e-10
        checks["by reuse"] = handle.metrics["prefixflow/fallback"] == 0
        checks["no timer runs"] = not framework.config.timers.running
    framework.config.timers = None
    checks["and without reuse"] = is_same(framework.original(1), expected)
    restore()
    return checks


@dataclass(frozen=True)
class Refilled:
    """A loader with one set of buffers, which it fills anew for each microbatch."""

    items: list[dict[str, Tensor]]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        buffers = {name: None if tensor is None else tensor.clone() for name, tensor in self.items[0].items()}
        for item in self.items:
            for name, tensor in item.items():
                if tensor is not None:
                    buffers[name].copy_(tensor)
            yield buffers


class Refilling(Framework):
    def _data(self, door: str, microbatches: list[list[Sample]]) -> tuple[Any, Any]:
        forward_step, items = super()._data(door, microbatches)
        return forward_step, Refilled(items)


def with_refilled_buffers() -> dict[str, bool]:
    """Against Megatron's own schedule with tensors of its own for each microbatch."""
    case = Case(Model())
    expected, framework = Framework(case).original(0), Refilling(case)
    checks = {"Megatron's own may do it": is_same(framework.original(0), expected)}
    for reuse in ("on", "off"):
        with enable_prefix_reuse(framework.model, prefix_reuse=reuse) as handle:
            checks[reuse] = difference(framework.ours(0).gradients, expected.gradients) < 1e-10
            checks[f"{reuse}: by reuse"] = handle.metrics["prefixflow/fallback"] == (reuse == "off")
    return checks


def refused_on_one_rank() -> tuple[str, bool]:
    """The error of this data-parallel rank where one of them changes the output; whether the next step is right."""
    framework = Framework(Case(layout(dp=2)))
    expected = framework.original(1)
    step = foreign.forward_step

    def changing(loss: str, with_mask: bool, data: Any, model: Any) -> tuple[Any, Any]:
        output, loss_func = step(loss, with_mask, data, model)
        return (output * 2 if framework.data_rank == 1 else output), loss_func

    with enable_prefix_reuse(framework.model, prefix_reuse="on"):
        patch(foreign, "forward_step", changing)
        error = error_of(framework)
        restore()
        return error, difference(framework.ours(1).gradients, expected.gradients) < 1e-10


class MayBeEmpty(Adapter):
    """Whose loss takes a microbatch without samples."""

    def loss(self, microbatch: Any, scores: Any, *, non_loss_data: bool = False) -> Any:
        if microbatch:
            return super().loss(microbatch, scores, non_loss_data=non_loss_data)
        return torch.zeros(()), torch.tensor(0, dtype=torch.int), {"loss": torch.zeros(()), "tokens": torch.tensor(0)}


def with_an_idle_rank(model: Model) -> tuple[float, list[int | None], list[int | None]]:
    """One data-parallel rank has no sequence, against one whose sequences have no weight; difference of gradients, tokens."""
    framework = Framework(Case(model, door="adapter", loss="triple"))
    microbatches = framework.samples(0)
    if framework.data_rank == 1:
        microbatches = [[replace(s, weights=0.0 * s.weights) for s in samples] for samples in microbatches]
    expected = framework._run(get_forward_backward_func(), "adapter", microbatches, {})
    if framework.data_rank == 1:
        microbatches = [[] for _ in microbatches]
    with enable_prefix_reuse(framework.model, prefix_reuse="on"):
        got = framework._run(forward_backward, "adapter", microbatches, {"adapter": MayBeEmpty("triple")})
    restore()
    return difference(got.gradients, expected.gradients), got.num_tokens, expected.num_tokens


def wrong_gradient() -> None:
    """A mutant: the step leaves the gradient of one parameter a little too long."""
    run = StepRunner.run

    def mutated(self: StepRunner, *args: Any, training: bool, **keywords: Any) -> None:
        run(self, *args, training=training, **keywords)
        if training:
            self.chunks[0].decoder.layers[0].mlp.linear_fc1.weight.main_grad.mul_(1.001)

    patch(StepRunner, "run", mutated)


def verified(case: Case) -> dict[str, Any]:
    """Steps that are compared: right, then wrong."""
    framework = Framework(case)
    report: dict[str, Any] = {}
    expected = [framework.original(step) for step in range(2)]
    settings = {**case.settings, "verify_steps": 1}
    with enable_prefix_reuse(framework.model, **settings) as handle:
        got = framework.ours(0)
        report["right"] = difference(got.gradients, expected[0].gradients), got.num_tokens == expected[0].num_tokens
        report["error"] = handle.metrics["prefixflow/gradient_error"]
        wrong_gradient()
        report["not compared"] = difference(framework.ours(1).gradients, expected[1].gradients)
    with enable_prefix_reuse(framework.model, **settings):
        report["stopped"] = error_of(framework)
        report["stopped again"] = error_of(framework)
        left = framework.gradients()
    if case.model.layout.dp == 1:
        # Elsewhere they are not reduced yet.
        framework.config.finalize_model_grads_func = None
        report["left"] = difference(left, framework.original(0).gradients)
        framework.config.finalize_model_grads_func = framework._finalized
    with enable_prefix_reuse(framework.model, **settings, on_mismatch="fallback") as handle:
        report["fell back"] = []
        for step in range(2):
            report["fell back"].append(difference(framework.ours(step).gradients, expected[step].gradients))
            report.setdefault("mismatch", handle.metrics.get("prefixflow/gradient_error"))
        report["fallback"] = handle.metrics["prefixflow/fallback"]
    restore()
    return report


def layout(**sizes: int) -> Model:
    return Model(layout=ParallelLayout(**sizes), num_layers=4 if sizes.get("vpp", 1) > 1 else 2)


PER_TOKEN = {"calculate_per_token_loss": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
# Without it Megatron's interleaved schedule confuses the messages of two ranks, which are each other's next and previous.
OVERLAPPED_P2P = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
CASES = {
    "dense": Case(),
    "masked": Case(door="masked"),
    "packed": Case(door="packed"),
    "adapter": Case(door="adapter"),
    "triple": Case(loss="triple", door="masked"),
    "triple per token": Case(Model(options=PER_TOKEN), loss="triple", door="adapter"),
    "pair per token": Case(Model(options=PER_TOKEN)),
    "scaled": Case(Model(options={"grad_scale_func": partial(torch.mul, 64.0)}), loss="triple"),
    "bare": Case(Model(ddp=None)),
    "recomputed": Case(Model(options=RECOMPUTED)),
    "dp 2, sharded": Case(replace(layout(dp=2), ddp={"use_distributed_optimizer": True}), door="masked"),
    "dp 2, overlap, per token": Case(
        Model(layout=ParallelLayout(dp=2), options=PER_TOKEN, ddp={"overlap_grad_reduce": True, "bucket_size": 5000}),
        loss="triple",
    ),
    "tp 2": Case(layout(tp=2), door="packed"),
    "pp 2": Case(layout(pp=2), door="staged"),
    "pp 2, per token": Case(replace(layout(pp=2), options=PER_TOKEN), door="adapter", loss="triple"),
    "pp 2, vpp 2": Case(replace(layout(pp=2, vpp=2), options=OVERLAPPED_P2P), door="staged"),
    "bf16": Case(Model(dtype=torch.bfloat16, ddp={"grad_reduce_in_fp32": True}), door="masked"),
    "ep 2": Case(replace(layout(dp=2, ep=2), options=MOE), door="masked"),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_results_are_those_of_megatrons_own_schedule(worlds: Worlds, name: str) -> None:
    case = CASES[name]
    for report in worlds[case.model.layout.world_size].run(compare, case, timeout_s=120):
        # Megatron's router rounds to float32.
        limit = {"ep 2": 1e-6, "bf16": 0.05}.get(name, 1e-10)
        assert report["gradients"] < limit, report
        assert report["results"] < limit, report
        assert report["restored"]
        for got, expected in report["num_tokens"]:
            assert got == expected
            assert len(got) == (case.model.ddp is not None)
        assert report["metrics"]["prefixflow/shared_tokens_ratio"] > 0.3
        assert report["metrics"]["prefixflow/fallback"] == 0


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("loss", ["pair", "triple"])
def test_ranks_that_share_sequences_call_the_loss_on_whole_ones(worlds: Worlds, loss: str, per_token: bool) -> None:
    model = Model(
        ParallelLayout(cp=2), options={"calculate_per_token_loss": per_token}, attention=foreign.UnusedAttention
    )
    for report in worlds[2].run(compare_context_parallel, Case(model, door="adapter", loss=loss), timeout_s=120):
        assert report["gradients"] < 1e-10, report
        assert report["results"] < 1e-10, report
        assert report["num_tokens"][0] == report["num_tokens"][1]


def test_scoring_and_steps_that_share_nothing(worlds: Worlds) -> None:
    (checks,) = worlds[1].run(other_calls, timeout_s=120)
    assert all(checks.values()), checks


@pytest.mark.parametrize("ep", [1, 2])
def test_a_rank_may_have_nothing_to_run(worlds: Worlds, ep: int) -> None:
    model = Model(ParallelLayout(dp=2, ep=ep), options={**PER_TOKEN, **(MOE if ep > 1 else {})})
    for error, num_tokens, expected in worlds[2].run(with_an_idle_rank, model, timeout_s=120):
        assert error < (1e-10 if ep == 1 else 1e-6)
        assert num_tokens == expected


def test_a_step_after_an_error_is_right(worlds: Worlds) -> None:
    (checks,) = worlds[1].run(after_an_error, timeout_s=120)
    assert all(checks.values()), checks


@pytest.mark.parametrize(
    "model",
    [Model(), layout(tp=2), Model(ParallelLayout(dp=2), ddp={"overlap_grad_reduce": True, "bucket_size": 5000})],
    ids=["one process", "tp 2", "dp 2, overlap"],
)
def test_steps_can_be_verified(worlds: Worlds, model: Model) -> None:
    for report in worlds[model.layout.world_size].run(verified, Case(model), timeout_s=120):
        assert report["right"][0] < 1e-10
        assert report["right"][1]
        assert report["error"] < 1e-10
        assert report["not compared"] > 1e-4
        assert "verify_steps: step 1 with prefix reuse is not the original one: the gradient of" in report["stopped"]
        assert "linear_fc1" in report["stopped"]
        assert report["stopped again"] == report["stopped"]
        assert report.get("left", 0) == 0
        assert ("left" in report) == (model.layout.dp == 1)
        assert 1e-4 < report["mismatch"] < 1e-2
        assert max(report["fell back"]) == 0
        assert report["fallback"] == 1


def refused_on_one_stage() -> tuple[str, bool]:
    """The error of this rank where the last stage's forward step changes the output; whether the next step runs."""
    framework = Framework(CASES["pp 2"])
    step = foreign.staged_forward_step

    def changing(loss: str, data: Any, model: Any) -> tuple[Any, Any]:
        output, loss_func = step(loss, data, model)
        return (output * 2 if bare_model(framework.chunks[0]).post_process else output), loss_func

    with enable_prefix_reuse(framework.model, prefix_reuse="on"):
        patch(foreign, "staged_forward_step", changing)
        error = error_of(framework)
        restore()
        return error, bool(framework.ours(0).gradients)


def test_what_one_stage_refuses_all_refuse(worlds: Worlds) -> None:
    for error, went_on in worlds[2].run(refused_on_one_stage, timeout_s=120):
        assert error.startswith("Pipeline rank 1: The forward step uses the model's output before it returns it (mul)")
        assert went_on


def test_a_loader_may_refill_its_buffers(worlds: Worlds) -> None:
    (checks,) = worlds[1].run(with_refilled_buffers, timeout_s=120)
    assert all(checks.values()), checks


def test_what_one_data_parallel_rank_refuses_stops_all(worlds: Worlds) -> None:
    (bystander, went_on), (refused, also_went_on) = worlds[2].run(refused_on_one_rank, timeout_s=120)
    assert "another data-parallel rank could not read or plan its microbatches" in bystander
    assert refused.startswith("The forward step uses the model's output before it returns it (mul)")
    assert went_on
    assert also_went_on


class Sums(Adapter):
    """Its loss is a sum over samples, so it may be called for each by itself."""

    def __init__(self, in_parts: bool) -> None:
        self.in_parts = in_parts

    def loss_calls(self, microbatch: list[Sample]) -> list[list[Sample]]:
        return [[sample] for sample in microbatch] if self.in_parts else [microbatch]

    def loss(self, microbatch: Any, scores: Any, *, non_loss_data: bool = False) -> Any:
        pairs = zip(microbatch, scores, strict=True)
        loss = sum((-s.logprobs * torch.from_numpy(m.weights)).sum() for m, s in pairs)
        return loss, {"lengths": [len(sample.tokens) for sample in microbatch]}


def in_parts() -> tuple[float, list[int], list[int]]:
    """Difference of gradients with and without parts; lengths in the order of the results of both."""
    framework = Framework(Case(door="adapter"))
    microbatches = framework.samples(0)
    with enable_prefix_reuse(framework.model, prefix_reuse="on"):
        runs = [framework._run(forward_backward, "adapter", microbatches, {"adapter": Sums(p)}) for p in (True, False)]
    restore()
    parts, whole = ([n for result in run.results for n in result["lengths"]] for run in runs)
    assert len(runs[0].results) == 12
    return difference(runs[0].gradients, runs[1].gradients), parts, whole


def test_an_adapter_may_call_its_loss_in_parts(worlds: Worlds) -> None:
    ((error, parts, whole),) = worlds[1].run(in_parts, timeout_s=120)
    assert error < 1e-12
    assert parts == whole


class Routed(Adapter):
    """Replays routes, in which all samples differ at position 1 unless `agreed`: then those of the first of a prefix hold."""

    def __init__(self, agreed: bool) -> None:
        super().__init__("pair")
        self._agreed = agreed
        self._num_samples = 0
        self._first: dict[bytes, int] = {}

    def sequences(self, microbatch: Sequence[Sample]) -> list[SequenceInput]:
        return [replace(s, routes=self._routes(s.tokens)) for s in super().sequences(microbatch)]

    def _routes(self, tokens: np.ndarray) -> np.ndarray:
        number, self._num_samples = self._num_samples, self._num_samples + 1
        expert = np.array(tokens)
        expert[1] = self._first.setdefault(tokens[:2].tobytes(), number) if self._agreed else number
        pairs = np.stack([expert, expert + 1], 1) % MOE["num_moe_experts"]
        return np.repeat(pairs[:, None], 2, 1).astype(np.int16)


def conflicting_routes() -> dict[str, tuple[Outcome, float]]:
    """A step under both settings of `route_mismatch`, and one without conflicts; the part of tokens that was shared."""
    framework = Framework(Case(Model(options=MOE)))
    found = {}
    for name, setting, agreed in (("exact", "exact", False), ("first", "first", False), ("agreed", "exact", True)):
        with enable_prefix_reuse(framework.model, prefix_reuse="on", route_mismatch=setting) as handle:
            outcome = framework._run(forward_backward, "adapter", framework.samples(0), {"adapter": Routed(agreed)})
            found[name] = outcome, handle.metrics["prefixflow/shared_tokens_ratio"]
    restore()
    return found


def test_conflicting_routes_share_where_the_first_ones_hold(worlds: Worlds) -> None:
    (found,) = worlds[1].run(conflicting_routes, timeout_s=120)
    first, shared = found["first"]
    agreed, shared_in_agreement = found["agreed"]
    assert is_same(first, agreed)
    assert found["exact"][1] < shared == shared_in_agreement
    assert difference(found["exact"][0].gradients, first.gradients) > 1e-4


def test_the_example_runs() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "ignore", str(root / "examples" / "bring_your_own_model.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gradient difference" in done.stdout


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.forward_backward_no_pipelining,
        schedules.forward_backward_pipelining_without_interleaving,
        schedules.forward_backward_pipelining_with_interleaving,
    ],
)
def test_the_signature_is_that_of_megatrons_schedules(schedule: Any) -> None:
    ours, theirs = inspect.signature(forward_backward).parameters, inspect.signature(schedule).parameters
    assert [*theirs, "adapter"] == list(ours)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    called = inspect.signature(schedules.forward_step_calc_loss).parameters
    assert list(called)[:8] == [
        "model",
        "output_tensor",
        "loss_func",
        "config",
        "vp_stage",
        "collect_non_loss_data",
        "num_microbatches",
        "forward_data_store",
    ]
    assert {"cp_group_size", "is_last_stage"} < set(called)

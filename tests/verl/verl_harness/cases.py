"""Steps of verl's own engine and of ours on the same batch, in one world of gloo processes, and how far they are apart."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_harness import cpu
from verl_harness.batches import Samples, make_samples, verl_batch, with_routes
from verl_harness.engines import (
    Layout,
    build,
    engine_configs,
    environment,
    gradients,
    grpo_loss,
    restart_model_parallelism,
)


@dataclass(frozen=True)
class Case:
    """One comparison.

    model: kind of `models.KINDS`. batch: what `verl_batch` takes beside samples and ranks. loss: fields of the actor's
    configuration. multiple: all lengths are multiples of it.
    """

    model: str = "qwen2"
    layout: Layout = field(default_factory=Layout)
    batch: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    num_steps: int = 1
    multiple: int = 1
    seed: int = 1


@dataclass
class Step:
    """What a step left on this rank. logprobs, entropy: [tokens - 1] of each sample, empty where there is no head.

    scored, routes: of the old-policy pass before it, and its fallback counter.
    """

    logprobs: list[Tensor]
    entropy: list[Tensor]
    scored: list[Tensor]
    routes: list[Tensor]
    scored_fallback: float
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    metrics: dict[str, Any]


def loss_and_norm(folders: Mapping[str, Path], case: Case, vendor: str | None) -> tuple[float, float]:
    """Of the last step on this rank."""
    step = run(folders[case.model], case, samples_of(case), vendor)[-1]
    return step.loss, step.grad_norm


def samples_of(case: Case) -> Samples:
    return make_samples(3, 4, prompt=24, response=10, vocab_size=96, seed=case.seed, multiple=case.multiple)


def compare(folders: Mapping[str, Path], case: Case) -> dict[str, float]:
    """Largest differences on this rank between verl's own engine and ours, and our counters of the last step.

    `logprobs`, `entropy`, and of the old-policy pass `scored` and `routes`, are absolute, `loss`, `grad_norm`, `gradient`
    relative; `scored_fallback` is 1 where that pass was verl's own.
    """
    samples = samples_of(case)
    expected = run(folders[case.model], case, samples, None)
    ours = run(folders[case.model], case, samples, "prefixflow")
    errors = [_errors(a, b) for a, b in zip(ours, expected, strict=True)]
    largest = {name: max(e[name] for e in errors) for name in errors[0]}
    counters = {name: float(v[0]) for name, v in ours[-1].metrics.items() if name.startswith("prefixflow/")}
    return {**largest, **counters}


def run(folder: Path, case: Case, samples: Samples, vendor: str | None) -> list[Step]:
    """Score as the old policy does, then train, on one engine."""
    engine = build(folder, case.layout, vendor)
    place = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    options = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 100, "calculate_entropy": True, **case.batch}
    if case.layout.replay != "disabled":
        options["enable_routing_replay"] = True
    steps = []
    for _ in range(case.num_steps):
        batch = verl_batch(samples, *place, **options)
        if case.layout.replay == "R3":
            batch = with_routes(batch, engine.tf_config)
        with engine.eval_mode():
            scored = engine.infer_batch(batch.clone(recurse=False))
        if case.layout.replay == "R2":
            batch["routed_experts"] = _everywhere(
                engine, scored["model_output"].get("routed_experts") if scored else None
            )
        steps.append(_train(engine, batch, grpo_loss(**case.loss), scored))
    return steps


def worker_update(folder: Path, vendor: str | None) -> dict[str, Any]:
    """Metrics of one update by verl's `TrainingWorker` on this process."""
    cpu.install()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    restart_model_parallelism()
    os.environ.update(WORLD_SIZE="1", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    samples = samples_of(Case())
    batch = verl_batch(samples, 0, 1, use_dynamic_bsz=True, max_token_len_per_gpu=100)
    tu.assign_non_tensor(batch, global_token_num=tu.NonTensorData([len(t) for t in samples.tokens]))
    with environment(vendor), contextlib.redirect_stdout(io.StringIO()):
        worker = TrainingWorker(
            TrainingWorkerConfig(model_type="language_model", **engine_configs(folder, Layout(), vendor))
        )
        model_parallel_cuda_manual_seed(42)
        worker.reset()
    worker.set_loss_fn(grpo_loss())
    return dict(tu.get(worker.train_batch(batch), "metrics"))


def checkpoint_there_and_back(folder: Path, out: Path) -> float:
    """Asserts that state goes from our engine to verl's own and back to the bit; the largest weight difference after one step of each."""
    own = build(folder, Layout(), None)
    ours = build(folder, Layout(), "prefixflow", is_first=False)
    assert own.module[0].state_dict().keys() == ours.module[0].state_dict().keys()
    _assert_equal_exports(own, ours)
    _train_on(ours, seed=2)
    # Megatron's optimizer has nothing to load into before its first step.
    _train_on(own, seed=3)
    _hand_over(ours, own, out / "ours")
    for engine in (own, ours):
        _train_on(engine, seed=4)
    error = max(
        float((a - b).abs().max()) for a, b in zip(own.module[0].parameters(), ours.module[0].parameters(), strict=True)
    )
    _hand_over(own, ours, out / "own")
    return error


def _hand_over(giver: Any, taker: Any, out: Path) -> None:
    """Through a checkpoint: weights, moments and step counts are equal then."""
    giver.save_checkpoint(str(out), global_step=1)
    with torch.no_grad():  # float32 parameters are leaves, which Megatron copies into
        taker.load_checkpoint(str(out), del_local_after_load=False)
    # Without Apex and Transformer Engine, Megatron loads one `step` for all parameters, which each of them would count up.
    for state in _adam_states(taker):
        state["step"] = state["step"].clone()
    _assert_equal_exports(giver, taker)
    for given, taken in zip(_adam_states(giver), _adam_states(taker), strict=True):
        assert given.keys() == taken.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(given[name], taken[name]) for name in given)


def _adam_states(engine: Any) -> list[dict[str, Tensor]]:
    """Of every parameter, in the order of the optimizer."""
    adams = [part.optimizer for part in engine.optimizer.chained_optimizers]
    return [adam.state[p] for adam in adams for group in adam.param_groups for p in group["params"]]


def _train_on(engine: Any, seed: int) -> None:
    samples = make_samples(2, 3, prompt=24, response=10, vocab_size=96, seed=seed)
    batch = verl_batch(samples, 0, 1, use_dynamic_bsz=True, max_token_len_per_gpu=100)
    with engine.train_mode():
        engine.train_batch(batch, grpo_loss())


def _assert_equal_exports(own: Any, ours: Any) -> None:
    pairs = zip(own.get_per_tensor_param()[0], ours.get_per_tensor_param()[0], strict=True)
    for (own_name, own_weight), (name, weight) in pairs:
        assert own_name == name
        assert torch.equal(own_weight, weight), name


def padded_inputs(folder: Path) -> float:
    """Largest difference of our gradients between jagged and padded `input_ids`."""
    samples = make_samples(2, 3, prompt=24, response=10, vocab_size=96, seed=2)
    engine = build(folder, Layout(), "prefixflow")
    steps = []
    for is_dense_input in (False, True):
        batch = verl_batch(
            samples, 0, 1, use_dynamic_bsz=True, max_token_len_per_gpu=100, is_dense=True, is_dense_input=is_dense_input
        )
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(batch, grpo_loss())
            steps.append(gradients(engine))
    return gradient_error(*steps)


def _train(engine: Any, batch: Any, loss: Any, scored: dict[str, Any]) -> Step:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(batch, loss)
        found = gradients(engine)
        grad_norm = float(engine.optimizer_step())
    outputs = output.get("model_output", {})
    return Step(
        logprobs=_rows(outputs.get("log_probs")),
        entropy=_rows(outputs.get("entropy")),
        scored=_rows(scored.get("model_output", {}).get("log_probs")),
        routes=_rows(scored.get("model_output", {}).get("routed_experts")),
        scored_fallback=scored.get("metrics", {}).get("prefixflow/fallback", [0.0])[0],
        loss=float(np.sum(output.get("loss", 0.0))),
        grad_norm=grad_norm,
        gradients=found,
        metrics=output.get("metrics", {}),
    )


def _everywhere(engine: Any, routes: Tensor | None) -> Tensor:
    """Routes of the last pipeline stage, on all stages, as verl's controller hands them out."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    group = mpu.get_pipeline_model_parallel_group()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, None if routes is None else list(routes.unbind()), group=group)
    return torch.nested.as_nested_tensor(gathered[-1], layout=torch.jagged)


def _rows(jagged: Tensor | None) -> list[Tensor]:
    """Without the last row of each sample, which in verl's engine depends on what was packed next to it."""
    return [] if jagged is None else [row[:-1].detach().double() for row in jagged.unbind()]


def _errors(ours: Step, expected: Step) -> dict[str, float]:
    return {
        **{name: _rows_error(ours, expected, name) for name in ("logprobs", "entropy", "scored", "routes")},
        "scored_fallback": ours.scored_fallback,
        "loss": abs(ours.loss - expected.loss) / max(abs(expected.loss), 1e-3),
        "grad_norm": abs(ours.grad_norm - expected.grad_norm) / expected.grad_norm,
        "gradient": gradient_error(ours.gradients, expected.gradients),
    }


def _rows_error(ours: Step, expected: Step, name: str) -> float:
    pairs = zip(getattr(ours, name), getattr(expected, name), strict=True)
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def gradient_error(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest ||g - g_ref|| / ||g_ref|| of a parameter; tiny gradients are measured against the whole's scale."""
    assert ours.keys() == expected.keys()
    whole = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    assert whole > 0
    floor = 1e-3 * whole / len(expected) ** 0.5
    return max(
        float((ours[name] - g).double().norm()) / max(float(g.double().norm()), floor) for name, g in expected.items()
    )

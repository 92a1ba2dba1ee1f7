"""Megatron-Core on the CPU, as it comes: layouts, optimizers and recomputation agree with each other.

Every case trains the same tiny model for three steps with Megatron's own schedule, DDP and
optimizer, in a gloo world. Losses after the first step depend on gradients and updates, so equal
losses mean that all of them agree.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron.prefixflow.device import install_cpu_device_layer, torch_device
from prefixflow.runtime.world import Worlds, destroy_subgroups

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the layer is for the CPU")

NUM_LAYERS, HIDDEN, HEADS, VOCAB, SEQUENCE, BATCH = 2, 32, 4, 64, 16, 4
NUM_STEPS = 3
LEARNING_RATE = {"adam": 1e-2, "sgd": 1.0}


@dataclass(frozen=True)
class Case:
    """One layout and its flags; the world is tp * pp * dp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    num_experts: int | None = None
    optimizer: str = "adam"
    distributed_optimizer: bool = False
    recompute: str | None = None
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    grad_norms: list[float]


def drop_groups() -> None:
    """Other tests share these processes and leave their groups behind."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    destroy_subgroups()


def train(case: Case) -> Outcome:
    """Three steps of one case; every rank returns the same losses."""
    assert install_cpu_device_layer()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    drop_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
    )
    try:
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        return _train(case)
    finally:
        drop_groups()


def _train(case: Case) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = _model(case)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=case.distributed_optimizer, overlap_grad_reduce=False
    )
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    optimizer_config = OptimizerConfig(
        optimizer=case.optimizer,
        lr=LEARNING_RATE[case.optimizer],
        params_dtype=case.dtype,
        use_distributed_optimizer=case.distributed_optimizer,
        # Megatron's clipping refuses float64 by type.
        clip_grad=1.0 if case.dtype == torch.float32 else 0.0,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    share = BATCH // case.dp
    first = parallel_state.get_data_parallel_rank() * share
    rows = _tokens()[first : first + share]
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(rows.split(1)),
            model=[ddp],
            num_microbatches=share,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        losses.append(_mean_over_ranks([entry["loss"] for entry in reduced], case))
        norms.append(float(norm or 0.0))
    return Outcome(losses, norms)


def _tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)


def _forward_step(data: Iterator[torch.Tensor], model: Any) -> Any:
    row = next(data)
    positions = torch.arange(SEQUENCE, device="cuda").unsqueeze(0)
    output = model(row[:, :-1].cuda(), positions, None, labels=row[:, 1:].cuda())

    def loss_func(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = per_token.mean()
        return loss, {"loss": loss.item()}

    return output, loss_func


def _mean_over_ranks(losses: list[float], case: Case) -> float:
    """Mean over the batch: only last stages hold losses, each of its own rows."""
    total = torch.tensor([sum(losses)], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total) / case.tp / BATCH


def _model(case: Case) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe: dict[str, Any] = {
        "num_moe_experts": case.num_experts,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": HIDDEN,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 1e-2,
        "expert_model_parallel_size": case.ep,
    }
    recompute: dict[str | None, dict[str, Any]] = {
        None: {},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "selective": {"recompute_granularity": "selective"},
    }
    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=2,
        ffn_hidden_size=2 * HIDDEN,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        init_method_std=0.2,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        sequence_parallel=case.tp > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        **recompute[case.recompute],
        **(moe if case.num_experts else {}),
    )
    model = GPTModel(
        config,
        _block(config, case),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    _fill_by_name(model, case)
    return model


class _Norm(torch.nn.RMSNorm):
    """Megatron's local norm refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _block(config: Any, case: Case) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(num_experts=case.num_experts, moe_grouped_gemm=False, normalization="RMSNorm")
    layer.submodules.input_layernorm = _Norm
    layer.submodules.pre_mlp_layernorm = _Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * (NUM_LAYERS // case.pp), layer_norm=_Norm)


def _fill_by_name(model: Any, case: Case) -> None:
    """Weights that follow from a parameter's name in the whole model, in every layout."""
    from megatron.core import parallel_state

    first_layer = parallel_state.get_pipeline_model_parallel_rank() * (NUM_LAYERS // case.pp)
    num_local = (case.num_experts or 0) // case.ep
    first_expert = parallel_state.get_expert_model_parallel_rank() * num_local
    for name, parameter in model.named_parameters():
        name = _shift_number(name, ".layers.", first_layer)
        name = _shift_number(name, ".local_experts.", first_expert)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        shape = list(parameter.shape)
        sharded = getattr(parameter, "tensor_model_parallel", False)
        if sharded:
            shape[parameter.partition_dim] *= case.tp
        full = 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        mean = 1.0 if len(shape) == 1 else 0.0
        with torch.no_grad():
            parameter.copy_(mean + (_shard(full, parameter, case.tp) if sharded else full))


def _shift_number(name: str, marker: str, offset: int) -> str:
    head, found, tail = name.partition(marker)
    if not found:
        return name
    number, _, rest = tail.partition(".")
    return f"{head}{marker}{int(number) + offset}.{rest}"


def _shard(full: torch.Tensor, parameter: Any, tp: int) -> torch.Tensor:
    """This rank's part: with a stride (gate and up rows in one weight), a part of each block."""
    from megatron.core import parallel_state

    dim, rank = parameter.partition_dim, parallel_state.get_tensor_model_parallel_rank()
    blocks = full.chunk(parameter.partition_stride, dim)
    return torch.cat([block.chunk(tp, dim)[rank] for block in blocks], dim)


def outcome(worlds: Worlds, case: Case) -> Outcome:
    results = worlds[case.world_size].run(train, case, timeout_s=180)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def reference(worlds: Worlds) -> Outcome:
    result = outcome(worlds, Case())
    assert all(map(math.isfinite, result.losses))
    assert result.losses[0] > result.losses[1] > result.losses[2]
    assert min(result.grad_norms) > 0
    return result


def same(left: Outcome, right: Outcome, tolerance: float) -> bool:
    pairs = zip(left.losses + left.grad_norms, right.losses + right.grad_norms, strict=True)
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in pairs)


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2),
        Case(pp=2),
        Case(dp=2),
        Case(dp=2, distributed_optimizer=True),
        Case(tp=2, recompute="full"),
    ],
    ids=["tp2-sp", "pp2", "dp2", "dp2-distributed-optimizer", "tp2-sp-full-recompute"],
)
def test_layouts_agree_with_one_process(worlds: Worlds, reference: Outcome, case: Case) -> None:
    assert same(outcome(worlds, case), reference, tolerance=2e-5)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_no_bit(worlds: Worlds, reference: Outcome, recompute: str) -> None:
    assert outcome(worlds, Case(recompute=recompute)) == reference


def test_recomputation_restores_the_random_state(worlds: Worlds, reference: Outcome) -> None:
    """With dropout, the recomputed forward must draw what the first one drew."""
    dropped = outcome(worlds, Case(dropout=0.5))
    assert not same(dropped, reference, tolerance=1e-3)
    assert outcome(worlds, Case(dropout=0.5, recompute="full")) == dropped


def test_expert_parallel_agrees_with_one_process(worlds: Worlds) -> None:
    alone = outcome(worlds, Case(num_experts=4, optimizer="sgd"))
    spread = outcome(worlds, Case(num_experts=4, optimizer="sgd", dp=2, ep=2))
    assert alone.losses[0] > alone.losses[2]
    # Norms and clipping factors of expert parameters are reduced over other groups.
    assert same(spread, alone, tolerance=2e-5)


def test_float64_trains_with_the_plain_optimizer(worlds: Worlds) -> None:
    """Megatron's cross entropy works in float32, hence the tolerance."""
    alone = outcome(worlds, Case(dtype=torch.float64, optimizer="sgd"))
    assert alone.losses[0] > alone.losses[2]
    spread = outcome(worlds, Case(dtype=torch.float64, optimizer="sgd", tp=2))
    assert same(spread, alone, tolerance=1e-6)


def stand_ins() -> dict[str, Any]:
    """What the layer answers, seen from one rank."""
    assert install_cpu_device_layer()
    assert install_cpu_device_layer(), "the second call must find the layer in place"
    numbers = torch.arange(3, device="cuda", dtype=torch.float32)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.nvtx.range("name"):
        torch.cuda.synchronize()
    end.record(torch.cuda.current_stream())
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(state)
    with torch.device("meta"):
        on_meta = torch.empty(2).device.type
    out = torch.empty(3)
    torch.distributed.all_to_all_single(out, numbers, torch.tensor([3]), torch.tensor([3]))
    torch.cuda.reset_peak_memory_stats()
    return {
        "devices": {
            str(numbers.device),
            str(torch_device()),
            str(torch.empty(1, device=torch.cuda.current_device()).device),
            str(torch.zeros_like(numbers, device=torch.device("cuda", 0)).device),
        },
        "meta": on_meta,
        "identity": numbers.cuda() is numbers,
        "types": (numbers.type(), numbers.long().type(), numbers.type(torch.float64).dtype),
        "elapsed_ms": begin.elapsed_time(end),
        "drawn": torch.equal(drawn, torch.rand(2)),
        "exchanged": out.tolist(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "available": torch.cuda.is_available(),
        "queued": len(torch.cuda._queued_calls),
    }


def test_stand_ins_answer_for_the_cpu(worlds: Worlds) -> None:
    first, second = worlds[1].run(stand_ins)[0], worlds[1].run(stand_ins)[0]
    assert first["devices"] == {"cpu"}
    assert first["meta"] == "meta"
    assert first["identity"]
    assert first["types"] == ("torch.cuda.FloatTensor", "torch.LongTensor", torch.float64)
    assert 0 <= first["elapsed_ms"] < 10_000
    assert first["drawn"]
    assert first["exchanged"] == [0.0, 1.0, 2.0]
    assert first["peak_bytes"] > 2**20
    assert not first["available"]
    assert second["queued"] == first["queued"], "calls awaiting CUDA pile up"


def group_sizes() -> dict[str, int]:
    """Sizes of the groups of a layout with context parallelism."""
    assert install_cpu_device_layer()
    from megatron.core import parallel_state as state

    drop_groups()
    state.initialize_model_parallel(context_parallel_size=2)
    try:
        summed = torch.ones(1, device="cuda")
        torch.distributed.all_reduce(summed, group=state.get_context_parallel_group())
        return {
            "cp": int(summed),
            "dp": state.get_data_parallel_world_size(),
            "dp_cp": state.get_data_parallel_world_size(with_context_parallel=True),
        }
    finally:
        drop_groups()


def test_context_parallel_groups(worlds: Worlds) -> None:
    assert worlds[2].run(group_sizes) == [{"cp": 2, "dp": 1, "dp_cp": 2}] * 2


def test_importing_the_module_changes_nothing() -> None:
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"
    assert torch.empty.__module__ is None or "prefixflow" not in torch.empty.__module__

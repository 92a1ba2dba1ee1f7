"""The upstream symbols that we rely on (docs/seams.md), as we use them: a move upstream fails here first, by name."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import packed_seq_params, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias, reset_model_temporary_tensors
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer import TransformerConfig, attention, transformer_block, transformer_layer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron.prefixflow.arguments import parallel_layout, parse_arguments, plan_config, transformer_config
from megatron.prefixflow.params import MicrobatchParams
from megatron.prefixflow.router import SegmentRouter
from megatron.prefixflow.spec import SegmentCoreAttention, SegmentTransformerLayer, SequenceParallelNorm, block_spec
from prefixflow.runtime.world import Worlds

LAYER = transformer_layer.TransformerLayer
BLOCK = transformer_block.TransformerBlock

CALLS: dict[str, tuple[Callable[..., Any], int, str]] = {
    # What is called -> the symbol, how many positional arguments, and keywords.
    "DotProductAttention": (
        DotProductAttention.__init__,
        1,
        "config layer_number attn_mask_type attention_type attention_dropout softmax_scale cp_comm_type pg_collection",
    ),
    "DotProductAttention.forward": (
        DotProductAttention.forward,
        5,
        "attn_mask_type attention_bias packed_seq_params",
    ),
    "TransformerLayer._forward_attention": (
        LAYER._forward_attention,
        1,
        "hidden_states attention_mask rotary_pos_emb packed_seq_params",
    ),
    "TransformerLayer._forward_mlp": (LAYER._forward_mlp, 2, ""),
    "TransformerBlock.forward": (BLOCK.forward, 1, "hidden_states attention_mask rotary_pos_emb packed_seq_params"),
    "WrappedTorchNorm": (WrappedTorchNorm.__new__, 1, "config hidden_size eps"),
    "get_gpt_decoder_layer_specs": (gpt_layer_specs.get_gpt_decoder_layer_specs, 3, ""),
    "get_gpt_decoder_block_spec": (
        gpt_layer_specs.get_gpt_decoder_block_spec,
        1,
        "use_transformer_engine normalization",
    ),
    "get_num_layers_to_build": (transformer_block.get_num_layers_to_build, 1, "vp_stage"),
    "get_transformer_layer_offset": (transformer_layer.get_transformer_layer_offset, 1, "vp_stage"),
    "RotaryEmbedding.get_emb": (RotaryEmbedding.get_emb, 2, ""),
    "GPTModel": (
        GPTModel.__init__,
        1,
        """config transformer_layer_spec vocab_size max_sequence_length parallel_output
        share_embeddings_and_output_weights position_embedding_type rotary_percent rotary_base rope_scaling
        rope_scaling_factor seq_len_interpolation_factor""",
    ),
    "GPTModel.forward": (GPTModel.forward, 1, "input_ids position_ids attention_mask"),
    "GPTModel.shared_embedding_or_output_weight": (GPTModel.shared_embedding_or_output_weight, 1, ""),
    "gather_from_sequence_parallel_region": (
        tensor_parallel.gather_from_sequence_parallel_region,
        1,
        "tensor_parallel_output_grad group",
    ),
    "TopKRouter": (TopKRouter.__init__, 1, "config pg_collection"),
    "MoEAuxLossAutoScaler.set_loss_scale": (moe_utils.MoEAuxLossAutoScaler.set_loss_scale, 1, ""),
    "_update_router_expert_bias": (_update_router_expert_bias, 2, ""),
    "reset_model_temporary_tensors": (reset_model_temporary_tensors, 2, ""),
    "get_expert_model_parallel_group": (parallel_state.get_expert_model_parallel_group, 0, ""),
    "get_expert_tensor_parallel_group": (parallel_state.get_expert_tensor_parallel_group, 0, ""),
    "get_expert_data_parallel_group": (parallel_state.get_expert_data_parallel_group, 0, ""),
    "get_expert_tensor_model_pipeline_parallel_group": (
        parallel_state.get_expert_tensor_model_pipeline_parallel_group,
        0,
        "",
    ),
    "TopKRouter.gating": (TopKRouter.gating, 2, ""),
    "topk_routing_with_score_function": (
        moe_utils.topk_routing_with_score_function,
        2,
        """use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias router_replay""",
    ),
    "compute_routing_scores_for_aux_loss": (moe_utils.compute_routing_scores_for_aux_loss, 3, ""),
    "finalize_model_grads": (finalize_model_grads, 1, ""),
    "DistributedDataParallel": (DistributedDataParallel.__init__, 4, "disable_bucketing"),
    "bucket_group.finish_param_sync": (_ParamAndGradBucketGroup.finish_param_sync, 1, "skip_next_bucket_dispatch"),
    "bucket_group.start_grad_sync": (_ParamAndGradBucketGroup.start_grad_sync, 1, "force_all_reduce"),
    "DistributedDataParallel.scale_gradients": (DistributedDataParallel.scale_gradients, 2, ""),
    "DistributedDataParallel.zero_grad_buffer": (DistributedDataParallel.zero_grad_buffer, 1, ""),
    "DistributedDataParallel.broadcast_params": (DistributedDataParallel.broadcast_params, 1, ""),
    "param_is_not_tensor_parallel_duplicate": (param_is_not_tensor_parallel_duplicate, 2, ""),
    "param_is_not_shared": (param_is_not_shared, 1, ""),
    "get_megatron_optimizer": (get_megatron_optimizer, 2, ""),
    "FileSystemWriterAsync.write_preloaded_data": (
        filesystem_async.FileSystemWriterAsync.write_preloaded_data,
        5,
        "use_fsync use_msc",
    ),
    "FileSystemWriterAsync.write_preloaded_data_multiproc": (
        filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc,
        5,
        "",
    ),
    "DistributedOptimizer.load_parameter_state_from_fully_reshardable": (
        DistributedOptimizer.load_parameter_state_from_fully_reshardable,
        2,
        "",
    ),
    "initialize_model_parallel": (
        parallel_state.initialize_model_parallel,
        0,
        """tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size""",
    ),
    "get_data_parallel_group": (parallel_state.get_data_parallel_group, 0, "with_context_parallel"),
    "get_context_parallel_group": (parallel_state.get_context_parallel_group, 0, ""),
    "get_tensor_model_parallel_group": (parallel_state.get_tensor_model_parallel_group, 0, ""),
    "get_model_parallel_group": (parallel_state.get_model_parallel_group, 0, ""),
}

FIELDS: dict[type, str] = {
    packed_seq_params.PackedSeqParams: "qkv_format cu_seqlens_q cu_seqlens_kv",
    attention.SelfAttentionSubmodules: "linear_qkv core_attention linear_proj q_layernorm k_layernorm",
    transformer_layer.TransformerLayerSubmodules: "input_layernorm self_attention pre_mlp_layernorm mlp",
    transformer_block.TransformerBlockSubmodules: "layer_specs layer_norm",
    MoESubmodules: "experts shared_experts router",
    TransformerConfig: """calculate_per_token_loss sequence_parallel recompute_granularity recompute_method
    recompute_num_layers use_cpu_initialization params_dtype kv_channels softmax_scale num_moe_experts
    apply_query_key_layer_scaling gated_linear_unit normalization moe_layer_freq moe_router_topk
    moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_pre_softmax moe_router_num_groups
    moe_router_group_topk moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias
    moe_expert_capacity_factor moe_input_jitter_eps moe_router_force_load_balancing moe_router_fusion
    moe_enable_routing_replay""",
    DistributedDataParallelConfig: """overlap_grad_reduce average_in_collective use_distributed_optimizer
    grad_reduce_in_fp32 bucket_size""",
    OptimizerConfig: """optimizer lr sgd_momentum adam_beta1 adam_beta2 adam_eps weight_decay clip_grad bf16
    params_dtype use_distributed_optimizer""",
}


@pytest.mark.parametrize("name", CALLS)
def test_signature(name):
    function, num_positional, keywords = CALLS[name]
    signature = inspect.signature(function)
    # `self` or `cls` is the first positional argument of what is called on an instance.
    names = keywords.split()
    try:
        signature.bind(*range(num_positional), **dict.fromkeys(names))
    except TypeError as error:
        pytest.fail(f"Megatron-Core's {name}{signature} can no longer be called as docs/seams.md says: {error}")


@pytest.mark.parametrize("owner", FIELDS, ids=lambda owner: owner.__name__)
def test_fields(owner):
    missing = set(FIELDS[owner].split()) - {f.name for f in dataclasses.fields(owner)}
    assert not missing, f"Megatron-Core's {owner.__name__} no longer has {sorted(missing)}"


@pytest.mark.parametrize(
    ("ours", "upstream"),
    [
        (SegmentCoreAttention.__init__, DotProductAttention.__init__),
        (SegmentCoreAttention.forward, DotProductAttention.forward),
    ],
)
def test_our_core_attention_takes_what_upstream_takes(ours, upstream):
    expected, got = (list(inspect.signature(f).parameters) for f in (upstream, ours))
    assert got == expected, "core attention is called with other arguments than ours takes"


def test_the_layer_is_attention_then_mlp():
    source = inspect.getsource(LAYER.forward)
    order = ["_forward_attention(", "_forward_mlp("]
    places = [source.find(call) for call in order]
    assert -1 not in places, "TransformerLayer.forward no longer calls attention and MLP as two methods"
    assert places == sorted(places)


def test_packed_parameters_matter_to_thd_only():
    assert issubclass(MicrobatchParams, packed_seq_params.PackedSeqParams)
    folder = Path(inspect.getsourcefile(transformer_layer)).parents[1]  # type: ignore[arg-type]
    for place in ("transformer/attention.py", "models/common/embeddings/rope_utils.py"):
        for line in (folder / place).read_text().splitlines():
            if "qkv_format ==" in line:
                assert "'thd'" in line or '"thd"' in line, f"{place} has a new branch: {line.strip()}"


def test_seams_are_listed():
    """Every symbol that is checked here stands in docs/seams.md, under its own or its owner's name."""
    text = (Path(__file__).parents[2] / "docs" / "seams.md").read_text()
    ours = (
        "SegmentRouter",
        "PrefixReuseHandle.step",
        "SegmentCoreAttention",
        "SegmentTransformerLayer",
        "SequenceParallelNorm",
        "MicrobatchParams",
    )
    for name in (*ours, "RotaryEmbedding.get_emb", "finalize_model_grads", "get_gpt_decoder_layer_specs"):
        assert name in text, f"docs/seams.md does not mention {name}"


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_our_router_takes_what_upstream_takes(method):
    upstream, ours = (list(inspect.signature(getattr(c, method)).parameters) for c in (TopKRouter, SegmentRouter))
    assert ours == upstream, "the router is called with other arguments than ours takes"


# What the symbols do.


class _Model:
    """A two-layer model of ours in this process, and what a forward through it handed down."""

    def __init__(self, recompute: str | None, *more: str) -> None:
        from megatron.prefixflow.arguments import gpt_model_kwargs
        from megatron.prefixflow.session import start_session
        from prefixflow.plan.layout import ParallelLayout

        argv = ["--model", "tiny", "--num-layers", "2", "--recompute", recompute or "none", *more]
        args = parse_arguments(argv)
        start_session(ParallelLayout(), 1)
        config = transformer_config(args)
        self.model = GPTModel(config, transformer_layer_spec=block_spec(config), **gpt_model_kwargs(args))


def observe_core_attention(recompute: str | None) -> list[tuple[Any, ...]]:
    """Shapes and packed parameters that core attention got in each call of a forward and backward."""
    model = _Model(recompute).model
    seen = []
    params = MicrobatchParams(qkv_format="sbhd", context=None)

    class Context:
        keys_only_layer = None

    params.context = Context()  # type: ignore[assignment]

    def observed(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        seen.append((tuple(query.shape), tuple(key.shape), packed_seq_params is params, query.dtype))
        out = query + key.repeat_interleave(query.shape[2] // key.shape[2], 2) + value.mean()
        return out.reshape(*query.shape[:2], -1)

    with mock.patch.object(SegmentCoreAttention, "forward", observed):
        hidden = model.embedding(input_ids=torch.arange(6)[None], position_ids=torch.arange(6)[None])
        assert hidden.shape == (6, 1, 128)
        angles = model.rotary_pos_emb.get_emb(6)
        assert angles.shape == (6, 1, 1, 16)
        out = model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=params)
        assert out.shape == (6, 1, 128)
        out.sum().backward()
    assert all(isinstance(layer, SegmentTransformerLayer) for layer in model.decoder.layers)
    assert model.output_layer.weight.shape[1] == 128
    return seen


@pytest.mark.parametrize(("recompute", "num_calls"), [(None, 2), ("full", 4), ("selective", 4)])
def test_core_attention_gets_packed_parameters(worlds: Worlds, recompute, num_calls):
    (seen,) = worlds[1].run(observe_core_attention, recompute)
    assert seen == [((6, 1, 8, 16), (6, 1, 4, 16), True, torch.float32)] * num_calls


def test_norms_are_marked_for_sequence_parallelism():
    for normalization in ("RMSNorm", "LayerNorm"):
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, normalization=normalization, use_cpu_initialization=True
        )
        upstream = WrappedTorchNorm(config=config, hidden_size=8, eps=1e-3)
        ours: Any = SequenceParallelNorm(config=config, hidden_size=8, eps=1e-3)
        assert type(ours) is type(upstream)
        assert ours.eps == upstream.eps
        assert not any(p.sequence_parallel for p in ours.parameters())
        config.sequence_parallel = True
        marked: Any = SequenceParallelNorm(config=config, hidden_size=8)
        assert all(p.sequence_parallel for p in marked.parameters())


@pytest.mark.parametrize(
    "argv",
    [
        "--pp 2",
        "--pp 4 --num-layers 6 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
        "--pp 2 --vpp 2 --num-layers 6 --decoder-last-pipeline-num-layers 2",
        "--pp 3 --num-layers 5 --account-for-loss-in-pipeline-split",
        "--pp 2 --vpp 3 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ],
)
def test_layers_go_to_stages_as_upstream_puts_them(argv):
    args = parse_arguments(["--model", "tiny", *argv.split()])
    config, layout = transformer_config(args, on_gpu=False), parallel_layout(args)
    stages = [(chunk if layout.vpp > 1 else None, rank) for chunk in range(layout.vpp) for rank in range(layout.pp)]
    layers = plan_config(args).stage_layers
    assert tuple(transformer_block.get_num_layers_to_build(config, *stage) for stage in stages) == layers
    offsets = [transformer_layer.get_transformer_layer_offset(config, *stage) for stage in stages]
    # A stage without layers has no first one.
    expected = list(itertools.accumulate(layers, initial=0))
    assert all(got == want for got, want, number in zip(offsets, expected, layers, strict=False) if number)


def ddp_attributes() -> list[str]:
    """What `gradients` and `shards` read of DDP and is not there."""
    from megatron.prefixflow.model import wrap_data_parallel

    # The weights of q and k norms have 16 elements each: the buffer pads between parameters.
    model = _Model(None, "--qk-layernorm").model
    (ddp,) = wrap_data_parallel([model], DistributedDataParallelConfig(use_distributed_optimizer=True))
    wrong = []
    for buffer in ddp.buffers:
        for bucket in buffer.buckets:
            for parameter in bucket.params:
                first, last, _ = buffer.param_index_map[parameter]
                bucket.grad_data[first - bucket.offset : last - bucket.offset] = 3.0
                is_there = bool((parameter.main_grad == 3.0).all())
                if not is_there or last - first != parameter.numel():
                    wrong.append("param_index_map and offset do not lead to main_grad")
    for name, parameter in ddp.module.named_parameters():
        is_split = any(part in name for part in ("linear_fc1", "linear_qkv", "embedding", "output_layer"))
        if is_split and not (parameter.tensor_model_parallel and parameter.partition_dim == 0):
            wrong.append(f"{name}: tensor_model_parallel, partition_dim")
    return wrong


def test_ddp_attributes(worlds: Worlds):
    assert worlds[1].run(ddp_attributes) == [[]]


def test_writers_of_checkpoints_report_through_a_queue_that_can_be_replaced() -> None:
    assert hasattr(filesystem_async, "_results_queue")

"""Reduction, norm and clipping against brute force on the whole, unsharded gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.prefixflow.arguments import (
    Arguments,
    ddp_config,
    gpt_model_kwargs,
    parallel_layout,
    parse_arguments,
    transformer_config,
)
from megatron.prefixflow.gradients import clip_gradients, gradient_norm, reduce_gradients
from megatron.prefixflow.model import build_model, wrap_data_parallel
from megatron.prefixflow.session import start_session
from megatron.prefixflow.shards import VOCABULARY_PARAMETERS, full_gradients, load_full_parameters, split_parameter
from prefixflow.runtime.world import WorldError, Worlds

MODEL = "--model tiny --num-layers 2 --vocab-size 509 --qk-layernorm --add-qkv-bias"
TIED = f"{MODEL.replace('--model tiny', '--hidden-size 128 --num-attention-heads 8 --max-position-embeddings 64')}"
LAYOUTS = {
    "plain": "--dtype float64",
    "tied": "--dtype float64",
    "tp2": "--dtype float64 --tp 2",
    "tp2 sp": "--dtype float64 --tp 2 --sequence-parallel",
    "tp2 sp tied": "--dtype float64 --tp 2 --sequence-parallel",
    "dp2": "--dtype float64 --dp 2",
    "dp2 distributed": "--dtype float32 --dp 2 --use-distributed-optimizer",
    "dp2 distributed tied": "--dtype float32 --dp 2 --use-distributed-optimizer --ddp-bucket-size 5000",
    "bf16": "--dtype bfloat16 --dp 2 --use-distributed-optimizer",
    "tp2 sp dp2 distributed": "--dtype float32 --tp 2 --sequence-parallel --dp 2 --use-distributed-optimizer",
}
PRECISION = {torch.float64: 1e-14, torch.float32: 1e-7, torch.bfloat16: 1e-7}


def arguments(layout: str) -> Arguments:
    return parse_arguments(f"{TIED if 'tied' in layout else MODEL} {LAYOUTS[layout]}".split())


def whole_gradients(model: Any, args: Arguments) -> dict[str, Tensor]:
    """Unsharded gradients by name, the same on every rank: of sizes from 1e-6 to 1e3, so that none can hide."""
    whole = {}
    for place, (name, parameter) in enumerate(model.named_parameters()):
        shape = list(parameter.shape)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= args.tensor_model_parallel_size
        if name in VOCABULARY_PARAMETERS:
            shape[0] = args.vocab_size
        generator = torch.Generator().manual_seed(place)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        whole[name] = values * 10.0 ** (place % 10 - 6)
    return whole


class Filled:
    """A model whose main gradients are this rank's share of known whole ones, then reduced."""

    def __init__(self, layout: str) -> None:
        self.args = args = arguments(layout)
        self.groups = start_session(parallel_layout(args), args.seed)
        config = transformer_config(args)
        (model,) = build_model(config, self.groups, **gpt_model_kwargs(args))
        self.whole = whole_gradients(model, args)
        self.model = wrap_data_parallel([model], ddp_config(args))
        (self.ddp,) = self.model
        self.ddp.zero_grad_buffer()
        for name, parameter in model.named_parameters():
            parameter.main_grad.copy_(self._share(name, parameter))
        reduce_gradients([self.ddp])
        self.norm = gradient_norm([self.ddp], self.groups)

    def _share(self, name: str, parameter: Any) -> Tensor:
        """Data-parallel ranks sum up; so do tensor-parallel ones that saw a part of the tokens (sequence parallelism) or of
        the heads (norms of q and k)."""
        rank, size = self.groups.tensor.rank(), self.groups.tensor.size()
        shard = split_parameter(name, self.whole[name], parameter, rank=rank, size=size, gated=True)
        if getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
            shard = shard * ((rank + 1) / (size * (size + 1) / 2))
        place, number = self.groups.data_rank, self.groups.data_parallel.size()
        return shard * ((place + 1) / (number * (number + 1) / 2))

    def gathered(self) -> dict[str, Tensor]:
        return full_gradients(self.model, self.groups, gated=True, vocab_size=self.args.vocab_size)

    @property
    def expected_norm(self) -> float:
        return math.sqrt(sum(float(g.square().sum()) for g in self.whole.values()))


def largest_error(got: dict[str, Tensor], whole: dict[str, Tensor], factor: float = 1.0) -> float:
    assert got.keys() == whole.keys()
    errors = [(got[n].double() - factor * g).norm() / (factor * g).norm() for n, g in whole.items()]
    return float(max(errors))


def measure(layout: str) -> dict[str, Any]:
    filled = Filled(layout)
    expected = filled.expected_norm
    result: dict[str, Any] = {"norm": filled.norm / expected - 1, "names": sorted(filled.whole)}
    untouched = [clip_gradients([filled.ddp], limit, filled.norm) for limit in (0.0, 2 * expected)]
    factor = clip_gradients([filled.ddp], expected / 4, filled.norm)
    clipped = gradient_norm([filled.ddp], filled.groups)
    result["untouched"], result["factor"] = untouched, factor
    result["clipped norm"] = clipped / (expected / 4) - 1
    result["gradients"] = largest_error(filled.gathered(), filled.whole, factor)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_clipping_and_gathering(worlds: Worlds, layout):
    args = arguments(layout)
    precision = PRECISION[args.params_dtype]
    for result in worlds[parallel_layout(args).world_size].run(measure, layout):
        assert abs(result["norm"]) < precision
        assert result["untouched"] == [1.0, 1.0]
        assert result["factor"] == pytest.approx(0.25, rel=precision)
        assert abs(result["clipped norm"]) < precision
        assert result["gradients"] < precision
        assert ("output_layer.weight" in result["names"]) == ("tied" not in layout)


def mutant_norms(layout: str) -> tuple[float, float]:
    """The norm when replicated parameters count on every rank, and when the other ranks' shards are left out."""
    filled = Filled(layout)
    everything = sum(float(p.main_grad.double().square().sum()) for p in filled.ddp.module.parameters())
    total = torch.tensor(everything, dtype=torch.float64)
    torch.distributed.all_reduce(total, group=filled.groups.model_parallel)
    return float(total.sqrt()) / filled.expected_norm, math.sqrt(everything) / filled.expected_norm


def test_wrong_norms_would_show(worlds: Worlds):
    for counted_twice, shard_only in worlds[2].run(mutant_norms, "tp2 sp"):
        assert counted_twice > 1 + 1e-6
        assert shard_only < 1 - 1e-6


def norm_of_few_large_and_many_small() -> float:
    """Error of the squared norm of gradients of 1 beside 1e-6: a float32 sum would lose the small ones."""
    args = parse_arguments(f"{MODEL} --dtype float64".split())
    groups = start_session(parallel_layout(args), args.seed)
    (ddp,) = wrap_data_parallel(
        build_model(transformer_config(args), groups, **gpt_model_kwargs(args)), ddp_config(args)
    )
    for parameter in ddp.module.parameters():
        parameter.main_grad.fill_(1e-6)
    ddp.module.decoder.final_layernorm.weight.main_grad.fill_(1.0)
    reduce_gradients([ddp])
    small = sum(p.numel() for p in ddp.module.parameters()) - 128
    return gradient_norm([ddp], groups) ** 2 - 128 - small * 1e-12


def norm_of_a_large_parameter(dtype: str) -> float:
    """Relative error of the norm with an embedding of 6 million elements, random and of very different rows."""
    args = parse_arguments(f"--model tiny --num-layers 1 --vocab-size 49152 --dtype {dtype}".split())
    groups = start_session(parallel_layout(args), args.seed)
    (ddp,) = wrap_data_parallel(
        build_model(transformer_config(args), groups, **gpt_model_kwargs(args)), ddp_config(args)
    )
    generator = torch.Generator().manual_seed(0)
    square_sum = 0.0
    for parameter in ddp.module.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        sizes = torch.rand(len(values), generator=generator) ** 8
        parameter.main_grad.copy_((values.T * sizes).T)
        square_sum += float(parameter.main_grad.double().square().sum())
    reduce_gradients([ddp])
    return gradient_norm([ddp], groups) / math.sqrt(square_sum) - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_norm_of_a_large_parameter(worlds: Worlds, dtype):
    (error,) = worlds[1].run(norm_of_a_large_parameter, dtype)
    assert abs(error) < (1e-12 if dtype == "float64" else 1e-7)


def test_float64_is_kept(worlds: Worlds):
    (error,) = worlds[1].run(norm_of_few_large_and_many_small)
    assert abs(error) < 1e-12


# Shards.


def test_split_and_join_are_inverse(worlds: Worlds):
    errors = worlds[2].run(load_and_gather, "tp2 sp")
    assert errors == [0.0, 0.0]


def load_and_gather(layout: str) -> float:
    """Whole values written as parameters and read back as gradients."""
    args = arguments(layout)
    groups = start_session(parallel_layout(args), args.seed)
    (model,) = build_model(transformer_config(args), groups, **gpt_model_kwargs(args))
    whole = whole_gradients(model, args)
    load_full_parameters([model], whole, groups, gated=True)
    ddp = wrap_data_parallel([model], ddp_config(args))
    for parameter in model.parameters():
        parameter.main_grad.copy_(parameter.detach())
    return largest_error(full_gradients(ddp, groups, gated=True, vocab_size=args.vocab_size), whole)


def load_incomplete(missing: str, shape: tuple[int, ...] | None) -> None:
    args = arguments("plain")
    groups = start_session(parallel_layout(args), args.seed)
    (model,) = build_model(transformer_config(args), groups, **gpt_model_kwargs(args))
    whole = whole_gradients(model, args)
    del whole[missing]
    if shape is not None:
        whole[missing] = torch.zeros(shape)
    load_full_parameters([model], whole, groups, gated=True)


@pytest.mark.parametrize("shape", [None, (7,)])
def test_incomplete_weights_are_refused_by_name(worlds: Worlds, shape):
    name = "decoder.final_layernorm.weight"
    with pytest.raises(WorldError, match=f"Parameter '{name}'"):
        worlds[1].run(load_incomplete, name, shape)

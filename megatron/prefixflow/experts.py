"""Expert parameters: which they are, what they are called in the whole model, and which ranks hold copies of them.

Megatron tells them apart by the parameter attribute `allreduce`: where it is False, DDP and the optimizer take the experts'
own data-parallel group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_LOCAL_EXPERT = re.compile(r"(?P<layer>.*\.mlp)\.experts\.local_experts\.(?P<number>\d+)\.(?P<rest>.*)")
_GROUPED_EXPERT = re.compile(
    r"(?P<layer>.*\.mlp)\.experts\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)(?P<number>\d+)"
)


def mark_expert_parameters(chunk: torch.nn.Module) -> None:
    """Send the gradients of all experts of a chunk to their own groups.

    Megatron marks them under expert parallelism only. Without it, but with fewer expert tensor than tensor parallel ranks,
    each tensor parallel rank sends its own tokens through its own copy, and their gradients would never be summed. And the
    bias of an expert's second linear layer is marked as sequence parallel, so it would be summed over ranks with other experts.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """True for a parameter of an expert (not of a shared expert, nor of the router) of a model that `build_model` made."""
    return not getattr(parameter, "allreduce", True)


def global_expert_name(name: str, expert_numbers: Mapping[str, list[int]]) -> str:
    """Name in the whole model of a parameter of a chunk; one that is not of an expert keeps its name.

    Experts of Transformer Engine's grouped linear layers get the names of Megatron's sequential ones.

    expert_numbers: `local_expert_numbers` of the chunk.
    """
    if found := _LOCAL_EXPERT.fullmatch(name):
        number = expert_numbers[found["layer"]][int(found["number"])]
        return f"{found['layer']}.experts.local_experts.{number}.{found['rest']}"
    if found := _GROUPED_EXPERT.fullmatch(name):
        number = expert_numbers[found["layer"]][int(found["number"])]
        return f"{found['layer']}.experts.local_experts.{number}.{found['linear']}.{found['kind']}"
    return name


def local_expert_numbers(chunk: Any) -> dict[str, list[int]]:
    """Numbers in the whole model of the experts that this rank holds, by the module name of their MoE layer."""
    return {name: module.local_expert_indices for name, module in _moe_layers(chunk)}


def _moe_layers(chunk: Any) -> Iterator[tuple[str, Any]]:
    for name, module in chunk.named_modules():
        if hasattr(module, "local_expert_indices") and hasattr(module, "router"):
            yield name, module

"""Names of experts in the whole model, from those of one rank."""

from __future__ import annotations

import pytest

from megatron.prefixflow.experts import global_expert_name

LAYER = "decoder.layers.3.mlp"
NUMBERS = {LAYER: [4, 5, 6, 7]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{LAYER}.experts.local_experts.2.linear_fc1.weight", f"{LAYER}.experts.local_experts.6.linear_fc1.weight"),
        # Transformer Engine's grouped layers have the parameters of all experts in one module.
        (f"{LAYER}.experts.linear_fc2.weight0", f"{LAYER}.experts.local_experts.4.linear_fc2.weight"),
        (f"{LAYER}.experts.linear_fc1.bias3", f"{LAYER}.experts.local_experts.7.linear_fc1.bias"),
        (f"{LAYER}.shared_experts.linear_fc1.weight", f"{LAYER}.shared_experts.linear_fc1.weight"),
        (f"{LAYER}.router.weight", f"{LAYER}.router.weight"),
    ],
)
def test_global_expert_name(name: str, expected: str) -> None:
    assert global_expert_name(name, NUMBERS) == expected

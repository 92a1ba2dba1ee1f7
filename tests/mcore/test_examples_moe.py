"""The launch scripts of mixtures of experts: what they would start parses, and plans a batch with routes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron.prefixflow.arguments import parallel_layout, parse_arguments, plan_config, shape_of
from prefixflow.plan.shapes import BUILTIN_SHAPES
from prefixflow.schedule.search import plan_pipeline
from prefixflow.testing.generate import Style, two_level_groups, with_routes
from prefixflow.trajectories import RouteShape

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "moe"

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SIZES = {
    "qwen3_30b_a3b": {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "qwen3_235b_a22b": {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
}


def launched(script: Path, folder: Path, *arguments: str) -> list[str]:
    """What the script gives to torchrun, after the name of the program."""
    torchrun = folder / "torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return lines[lines.index("pretrain_rl.py") + 1 :]


@pytest.mark.parametrize(("name", "world", "block"), [("qwen3_30b_a3b", 32, 2), ("qwen3_235b_a22b", 128, 2)])
def test_qwen3_script(name: str, world: int, block: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE | SIZES[name]))
    out = str(tmp_path / "out")
    argv = launched(EXAMPLES / f"grpo_{name}.sh", tmp_path, str(tmp_path), "rollouts.jsonl", out)
    args = parse_arguments(argv, training=True)
    expected = BUILTIN_SHAPES[name.replace("_", "-")]
    assert shape_of(args).num_parameters == expected.num_parameters
    assert shape_of(args).num_moe_layers == expected.num_layers
    layout = parallel_layout(args, world)
    batch = two_level_groups(6, 4, 300, (20, 60), style=Style(vocab_size=args.vocab_size))
    batch = with_routes(batch, RouteShape(expected.num_layers, 8, 128), missing=0.1)
    plan = plan_pipeline(batch, plan_config(args, layout))
    plan.assert_invariants(batch)
    assert plan.config.expert_block == block
    assert plan.route_report is not None
    assert plan.route_report.num_filled > 0
    for rank, microbatches in enumerate(plan.ranks):
        assert len(microbatches) == len(plan.ranks[rank - rank % block])

"""An update of verl's actor: its own Megatron engine against ours, in one process.

    make test-verl        # once: makes .venv-verl
    PYTHONPATH=.:tests/verl .venv-verl/bin/python benchmarks/verl_update.py [--prefix-ratio R] [--group-size G] [--pairs N]

Groups of one prompt each, shuffled; verl's dynamic batches of `--max-tokens`; `forward_backward_batch` with verl's GRPO loss,
float32, one thread. The sides alternate; CPU seconds of this process, median of the pairs after one of each to warm up. The bound is
dense FLOPs over those computed, the head on every row on both sides as verl has it. On the CPU both sides have stand-ins for Transformer
Engine (tests/verl/verl_harness/cpu.py): what they measure is the schedule, with the same layers and kernels on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from prefixflow.runtime.world import World
from verl_harness.batches import make_samples, verl_batch
from verl_harness.cases import gradient_error
from verl_harness.engines import Layout, build, gradients, grpo_loss
from verl_harness.models import save_tiny

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
}
TIMEOUT_S = 3600.0


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs in the world's process."""
    import torch

    torch.set_num_threads(1)
    engines = {
        name: build(folder, Layout(), vendor, is_first=vendor is None)
        for name, vendor in (("verl", None), ("prefixflow", "prefixflow"))
    }
    prompt = round(options.tokens * options.prefix_ratio)
    samples = make_samples(
        options.groups,
        options.group_size,
        prompt=prompt,
        response=options.tokens - prompt,
        vocab_size=SHAPE["vocab_size"],
        seed=1,
    )
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    kept: dict[str, Any] = {}
    for pair in range(options.pairs + 1):
        for name, engine in engines.items():
            batch = verl_batch(samples, 0, 1, use_dynamic_bsz=True, max_token_len_per_gpu=options.max_tokens)
            with engine.train_mode():
                engine.optimizer_zero_grad()
                start = time.process_time()
                output = engine.forward_backward_batch(batch, grpo_loss())
                if pair:
                    seconds[name].append(time.process_time() - start)
                kept[name] = gradients(engine), output["metrics"]
    dense_s, reuse_s = (statistics.median(seconds[name]) for name in ("verl", "prefixflow"))
    metrics = {key: value[0] for key, value in kept["prefixflow"][1].items() if key.startswith("prefixflow/")}
    speedup = statistics.median(a / b for a, b in zip(seconds["verl"], seconds["prefixflow"], strict=True))
    return {
        "prefix_ratio": options.prefix_ratio,
        "group_size": options.group_size,
        "samples": len(samples.tokens),
        "tokens": sum(len(t) for t in samples.tokens),
        "dense_s": round(dense_s, 3),
        "reuse_s": round(reuse_s, 3),
        "speedup": round(speedup, 3),
        "bound": round(metrics["prefixflow/bound"], 3),
        "fraction_of_bound": round(speedup / metrics["prefixflow/bound"], 3),
        "shared_tokens_ratio": round(metrics["prefixflow/shared_tokens_ratio"], 3),
        "gradient_error": gradient_error(kept["prefixflow"][0], kept["verl"][0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix-ratio", type=float, default=0.833)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="of one sample")
    parser.add_argument("--max-tokens", type=int, default=4096, help="max_token_len_per_gpu")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, World(1) as world:
        path = save_tiny("qwen2", Path(folder), **SHAPE)
        print(json.dumps(world.run(measure, path, options, timeout_s=TIMEOUT_S)[0]))


if __name__ == "__main__":
    main()

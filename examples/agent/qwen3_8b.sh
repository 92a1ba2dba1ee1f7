#!/usr/bin/env bash
# GRPO with Qwen3-8B on agents, step-wise: sample k is all up to action k, which it trains. 2 nodes of 8 GPUs.
#
#     examples/agent/qwen3_8b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 10.56x the speed of dense, 28.6 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py agent.jsonl --shape steps --groups 8 --group-size 16 --prompt-tokens 4096 --turn-tokens 256
#     examples/agent/qwen3_8b.sh --plan qwen3-8b agent.jsonl
#
# NOT RUN on a cluster: parsed and planned by a test.
source "$(dirname "$0")/../common.sh"

NUM_NODES=${NUM_NODES:-2}
PLAN_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --max-tokens-per-microbatch 8192
)
TRAIN_ARGS=(
    --global-batch-size 768
)
recipe "$@"

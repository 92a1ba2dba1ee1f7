#!/usr/bin/env bash
# GRPO with Llama 3 8B on agents, step-wise: sample k is all up to action k, which it trains. One node of 8 GPUs.
#
#     examples/agent/llama3_8b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 8.76x the speed of dense, 30.4 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py agent.jsonl --shape steps --groups 4 --group-size 14 --prompt-tokens 2048 --turn-tokens 256
#     examples/agent/llama3_8b.sh --plan llama3-8b agent.jsonl
#
# NOT RUN on a cluster: parsed and planned by a test.
source "$(dirname "$0")/../common.sh"

NUM_NODES=${NUM_NODES:-1}
PLAN_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --max-tokens-per-microbatch 8192
)
TRAIN_ARGS=(
    --global-batch-size 512
)
recipe "$@"

#!/usr/bin/env bash
# GRPO with Qwen3-30B-A3B on agents, step-wise: sample k is all up to action k, which it trains. 4 nodes of 8 GPUs.
#
#     examples/agent/qwen3_30b_a3b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 9.86x the speed of dense, 34.1 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py agent.jsonl --shape steps --groups 8 --group-size 16 --prompt-tokens 4096 --turn-tokens 256
#     examples/agent/qwen3_30b_a3b.sh --plan qwen3-30b-a3b agent.jsonl
#
# NOT RUN on a cluster: parsed and planned by a test.
source "$(dirname "$0")/../common.sh"

NUM_NODES=${NUM_NODES:-4}
PLAN_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --recompute full
    --route-mismatch exact
    --max-tokens-per-microbatch 16384
)
TRAIN_ARGS=(
    "${MOE_TRAIN_ARGS[@]}"
    --global-batch-size 768
)
recipe "$@"

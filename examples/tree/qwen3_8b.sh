#!/usr/bin/env bash
# GRPO with Qwen3-8B on tree search: one trajectory a leaf, inner branches shared. 2 nodes of 8 GPUs.
#
#     examples/tree/qwen3_8b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 2.67x the speed of dense, 33.4 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py tree.jsonl --shape tree --groups 8 --depth 3 --branching 3 --prompt-tokens 1024 --turn-tokens 1024
#     examples/tree/qwen3_8b.sh --plan qwen3-8b tree.jsonl
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
    --global-batch-size 432
)
recipe "$@"

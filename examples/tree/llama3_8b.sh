#!/usr/bin/env bash
# GRPO with Llama 3 8B on tree search: one trajectory a leaf, inner branches shared. One node of 8 GPUs.
#
#     examples/tree/llama3_8b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 2.68x the speed of dense, 38.2 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py tree.jsonl --shape tree --groups 4 --depth 3 --branching 3 --prompt-tokens 1024 --turn-tokens 1024
#     examples/tree/llama3_8b.sh --plan llama3-8b tree.jsonl
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
    --global-batch-size 432
)
recipe "$@"

#!/usr/bin/env bash
# GRPO with Qwen3-30B-A3B on tree search: one trajectory a leaf, inner branches shared. 4 nodes of 8 GPUs.
#
#     examples/tree/qwen3_30b_a3b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 2.43x the speed of dense, 36.0 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py tree.jsonl --shape tree --groups 8 --depth 3 --branching 3 --prompt-tokens 1024 --turn-tokens 1024
#     examples/tree/qwen3_30b_a3b.sh --plan qwen3-30b-a3b tree.jsonl
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
    --global-batch-size 432
)
recipe "$@"

#!/usr/bin/env bash
# GRPO with Qwen3-30B-A3B on questions about long retrieved texts. 4 nodes of 8 GPUs.
#
#     examples/rag/qwen3_30b_a3b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 5.15x the speed of dense, 35.6 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py rag.jsonl --groups 8 --group-size 8 --prompt-tokens 16384 --turn-tokens 1024
#     examples/rag/qwen3_30b_a3b.sh --plan qwen3-30b-a3b rag.jsonl
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
    --global-batch-size 512
)
recipe "$@"

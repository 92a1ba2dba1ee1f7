#!/usr/bin/env bash
# GRPO with Qwen3-8B on questions about long retrieved texts. One node of 8 GPUs.
#
#     examples/rag/qwen3_8b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 5.62x the speed of dense, 36.6 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py rag.jsonl --groups 8 --group-size 8 --prompt-tokens 16384 --turn-tokens 1024
#     examples/rag/qwen3_8b.sh --plan qwen3-8b rag.jsonl
#
# NOT RUN on a cluster: parsed and planned by a test.
source "$(dirname "$0")/../common.sh"

NUM_NODES=${NUM_NODES:-1}
PLAN_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --context-parallel-size 2
    --max-tokens-per-microbatch 16384
)
TRAIN_ARGS=(
    --global-batch-size 512
)
recipe "$@"

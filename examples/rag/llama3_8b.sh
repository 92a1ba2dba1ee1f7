#!/usr/bin/env bash
# GRPO with Llama 3 8B on questions about long retrieved texts. One node of 8 GPUs.
#
#     examples/rag/llama3_8b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 5.27x the speed of dense, 44.6 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py rag.jsonl --groups 4 --group-size 16 --prompt-tokens 6144 --turn-tokens 1024
#     examples/rag/llama3_8b.sh --plan llama3-8b rag.jsonl
#
# NOT RUN on a cluster: parsed and planned by a test.
source "$(dirname "$0")/../common.sh"

NUM_NODES=${NUM_NODES:-1}
PLAN_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --max-tokens-per-microbatch 16384
)
TRAIN_ARGS=(
    --global-batch-size 512
)
recipe "$@"

#!/usr/bin/env bash
# GSPO with Qwen3-235B-A22B on questions about long retrieved texts. 16 nodes of 8 GPUs.
#
#     examples/rag/qwen3_235b_a22b.sh MODEL TRAJECTORIES OUT [ARGUMENT...]
#
# Predicted: 7.33x the speed of dense, 43.3 GiB on a GPU, by
#     .venv/bin/python examples/make_trajectories.py rag.jsonl --groups 8 --group-size 8 --prompt-tokens 16384 --turn-tokens 1024
#     examples/rag/qwen3_235b_a22b.sh --plan qwen3-235b-a22b rag.jsonl
#
# NOT RUN on a cluster: parsed and planned by a test. Predicted by FLOPs alone, which cuts microbatches as small as fills the
# pipeline best: let a first run measure what operations cost with --calibrate FILE, and give it from then on.
source "$(dirname "$0")/../common.sh"

NUM_NODES=${NUM_NODES:-16}
PLAN_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 8
    # 94 layers: embedding and LM head stand for one each.
    --decoder-first-pipeline-num-layers 11
    --decoder-last-pipeline-num-layers 11
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --recompute full
    --route-mismatch exact
    --max-tokens-per-microbatch 16384
)
TRAIN_ARGS=(
    "${MOE_TRAIN_ARGS[@]}"
    --global-batch-size 1024
    --policy-loss gspo
    --loss-aggregation seq-mean-token-mean
    --clip-low 3e-4
    --clip-high 4e-4
)
recipe "$@"

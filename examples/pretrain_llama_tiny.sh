#!/usr/bin/env bash
# Four GRPO steps of a tiny Llama on the CPU, in less than a minute: a first look at pretrain_rl.py.
#
#     examples/pretrain_llama_tiny.sh [FOLDER]
#
# FOLDER (default: a temporary one) gets the trajectories and the metrics. NUM_PROCESSES=2 runs two
# data-parallel processes.
NUM_PROCESSES=${NUM_PROCESSES:-1}
source "$(dirname "$0")/common.sh"

FOLDER=${1:-$(mktemp -d)}
mkdir -p "$FOLDER"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore

"$PYTHON" "$ROOT/examples/make_trajectories.py" "$FOLDER/trajectories.jsonl" --groups 8 --group-size 8

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 512
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 4
    --max-position-embeddings 4096
    --vocab-size 512
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --position-embedding-type rope
    --untie-embeddings-and-output-weights
)
TRAINING_ARGS=(
    --trajectories "$FOLDER/trajectories.jsonl"
    --global-batch-size 32
    --train-iters 4
    --updates-per-batch 2
    --lr 1e-3
    --lr-decay-style cosine
    --min-lr 1e-4
    --lr-warmup-iters 1
    --lr-warmup-init 5e-4
    --clip-grad 1.0
    --weight-decay 0.01
    --seed 1234
)
RL_ARGS=(
    --policy-loss grpo
    --kl-coef 0.01
    --prefix-reuse on
    --max-tokens-per-microbatch 1024
    --metrics-file "$FOLDER/metrics.jsonl"
)

start "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${RL_ARGS[@]}"
echo "metrics: $FOLDER/metrics.jsonl"

#!/usr/bin/env bash
# GRPO on Llama 3 8B with prefix reuse, on nodes of 8 GPUs. Started on every node, for example by `srun`:
#
#     MASTER_ADDR=host0 NUM_NODES=4 NODE_RANK=$SLURM_NODEID examples/grpo_llama3_8b.sh MODEL TRAJECTORIES OUT
#
# MODEL: Hugging Face folder of Llama 3 8B, whose config.json and weights are read.
# TRAJECTORIES: a trajectory file, or a folder of them (docs: the trajectory file).
# OUT: folder for the metrics, seen by all nodes.
#
# NOT RUN: this script has been checked against the argument parser, not on a cluster of this size. Batch sizes and the token
# budget are starting points, not measurements.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${1:?"first argument: Hugging Face folder of Llama 3 8B"}
TRAJECTORIES=${2:?"second argument: trajectory file or folder"}
OUT=${3:?"third argument: folder for the metrics"}
mkdir -p "$OUT"

export CUDA_DEVICE_MAX_CONNECTIONS=1

DISTRIBUTED_ARGS=(
    --nproc-per-node 8
    --nnodes "${NUM_NODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --use-distributed-optimizer
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
TRAINING_ARGS=(
    --bf16
    --global-batch-size 512
    --train-iters 200
    --lr 1e-6
    --lr-decay-style constant
    --lr-warmup-iters 5
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.01
    --clip-grad 1.0
    --distributed-timeout-minutes 30
)
RL_ARGS=(
    --trajectories "$TRAJECTORIES"
    --policy-loss grpo
    --loss-aggregation token-mean
    --clip-low 0.2
    --clip-high 0.28
    --kl-coef 0.001
    --updates-per-batch 2
    --skip-zero-advantage
    --prefix-reuse auto
    --max-tokens-per-microbatch 16384
    --metrics-file "$OUT/metrics.jsonl"
)

# The model's own arguments (layers, hidden size, RoPE scaling and so on) come from MODEL.
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_rl.py \
    --model "$MODEL" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${RL_ARGS[@]}"

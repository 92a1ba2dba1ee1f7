#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B with prefix reuse and routing replay, on nodes of 8 GPUs. Started on every node, for
# example by `srun`:
#
#     MASTER_ADDR=host0 NUM_NODES=4 NODE_RANK=$SLURM_NODEID examples/moe/grpo_qwen3_30b_a3b.sh MODEL TRAJECTORIES OUT
#
# MODEL: Hugging Face folder of Qwen3-30B-A3B. Its config.json is read; loading its experts is not built yet, so the
# run stops there (docs/status.md).
# TRAJECTORIES: a trajectory file, or a folder of them, with the rollout engine's routes beside each (a.jsonl:
# a.routes.safetensors).
# OUT: folder for the metrics, seen by all nodes.
#
# NOT RUN: this script has been checked against the argument parser and the planner, not on a cluster of this size. Batch sizes
# and the token budget are starting points, not measurements.
set -euo pipefail
cd "$(dirname "$0")/../.."

MODEL=${1:?"first argument: Hugging Face folder of Qwen3-30B-A3B"}
TRAJECTORIES=${2:?"second argument: trajectory file or folder"}
OUT=${3:?"third argument: folder for the metrics"}
mkdir -p "$OUT"

export CUDA_DEVICE_MAX_CONNECTIONS=1

DISTRIBUTED_ARGS=(
    --nproc-per-node 8
    --nnodes "${NUM_NODES:-4}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
MOE_ARGS=(
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-router-dtype fp32
    # Qwen3 was trained with a global balance loss; in RL replayed routes keep training and rollout together.
    --moe-router-load-balancing-type none
    # The rollout engine's routes, in every forward and in every recomputation.
    --routing-replay rollout
    # A prefix position that two rollouts routed differently is computed for each. `first` shares it and reports the rate.
    --route-mismatch exact
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
    --policy-loss gspo
    --clip-low 3e-4
    --clip-high 4e-4
    --prefix-reuse auto
    --max-tokens-per-microbatch 16384
    --metrics-file "$OUT/metrics.jsonl"
)

# The model's own arguments (layers, experts, top-k and so on) come from MODEL.
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_rl.py --model "$MODEL" \
    "${PARALLEL_ARGS[@]}" "${MOE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${RL_ARGS[@]}"

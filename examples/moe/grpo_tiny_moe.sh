#!/usr/bin/env bash
# Four GSPO steps of a tiny mixture of experts on the CPU, with replayed routes and an auxiliary loss.
#
#     examples/moe/grpo_tiny_moe.sh [FOLDER]
#
# FOLDER (default: a temporary one) gets the trajectories, their routes and the metrics. NUM_PROCESSES=2 (default) ranks hold
# half of the experts each.
NUM_PROCESSES=${NUM_PROCESSES:-2}
source "$(dirname "$0")/../common.sh"

FOLDER=${1:-$(mktemp -d)}
mkdir -p "$FOLDER"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore

# Random routes, as a rollout engine with other weights might have taken them; one position in fifty lacks them.
"$PYTHON" "$ROOT/examples/make_trajectories.py" "$FOLDER/trajectories.jsonl" --groups 8 --group-size 8 --prompt-tokens 96 \
    --turn-tokens 24 --moe-layers 2 --experts 8 --topk 2

MODEL_ARGS=(
    --model tiny-moe
    --num-layers 2
)
MOE_ARGS=(
    --expert-model-parallel-size "$NUM_PROCESSES"
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-3
    --routing-replay rollout
    --route-mismatch exact
)
TRAINING_ARGS=(
    --trajectories "$FOLDER/trajectories.jsonl"
    --global-batch-size 32
    --train-iters 4
    --updates-per-batch 2
    --lr 1e-3
    --lr-decay-style constant
    --clip-grad 1.0
    --seed 1234
)
RL_ARGS=(
    --policy-loss gspo
    --clip-low 0.01
    --clip-high 0.01
    --prefix-reuse on
    --max-tokens-per-microbatch 512
    --metrics-file "$FOLDER/metrics.jsonl"
)

start "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${RL_ARGS[@]}"
echo "metrics: $FOLDER/metrics.jsonl"

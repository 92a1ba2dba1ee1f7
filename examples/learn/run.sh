#!/usr/bin/env bash
# Teach a model of two layers, from random weights, to count up to nine: a few minutes on one core of a CPU.
#
#   examples/learn/run.sh [OUT_DIR] [more arguments of pretrain_rl.py ...]     e.g.  --seed 2 --prefix-reuse off
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OUT=${1:-learn}
mkdir -p "$OUT"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x "$HERE/../../.venv/bin/python" ] && PYTHON=$HERE/../../.venv/bin/python
fi
# Megatron's jit fusions otherwise compile on a CPU.
export TORCHDYNAMO_DISABLE=1
"$PYTHON" "$HERE/counting.py" "$OUT/prompts.jsonl"
"$PYTHON" "$HERE/../../pretrain_rl.py" \
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu \
    --normalization RMSNorm --disable-bias-linear --vocab-size 40 --make-vocab-size-divisible-by 1 \
    --max-position-embeddings 256 --seq-length 256 --dtype float64 --init-method-std 0.08 \
    --rollout sample --trajectories "$OUT/prompts.jsonl" --reward-function "$HERE/counting.py:reward" \
    --group-size 16 --global-batch-size 160 --max-response-length 10 --stop-tokens 10 \
    --policy-loss dapo --advantage-estimator grpo --max-tokens-per-microbatch 2048 --prefix-reuse on \
    --entropy-coef 0.08 --train-iters 160 --lr 1e-3 --lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0 \
    --metrics-file "$OUT/metrics.jsonl" --tensorboard-dir "$OUT/tensorboard" "${@:2}"

# Sourced by the launch scripts, which state what differs: layout, batch, loss. Environment variables that are read:
#
# PYTHON          interpreter; by default the one of `make setup` if it is there, else python3
# NUM_PROCESSES   processes of a node, one a GPU (default 8)
# NUM_NODES       nodes; by default those of the Slurm job, else as many as the script says
# NODE_RANK       number of this node, from 0; by default Slurm's
# MASTER_ADDR     name of node 0, where several nodes meet
# MASTER_PORT     port there (default 6000)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x "$ROOT/.venv/bin/python" ] && PYTHON=$ROOT/.venv/bin/python
fi
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
NUM_PROCESSES=${NUM_PROCESSES:-8}
NUM_NODES=${NUM_NODES:-${SLURM_NNODES:-}}

# Of every recipe; what a script gives comes later and wins.
COMMON_PLAN_ARGS=(
    --prefix-reuse auto
    --use-distributed-optimizer
)
COMMON_TRAIN_ARGS=(
    --bf16
    --train-iters 200
    --lr 1e-6
    --lr-decay-style constant
    --lr-warmup-iters 5
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.01
    --clip-grad 1.0
    --policy-loss grpo
    --loss-aggregation token-mean
    --clip-low 0.2
    --clip-high 0.28
    --updates-per-batch 2
    --skip-zero-advantage
    --distributed-timeout-minutes 30
)
# Of the mixtures of experts.
MOE_TRAIN_ARGS=(
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-router-dtype fp32
    # A balance loss serves pre-training; in RL replayed routes keep training and rollout together.
    --moe-router-load-balancing-type none
    # The rollout engine's routes, in every forward and in every recomputation.
    --routing-replay rollout
)

# refuse MESSAGE
refuse() {
    echo "$0: $1" >&2
    exit 2
}

# check_counts: variables of the environment that count something do.
check_counts() {
    local name
    for name in NUM_PROCESSES NUM_NODES; do
        [[ ${!name:-1} =~ ^[1-9][0-9]*$ ]] || refuse "$name is '${!name}', expected a whole number of at least 1."
    done
    [[ ${NODE_RANK:-0} =~ ^[0-9]+$ ]] || refuse "NODE_RANK is '$NODE_RANK', expected the number of this node, from 0."
}

# start ARGUMENT...: pretrain_rl.py on the processes of this node.
start() {
    check_counts
    local torchrun=(--nproc-per-node "$NUM_PROCESSES")
    if [ "${NUM_NODES:-1}" -gt 1 ]; then
        torchrun+=(
            --nnodes "$NUM_NODES"
            --node-rank "${NODE_RANK:-${SLURM_NODEID:?"several nodes: set NODE_RANK, or use examples/slurm.sh"}}"
            --master-addr "${MASTER_ADDR:?"several nodes: set MASTER_ADDR to the name of node 0"}"
            --master-port "${MASTER_PORT:-6000}"
        )
    else
        torchrun+=(--standalone)
    fi
    "$PYTHON" -m torch.distributed.run "${torchrun[@]}" "$ROOT/pretrain_rl.py" "$@"
}

# value_of NAME ARGUMENT...: what the last argument of that name says, 1 where there is none.
value_of() {
    local name=$1 value=1
    shift
    while [ $# -gt 1 ]; do
        [ "$1" = "$name" ] && value=$2
        shift
    done
    echo "$value"
}

# recipe MODEL TRAJECTORIES OUT [ARGUMENT...]: train with PLAN_ARGS and TRAIN_ARGS; arguments that are added win.
#     MODEL         Hugging Face folder, whose config.json gives the model's own arguments (layers, experts, RoPE scaling ...)
#     TRAJECTORIES  trajectory file, or a folder of them; for a mixture of experts with routes beside it (README.md)
#     OUT           folder for the metrics, seen by all nodes
# recipe --plan MODEL TRAJECTORIES [ARGUMENT...]: what `prefixflow plan` says of it. No GPU is needed, MODEL may be the name of
# a built-in shape, and what is added are arguments of that program. PLAN_ARGS are what both programs read.
recipe() {
    local usage="usage: [--plan] MODEL TRAJECTORIES OUT (none with --plan) [ARGUMENT...]" plans=false
    if [ "${1:-}" = --plan ]; then
        plans=true
        shift
    fi
    check_counts
    local model=${1:?"$usage"} trajectories=${2:?"$usage"}
    shift 2
    local plan_args=("${COMMON_PLAN_ARGS[@]}" "${PLAN_ARGS[@]}")
    if $plans; then
        local tp pp cp
        tp=$(value_of --tensor-model-parallel-size "${plan_args[@]}" "$@")
        pp=$(value_of --pipeline-model-parallel-size "${plan_args[@]}" "$@")
        cp=$(value_of --context-parallel-size "${plan_args[@]}" "$@")
        local world=$((NUM_NODES * NUM_PROCESSES)) copy=$((tp * pp * cp))
        [ $((world % copy)) -eq 0 ] ||
            refuse "NUM_NODES=$NUM_NODES of NUM_PROCESSES=$NUM_PROCESSES are no multiple of the $copy processes of a model."
        "$PYTHON" -m prefixflow.cli plan "$trajectories" --model "$model" "${plan_args[@]}" \
            --data-parallel-size $((world / copy)) "$@"
        return
    fi
    local out=${1:?"$usage"}
    shift
    mkdir -p "$out"
    # With several of them, Megatron's tensor-parallel communication may start after what it should overlap with.
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    start --model "$model" --trajectories "$trajectories" --metrics-file "$out/metrics.jsonl" \
        "${plan_args[@]}" "${COMMON_TRAIN_ARGS[@]}" "${TRAIN_ARGS[@]}" "$@"
}

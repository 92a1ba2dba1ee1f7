#!/usr/bin/env bash
#SBATCH --job-name=prefixflow
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# A launch script on all nodes of a Slurm job:
#
#     sbatch --nodes 4 examples/slurm.sh examples/rag/qwen3_30b_a3b.sh MODEL TRAJECTORIES OUT
#
# NOT RUN on a cluster: a test has taken srun's place.
set -euo pipefail

# Read whole: under pipefail a `head` that leaves early would end the script.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_ADDR
# Jobs that share a node meet at different ports.
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000))
srun --kill-on-bad-exit=1 "$@"

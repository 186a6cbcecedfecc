#!/bin/bash
#SBATCH --job-name=odb
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # a launcher on each node, which starts a rank for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=128        # data workers: 2 x dataloader_num_workers for each rank
#SBATCH --time=24:00:00
#SBATCH --output=%x_%j.log
##SBATCH --signal=TERM@300         # with enable_jit_checkpoint: saves five minutes before the time is up
#
# sbatch examples/slurm.sh MY.yaml [KEY=VALUE ...], where the Python with odb_factory is active on every node.
# INTERFACE=eth0 sbatch ...: the network interface between the nodes (ip -br addr), if they have several.
set -euo pipefail

read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT FORCE_TORCHRUN=1 NNODES=$SLURM_NNODES
export NPROC_PER_NODE=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:?not set: ask Slurm for GPUs, or set NPROC_PER_NODE}}
if [[ -n ${INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it over since Slurm 22.05
fi
ulimit -n "$(ulimit -Hn)" # ranks hold connections to each other

# Where a node fails the others end as well; `requeue` or a new sbatch resumes from the last checkpoint.
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec llamafactory-cli train "$@"' train "$@"

#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@300

# Submit it in the folder of train.py: sbatch slurm.sh
set -euo pipefail
# source /path/to/.venv/bin/activate  # unless you submit it with the environment active
export ACCELERATOR=${ACCELERATOR:-gpu} DEVICES=$SLURM_NTASKS_PER_NODE NODES=$SLURM_NNODES
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun python train.py

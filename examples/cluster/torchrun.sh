#!/bin/bash
# Run this on each node, in the folder of train.py, with the name of one of them in HEAD.
set -euo pipefail
export ACCELERATOR=${ACCELERATOR:-gpu} DEVICES=${DEVICES:-8} NODES=${NODES:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
torchrun --nnodes="$NODES" --nproc-per-node="$DEVICES" --rdzv-id=1 \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${PORT:-29500}" train.py

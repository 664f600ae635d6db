#!/usr/bin/env bash
# torchrun.sh -- trains by PyTorch's torchrun, and resumes after SIGUSR1 or a failure (again.sh). On each machine, with
# its own NODE_RANK:
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=node1 scripts/multi_node/torchrun.sh ./train_gpt2cu --B -1 \
#       --config scripts/paper.json --train_files 'data/edu_fineweb10B/*_train_*.bin' \
#       --val_files 'data/edu_fineweb10B/*_val_*.bin' --out run/cable --checkpoint_every 1000
#
# --out and the data are in directories that all machines share. No MPI is needed. The ranks talk by TCP through
# MASTER_PORT + 1, which must be open among the machines.
#   GPUS [8]                     processes on this machine
#   NODES [1], NODE_RANK [0]     number of machines, and which of them this is
#   MASTER_ADDR [127.0.0.1], MASTER_PORT [29500]
#   CABLE_SECRET                 for several machines: 16 characters or more, the same on all of them
#   TORCHRUN [torchrun], TORCHRUN_FLAGS []     more words for it
#   RESTARTS [3]                 after failures; RESTART_WAIT [10] seconds before each
set -euo pipefail
source "$(dirname "$0")/again.sh"

# torchrun answers any code but 0 with 1. So each rank that has saved and stopped leaves a file and ends with 0.
if [ "${1:-}" = --rank ]; then
    marks=$2
    shift 2
    trap save_and_stop TERM INT USR1
    "$@" &
    pid=$!
    echo "$pid" >"$marks/pid.$pid"
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do
        code=0
        wait "$pid" || code=$?
    done
    if [ "$code" -ne 75 ]; then exit "$code"; fi
    touch "$marks/saved"
    exit 0
fi
if [ $# -eq 0 ]; then
    sed -n '2,18s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
TORCHRUN_FLAGS=${TORCHRUN_FLAGS:-}
marks=$(mktemp -d)
trap 'rm -rf "$marks"' EXIT
# A signal to any rank saves and stops all of them.
save_and_stop() { kill -USR1 $(cat "$marks"/pid.* 2>/dev/null) 2>/dev/null || true; }
launch() {
    rm -f "$marks"/*
    watched "${TORCHRUN:-torchrun}" --nnodes "${NODES:-1}" --node_rank "${NODE_RANK:-0}" \
        --nproc_per_node "${GPUS:-8}" --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-29500}" \
        $TORCHRUN_FLAGS --no_python bash "$0" --rank "$marks" "$@"
    if [ "$code" -eq 0 ] && [ -e "$marks/saved" ]; then code=75; fi
}
again "$@"

#!/usr/bin/env bash
# mpirun.sh -- trains on the GPUs of several machines by mpirun, and resumes after SIGUSR1 or a failure (again.sh).
#
#   HOSTFILE=hosts RANKS=16 scripts/multi_node/mpirun.sh ./train_gpt2cu --B -1 --config scripts/paper.json \
#       --train_files 'data/edu_fineweb10B/*_train_*.bin' --val_files 'data/edu_fineweb10B/*_val_*.bin' \
#       --out run/cable --checkpoint_every 1000
#
# --out, the data and the program are in directories that all machines share; the program is built with this MPI.
#   RANKS [8]            processes, one for each GPU
#   HOSTFILE []          Open MPI's list of machines: `node1 slots=8` on each line; none: this machine
#   MPI_FLAGS []         more words for mpirun, such as `-x NCCL_SOCKET_IFNAME=eth0`
#   MPIRUN [mpirun]      another MPI's
#   RESTARTS [3]         after failures; RESTART_WAIT [10] seconds before each
set -euo pipefail
source "$(dirname "$0")/again.sh"
if [ $# -eq 0 ]; then
    sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
# Open MPI refuses root, as in a container, unless it is told twice.
if [ "$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
words=(--bind-to none -np "${RANKS:-8}")
[ -z "${HOSTFILE:-}" ] || words+=(--hostfile "$HOSTFILE")
read -ra more <<<"${MPI_FLAGS:-}"
launch() { watched "${MPIRUN:-mpirun}" "${words[@]}" "${more[@]}" "$@"; }
again "$@"

#!/usr/bin/env bash
# run.sh -- `make bench`: training speed compared with PyTorch's, what encodings cost over none, and the memory of a
# long evaluation. The programs run in turns on this machine, so that a ratio means something on a busy machine too.
#
#   dev/bench/run.sh [256|1024|4096|124M|shares|memory]...      default: all, 25 minutes on 2 cores
#   THREADS=2 ROUNDS=9 dev/bench/run.sh shares          what products and attention reach of the CPU's limit, 2 minutes
#   THREADS=1 ROUNDS=3 dev/bench/run.sh encodings       what each encoding costs the fastest step, 13 minutes
#   THREADS=2 ROUNDS=2 CSV=FILE        THREADS=1 counts CPU time, which other programs disturb less than the clock
#   FORMS=eager,compiled               those of bench_pytorch.py to compare with; the faster one counts
#   PYTORCH_PYTHON=PATH                the PyTorch to compare with, instead of that of dev/hf/requirements.txt
#
# 256, 1024 and 4096 are lengths of the small model, L4 NH4 C128. CSV: the table, with machine, commit and command.
set -euo pipefail
cd "$(dirname "$0")/../.."
dev/install.sh build
make train_gpt2
export THREADS=${THREADS:-$(nproc)} OMP_WAIT_POLICY=passive
export OMP_NUM_THREADS=$THREADS
[ "$*" = encodings ] ||     # which needs none
    PYTORCH_PYTHON=${PYTORCH_PYTHON:-$(dev/hf/exports.sh --python || dev/install.sh --python torch)}
export PYTORCH_PYTHON
exec python3 dev/bench/bench.py "$@"

#!/usr/bin/env bash
# run_gpt2_124M.sh -- GPT-2 124M with learned positions on 10 billion tokens of FineWeb-Edu, on 8 GPUs: builds, prepares
# the data, trains, resumes after SIGUSR1 or a failure (multi_node/again.sh), scores HellaSwag, and draws the losses.
#
#   scripts/run_gpt2_124M.sh [FLAGS]           more flags of the trainer; the last of a kind holds
#
# llm.c's pretokenized shards are read as they are:
#   TRAIN_FILES='dev/data/fineweb10B/fineweb_train_*.bin' VAL_FILES='dev/data/fineweb10B/fineweb_val_*.bin'
#
# What it costs, a PREDICTION: 19,073 steps of 524,288 tokens are 10.0G tokens, and one H200 trains 585 thousand a
# second with cable (docs/results.md): 4.7 GPU hours, 0.6 on 8. Validation and HellaSwag are not counted.
# What the paper has (Table 3, FineWeb-Edu): perplexity 21.56 at 1,024 tokens and 22.16 at 512.
# Nothing of this has run on a GPU yet.
#   GPUS [8]  B [64]  TOTAL_BATCH [524288]  T [1024]  STEPS [19073]  MODEL [small]  POS [learned]  LENGTHS [512,1024]
#   OUT [run/gpt2_124M]  CHECKPOINT_EVERY [1000]  VAL_EVERY [250]  DATA [data/edu_fineweb10B]
#   TRAIN_FILES, VAL_FILES [its shards]  HELLASWAG [data/hellaswag/hellaswag_val.bin; none = leave it out]
#   TRAINER [./train_gpt2cu, which is built]  LAUNCH [--gpus GPUS]
#   RESTARTS [3]  RESTART_WAIT [10] seconds
#   PYTHON [python3, with data/requirements.txt and matplotlib]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/multi_node/again.sh
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,21s/^# \{0,1\}//p' "$0"
    exit 0
fi

python=${PYTHON:-python3} data=${DATA:-data/edu_fineweb10B} out=${OUT:-run/gpt2_124M}
hellaswag=${HELLASWAG:-data/hellaswag/hellaswag_val.bin}
if [ -z "${TRAINER:-}" ]; then make train_gpt2cu; fi
if [ -z "${TRAIN_FILES:-}" ] && ! compgen -G "$data/*_train_*.bin" >/dev/null; then
    "$python" data/fineweb_edu.py --out "$data"
fi
flags=(--train_files "${TRAIN_FILES:-$data/*_train_*.bin}" --val_files "${VAL_FILES:-$data/*_val_*.bin}"
    --model "${MODEL:-small}" --pos "${POS:-learned}" --T "${T:-1024}" --B "${B:-64}"
    --total_batch "${TOTAL_BATCH:-524288}" --steps "${STEPS:-19073}" --config scripts/paper.json --sample_every 0
    --val_every "${VAL_EVERY:-250}" --checkpoint_every "${CHECKPOINT_EVERY:-1000}" --keep 3
    --eval_lengths "${LENGTHS:-512,1024}" --out "$out")
if [ "$hellaswag" != none ]; then
    [ -e "$hellaswag" ] || "$python" data/hellaswag.py --out "$(dirname "$hellaswag")"
    flags+=(--hellaswag "$hellaswag")
fi
read -ra start <<<"${LAUNCH:---gpus ${GPUS:-8}}"
launch() { watched "$@"; }
again "${TRAINER:-./train_gpt2cu}" "${start[@]}" "${flags[@]}" "$@"
"$python" scripts/plot.py train "$out" -o "$out/train.png"

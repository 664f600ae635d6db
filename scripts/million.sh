#!/usr/bin/env bash
# The demo's models, which were trained at 128 tokens, in one window of Shakespeare: of 1,048,576 tokens for cable and
# alibi, which forget the keys that no query visits any more (llmc/lab/evaluate.h); of 65,536 for rope and sinusoidal,
# whose time grows with the square. Results in build/million: the losses by position in log.jsonl, and million.png.
set -euo pipefail
cd "$(dirname "$0")/.."
for pos in cable alibi rope sinusoidal; do
    [ -d "build/demo/$pos" ] || { echo "build/demo/$pos: no such model; make demo trains it" >&2; exit 2; }
done
for pos in cable alibi rope sinusoidal; do
    case $pos in cable | alibi) T=1048576 ;; *) T=65536 ;; esac
    rm -rf "build/million/$pos"
    ./train_gpt2 --load "build/demo/$pos" --val_files 'data/shakespeare_*.txt' --eval_lengths $T --eval_tokens $T \
        --curve --out "build/million/$pos" | sed -n '/^ *[0-9]/p; /trained at/p'
done
"$(dev/install.sh --python matplotlib)" scripts/plot.py curve build/million/{cable,alibi,rope,sinusoidal} \
    -o build/million/million.png

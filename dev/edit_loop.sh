#!/usr/bin/env bash
# edit_loop.sh -- the cost of editing a file and running its tests: user CPU seconds, the best of three, against a
# limit. The exit code is 1 if a file is over its limit.
#
#   dev/edit_loop.sh [NAME...]      some of: rows layernorm gelu classifier attention alibi train_gpt2
set -euo pipefail
cd "$(dirname "$0")/.."
export CCACHE_DISABLE=1         # what is touched has not changed, and ccache would know

# NAME LIMIT FILE and what is made after it is edited
loops=(
    "rows        5 llmc/layernorm.cuh       train_gpt2"
    "layernorm  20 llmc/layernorm.cuh       test ARGS=[layernorm]"
    "gelu       20 llmc/gelu.cuh            test ARGS=[gelu]"
    "classifier 20 llmc/classifier.cuh      test ARGS=[classifier]"
    "attention  60 llmc/attention.cuh       test ARGS=[attention]"
    "alibi      60 llmc/position/alibi.cuh  test ARGS=[positions]"
    "train_gpt2 40 train_gpt2.cu            train_gpt2"
)
log=build/edit_loop.log over=0 known=" "
mkdir -p build
# edit FILE N: a function more, among the kernels where there are some. The file is put back at the end.
edit() {
    local line="inline int edited_$2() { return $2; }"
    if grep -q '^#if !defined(KERNELS_ELSEWHERE)' "$1"; then
        sed -i "0,/^#if !defined(KERNELS_ELSEWHERE)/s//&\n$line/" "$1"
    else
        echo "$line" >>"$1"
    fi
}
saved=build/edit_loop.saved file=""
restore() { [ -z "$file" ] || [ ! -e $saved ] || { cp "$saved" "$file"; rm $saved; }; }
trap restore EXIT
run() { make "$@" >$log 2>&1 || { tail -n 20 $log; echo "make $* failed"; exit 1; }; }
for loop in "${loops[@]}"; do
    read -r name limit file goals <<<"$loop"
    known+="$name "
    [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
    read -ra goals <<<"$goals"
    run "${goals[@]}"
    best=""
    cp "$file" $saved
    for n in 1 2 3; do
        edit "$file" $n
        TIMEFORMAT=%U
        seconds=$( { time run "${goals[@]}"; } 2>&1 ) || { echo "$seconds"; exit 1; }
        best=$(printf '%s\n' $best "$seconds" | sort -n | head -n 1)
    done
    restore
    verdict=ok
    if awk "BEGIN { exit !($best > $limit) }"; then verdict="OVER ITS LIMIT" over=$((over + 1)); fi
    printf '%-11s %6.1f s of at most %2d s, user CPU   edit %-26s make %-22s %s\n' \
        "$name" "$best" "$limit" "$file" "${goals[*]}" "$verdict"
done
for name in "$@"; do
    [[ $known == *" $name "* ]] || { echo "$name: expected one of$known"; exit 2; }
done
[ $over = 0 ] || { echo "$over over their limits"; exit 1; }

#!/usr/bin/env bash
# edit_loop.sh -- what an edit costs: the CPU seconds, user and system, of the make that follows it, against a limit.
# The exit code is 1 if an edit is over its limit three times.
#
#   dev/edit_loop.sh [NAME...]      some of: layernorm cable attention trainer test nothing
#
# The edits are made in a copy of the sources, build/edit_loop. The limits hold where a reference, std::regex at -O3,
# compiles in REFERENCE CPU seconds. Each try compiles it; the limits are in proportion, and a quarter is allowed on
# top, as processors differ.
set -euo pipefail
cd "$(dirname "$0")/.."
REFERENCE=2.4

# NAME LIMIT FILE, and what is made after it is edited; -: all of it, from nothing
loops=(
    "layernorm   5 llmc/layernorm.cuh   train_gpt2"
    "cable       8 llmc/cable.cuh       train_gpt2"
    "attention  10 llmc/attention.cuh   train_gpt2"
    "trainer    30 train_gpt2.cu        train_gpt2"
    "test        8 llmc/layernorm.cuh   test ARGS=[layernorm]"
    "nothing    75 -                    train_gpt2"
)
log=$PWD/build/edit_loop.log over=0 known=" "
rm -rf build/edit_loop
mkdir -p build/edit_loop
git ls-files -z | xargs -0 cp -p --parents -t build/edit_loop
cd build/edit_loop

# edit FILE NAME: a function more, among the kernels where there are some
edit() {
    local line="inline int edited_$2() { return 1; }"
    if [ "$1" = - ]; then rm -rf build
    elif grep -q '^#if !defined([A-Z]*_ELSEWHERE)' "$1"; then
        sed -i "0,/^#if !defined([A-Z]*_ELSEWHERE)/s//&\n$line/" "$1"
    else
        echo "$line" >>"$1"
    fi
}
# cpu COMMAND...: its CPU seconds
cpu() {
    local TIMEFORMAT='%U %S' times
    times=$( { time "$@" >"$log" 2>&1; } 2>&1 ) || { tail -n 20 "$log" >&2; echo "$* failed" >&2; return 1; }
    awk '{ print $1 + $2 }' <<<"$times"
}
reference() {
    printf '%s\n' '#include <regex>' 'bool f(const std::string& s) { return std::regex_match(s, std::regex(s)); }' |
        "${CXX:-g++}" -O3 -x c++ -c - -o reference.o
}
for loop in "${loops[@]}"; do
    read -r name limit file goals <<<"$loop"
    known+="$name "
    [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
    read -ra goals <<<"$goals"
    [ "$file" = - ] || cpu make "${goals[@]}" >/dev/null
    for try in 1 2 3; do
        edit "$file" "${name}_$try"
        of_reference=$(cpu reference)
        seconds=$(CCACHE_DISABLE=1 cpu make "${goals[@]}")
        limit_here=$(awk "BEGIN { printf \"%.1f\", 1.25 * $limit * $of_reference / $REFERENCE }")
        verdict=ok
        awk "BEGIN { exit !($seconds > $limit_here) }" || break
        verdict="OVER ITS LIMIT"
    done
    [ "$verdict" = ok ] || over=$((over + 1))
    printf '%-10s %5.1f s, at most %5.1f (%2d where the reference takes %s s, here %.1f)   %-20s make %-22s %s\n' \
        "$name" "$seconds" "$limit_here" "$limit" "$REFERENCE" "$of_reference" "$file" "${goals[*]}" "$verdict"
done
for name in "$@"; do
    [[ $known == *" $name "* ]] || { echo "$name: expected one of$known"; exit 2; }
done
[ $over = 0 ] || { echo "$over over their limits"; exit 1; }

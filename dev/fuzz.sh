#!/usr/bin/env bash
# fuzz.sh -- runs libFuzzer on each parser, several at a time: executions, coverage, findings; ends with one count.
#
#   dev/fuzz.sh SECONDS [TARGET...]      SECONDS for each; targets: build/fuzz --targets
# The corpus stays in build/fuzz_corpus/TARGET. An input on which a parser fails is build/fuzz_TARGET-crash-..., -oom-
# or -timeout-.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
mkdir -p build
if ! echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' |
     clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o build/fuzz_probe >build/fuzz_probe.log 2>&1; then
    echo "########################################################################"
    echo "## SKIPPED: no clang++ with libFuzzer here. No parser was fuzzed.     ##"
    echo "########################################################################"
    tail -n 3 build/fuzz_probe.log
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
seconds=$1
shift
make build/fuzz || { echo "0 passed, 1 failed"; exit 1; }

# files in memory: ten times as many inputs
TMPDIR=$(if [ -w /dev/shm ]; then mktemp -d /dev/shm/fuzz_XXXXXX; else mktemp -d; fi)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
# With the bounds on one allocation and on all: an input of 4 kB is not a reason to take more.
export ASAN_OPTIONS=quarantine_size_mb=8:detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1
limits=(-max_len=4096 -timeout=5 -rss_limit_mb=256 -malloc_limit_mb=32)

rm -rf build/fuzz_seeds
if ! build/fuzz --seeds build/fuzz_seeds 2>build/fuzz_seeds.log; then
    cat build/fuzz_seeds.log
    echo "a parser refuses what it is made for"
    echo "0 passed, 1 failed"
    exit 1
fi

fuzz_one() {
    local name=$1 log=build/fuzz_$1.log code=0 found
    mkdir -p "build/fuzz_corpus/$name"
    build/fuzz "--target=$name" "${limits[@]}" -max_total_time="$seconds" -print_final_stats=1 -close_fd_mask=3 \
        -artifact_prefix="build/fuzz_$name-" "build/fuzz_corpus/$name" "build/fuzz_seeds/$name" >"$log" 2>&1 || code=$?
    printf '%-12s %9s executions  %6s edges  %s\n' "$name" \
        "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" \
        "$(sed -nE 's/.* cov: ([0-9]+).*/\1/p' "$log" | tail -n 1)" "$([ $code = 0 ] && echo ok || echo FAILED)"
    [ $code = 0 ] && return
    found=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    tail -n 40 "$log"
    [ -z "$found" ] || build/fuzz "--target=$name" "${limits[@]}" "$found" 2>&1 |
        grep -E 'what\(\)|ERROR|runtime error|SUMMARY' | head -n 5
    echo "again: build/fuzz --target=$name ${found:-}"
    return 1
}

names=("$@")
[ $# -gt 0 ] || mapfile -t names < <(build/fuzz --targets)
passed=0 failed=0 next=0 running=0
jobs=$(nproc 2>/dev/null || echo 2)
while [ $next -lt ${#names[@]} ] || [ $running -gt 0 ]; do
    if [ $next -lt ${#names[@]} ] && [ $running -lt "$jobs" ]; then
        fuzz_one "${names[$next]}" &
        next=$((next + 1)) running=$((running + 1))
        continue
    fi
    if wait -n; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    running=$((running - 1))
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]

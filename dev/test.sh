#!/usr/bin/env bash
# test.sh -- runs what `make test` built: the tests in C++, then the scripts test/*/test_*.py; closes with one count of all.
#
#   dev/test.sh ['[tag]'...]      arguments are for Catch2; with any, only the tests in C++ run
#   dev/test.sh --simt            only what runs on the emulated GPU
set -uo pipefail
cd "$(dirname "$0")/.." || exit
# A thread that waits gives up its core: with anything else running, spinning takes several times as long.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export TRAIN_GPT2=${TRAIN_GPT2:-./train_gpt2} TRAIN_BERT=${TRAIN_BERT:-./train_bert}       # the tests of the programs run them from here
if [ "${1:-}" = --script ]; then        # one script, as xargs starts it below: what it prints to a file in $3, its exit code beside
    python=$TEST_PYTHON output=$3/${2##*/}
    [ "$2" != test/scripts/test_data.py ] || [ ! -x build/venv/bin/python ] || python=build/venv/bin/python         # data/requirements.txt
    "$python" "$2" >"$output" 2>&1
    echo $? >"$output.code"
    (flock 9; echo "== $2"; cat "$output") 9>"$3/lock"
    exit
fi
logs=$(mktemp -d)
log=$logs/log
trap 'rm -rf "$logs"' EXIT
passed=0 failed=0

count() { sed -n "s/$1/\\1/p" "$log" | tail -n 1; }
if [ "${1:-}" != --simt ]; then
    # The counts of Catch2's last line: "All tests passed (9 assertions in 3 test cases)" or "test cases: 3 | 2 passed | 1 failed".
    build/run_tests --min-duration 5 "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    passed=$(count '^All tests passed (.* in \([0-9]*\) test cases\{0,1\}).*')
    [ -n "$passed" ] || passed=$(count '^test cases:.*| *\([0-9]*\) passed.*')
    failed=$(count '^test cases:.*| *\([0-9]*\) failed.*')
    passed=${passed:-0} failed=${failed:-0}
    if [ "$code" != 0 ] && [ "$failed" = 0 ]; then echo "run_tests ended with exit code $code"; failed=1; fi
    skipped=$(grep -c 'SKIPPED:' "$log")
    passed=$((passed - skipped))
fi

# The kernel tests print a line each: name, ok | FAILED | skipped, time.
if [ $# -eq 0 ] || [ "$1" = --simt ]; then
    for program in build/simt/test_*; do
        [ -x "$program" ] || continue
        echo "== $program"
        "$program" 2>&1 | tee "$log"
        code=${PIPESTATUS[0]}
        bad=$(grep -cE ' FAILED +[0-9.]+ ms' "$log")
        [ "$code" = 0 ] || [ "$bad" -gt 0 ] || bad=1
        passed=$((passed + $(grep -cE ' ok +[0-9.]+ ms' "$log"))) failed=$((failed + bad))
        skipped=$((skipped + $(grep -cE ' skipped +[0-9.]+ ms' "$log")))
    done
fi
# The scripts, as many at a time as there are cores; each is printed when it has ended.
if [ $# -eq 0 ] || [ "$1" = --simt ]; then
    TEST_PYTHON=$(dev/install.sh --python numpy matplotlib) || exit 1
    export TEST_PYTHON
    scripts=(test/*/test_*.py)
    [ $# -eq 0 ] || scripts=(test/simt/test_simt_training.py)
    printf '%s\n' "${scripts[@]}" | xargs -P "$(nproc)" -I{} bash dev/test.sh --script {} "$logs"
    for script in "${scripts[@]}"; do
        log=$logs/${script##*/}
        code=$(cat "$log.code" 2>/dev/null || echo 1)
        ran=$(count '^Ran \([0-9]*\) tests\{0,1\} in .*')               # unittest's last lines; another script counts as one test
        bad=$(( $(count '.*failures=\([0-9]*\).*' | grep . || echo 0) + $(count '.*errors=\([0-9]*\).*' | grep . || echo 0) ))
        left=$(count '.*skipped=\([0-9]*\).*' | grep . || echo 0)
        [ "$code" = 0 ] || [ "$bad" -gt 0 ] || bad=1
        passed=$((passed + ${ran:-1} - bad - left)) failed=$((failed + bad)) skipped=$((skipped + left))
    done
fi
[ "$skipped" = 0 ] || [ -n "${CABLE_DATA:-}" ] || echo "SKIPPED tests on real data: set CABLE_DATA to a directory of it (the README says which files)"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]

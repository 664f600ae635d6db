#!/usr/bin/env bash
# test.sh -- runs what `make test` built: the tests in C++, then the scripts test/test_*.py; closes with one count of all.
#
#   dev/test.sh ['[tag]'...]      arguments are for Catch2; with any, only the tests in C++ run
set -uo pipefail
cd "$(dirname "$0")/.." || exit
# A thread that waits gives up its core: with anything else running, spinning takes several times as long.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export TRAIN_GPT2=${TRAIN_GPT2:-./train_gpt2}       # the tests of the program run it from here
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 failed=0

# The counts of Catch2's last line: "All tests passed (9 assertions in 3 test cases)" or "test cases: 3 | 2 passed | 1 failed".
build/run_tests --min-duration 5 "$@" 2>&1 | tee "$log"
code=${PIPESTATUS[0]}
count() { sed -n "s/$1/\\1/p" "$log" | tail -n 1; }
passed=$(count '^All tests passed (.* in \([0-9]*\) test cases\{0,1\}).*')
[ -n "$passed" ] || passed=$(count '^test cases:.*| *\([0-9]*\) passed.*')
failed=$(count '^test cases:.*| *\([0-9]*\) failed.*')
passed=${passed:-0} failed=${failed:-0}
if [ "$code" != 0 ] && [ "$failed" = 0 ]; then echo "run_tests ended with exit code $code"; failed=1; fi
skipped=$(grep -c 'SKIPPED:' "$log")
passed=$((passed - skipped))

if [ $# -eq 0 ]; then
    python=$(dev/install.sh --python numpy matplotlib) || exit 1
    for script in test/test_*.py; do
        [ -e "$script" ] || continue
        echo "== $script"
        "$python" "$script" 2>&1 | tee "$log"
        code=${PIPESTATUS[0]}
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

#!/usr/bin/env bash
# exports.sh -- checkpoints and logs as the libraries of dev/hf/requirements.txt read them: all of test_exports.py,
# test_tokenizer_export.py and test_log_to_tensorboard.py, in a Python environment of its own; what those libraries save
# as the trainers read it: test_hf_directories.py, also with the transformers of build/pytorch; and
# test_gpu_bench_pytorch.py and test_torch.py, which want a PyTorch of this year. The environment is made once (a
# minute, 5 GB) and kept under the hash of what is in it.
#
# Then those of transformers and of logs run once more in a copy with the newest releases, where there are newer ones.
#
#   dev/hf/exports.sh [TEST...]       make exports; TEST: a class or Class.test of test_exports.py
#   dev/hf/exports.sh --python        makes the environment where it is missing, and prints its python
#   dev/hf/exports.sh --ci            only the pinned releases; where the environment cannot be made within 5 minutes,
#                                     says so and skips
set -euo pipefail
cd "$(dirname "$0")/../.."

NEEDED_GB=8         # 5 to keep, the rest while installing
LIMIT=300           # seconds, with --ci
requirements=dev/hf/requirements.txt
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cable.c
environment=$cache/exports-$({ python3 --version; cat "$requirements"; } | sha256sum | cut -c 1-16)

# PyPI's PyTorch links CUDA's libraries, so they are installed although nothing here uses them; Triton is left out. uv
# takes a third of pip's time.
make_environment() {
    local made free
    mkdir -p "$cache"
    find "$cache" -maxdepth 1 -name 'making.*' -mmin +60 -exec rm -rf {} +       # of a run that was killed
    free=$(df --output=avail -BG "$cache" | tail -n 1 | tr -dc 0-9)
    [ "$free" -ge $NEEDED_GB ] || { echo "$cache: expected $NEEDED_GB GB of free space, got $free"; return 1; }
    made=$(mktemp -d "$cache/making.XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf '$made'" EXIT
    echo 'triton; sys_platform == "never"' >"$made/left_out.txt"
    python3 -m venv "$made/env"
    "$made/env/bin/python" -m pip install -q --disable-pip-version-check uv
    UV_CACHE_DIR=$made/cache "$made/env/bin/uv" pip install -q --python "$made/env/bin/python" \
        --overrides "$made/left_out.txt" -r "$requirements"
    mv -T "$made/env" "$environment" 2>/dev/null || [ -d "$environment" ]       # or another run was faster
}
versions() {
    "$1" - "$requirements" <<'PYTHON'
import importlib.metadata as metadata
import platform
import sys

names = [line.split("==")[0].split("[")[0] for line in open(sys.argv[1]) if "==" in line]
print(", ".join([f"Python {platform.python_version()}"] + [f"{name} {metadata.version(name)}" for name in names]))
PYTHON
}

# A copy with the newest releases of all but PyTorch; what has not changed is linked. Prints its python, or nothing if
# no release is newer.
make_newest() {
    local made newest=$environment-newest names upgraded
    made=$(mktemp -d "$cache/making.XXXXXX")
    cp -al "$environment" "$made/env"
    echo 'triton; sys_platform == "never"' >"$made/left_out.txt"
    grep '^torch==' "$requirements" >"$made/pinned.txt"
    mapfile -t names < <(sed -n 's/==.*//p' "$requirements")
    mapfile -t upgraded < <(printf -- '--upgrade-package=%s\n' "${names[@]%%[*}")
    UV_CACHE_DIR=$made/cache "$made/env/bin/uv" pip install -q --python "$made/env/bin/python" -c "$made/pinned.txt" \
        --overrides "$made/left_out.txt" "${upgraded[@]}" "${names[@]}" >&2 || { rm -rf "$made"; return 1; }
    rm -rf "$newest"
    if [ "$(versions "$made/env/bin/python")" != "$(versions "$environment/bin/python")" ]; then
        mv "$made/env" "$newest"
        echo "$newest/bin/python"
    fi
    rm -rf "$made"
}
if [ "${1:-}" = --make ]; then make_environment; exit; fi
if [ "${1:-}" = --python ]; then
    [ -d "$environment" ] || make_environment >&2
    echo "$environment/bin/python"
    exit
fi

ci=""
if [ "${1:-}" = --ci ]; then ci=1; shift; fi
if [ ! -d "$environment" ]; then
    start=$SECONDS code=0
    echo "installing $requirements in $environment"
    if [ -n "$ci" ]; then
        log=$(timeout --kill-after=10 $LIMIT "$0" --make 2>&1) || code=$?
        if [ $code != 0 ]; then
            [ $code != 124 ] || log="it took more than $LIMIT s"
            echo "SKIPPED: the libraries of $requirements could not be installed: $(tail -n 3 <<<"$log")"
            echo "0 passed, 0 failed, 1 skipped"
            exit 0
        fi
    else
        "$0" --make
    fi
    echo "installed in $((SECONDS - start)) s"
fi
python=$environment/bin/python
versions "$python"
dev/install.sh build
make -s train_gpt2 train_bert build/libcable.so build/libcable_simt.so
export PYTORCH_PYTHON=$python
if [ $# != 0 ]; then exec python3 test/scripts/test_exports.py "$@"; fi
# Most of it runs in one thread, so as many as there are cores run at a time; what each printed follows in order.
exports="python3 test/scripts/test_exports.py"
parts=("$exports Exports Authors HellaSwag" "$exports Transformers BertForMaskedLM SentenceTransformers"
    "$python test/scripts/test_gpu_bench_pytorch.py" "$python test/scripts/test_torch.py"
    "python3 test/scripts/test_tokenizer_export.py"
    "python3 test/scripts/test_log_to_tensorboard.py" "python3 test/scripts/test_hf_directories.py")
if [ -x build/pytorch/bin/python ]; then
    parts+=("PYTORCH_PYTHON=build/pytorch/bin/python python3 test/scripts/test_hf_directories.py")
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
code=0
for i in "${!parts[@]}"; do printf '%s\0' "${parts[$i]} >$logs/$i 2>&1 && touch $logs/$i.ok"; done |
    xargs -0 -P "$(nproc)" -I{} bash -c '{}' || code=1
for i in "${!parts[@]}"; do
    printf '%s\n' "${parts[$i]}"
    cat "$logs/$i"
    [ -e "$logs/$i.ok" ] || code=1
done
[ -z "$ci" ] || exit $code
newest=$(make_newest) || { echo "the newest releases could not be installed"; exit 1; }
if [ -z "$newest" ]; then echo "no release is newer"; exit $code; fi
versions "$newest"
export PYTORCH_PYTHON=$newest
python3 test/scripts/test_log_to_tensorboard.py || code=1
python3 test/scripts/test_hf_directories.py || code=1
$exports Transformers BertForMaskedLM SentenceTransformers HellaSwag || code=1
exit $code

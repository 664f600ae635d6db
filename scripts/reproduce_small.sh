#!/usr/bin/env bash
# reproduce_small.sh -- the paper's comparison on two CPU cores. Models that differ only in their positional encoding
# learn WikiText-2 as bytes, with the same order of tokens and the same initial values, and are evaluated on its test
# split at up to 16 times the trained length.
#
#   scripts/reproduce_small.sh --quick     9 encodings x 2 seeds, L2 NH4 C64, T 128, 500 steps of 2,048 tokens;
#                                          under 15 minutes
#   scripts/reproduce_small.sh             10 encodings x 3 seeds, L4 NH4 C128, T 256, 4,000 steps of 4,096 tokens;
#                                          a night
#   --out DIR                              directory of the runs [run/quick or run/small]
#   anything else                          is passed on to scripts/paper.py: --jobs 2, --seeds 42, cable rope fox,
#                                          --set T=64, --dry_run
#
# After an interruption run the same command again: it continues, and finished runs are not repeated. DIR/report has the
# table and the figure. The text is $CABLE_DATA/wikitext-2/{train.txt.xz,valid.txt,test.txt}; without CABLE_DATA it is
# downloaded (8 MB), which needs data/requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

size=small out="" dry=false rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        --quick) size=quick ;;
        --out) [ $# -ge 2 ] || { echo "--out: expected a directory" >&2; exit 2; }; out=$2; shift ;;
        -h|--help) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --dry_run) dry=true; rest+=("$1") ;;
        *) rest+=("$1") ;;
    esac
    shift
done
out=${out:-run/$size}
text=$out/text
files=(--set train_files="$text/wikitext2_bytes_train.txt" --set val_files="$text/wikitext2_bytes_test.txt")

dev/install.sh demo
python=$(dev/install.sh --python matplotlib numpy)
if $dry; then exec "$python" scripts/paper.py "$size" "${files[@]}" "${rest[@]}" --out "$out"; fi
if [ -z "${TRAIN_GPT2:-}" ]; then
    echo "building ./train_gpt2 (half a minute)"
    mkdir -p build
    make train_gpt2 >build/reproduce_build.log 2>&1 || { cat build/reproduce_build.log; exit 1; }
fi

if [ ! -e "$text/done" ]; then
    loader=$python
    if [ -z "${CABLE_DATA:-}" ]; then
        [ ! -x build/venv/bin/python ] || export PYTHON=${PYTHON:-build/venv/bin/python}
        loader=$(dev/install.sh --python requests pyarrow) || {
            echo "expected requests and pyarrow to download WikiText-2: pip install -r data/requirements.txt," \
                 "or set CABLE_DATA to a directory that has wikitext-2/" >&2
            exit 2
        }
    fi
    mkdir -p "$text"
    "$loader" - "$text" <<'PYTHON'
import lzma
import os
import sys

sys.path.insert(0, "data")
out, have = sys.argv[1], os.environ.get("CABLE_DATA")
BYTES = {"train": 10797148, "val": 1121681, "test": 1256449}        # sizes of the original files


def from_disk(split):
    name = {"train": "train.txt.xz", "val": "valid.txt", "test": "test.txt"}[split]
    path = os.path.join(have, "wikitext-2", name)
    try:
        with (lzma.open if name.endswith(".xz") else open)(path, "rb") as f:
            return f.read()
    except (OSError, EOFError, lzma.LZMAError) as e:
        sys.exit(f"{path}: {e}")


def from_hub():
    from download import hub_download, hub_files
    from sources import new_counts
    from wikitext import REPO, SPLITS, WikiReader
    paths = hub_download(REPO, hub_files(REPO, "wikitext-2-v1", ".parquet"), os.path.join(out, "source"))
    reader = WikiReader("file", "split")
    for split, names in SPLITS.items():
        files = [p for p in paths if os.path.basename(p).split("-")[0] in names]
        yield split, b"".join(reader.joined(reader.lines(files, new_counts())))


for split, text in ((s, from_disk(s)) for s in BYTES) if have else from_hub():
    if len(text) != BYTES[split]:
        print(f"warning: WikiText-2's {split} split: expected {BYTES[split]:,} bytes, got {len(text):,}: "
              "results will differ", file=sys.stderr)
    with open(f"{out}/wikitext2_bytes_{split}.txt", "wb") as f:
        f.write(text)
    print(f"{out}/wikitext2_bytes_{split}.txt: {len(text):,} bytes")
PYTHON
    touch "$text/done"
fi

start=$SECONDS
"$python" scripts/paper.py "$size" --quiet --trainer "${TRAIN_GPT2:-./train_gpt2}" "${files[@]}" "${rest[@]}" \
    --out "$out"
echo "trained and evaluated in $((SECONDS - start)) s"
"$python" scripts/report.py "$out" -o "$out/report"

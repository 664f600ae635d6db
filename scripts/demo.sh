#!/usr/bin/env bash
# demo.sh -- the point of CABLE in four minutes: four small byte-level models, alike but for their positional encoding,
# learn this repository's own text at T = 128 and are then evaluated at lengths up to 16 times that. Nothing is
# downloaded but what dev/install.sh installs. The exit code is 1 unless cable and alibi extrapolate and the other two
# do not.
#
#   scripts/demo.sh            GPT-2; results in build/demo: a table, lengths.png, one directory per model
#   scripts/demo.sh bert       BERT, on masked bytes; results in build/demo_bert
#   scripts/demo.sh tasks      tasks with one right answer, at longer lengths than trained; results in build/demo_tasks
#   scripts/demo.sh text       only the text that they learn: build/demo_text/train.txt and val.txt
#   DEMO_STEPS=400 ...         a shorter training
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-gpt2}
trainer=train_$kind
lengths=(64 128 256 512 1024 2048)
case $kind in
    gpt2) steps=${DEMO_STEPS:-800} encodings=(cable alibi rope sinusoidal) out=build/demo options=(--sample_every 0) ;;
    bert) steps=${DEMO_STEPS:-800} encodings=(cable alibi sinusoidal learned) out=build/demo_bert options=() ;;
    tasks) steps=${DEMO_STEPS:-1200} trainer=train_gpt2 out=build/demo_tasks ;;
    text) steps=1 out=build/demo_text ;;
    *) echo "scripts/demo.sh $kind: expected gpt2, bert, tasks or text"; exit 2 ;;
esac
[[ $steps =~ ^[1-9][0-9]{0,5}$ ]] || { echo "DEMO_STEPS=$steps: expected a number of training steps"; exit 2; }

# The corpus: every tenth block of 4096 bytes is held out, so that both parts hold every kind of text.
write_text() {
    rm -rf "$out"
    mkdir -p "$out"
    find . \( -name .git -o -name build -o -name fixtures -o -name '.?*' \) -prune -o -type f -print |
        grep -E '(\.(cu|cuh|h|py|sh|md)|/Makefile)$' | LC_ALL=C sort | tr '\n' '\0' | xargs -0 cat >"$out/corpus.txt"
    "$(dev/install.sh --python)" - "$out" <<'PYTHON'
import sys
out = sys.argv[1]
text = open(out + "/corpus.txt", "rb").read()
blocks = [text[i:i + 4096] for i in range(0, len(text), 4096)]
for name, part in (("train", [b for i, b in enumerate(blocks) if i % 10 != 5]), ("val", blocks[5::10])):
    with open(f"{out}/{name}.txt", "wb") as f:
        f.write(b"".join(part))
    print(f"{out}/{name}.txt: {sum(map(len, part)):,} bytes")
PYTHON
}
if [ "$kind" = text ]; then write_text; exit; fi

dev/install.sh demo
python=$(dev/install.sh --python matplotlib numpy)
echo "building ./$trainer (half a minute)"
mkdir -p build
make "$trainer" >build/demo_build.log 2>&1 || { cat build/demo_build.log; exit 1; }
# A thread that waits gives up its core: with anything else running, spinning takes several times as long.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

if [ "$kind" = tasks ]; then
    rm -rf "$out"
    exec "$python" scripts/tasks.py --out "$out" --pos cable,t5,rope --tasks sort,reverse --seeds 1 --steps "$steps"
fi

write_text

# Reads a trainer's output; shows one line of progress over all models. Evaluating at one length counts as $eval steps.
eval=$((steps / 40 + 1))
model_work=$((steps + eval * ${#lengths[@]}))
work=$((model_work * ${#encodings[@]})) work_before=0 start=$SECONDS shown=-9
if [ -t 1 ]; then before='\r\033[K' after='' every=1; else before='' after='\n' every=5; fi
show() {    # what is being done, the work done in this model
    local finished=$((work_before + $2)) left
    [ $((SECONDS - shown)) -ge $every ] || return 0
    shown=$SECONDS
    left=$(((SECONDS - start) * (work - finished) / (finished + 1)))
    printf "${before}[%3d%%, %d:%02d left] %s${after}" $((100 * finished / work)) $((left / 60)) $((left % 60)) "$1"
}
watch() {
    local line evaluated=0
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$out/$1.log"
        if [[ $line =~ ^step\ +([0-9]+)/[0-9]+\ \|\ loss\ ([0-9.]+) ]]; then
            show "$1: step ${BASH_REMATCH[1]} of $steps, loss ${BASH_REMATCH[2]}" "${BASH_REMATCH[1]}"
        elif [[ $line =~ ^\ +[0-9]+\ +[0-9]+\ +[0-9]+ ]]; then
            evaluated=$((evaluated + 1))
            show "$1: evaluated at $evaluated of ${#lengths[@]} lengths" $((steps + evaluated * eval))
        fi
    done
}
warmup=$((steps / 10 < 100 ? steps / 10 : 100))
options+=(--train_files "$out/train.txt" --val_files "$out/val.txt" --model 2,4,64 --T 128 --B 16 --steps "$steps"
    --lr 2e-3 --warmup "$warmup" --final_lr 0.1 --weight_decay 0.1 --val_every 0 --seed "${DEMO_SEED:-42}"
    --checkpoint_every "$steps" --eval_lengths "$(IFS=,; echo "${lengths[*]}")")
for pos in "${encodings[@]}"; do
    "./$trainer" "${options[@]}" --pos "$pos" --out "$out/$pos" 2>&1 | watch "$pos" ||
        { echo; tail -n 5 "$out/$pos.log"; echo "training $pos failed"; exit 1; }
    work_before=$((work_before + model_work))
done
[ ! -t 1 ] || printf '\r\033[K'
echo "trained and evaluated in $((SECONDS - start)) s"

echo
model="$out/cable/step_$(printf %08d "$steps")"
if [ "$kind" = gpt2 ]; then
    echo "What the cable model writes after \"inline \":"
    ./train_gpt2 --load "$model" --generate "inline " --tokens 400 --temperature 0.7 --top_k 40 2>"$out/sample.log" |
        sed -n '/^inline /,$p'
else
    echo "What the cable model takes the masked bytes for:"
    ./train_bert --load "$model" 2>"$out/sample.log" \
        --predict "    retu[MASK]n 0;   // the [MASK]ame bits for any number of threads"
fi
echo
"$python" scripts/plot.py lengths "${encodings[@]/#/$out/}" -o "$out/lengths.png"

"$python" - "$kind" "$out" "$steps" "${lengths[*]}" "${encodings[@]}" <<'PYTHON'
import json
import sys

kind, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
lengths, encodings = [int(T) for T in sys.argv[4].split()], sys.argv[5:]
expected = {"cable": ("<=", 1.02), "alibi": ("<=", 1.02), "rope": (">=", 1.2),
            "sinusoidal": (">=", 1.5 if kind == "gpt2" else 1.1)}
what = "perplexity per byte" if kind == "gpt2" else "pseudo-perplexity per masked byte"
print(what + " of held-out text, trained at T = 128")
print(f"{'T':>12}" + "".join(f"{T:>9}" for T in lengths) + "   PPL(2048) / PPL(128)")
good = True
for pos in encodings:
    ppl = {}
    for line in open(f"{out}/{pos}/log.jsonl"):
        r = json.loads(line)
        if r["kind"] == "extrapolation":
            ppl[r["T"]] = r["ppl"]
    if pos == "learned":                        # has no positions beyond the trained ones
        good = good and sorted(ppl) == [64, 128]
        print(f"{pos:>12}" + "".join(f"{ppl[T]:9.2f}" if T in ppl else f"{'-':>9}" for T in lengths))
        continue
    ratio, (relation, bound) = ppl[2048] / ppl[128], expected[pos]
    holds = ratio <= bound if relation == "<=" else ratio >= bound
    good = good and holds
    print(f"{pos:>12}" + "".join(f"{ppl[T]:9.2f}" for T in lengths) +
          f"   {ratio:8.3f}   expected {relation} {bound}: {'yes' if holds else 'NO'}")
print()
if good:
    print(f"cable and alibi hold beyond the trained length, {' and '.join(encodings[2:])} do not: as the paper says.")
else:
    few = f" {steps} steps are few: with 400 or more every line holds." if steps < 400 else ""
    print("This is not what the paper says: a line above ends in NO." + few)
sys.exit(0 if good else 1)
PYTHON

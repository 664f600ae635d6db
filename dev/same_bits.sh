#!/usr/bin/env bash
# same_bits.sh -- shows that a change of the sources changes no bit of a training run. Trains two versions of this
# repository from the same seed, with every encoding and both trainers, on the CPU and on the emulated GPU, and compares
# what they save.
#
#   dev/same_bits.sh BEFORE [AFTER]     commits; without AFTER, BEFORE is compared with the working tree
#   STEPS=50 SIMT_STEPS=50 ENCODINGS="cable rope" PARTS="cpu simt"      for shorter or partial runs
#
# Both versions are built without reordered sums and without fused multiply-add, so that the compiler has no say in it.
# A commit is built and run only once: build/same_bits/COMMIT keeps its checksums.
set -euo pipefail
cd "$(dirname "$0")/.."
export STEPS=${STEPS:-50} SIMT_STEPS=${SIMT_STEPS:-50} OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2
parts=${PARTS:-cpu simt}

# --one DIRECTORY PART PROGRAM ENCODING: trains in that version and prints the checksum of what it saved
if [ "${1:-}" = --one ]; then
    version=$2 part=$3 program=$4 pos=$5 out=$2/runs/$3_$4_$5
    rm -rf "$out"
    if [ "$part" = cpu ]; then
        command=("$version/$program" --model 2,2,32 --T 160 --B 2 --total_batch 640 --steps "$STEPS")
    else    # heads of 64, so that the tensor-core kernels run; both T cross a chunk of the cumulative sum
        command=("$version/build/simt/$program" --model 1,1,64 --T 136 --B 1 --steps "$SIMT_STEPS")
    fi
    [ "$program" = train_bert ] || command+=(--sample_every 0)
    mkdir -p "$out"
    "${command[@]}" --train_files build/same_bits/text.txt --pos "$pos" --lr 1e-3 --warmup 5 --weight_decay 0.1 \
        --val_every 0 --out "$out" --checkpoint_every 1000000 >"$out.log" 2>&1 ||
        { tail -n 5 "$out.log"; echo "FAILED: $part $program $pos"; exit 255; }
    printf '%-5s %-10s %-13s %s\n' "$part" "$program" "$pos" \
        "$(cat "$out"/step_*/model.safetensors "$out"/step_*/optimizer_0.* | sha256sum | cut -c1-16)"
    rm -rf "$out"
    exit
fi
[ $# -ge 1 ] && [ $# -le 2 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=build/same_bits
mkdir -p "$root"

# Prints the directory with the sources of a version. The working tree is copied, so that its own build does not change.
checkout() {
    local hash directory
    if [ "$1" = working-tree ]; then
        directory=$root/working-tree
        rm -rf "$directory.new"
        mkdir -p "$directory.new"
        git ls-files -z -co --exclude-standard | xargs -0 ls -d 2>/dev/null | tar -c -T - | tar -x -C "$directory.new"
        [ ! -d "$directory/build" ] || mv "$directory/build" "$directory.new/"
        rm -rf "$directory"
        mv "$directory.new" "$directory"
    else
        hash=$(git rev-parse --short=12 "$1^{commit}")
        directory=$root/$hash
        if [ ! -d "$directory" ]; then
            mkdir -p "$directory.new"
            git archive "$hash" | tar -x -C "$directory.new"
            mv "$directory.new" "$directory"
        fi
    fi
    echo "$directory"
}

# sums VERSION ENCODINGS: builds the version and prints a line for each run
sums() {
    local version=$1 programs=() part program pos
    [[ $parts != *cpu* ]] || programs+=(train_gpt2 train_bert)
    [[ $parts != *simt* ]] || programs+=(build/simt/train_gpt2 build/simt/train_bert)
    echo "building $version" >&2
    make -C "$version" -j2 MPI=0 OPT='-O1 -ffp-contract=off -fno-associative-math' "${programs[@]}" \
        >"$version/build.log" 2>&1 || { tail -n 20 "$version/build.log" >&2; return 1; }
    for part in $parts; do
        for program in train_gpt2 train_bert; do
            for pos in $2; do echo "$version $part $program $pos"; done
        done
    done | xargs -P 2 -L 1 bash dev/same_bits.sh --one | sort
}

before=$(checkout "$1") after=$(checkout "${2:-working-tree}")
[ -f "$root/text.txt" ] || cat "$before"/train_gpt2.cu "$before"/train_bert.cu >"$root/text.txt"
table=$(grep -rhoE '^ +X\([a-z0-9_]+, +[A-Z][A-Za-z0-9]*, +"' "$before"/llmc/position*)
encodings=${ENCODINGS:-$(sed -E 's/ +X\(([a-z0-9_]+).*/\1/' <<<"$table")}
name=sums.$(printf '%s ' "$STEPS" "$SIMT_STEPS" "$parts" "$encodings" | sha256sum | cut -c1-8)
rm -f "$root"/working-tree/sums.*
for version in "$before" "$after"; do
    [ ! -s "$version/$name" ] || continue
    sums "$version" "$encodings" >"$version/$name.new"
    mv "$version/$name.new" "$version/$name"
done
if diff "$before/$name" "$after/$name" >"$root/diff"; then
    echo "same bits in ${before##*/} and ${after##*/}: $(wc -l <"$after/$name") runs"
else
    cat "$root/diff"
    echo "the bits differ (< ${before##*/}, > ${after##*/})"
    exit 1
fi

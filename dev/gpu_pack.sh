#!/usr/bin/env bash
# gpu_pack.sh -- collects what `make gpu-check` needs on a bare GPU machine in build/gpu_headers, which git ignores: the
# headers of xxHash and nlohmann-json, each with all of its own headers. The kernel tests need nothing else.
# gpu_check.py adds that folder to CPATH. Run this on a machine that has the headers, and copy the folder.
#
#   dev/gpu_pack.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/gpu_headers}
dev/install.sh --check build
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for header in xxhash.h nlohmann/json.hpp; do
    # -M names all files that are read; those below the header's own directory are the library's
    read_files=$(echo "#include <$header>" | "${CXX:-g++}" -std=c++17 -DXXH_INLINE_ALL -x c++ -M - | tr " \\\\" "\n")
    first=$(grep -m 1 "/$header\$" <<<"$read_files")
    root=${first%"/$header"}
    case $header in
        */*) own=$(grep "^$root/${header%%/*}/" <<<"$read_files") ;;
        *) own=$(grep "^$root/x\(xh\|xhash\)[^/]*\$" <<<"$read_files") ;;
    esac
    while IFS= read -r file; do
        mkdir -p "$work/$(dirname "${file#"$root/"}")"
        cp "$file" "$work/${file#"$root/"}"
    done <<<"$own"
done
rm -rf "$folder"
mkdir -p "$(dirname "$folder")"
mv "$work" "$folder"
chmod 755 "$folder"
echo "$folder: $(find "$folder" -type f | wc -l) headers, $(du -sk "$folder" | cut -f 1) KB"

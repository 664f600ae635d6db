#!/usr/bin/env bash
# configure.sh -- finds out what this machine has by building small programs. The Makefile includes the results.
#
#   dev/configure.sh CXX=g++ NVCC= NO_OMP= MPI= NCCL= OPENMPI_DIR= NCCL_DIR=     writes build/config.mk, or CONFIG=FILE
#   dev/configure.sh --commands FILE DIRECTORY FLAGS_CPU FLAGS_SIMT                    writes FILE for editors (clangd)
#
# It runs again when a knob, the compiler, the processor, the GPU, the installed packages or a search path has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

# One entry per source: the CUDA build's text is compiled on the emulator there, everything else as the CPU build does.
if [ "${1:-}" = --commands ]; then
    comma="["
    for source in train_*.cu test/*/*.cu dev/cuda/*.cu; do
        [ -e "$source" ] || continue
        flags=$4
        [[ $source != test/simt/* ]] || flags=$5
        printf '%s\n  {"directory": "%s", "file": "%s", "command": "c++ %s -x c++ -c %s"}' \
            "$comma" "$3" "$source" "$flags" "$source"
        comma=","
    done >"$2.$$"
    printf '\n]\n' >>"$2.$$"
    mv "$2.$$" "$2"
    exit
fi

for knob in CXX NVCC NO_OMP MPI NCCL OPENMPI_DIR NCCL_DIR CONFIG; do declare "$knob="; done
for argument; do declare "$argument"; done
read -ra cxx <<<"$CXX"
command -v "${cxx[0]:-}" >/dev/null || {
    why="there is no such compiler; install one (dev/install.sh build) or name one that is here"
    [ ! -x "$CXX" ] || why="make cuts a path at its spaces; name a link to it without any"
    echo "CXX=$CXX: $why" >&2
    exit 1
}
mkdir -p build/bf16 build/trace build/cuda build/pic build/simt build/simt_asan build/ladders
for folder in test/*/; do mkdir -p "build/$folder" "build/asan/${folder#test/}"; done
config=${CONFIG:-build/config.mk}

questions() {
    printf '%s\n' "$@"
    env | LC_ALL=C grep -E '^(PATH|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|LIBRARY_PATH|PKG_CONFIG_PATH)=' | sort
    "${cxx[@]}" --version
    grep -m 1 '^flags' /proc/cpuinfo
    cat /proc/driver/nvidia/gpus/*/information
    "$NVCC" --version
    stat -c %Y dev/configure.sh /var/lib/dpkg/status || true
}
key=$(questions "$@" 2>/dev/null | cksum)
[ "$(head -n 1 $config 2>/dev/null)" != "# $key" ] || exit 0

# Several makes may ask at the same time: each writes files of its own, and the last to rename its answers wins.
program=build/probe.$$
trap 'rm -f "$program" $config.$$' EXIT
# builds SOURCE FLAGS...
builds() { "${cxx[@]}" -x c++ - -o "$program" "${@:2}" <<<"$1" >/dev/null 2>&1; }
# first SOURCE FLAGS...: prints the first of these strings of flags with which the source becomes a program
first() {
    local flags
    for flags in "${@:2}"; do
        # shellcheck disable=SC2086
        if [ -n "$flags" ] && builds "$1" $flags; then echo "$flags"; return; fi
    done
}
packaged() { pkg-config --cflags --libs "$1" 2>/dev/null || true; }
library() { echo "-I$1/include -L$1/lib -Wl,-rpath=$1/lib $2"; }
# Includes are for compiling, everything else is for linking.
includes() { tr ' ' '\n' <<<"$*" | grep '^-I' | paste -sd ' ' || true; }
# MPICH's mpicc also names how MPICH itself was compiled, -flto=auto for one, and nvcc refuses that.
linking() { tr ' ' '\n' <<<"$*" | grep -v -E '^(-[IDfmOg]|-W[^l]|-specs=|$)' | paste -sd ' ' || true; }

openmp=""
if [ -z "$NO_OMP" ] && builds 'int main() {}' -fopenmp; then openmp=-fopenmp; fi

# Several ranks: MPI, where mpirun or srun starts them by it, and NCCL between GPUs.
mpi="" nccl=""
if [ "$MPI" != 0 ]; then
    source=$'#define OMPI_SKIP_MPICXX 1\n#include <mpi.h>\nint main() { return MPI_Finalize(); }'
    if [ -n "$OPENMPI_DIR" ]; then
        mpi=$(first "$source" "$(library "$OPENMPI_DIR" -lmpi)")
        if [ -z "$mpi" ]; then
            echo "OPENMPI_DIR=$OPENMPI_DIR: no program builds with include/mpi.h and lib/libmpi there" >&2
            rm -f $config
            exit 1
        fi
    else
        mpi=$(first "$source" "$(mpicc -show 2>/dev/null | cut -s -d ' ' -f 2- || true)" \
            "$(packaged ompi-c)" "$(packaged mpich)")
    fi
fi
if [ -n "$NVCC" ] && [ "$NCCL" != 0 ]; then
    cuda=$(realpath -m "$NVCC")
    cuda=${cuda%/bin/nvcc}
    nccl=$(first $'#include <nccl.h>\nstatic_assert(NCCL_VERSION_CODE >= 21700);
        int main() { int v; return ncclGetVersion(&v); }' \
        "${NCCL_DIR:+-I$cuda/include $(library "$NCCL_DIR" -lnccl)}" \
        "${NCCL_DIR:+-I$cuda/include $(library "$NCCL_DIR" -l:libnccl.so.2)}" \
        "-I$cuda/include -lnccl" "$(library "$cuda" -lnccl)")
fi

# Version 3 of Catch2 comes with a compiled main; version 2 has it in the header, test/main.cu.
catch=""
if builds $'#include <catch2/catch_all.hpp>\nint main() {}' -E; then catch="-lCatch2Main -lCatch2"; fi

# From 9.0 on there are instructions that only the "a" architectures have.
gpu=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .) || true
case $gpu in
    9?|1??) gpu=sm_${gpu}a ;;
    [1-9]?) gpu=sm_$gpu ;;
    *) gpu= ;;
esac
if [[ -n $gpu && $("$NVCC" -arch="$gpu" --dryrun -x cu /dev/null 2>&1) == *"Unsupported gpu architecture"* ]]; then
    echo "$NVCC is older than this GPU and has no $gpu: it builds PTX for compute_80, which the driver compiles" >&2
    gpu=compute_80
fi

{
    echo "# $key"
    echo "# what dev/configure.sh found on this machine"
    echo "CCACHE := $(basename "$(command -v ccache || true)")"
    echo "PROCESSOR := $(grep -m 1 '^flags' /proc/cpuinfo 2>/dev/null | cksum)"
    echo "FMA := $(grep -qw fma /proc/cpuinfo 2>/dev/null && echo -mfma)"
    echo "OMP := $openmp"
    echo "MPI_CFLAGS := ${mpi:+-DUSE_MPI }$(includes "$mpi")"
    echo "MPI_LIBS := $(linking "$mpi")"
    echo "NCCL_CFLAGS := ${nccl:+-DUSE_NCCL }$(includes "$nccl")"
    # nvcc wants the linker's flags in words of its own
    echo "CUDA_RANK_LIBS := $(linking "$mpi $nccl" | sed -e 's/-Wl,/-Xlinker /g' -e 's/-pthread/-Xcompiler -pthread/g')"
    echo "CATCH_LIBS := $catch"
    echo "GPU_ARCH := $gpu"
} >$config.$$
mv $config.$$ $config

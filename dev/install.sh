#!/usr/bin/env bash
# install.sh -- the only list of what this repository needs from the system. It installs what is missing with apt, as
# root or through sudo, or else prints exactly what to install.
#
#   dev/install.sh WHAT                   install what is missing for: build, ladders, unit (the tests in C++), test
#                                         (all tests), demo, data, bench, ranks or ci
#   dev/install.sh --check WHAT           only say what is missing; exit code 1 if anything is
#   dev/install.sh --python MODULE...     print a python3 that has these modules; exit code 1 if there is none
#
# A need is met if the thing works, from any source; so a machine without apt needs none of these packages. The tests of
# data/ also need the libraries of data/requirements.txt: in an environment of their own, build/venv.
set -euo pipefail
cd "$(dirname "$0")/.."

has_command() { command -v "$1" >/dev/null 2>&1; }
has_compiler() { has_command "${CXX:-g++}" || has_command clang++; }
compiler() { if has_command "${CXX:-g++}"; then echo "${CXX:-g++}"; else echo clang++; fi; }
has_header() {
    # shellcheck disable=SC2086
    has_compiler && printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" |
        $(compiler) ${CPPFLAGS:-} ${CXXFLAGS:-} -std=c++17 -x c++ -E - >/dev/null 2>&1
}
has_catch() { has_header catch2/catch_all.hpp || has_header catch2/catch.hpp; }
find_python() {     # the system's first: that is where apt puts modules
    local python has='import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))'
    for python in ${PYTHON:+"$PYTHON"} /usr/bin/python3 python3; do
        if "$python" -c "$has" "$@" >/dev/null 2>&1; then echo "$python"; return 0; fi
    done
    return 1
}
has_modules() { find_python "$@" >/dev/null; }

# need PACKAGE "what it is for" TEST...; optional likewise
missing=() missing_optional=() reasons=()
need() { local package=$1 reason=$2; shift 2; "$@" || { missing+=("$package"); reasons+=("  $package: $reason"); }; }
optional() {
    local package=$1 reason=$2
    shift 2
    "$@" || { missing_optional+=("$package"); reasons+=("  $package: $reason (optional)"); }
}

needs_python() { need python3 "figures, checks" has_modules; }
needs_compiler() {
    need g++ "a C++17 compiler" has_compiler
    need make "builds everything" has_command make
    need libxxhash-dev "checksums (xxhash.h)" has_header xxhash.h
}
needs_ladders() {
    needs_compiler
    needs_python
}
needs_build() {
    needs_compiler
    need nlohmann-json3-dev "JSON (nlohmann/json.hpp)" has_header nlohmann/json.hpp
}
needs_demo() {
    needs_build
    needs_python
    need python3-matplotlib "the figure" has_modules matplotlib numpy
}
needs_unit() {
    needs_build
    needs_python
    need catch2 "the tests (Catch2, version 2 or 3)" has_catch
}
needs_test() {
    needs_unit
    needs_ranks
    needs_data
    need python3-numpy "the tests of the scripts" has_modules numpy
    need python3-scipy "the intervals of a study" has_modules scipy
    need python3-xxhash "the checksums of a checkpoint that is exported" has_modules xxhash
    need python3-matplotlib "the tests of the figures" has_modules matplotlib numpy
}
# Several processes: any MPI that the Makefile finds will do.
has_mpi() { has_command mpirun && make -s -C "$(dirname "$0")/.." mpi-found >/dev/null 2>&1; }
needs_ranks() {
    needs_build
    needs_python
    need libopenmpi-dev "MPI, to build for several ranks" has_mpi
    need openmpi-bin "mpirun" has_command mpirun
}
needs_data() {
    needs_python
    need python3-venv "an environment for the libraries of data/requirements.txt" has_modules ensurepip
}
needs_ci() {
    needs_test
    optional ccache "compiles nothing twice" has_command ccache
    optional clang "libFuzzer, for make fuzz; make hashes" has_command clang++
    optional g++-aarch64-linux-gnu "make hashes: Arm" has_command aarch64-linux-gnu-g++
    optional qemu-user "make hashes: Arm" has_command qemu-aarch64
}
needs_bench() {
    needs_build
    needs_python
    need python3-torch "PyTorch, the base of the comparison" has_modules torch numpy
}

if [ "${1:-}" = --python ]; then
    shift
    find_python "$@" || { echo "no python3 has all of: $*" >&2; exit 1; }
    exit 0
fi
check=false
if [ "${1:-}" = --check ]; then check=true; shift; fi
case "${1:-}" in
    build|ladders|unit|test|demo|data|bench|ranks|ci) "needs_$1" ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

if $check; then
    [ ${#missing[@]} -eq 0 ] && exit 0
    echo "missing:" >&2
    printf '%s\n' "${reasons[@]}" >&2
    echo "install with: sudo apt-get install ${missing[*]} ${missing_optional[*]:-}      (or: dev/install.sh $1)" >&2
    exit 1
fi
# The libraries of data/: without them (no network) their tests skip and say so.
data_libraries() {
    case $1 in test | ci) ;; *) return 0 ;; esac
    [ ! -x build/venv/bin/python ] || [ data/requirements.txt -nt build/venv ] || return 0
    mkdir -p build
    echo "installing the libraries of data/requirements.txt in build/venv"
    { python3 -m venv build/venv.new && build/venv.new/bin/pip install -q --disable-pip-version-check --retries 1 \
        -r data/requirements.txt; } >build/venv.log 2>&1 ||
        { tail -n 3 build/venv.log; echo "continuing without them"; return 0; }
    rm -rf build/venv
    mv build/venv.new build/venv
}
all=("${missing[@]}" "${missing_optional[@]}")
[ ${#all[@]} -gt 0 ] || { data_libraries "$1"; exit 0; }
echo "missing here:"
printf '%s\n' "${reasons[@]}"

# Cannot install: fatal only if something is needed.
give_up() {
    echo "$1"
    if [ ${#missing[@]} -eq 0 ]; then echo "continuing without: ${all[*]}"; exit 0; fi
    exit 1
}
command="apt-get install ${all[*]}"
has_command apt-get ||
    give_up "There is no apt-get here. Install the above with this system's packages (conda-forge has them too)."
sudo=()
if [ "$(id -u)" != 0 ]; then
    has_command sudo || give_up "Not root and no sudo. As root: $command"
    sudo=(sudo)
    [ -t 0 ] || sudo=(sudo -n)      # nobody is there to type a password
    echo "This needs root: sudo $command"
    "${sudo[@]}" true || give_up "sudo was refused. As root: $command"
fi
apt() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@"; }
install() { apt install -y --no-install-recommends "$@"; }
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "installing: ${all[*]}"
apt update >"$log" 2>&1 || { tail -n 5 "$log"; echo "apt-get update failed; trying with the lists that are here"; }
if ! install "${all[@]}" >"$log" 2>&1; then
    tail -n 20 "$log"
    [ ${#missing[@]} -eq 0 ] || install "${missing[@]}" >"$log" 2>&1 ||
        { tail -n 20 "$log"; give_up "apt-get failed. As root: $command"; }
fi
again=$(dev/install.sh --check "$1" 2>&1) || { echo "$again"; give_up "Installed, but the above is still missing."; }
echo "installed."
data_libraries "$1"

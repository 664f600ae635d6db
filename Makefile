# Makefile -- `make help` lists what there is.
#
# Knobs:  CXX=clang++   NO_OMP=1 one thread   BLAS=0 the portable matmul even where OpenBLAS is
#         ARCH=sm_90a the GPU to build for    NVCC=path    ARGS='[tag]' the tests to run
#         PRECISION=FP32 the CUDA build in float32 instead of bf16 (make clean is not needed)
#         MPI=0, NCCL=0 without them even where they are    OPENMPI_DIR=path, NCCL_DIR=path where they are

ifeq ($(origin CXX),default)
CXX := $(if $(shell command -v g++),g++,clang++)
endif
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
MAKEFLAGS += --no-print-directory

B := build
HASH := \#
COMMA := ,
# Honest floating point: reductions may be reordered, but infinities and NaN keep their meaning.
OPT := -O3 -march=native -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math
CXX_BASE := -std=c++17 -Wall -Wextra -MMD -MP

# What this machine has, found by building a program with it; only asked when something will be compiled.
ifeq ($(filter-out help clean lint demo demo-bert test bench install simt gpu-check ranks fuzz $(B)/fuzz,$(or $(MAKECMDGOALS),all)),)
ifneq ($(MAKECMDGOALS),)
NO_PROBES := 1
endif
endif
ifndef NO_PROBES
probe = $(shell mkdir -p $(B) && printf '%s\n' $(1) | $(CXX) -x c++ - -o $(B)/probe $(2) >/dev/null 2>&1 && echo yes)
OMP := $(if $(NO_OMP),,$(if $(call probe,'int main() {}',-fopenmp),-fopenmp))
ifneq ($(BLAS),0)
# netlib's cblas.h has no openblas_get_config, and its cblas is slower than the portable kernel
OPENBLAS := $(or $(shell pkg-config --cflags --libs openblas 2>/dev/null),-lopenblas)
HAVE_OPENBLAS := $(call probe,'$(HASH)include <cblas.h>' 'int main() { return !openblas_get_config(); }',$(OPENBLAS))
BLAS_CFLAGS := $(if $(HAVE_OPENBLAS),-DUSE_CBLAS $(filter -I%,$(OPENBLAS)))
BLAS_LIBS := $(if $(HAVE_OPENBLAS),$(filter-out -I%,$(OPENBLAS)))
endif

# Several ranks: MPI, and NCCL between GPUs, which MPI starts. $(call try,VARIABLE,FLAGS,PROGRAM): the first flags that
# build the program
try = $(if $($(1)),,$(if $(2),$(if $(call probe,$(3),$(2)),$(eval $(1) := $(2)))))
find_mpi = $(call try,MPI_FLAGS,$(1),'$(HASH)define OMPI_SKIP_MPICXX 1' '$(HASH)include <mpi.h>' 'int main() { return MPI_Finalize(); }')
find_nccl = $(call try,NCCL_FLAGS,$(1),'$(HASH)include <nccl.h>' 'static_assert(NCCL_VERSION_CODE >= 21400); int main() { int v; return ncclGetVersion(&v); }')
library = -I$(1)/include -L$(1)/lib -Wl$(COMMA)-rpath=$(1)/lib $(2)
ifneq ($(MPI),0)
ifneq ($(OPENMPI_DIR),)
$(call find_mpi,$(call library,$(OPENMPI_DIR),-lmpi))
$(if $(MPI_FLAGS),,$(error OPENMPI_DIR=$(OPENMPI_DIR): no program builds with include/mpi.h and lib/libmpi there))
endif
$(call find_mpi,$(shell mpicc -show 2>/dev/null | cut -s -d' ' -f2-))
$(call find_mpi,$(shell pkg-config --cflags --libs ompi-c 2>/dev/null || pkg-config --cflags --libs mpich 2>/dev/null))
CUDA_DIR := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
ifneq ($(and $(MPI_FLAGS),$(CUDA_DIR),$(filter-out 0,$(or $(NCCL),1))),)
$(if $(NCCL_DIR),$(call find_nccl,-I$(CUDA_DIR)/include $(call library,$(NCCL_DIR),-lnccl)))
$(call find_nccl,-I$(CUDA_DIR)/include -lnccl)
$(call find_nccl,$(call library,$(CUDA_DIR),-lnccl))
endif
endif
# the flags for compiling and for linking; nvcc wants the linker's in words of its own
MPI_CFLAGS := $(if $(MPI_FLAGS),-DUSE_MPI $(filter -I%,$(MPI_FLAGS)))
MPI_LIBS := $(filter-out -I%,$(MPI_FLAGS))
NCCL_CFLAGS := $(if $(NCCL_FLAGS),-DUSE_NCCL $(filter -I%,$(NCCL_FLAGS)))
CUDA_RANK_LIBS := $(patsubst -pthread,-Xcompiler -pthread,$(subst -Wl$(COMMA),-Xlinker ,$(filter-out -I%,$(MPI_FLAGS) $(NCCL_FLAGS))))
endif

CPU_FLAGS = $(CXX_BASE) $(OPT) $(OMP) $(BLAS_CFLAGS) $(CPPFLAGS) $(CXXFLAGS)
CPU_LIBS = $(OMP) $(LDFLAGS) $(BLAS_LIBS) -lpthread
# Not for this machine's instruction set, so that a report does not depend on it.
RACE_FLAGS = $(CXX_BASE) -O1 -g -fsanitize=thread -DRACE_THREADS=4
SIMT_FLAGS = $(CXX_BASE) -O1 -g1 -include test/simt/simt.h -Itest/simt -I.
ASAN_FLAGS = $(CXX_BASE) -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined $(OMP)

# $(call remember,FILE,COMMAND): FILE changes when COMMAND does, and what depends on it is built anew
remember = $(shell mkdir -p $(dir $(1)); printf '%s\n' '$(2)' | cmp -s - $(1) || printf '%s\n' '$(2)' >$(1))
ifndef NO_PROBES
# -march=native: a build directory that was carried to another processor is built anew
PROCESSOR := $(shell grep -m1 '^flags' /proc/cpuinfo 2>/dev/null | cksum)
$(call remember,$(B)/cpu.flags,$(CXX) $(CPU_FLAGS) $(CPU_LIBS) $(PROCESSOR))
$(call remember,$(B)/race.flags,$(CXX) $(RACE_FLAGS))
$(call remember,$(B)/asan.flags,$(CXX) $(ASAN_FLAGS))
$(call remember,$(B)/simt.flags,$(CXX) $(SIMT_FLAGS))
$(call remember,$(B)/mpi.flags,$(MPI_CFLAGS) $(MPI_LIBS))
endif

# ---------------------------------------------------------------------------------------------------------
# the trainers

TRAINERS := train_gpt2 train_bert
all: $(TRAINERS) $(if $(NVCC),$(TRAINERS:%=%cu))
	@$(if $(NVCC),true,echo "no nvcc found: the CUDA builds ($(TRAINERS:%=%cu)) were left out")

$(TRAINERS): %: $(B)/%.o
	$(CXX) $< -o $@ $(CPU_LIBS) $(MPI_LIBS)

$(TRAINERS:%=$(B)/%.o): $(B)/%.o: %.cu $(B)/cpu.flags $(B)/mpi.flags
	@dev/install.sh --check build
	$(CXX) $(CPU_FLAGS) $(MPI_CFLAGS) -x c++ -c $< -o $@

# ARCH, or the GPU that is here, or A100 and H100 with PTX for what comes after
GPU = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | sed -n 's/^\([0-9]*\)\.\([0-9]\)$$/\1\2/p')
GPU_ARCH = $(if $(GPU),sm_$(GPU)$(if $(filter 9% 1%,$(GPU)),a))
GENCODE = $(if $(or $(ARCH),$(GPU_ARCH)),-arch=$(or $(ARCH),$(GPU_ARCH)),\
    -gencode arch=compute_80$(COMMA)code=[sm_80$(COMMA)compute_80] -gencode arch=compute_90a$(COMMA)code=sm_90a)
ifneq ($(filter-out BF16 FP32,$(PRECISION)),)
$(error PRECISION=$(PRECISION): wanted BF16 or FP32)
endif
NVCC_FLAGS = -std=c++17 -O3 --threads 2 $(GENCODE) $(if $(filter FP32,$(PRECISION)),-DPRECISION_FP32) -Xcompiler -Wall,-Wextra $(OMP:%=-Xcompiler %) \
    $(MPI_CFLAGS) $(NCCL_CFLAGS) $(NVCCFLAGS)
CUDA_LIBS = -lcublasLt -lcublas $(CUDA_RANK_LIBS)
ifndef NO_PROBES
$(if $(NVCC),$(call remember,$(B)/cuda.flags,$(NVCC) $(NVCC_FLAGS)))
endif

$(TRAINERS:%=%cu): %cu: %.cu $(B)/cuda.flags
	@$(if $(NVCC),true,echo "no nvcc found: install the CUDA toolkit or give NVCC=path"; exit 1)
	$(NVCC) $(NVCC_FLAGS) -MMD -MP -MT $@ -MF $(B)/$@.d $< -o $@ $(CUDA_LIBS)

$(B)/cuda.flags:
	@mkdir -p $(B) && touch $@

# ---------------------------------------------------------------------------------------------------------
# tests: one object a file and variant; race and asan take the files with a test of that tag

TESTS := $(filter-out test/simt/%,$(sort $(wildcard test/*/test_*.cu)))
RACE_TESTS = $(shell grep -l '\[race\]' $(TESTS))
ASAN_TESTS = $(shell grep -l '\[asan\]' $(TESTS))
# Version 3 of Catch2 comes with a compiled main; version 2 has it in the header, test/main.cu.
CATCH_LIBS = $(if $(call probe,'$(HASH)include <catch2/catch_all.hpp>' 'int main() {}',-E),-lCatch2Main -lCatch2)

$(B)/test/main.o: test/main.cu $(B)/cpu.flags
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O0 -MMD -MP -x c++ -c $< -o $@
$(B)/test/%.o: test/%.cu $(B)/cpu.flags
	@mkdir -p $(@D)
	$(CXX) $(CPU_FLAGS) -x c++ -c $< -o $@
$(B)/race/%.o: test/%.cu $(B)/race.flags
	@mkdir -p $(@D)
	$(CXX) $(RACE_FLAGS) $(CPPFLAGS) -x c++ -c $< -o $@
$(B)/asan/%.o: test/%.cu $(B)/asan.flags
	@mkdir -p $(@D)
	$(CXX) $(ASAN_FLAGS) $(CPPFLAGS) -x c++ -c $< -o $@

$(B)/test/%.o $(B)/race/%.o $(B)/asan/%.o: CPPFLAGS += -I.
# The CUDA build's text on the emulator of test/simt: one program a file of kernel tests, and the trainers.
SIMT_TESTS := $(sort $(wildcard test/simt/test_*.cu))
SIMT_PROGRAMS := $(SIMT_TESTS:test/simt/%.cu=$(B)/simt/%) $(B)/simt/train_gpt2 $(B)/simt/train_gpt2_fp32 $(B)/simt/train_bert
$(B)/simt/test_%: test/simt/test_%.cu $(B)/simt.flags
	@mkdir -p $(@D)
	$(CXX) $(SIMT_FLAGS) $(CPPFLAGS) -MF $@.d -x c++ $< -o $@
# with AddressSanitizer, which sees past the end of shared memory
$(B)/simt_asan/test_%: test/simt/test_%.cu $(B)/simt.flags
	@mkdir -p $(@D)
	$(CXX) $(SIMT_FLAGS) -fno-omit-frame-pointer -fsanitize=address $(CPPFLAGS) -MF $@.d -x c++ $< -o $@
$(B)/simt/train_bert: train_bert.cu
$(B)/simt/train_gpt2 $(B)/simt/train_gpt2_fp32: train_gpt2.cu
$(B)/simt/train_gpt2 $(B)/simt/train_gpt2_fp32 $(B)/simt/train_bert: $(B)/simt.flags $(B)/mpi.flags
	@mkdir -p $(@D)
	$(CXX) $(SIMT_FLAGS) $(MPI_CFLAGS) $(CPPFLAGS) $(if $(filter %_fp32,$@),-DPRECISION_FP32) -MF $@.d -x c++ $(filter %.cu,$^) -x none -o $@ $(MPI_LIBS)

SIMT_ASAN := $(B)/simt_asan/test_ptx $(B)/simt_asan/test_layers $(B)/simt_asan/test_decode_simt

# main.o is linked last, so that of an inline function the instrumented copy is taken
$(B)/run_tests: $(TESTS:test/%.cu=$(B)/test/%.o) $(B)/test/main.o
	$(CXX) $^ -o $@ $(CATCH_LIBS) $(CPU_LIBS)
$(B)/run_race: $(RACE_TESTS:test/%.cu=$(B)/race/%.o) $(B)/test/main.o
	$(CXX) -fsanitize=thread $^ -o $@ $(CATCH_LIBS) -lpthread
$(B)/run_asan: $(ASAN_TESTS:test/%.cu=$(B)/asan/%.o) $(B)/test/main.o
	$(CXX) -fsanitize=address,undefined $(OMP) $^ -o $@ $(CATCH_LIBS) -lpthread

# The program of test/ranks/test_ranks.py. Without $(OPT), so that its own sums keep the order in which they are written.
$(B)/comm_program: test/ranks/comm_program.cu $(B)/cpu.flags $(B)/mpi.flags
	$(CXX) $(CXX_BASE) -O2 $(OMP) $(MPI_CFLAGS) -I. -MF $@.d -x c++ $< -x none -o $@ $(OMP) $(MPI_LIBS)
$(B)/comm_programcu: test/ranks/comm_program.cu $(B)/mpi.flags
	$(NVCC) -std=c++17 -arch=sm_80 -Xcompiler -Wall,-Wextra $(MPI_CFLAGS) $(NCCL_CFLAGS) -I. -MMD -MP -MF $@.d $< -o $@ $(CUDA_RANK_LIBS)

# What is missing has to be there before the Makefile looks for it, hence the second make.
test: install
	@$(MAKE) -j$(JOBS) build/run_tests $(if $(ARGS),,$(SIMT_PROGRAMS) build/comm_program) $(TRAINERS)
	@dev/test.sh $(if $(ARGS),'$(ARGS)')

# ThreadSanitizer's shadow memory collides with the address randomization of some kernels: setarch -R turns that off.
race: install
	@$(MAKE) -j$(JOBS) build/run_race
	TSAN_OPTIONS=halt_on_error=1 $$(setarch -R true 2>/dev/null && echo setarch -R) build/run_race '[race]'

# Several ranks under mpirun; part of `make test` where MPI is.
ranks:
	@dev/install.sh ranks
	@$(MAKE) -j$(JOBS) build/comm_program train_gpt2
	@"$$(dev/install.sh --python)" test/ranks/test_ranks.py

mpi-found:
	@$(if $(MPI_FLAGS),echo "$(MPI_FLAGS)",echo "no MPI found" >&2; exit 1)

# The kernels on an emulated GPU; part of `make test`.
simt: install
	@$(MAKE) -j$(JOBS) $(SIMT_PROGRAMS) $(TRAINERS)
	@dev/test.sh --simt

# On a machine with a GPU: is the CUDA build right, and how fast is it? Writes dev/results/.
gpu-check:
	@python3 dev/gpu_check.py $(ARGS)

asan: install
	@$(MAKE) -j$(JOBS) build/run_asan $(SIMT_ASAN)
	set -e; for test in $(SIMT_ASAN); do $$test; done
	OMP_WAIT_POLICY=passive ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 build/run_asan '[asan]'

# Every parser under libFuzzer; ARGS: some of them (build/fuzz --targets)
FUZZ_SECONDS ?= 60
fuzz:
	@dev/fuzz.sh $(FUZZ_SECONDS) $(ARGS)
$(B)/fuzz: test/fuzz/fuzz_files.cu
	@mkdir -p $(@D)
	clang++ $(CXX_BASE) -I. -O1 -gline-tables-only -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -MF $@.d -x c++ $< -o $@

install:
	@dev/install.sh test

lint:
	@python3 dev/lint.py

# ---------------------------------------------------------------------------------------------------------

demo:
	@scripts/demo.sh

demo-bert:
	@scripts/demo.sh bert

bench:
	@dev/bench/run.sh

clean:
	rm -rf $(B) $(TRAINERS) $(TRAINERS:%=%cu)

help:
	@echo "make demo        train four small models, compare how far they extrapolate (installs what is missing; 5 minutes)"
	@echo "make demo-bert   the same with train_bert, on masked bytes"
	@echo "make test        build and run the tests (installs what is missing)"
	@echo "make             train_gpt2 and train_bert, and with nvcc train_gpt2cu and train_bertcu"
	@echo "make simt        the CUDA kernels and trainer on an emulated GPU (part of make test)"
	@echo "make ranks       one run on several processes, under mpirun (installs Open MPI; part of make test where it is)"
	@echo "make gpu-check   on a machine with a GPU: correctness, speed and memory, written to dev/results/"
	@echo "make race asan   the tests tagged [race], [asan] under ThreadSanitizer, AddressSanitizer"
	@echo "make fuzz        libFuzzer at each parser, for a minute (clang++; FUZZ_SECONDS=60)"
	@echo "make lint        rules of the sources that no compiler checks"
	@echo "make bench       speed and memory, beside PyTorch"
	@echo "make clean       remove everything that was built"
	@sed -n '3,7s/^$(HASH) //p' Makefile

.PHONY: all test race asan simt ranks mpi-found gpu-check fuzz install lint demo demo-bert bench clean help
.DELETE_ON_ERROR:
-include $(wildcard $(B)/*.d $(B)/*/*.d $(B)/*/*/*.d)

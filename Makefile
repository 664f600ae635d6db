# Makefile -- `make help` lists what there is.
#
# Knobs:  CXX=clang++   NO_OMP=1 one thread   BLAS=0 the portable matmul even where OpenBLAS is
#         ARCH=sm_90a the GPU to build for    NVCC=path    ARGS='[tag]' the tests to run
#         PRECISION=FP32 the CUDA build in float32 instead of bf16 (make clean is not needed)

ifeq ($(origin CXX),default)
CXX := $(if $(shell command -v g++),g++,clang++)
endif
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
MAKEFLAGS += --no-print-directory

B := build
HASH := \#
# Honest floating point: reductions may be reordered, but infinities and NaN keep their meaning.
OPT := -O3 -march=native -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math
CXX_BASE := -std=c++17 -Wall -Wextra -MMD -MP

# What this machine has, found by building a program with it; only asked when something will be compiled.
ifeq ($(filter-out help clean lint demo test bench install simt gpu-check,$(or $(MAKECMDGOALS),all)),)
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
endif

CPU_FLAGS = $(CXX_BASE) $(OPT) $(OMP) $(BLAS_CFLAGS) $(CPPFLAGS) $(CXXFLAGS)
CPU_LIBS = $(OMP) $(LDFLAGS) $(BLAS_LIBS) -lpthread
# Not for this machine's instruction set, so that a report does not depend on it.
RACE_FLAGS = $(CXX_BASE) -O1 -g -fsanitize=thread -DRACE_THREADS=4
SIMT_FLAGS = $(CXX_BASE) -O1 -g -DSIMT -Itest/simt -I. -Illmc
ASAN_FLAGS = $(CXX_BASE) -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined $(OMP)

# $(call remember,FILE,COMMAND): FILE changes when COMMAND does, and what depends on it is built anew
remember = $(shell mkdir -p $(dir $(1)); printf '%s\n' '$(2)' | cmp -s - $(1) || printf '%s\n' '$(2)' >$(1))
ifndef NO_PROBES
# -march=native: a build directory that was carried to another processor is built anew
PROCESSOR := $(shell grep -m1 '^flags' /proc/cpuinfo 2>/dev/null | cksum)
$(call remember,$(B)/cpu.flags,$(CXX) $(CPU_FLAGS) $(CPU_LIBS) $(PROCESSOR))
$(call remember,$(B)/race.flags,$(CXX) $(RACE_FLAGS))
$(call remember,$(B)/asan.flags,$(CXX) $(ASAN_FLAGS))
$(call remember,$(B)/simt.flags,$(CXX) $(SIMT_FLAGS))
endif

# ---------------------------------------------------------------------------------------------------------
# the trainer

all: train_gpt2 $(if $(NVCC),train_gpt2cu)
	@$(if $(NVCC),true,echo "no nvcc found: the CUDA build (train_gpt2cu) was left out")

train_gpt2: $(B)/train_gpt2.o
	$(CXX) $< -o $@ $(CPU_LIBS)

$(B)/train_gpt2.o: train_gpt2.cu $(B)/cpu.flags
	@dev/install.sh --check build
	$(CXX) $(CPU_FLAGS) -x c++ -c $< -o $@

# ARCH, or the GPU that is here, or A100 and H100 with PTX for what comes after
GPU = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | sed -n 's/^\([0-9]*\)\.\([0-9]\)$$/\1\2/p')
GPU_ARCH = $(if $(GPU),sm_$(GPU)$(if $(filter 9% 1%,$(GPU)),a))
GENCODE = $(if $(or $(ARCH),$(GPU_ARCH)),-arch=$(or $(ARCH),$(GPU_ARCH)),\
    -gencode arch=compute_80$(COMMA)code=[sm_80$(COMMA)compute_80] -gencode arch=compute_90a$(COMMA)code=sm_90a)
COMMA := ,
ifneq ($(filter-out BF16 FP32,$(PRECISION)),)
$(error PRECISION=$(PRECISION): wanted BF16 or FP32)
endif
NVCC_FLAGS = -std=c++17 -O3 --threads 2 $(GENCODE) $(if $(filter FP32,$(PRECISION)),-DPRECISION_FP32) -Xcompiler -Wall,-Wextra \
    -MMD -MP -MT train_gpt2cu -MF $(B)/train_gpt2cu.d $(NVCCFLAGS)
CUDA_LIBS = -lcublasLt -lcublas
ifndef NO_PROBES
$(if $(NVCC),$(call remember,$(B)/cuda.flags,$(NVCC) $(NVCC_FLAGS)))
endif

train_gpt2cu: train_gpt2.cu $(B)/cuda.flags
	@$(if $(NVCC),true,echo "no nvcc found: install the CUDA toolkit or give NVCC=path"; exit 1)
	$(NVCC) $(NVCC_FLAGS) $< -o $@ $(CUDA_LIBS)

$(B)/cuda.flags:
	@mkdir -p $(B) && touch $@

# ---------------------------------------------------------------------------------------------------------
# tests: one object a file and variant; race and asan take the files with a test of that tag

TESTS := $(sort $(wildcard test/test_*.cu))
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

$(B)/test/%.o $(B)/race/%.o $(B)/asan/%.o: CPPFLAGS += -I. -Illmc
# The CUDA build's text on the emulator of test/simt: one program a file of kernel tests, and the trainer.
SIMT_TESTS := $(sort $(wildcard test/simt/test_*.cu))
SIMT_PROGRAMS := $(SIMT_TESTS:test/simt/%.cu=$(B)/simt/%) $(B)/simt/train_gpt2 $(B)/simt/train_gpt2_fp32
$(B)/simt/test_%: test/simt/test_%.cu $(B)/simt.flags
	@mkdir -p $(@D)
	$(CXX) $(SIMT_FLAGS) $(CPPFLAGS) -MF $@.d -x c++ $< -o $@
$(B)/simt/train_gpt2 $(B)/simt/train_gpt2_fp32: train_gpt2.cu $(B)/simt.flags
	@mkdir -p $(@D)
	$(CXX) $(SIMT_FLAGS) $(CPPFLAGS) $(if $(filter %_fp32,$@),-DPRECISION_FP32) -MF $@.d -x c++ $< -o $@

# main.o is linked last, so that of an inline function the instrumented copy is taken
$(B)/run_tests: $(TESTS:test/%.cu=$(B)/test/%.o) $(B)/test/main.o
	$(CXX) $^ -o $@ $(CATCH_LIBS) $(CPU_LIBS)
$(B)/run_race: $(RACE_TESTS:test/%.cu=$(B)/race/%.o) $(B)/test/main.o
	$(CXX) -fsanitize=thread $^ -o $@ $(CATCH_LIBS) -lpthread
$(B)/run_asan: $(ASAN_TESTS:test/%.cu=$(B)/asan/%.o) $(B)/test/main.o
	$(CXX) -fsanitize=address,undefined $(OMP) $^ -o $@ $(CATCH_LIBS) -lpthread

# What is missing has to be there before the Makefile looks for it, hence the second make.
test: install
	@$(MAKE) -j$(JOBS) build/run_tests $(if $(ARGS),,$(SIMT_PROGRAMS)) train_gpt2
	@dev/test.sh $(if $(ARGS),'$(ARGS)')

# ThreadSanitizer's shadow memory collides with the address randomization of some kernels: setarch -R turns that off.
race: install
	@$(MAKE) -j$(JOBS) build/run_race
	TSAN_OPTIONS=halt_on_error=1 $$(setarch -R true 2>/dev/null && echo setarch -R) build/run_race '[race]'

# The kernels on an emulated GPU; part of `make test`.
simt: install
	@$(MAKE) -j$(JOBS) $(SIMT_PROGRAMS) train_gpt2
	@dev/test.sh --simt

# On a machine with a GPU: is the CUDA build right, and how fast is it? Writes dev/results/.
gpu-check:
	@python3 dev/gpu_check.py $(ARGS)

asan: install
	@$(MAKE) -j$(JOBS) build/run_asan
	OMP_WAIT_POLICY=passive ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 build/run_asan '[asan]'

FUZZ_SECONDS ?= 60
fuzz:
	@mkdir -p $(B)/fuzz_corpus
	clang++ $(CXX_BASE) -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -x c++ test/fuzz_tokenizer.cu -o $(B)/fuzz
	$(B)/fuzz $(B)/fuzz_corpus -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -artifact_prefix=$(B)/

install:
	@dev/install.sh test

lint:
	@python3 dev/lint.py

# ---------------------------------------------------------------------------------------------------------

demo:
	@scripts/demo.sh

bench:
	@dev/bench/run.sh

clean:
	rm -rf $(B) train_gpt2 train_gpt2cu

help:
	@echo "make demo        train four small models, compare how far they extrapolate (installs what is missing; 5 minutes)"
	@echo "make test        build and run the tests (installs what is missing)"
	@echo "make             train_gpt2, and train_gpt2cu where nvcc is"
	@echo "make simt        the CUDA kernels and trainer on an emulated GPU (part of make test)"
	@echo "make gpu-check   on a machine with a GPU: correctness, speed and memory, written to dev/results/"
	@echo "make race asan   the tests tagged [race], [asan] under ThreadSanitizer, AddressSanitizer"
	@echo "make fuzz        libFuzzer at the tokenizer, for a minute (clang++; FUZZ_SECONDS=60)"
	@echo "make lint        rules of the sources that no compiler checks"
	@echo "make bench       speed and memory, beside PyTorch"
	@echo "make clean       remove everything that was built"
	@sed -n '3,5s/^$(HASH) //p' Makefile

.PHONY: all test race asan simt gpu-check fuzz install lint demo bench clean help
.DELETE_ON_ERROR:
-include $(wildcard $(B)/*.d $(B)/*/*.d)

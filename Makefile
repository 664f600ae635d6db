# Makefile -- `make help` lists the targets. Knobs, given as make KNOB=value:
#
#   CXX=clang++  NVCC=path     the compilers
#   ARCH=sm_90a                the GPU to build for
#   PRECISION=FP32, or BF16    without it float32 on a CPU, bf16 in CUDA
#   NO_OMP=1                   one thread
#   MPI=0  NCCL=0              without them
#   OPENMPI_DIR=path  NCCL_DIR=path        where they are
#   FEW_POSITIONS=1            the encodings none and cable only: built faster
#   ARGS='[tag]'               the tests to run
#   CPPFLAGS  CXXFLAGS  LDFLAGS  NVCCFLAGS are added to ours: after ours if typed,
#                              before ours if the environment exports them

ifeq ($(origin CXX),default)
CXX := $(if $(shell command -v g++),g++,clang++)
endif
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
export JOBS NVCC
MAKEFLAGS += --no-print-directory
B := build
COMMA := ,
# $(call expect,KNOB,VALUES): stops at a value that would otherwise be ignored
expect = $(if $(filter-out $(2),$($(1))),$(error $(1)=$($(1)): expected $(firstword $(2)) or $(lastword $(2))))
$(foreach knob,NO_OMP MPI NCCL FEW_POSITIONS,$(call expect,$(knob),0 1))$(call expect,PRECISION,BF16 FP32)

# conda, Spack and modules export -march=nocona -O2 and the like. The last of two such flags wins: exported ones come
# before ours, typed ones (make CXXFLAGS=-O0) after. What would change the results is refused where it is exported.
exported = $(if $(filter environment,$(origin $(1))),$($(1)) )
typed = $(if $(call exported,$(1)),,$($(1)))
OTHER_BITS := -Of% -ffast% -funsafe-math% -fassociative-math -freciprocal-math -ffinite-math-only -fno-signed-zeros \
    -fno-honor% -fapprox-func -ffp-contract=fast -fp-model=fast% -ffp-model=fast% -fsingle-precision-constant \
    -mfpmath=387 -mrecip% -mdaz-ftz -use_fast% --use_fast% -fmad% --fmad% -prec-% --prec-%

# What this machine has; only asked when something is compiled.
PLAIN := help clean lint install test test-long simt asan ranks exports fuzz ladders edit-loop demo demo-bert \
    million bench hashes gpu-check verdict
ifneq ($(filter-out $(PLAIN) demo-tasks mutations,$(or $(MAKECMDGOALS),all)),)
$(foreach v,CXX CPPFLAGS CXXFLAGS LDFLAGS NVCCFLAGS NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS,$(foreach flag,\
    $(filter $(OTHER_BITS),$(subst =-, -,$(subst $(COMMA), ,$(call exported,$(v))))),$(error $(v) of the environment \
    has $(flag)$(COMMA) which changes the results: unset it, or type your own: make $(v)=...)))
ASKED := CXX NVCC NO_OMP MPI NCCL OPENMPI_DIR NCCL_DIR
$(shell dev/configure.sh $(foreach knob,$(ASKED),'$(knob)=$($(knob))') || rm -f $(B)/config.mk)
include $(B)/config.mk
endif

# The same bits on every CPU: no sum is reordered, and a product and a sum are fused only where the source says so.
OPT := -O3 -march=native -fno-math-errno -fno-trapping-math
CXX_BASE := $(call exported,CPPFLAGS)-std=c++17 -ffp-contract=off -Wall -Wextra -MMD -MP \
    $(if $(filter 1,$(FEW_POSITIONS)),-DFEW_POSITIONS)
CPU_FLAGS = $(call exported,CXXFLAGS)$(CXX_BASE) $(OPT) $(LEVEL) $(OMP) $(call typed,CPPFLAGS) \
    $(call typed,CXXFLAGS)
CPU_LIBS = $(OMP) $(LDFLAGS) -lpthread
# asan has -march=native, because it links objects of make test; simt has not, so that what it finds does not depend on
# this machine. FMA: -mfma where the processor has it; without it, each fma would be a call of the C library.
SANITIZE = -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
ASAN_FLAGS = $(CXX_BASE) -march=native $(SANITIZE) $(OMP) $(call typed,CPPFLAGS)
SIMT_FLAGS = $(CXX_BASE) $(FMA) -O1 -g1 -include test/simt/simt.h -Itest/simt -I. $(call typed,CPPFLAGS)
# ARCH, or this machine's GPU, or A100 and H100 with PTX for later ones
ONE_ARCH = $(or $(ARCH),$(GPU_ARCH))
GENCODE = $(if $(ONE_ARCH),-gencode arch=$(ONE_ARCH:sm_%=compute_%)$(COMMA)code=$(ONE_ARCH),\
    -gencode arch=compute_80$(COMMA)code=[sm_80$(COMMA)compute_80] -gencode arch=compute_90a$(COMMA)code=sm_90a)
# How all CUDA code is compiled; dev/gpu_check.py and dev/ptxas_budget.py read it here. -O1 is the host's; kernels are
# always optimized. -ftz: llmc/base/floats.h
NVCC_CODE := -std=c++17 -ftz=true -O1 -Xcompiler -Wall,-Wextra
NVCC_BASE = $(call exported,NVCCFLAGS)$(NVCC_CODE) $(filter -DFEW%,$(CXX_BASE)) $(MPI_CFLAGS) $(NCCL_CFLAGS)
NVCC_FLAGS = $(NVCC_BASE) --threads 2 $(GENCODE) $(if $(filter FP32,$(PRECISION)),-DPRECISION_FP32) \
    $(OMP:%=-Xcompiler %) $(call typed,NVCCFLAGS)
NVCC_FOUND = $(if $(NVCC),dev/install.sh --check build,\
    echo "no nvcc found: install the CUDA toolkit or give NVCC=path"; exit 1)
CUDA_LIBS = -lcublasLt -lcublas $(CUDA_RANK_LIBS)

# $(call remember,NAME,COMMAND): build/NAME.flags changes when COMMAND does, which rebuilds its dependents. The same
# happens to a build directory on a different processor (-march=native); ccache looks at that file, too.
# Several makes may remember at the same time.
remember = $(shell cd $(B); printf '%s\n' '$(2)' >$(1).$$$$; \
    if cmp -s $(1).$$$$ $(1).flags; then rm $(1).$$$$; else mv $(1).$$$$ $(1).flags; fi)
ifdef PROCESSOR
$(call remember,cpu,$(CXX) $(CPU_FLAGS) $(CPU_LIBS) $(PROCESSOR))
$(call remember,asan,$(CXX) $(ASAN_FLAGS) $(PROCESSOR))
$(call remember,simt,$(CXX) $(SIMT_FLAGS))
$(call remember,mpi,$(MPI_CFLAGS) $(MPI_LIBS))
$(call remember,cuda,$(NVCC) $(NVCC_FLAGS))
$(call remember,precision,$(PRECISION))
$(call remember,commit,$(shell git describe --always --dirty --abbrev=10 --exclude='*' 2>/dev/null || echo unknown))
endif
export CCACHE_EXTRAFILES := $(B)/cpu.flags
# the trainers -----------------------------------------------------------------------------------------------
TRAINERS := train_gpt2 train_bert
all: $(TRAINERS) $(if $(NVCC),$(TRAINERS:%=%cu)) $(B)/compile_commands.json  ## the trainers, with nvcc for CUDA too
	@$(if $(NVCC),true,echo "no nvcc found: the CUDA builds ($(TRAINERS:%=%cu)) were left out")

# How a trainer is linked. Its kernels are objects, one for each file of llmc/compiled, and all other objects see only
# declarations (base/device.h). Where several objects define a function, the linker takes the first definition, so the
# kernels come first.
KERNELS := rows product encodings causal bidirectional
GPT2 := rows product encodings causal train_gpt2
BERT := rows product encodings bidirectional train_bert
OBJECTS := $(B)$(if $(filter BF16,$(PRECISION)),/bf16)
train_gpt2: $(GPT2:%=$(OBJECTS)/%.o)
train_bert: $(BERT:%=$(OBJECTS)/%.o)
$(B)/bf16/train_gpt2: $(GPT2:%=$(B)/bf16/%.o)
$(B)/bf16/train_bert: $(BERT:%=$(B)/bf16/%.o)
$(TRAINERS) $(TRAINERS:%=$(B)/bf16/%): $(B)/commit.o $(B)/precision.flags
	$(LINK_CPU)
LINK_CPU = $(CXX) $(filter %.o,$^) -o $@ $(CPU_LIBS) $(MPI_LIBS)
$(B)/%.o: llmc/compiled/%.cu $(B)/cpu.flags $(B)/mpi.flags
	$(CCACHE) $(CXX) $(CPU_FLAGS) $(MPI_CFLAGS) -x c++ -c $< -o $@
$(B)/bf16/%.o: llmc/compiled/%.cu $(B)/cpu.flags $(B)/mpi.flags
	$(CCACHE) $(CXX) $(CPU_FLAGS) $(MPI_CFLAGS) -DPRECISION_BF16 -x c++ -c $< -o $@
# for --help; its own object, so that a commit links the trainers and compiles nothing
$(B)/commit.o: $(B)/commit.flags
	@echo "const char build_commit[] = \"$$(cat $<)\";" | $(CXX) -x c -c - -o $@
BF16 = $(if $(findstring bf16/,$@),-DPRECISION_BF16)
CPU_TRAINER = $(CCACHE) $(CXX) $(CPU_FLAGS) $(MPI_CFLAGS) $(BF16) -DKERNELS_ELSEWHERE -MT $@ -MF $(@:.o=.d) \
    -x c++ $(filter %.cu,$^)
$(TRAINERS:%=$(B)/%.o): $(B)/%.o: %.cu
$(TRAINERS:%=$(B)/bf16/%.o): $(B)/bf16/%.o: %.cu
$(foreach folder,$(B) $(B)/bf16 $(B)/trace,$(TRAINERS:%=$(folder)/%.o)): LEVEL := -O1
$(TRAINERS:%=$(B)/%.o) $(TRAINERS:%=$(B)/bf16/%.o): $(B)/cpu.flags $(B)/mpi.flags
	@dev/install.sh --check build
	@# If only kernels have changed, the compiler would read what it read before, and the object is right. Debug
	@# information (-g) also has the numbers of the lines.
	@$(CPU_TRAINER) -E $(if $(filter -g%,$(CPU_FLAGS)),,-P) -o $@.text
	@{ cat $(B)/cpu.flags $(B)/mpi.flags && echo '$(LEVEL)'; } >>$@.text
	@if cmp -s $@.text $@.read && [ -e $@ ]; then touch $@; else set -x; $(CPU_TRAINER) -c -o $@ && mv $@.text $@.read; fi
# CUDA: rows and product are objects. A trainer's object has the other kernels, and is compiled again if a line has
# changed that it reads of its sources: of a header of those two, what stands before the kernels.
CUDA_COMPILE = $(NVCC) $(NVCC_FLAGS) -MMD -MP
CUDA_OBJECT = -MT $@ -MF $(@:.o=.d) -x cu -c $< -o $@
CUDA_READ = { cat $(B)/cuda.flags; for f in $$(grep -os '[^ :]*[.]\(cu\|cuh\|h\|py\)\>' $(@:.o=.d) | sort -u); do \
    sed '/^\#if !defined(LAYERS_ELSEWHERE)/,$$d' $$f; done; }
$(TRAINERS:%=%cu): %cu: $(B)/cuda/%.o $(B)/cuda/rows.o $(B)/cuda/product.o $(B)/commit.o
	$(NVCC) $(NVCC_FLAGS) $^ -o $@ $(CUDA_LIBS)
$(B)/cuda/%.o: llmc/compiled/%.cu $(B)/cuda.flags
	$(CUDA_COMPILE) $(CUDA_OBJECT)
$(TRAINERS:%=$(B)/cuda/%.o): $(B)/cuda/%.o: %.cu $(B)/cuda.flags
	@$(NVCC_FOUND)
	@if [ -e $@ ] && $(CUDA_READ) | cmp -s - $@.read; then touch $@; \
	    else set -x; $(CUDA_COMPILE) -DLAYERS_ELSEWHERE $(CUDA_OBJECT); fi
	@$(CUDA_READ) >$@.read
# With checksums of every tensor after every kernel (dev/trace.h); on a CPU in float32
trace: $(TRAINERS:%=$(B)/trace/%) $(if $(NVCC),$(TRAINERS:%=$(B)/trace/%cu))  ## the trainers for scripts/part.py
$(TRAINERS:%=$(B)/trace/%.o): $(B)/trace/%.o: %.cu $(B)/cpu.flags $(B)/mpi.flags
	$(CPU_TRAINER) -include dev/trace.h -c -o $@
$(B)/trace/train_gpt2: $(patsubst %,$(B)/%.o,$(GPT2:train_%=trace/train_%))
$(B)/trace/train_bert: $(patsubst %,$(B)/%.o,$(BERT:train_%=trace/train_%))
$(TRAINERS:%=$(B)/trace/%): $(B)/commit.o
	$(LINK_CPU)
$(TRAINERS:%=$(B)/trace/%cu): $(B)/trace/%cu: %.cu $(B)/cuda.flags $(B)/commit.o
	$(CUDA_COMPILE) -include dev/trace.h -MT $@ -MF $@.d $< $(B)/commit.o -o $@ $(CUDA_LIBS)

# Attention for PyTorch (docs/torch.md): the kernels of both trainers as a library, whose names stay its own. The CPU's
# comes first, because nvcc takes minutes.
torch: $(B)/libcable.so  ## attention as a library for PyTorch
	@$(if $(NVCC),$(MAKE) $(B)/libcablecu.so,true)
LIBRARY_FLAGS := -fPIC -fvisibility=hidden
$(B)/pic/%.o: llmc/compiled/%.cu $(B)/cpu.flags
	$(CCACHE) $(CXX) $(CPU_FLAGS) $(LIBRARY_FLAGS) -x c++ -c $< -o $@
$(B)/pic/library.o: dev/torch/library.cu $(B)/cpu.flags
	@dev/install.sh --check build
	$(CCACHE) $(CXX) $(CPU_FLAGS) $(LIBRARY_FLAGS) -DKERNELS_ELSEWHERE -x c++ -c $< -o $@
$(B)/libcable.so: $(patsubst %,$(B)/pic/%.o,encodings causal bidirectional library)
	$(CXX) -shared $^ -o $@ $(CPU_LIBS)
$(B)/libcable_simt.so: dev/torch/library.cu $(B)/simt.flags
	$(CCACHE) $(CXX) $(SIMT_FLAGS) $(LIBRARY_FLAGS) -DFEW_POSITIONS -MT $@ -MF $@.d -x c++ -c $< -o $(@:.so=.o)
	$(CXX) -shared $(@:.so=.o) -o $@
$(B)/libcablecu.so $(B)/libcablecu_fp32.so: dev/torch/library.cu $(B)/cuda.flags
	@$(NVCC_FOUND)
	$(NVCC) $(NVCC_BASE) --threads 2 $(GENCODE) $(if $(findstring fp32,$@),-DPRECISION_FP32) -shared \
	    $(patsubst %,-Xcompiler %,$(LIBRARY_FLAGS)) -MMD -MP -MT $@ -MF $@.d $< -o $@ 2>$@.log || \
	    { cat $@.log >&2; exit 1; }
	@grep -v 'warpgroup[.].* is injected' $@.log >&2 || true

# For editors: how each source is compiled
$(B)/compile_commands.json: $(B)/cpu.flags $(B)/simt.flags $(wildcard test/*/ dev/cuda/)
	@dev/configure.sh --commands $@ '$(CURDIR)' '$(CPU_FLAGS) -I.' '$(SIMT_FLAGS)'

# tests: programs, each linked with the main of Catch2; dev/test.py makes those that it wants to run ----------
# test_gpt2.cu and test_gpt2_*.cu are one: what they include is compiled once.
# Tests that launch kernels are linked with the trainers' kernel objects, as they ship, and with the oracles; asan
# compiles such objects with its own flags. A test that calls what only kernels see says #undef KERNELS_ELSEWHERE.
LAUNCHING := $(patsubst test/%.cu,%,$(wildcard test/layers/*.cu)) model/test_bert model/test_gpt2 programs/test_faults
# Of these asan sees the kernels, which are all in the objects, and not the tests themselves.
OUTSIDE := model/test_bert $(patsubst %,layers/test_%,adamw attention classifier contrastive decode embedding gelu \
    layernorm pooling rows)
TEST_SOURCE = -DKERNELS_ELSEWHERE -I. -x c++ $(patsubst %,-include %,$(wildcard $(<:.cu=_*.cu))) -c $< -o $@
# The level that costs least, compiler and run together: of oracles and of what reads long texts -O1, else -O0
$(B)/test/%.o: test/%.cu $(B)/cpu.flags
	$(CCACHE) $(CXX) $(CPU_FLAGS) $(if $(filter main model/% programs/% ranks/%,$*),-O0) \
	    $(if $(filter files/% layers/% oracle_positions text/%,$*),-O1) $(TEST_SOURCE)
$(B)/asan/%.o: llmc/compiled/%.cu $(B)/asan.flags
	$(CCACHE) $(CXX) $(ASAN_FLAGS) -x c++ -c $< -o $@
$(B)/asan/%.o: test/%.cu $(B)/asan.flags
	$(CCACHE) $(CXX) $(ASAN_FLAGS) -O0 -fno-sanitize=null,alignment $(TEST_SOURCE)
$(LAUNCHING:%=$(B)/test/%): $(KERNELS:%=$(B)/%.o) $(B)/test/oracle_positions.o
$(LAUNCHING:%=$(B)/asan/%): $(KERNELS:%=$(B)/asan/%.o) $(B)/test/oracle_positions.o
# Calls that fail: a library for the trainers that test/programs starts, an object for tests that call llmc themselves
$(B)/faults.so $(B)/faults.o: test/faults.c test/faults.h
	$(CXX) -x c -std=gnu11 -O1 -Wall -Wextra $(if $(@:%.o=),-shared -fPIC,-DLINKED -c) $< -o $@
$(foreach variant,test asan,$(patsubst %,$(B)/$(variant)/%,files/test_checkpoint programs/test_faults \
    programs/test_log)): $(B)/faults.o
$(patsubst test/%.cu,$(B)/test/%,$(wildcard test/programs/*.cu)): | $(B)/faults.so
# The linker takes the first copy of an inline function: kernels come first, as in a trainer, and objects that no
# sanitizer has seen last.
LAST := $(B)/test/oracle_positions.o $(B)/test/main.o
LINKED = $(filter-out $(LAST) $<,$^) $< $(filter $(LAST),$^) -o $@ $(CATCH_LIBS)
$(B)/test/%: $(B)/test/%.o $(B)/test/main.o
	$(CXX) $(LINKED) $(CPU_LIBS)
LINK_ASAN = $(CXX) -fsanitize=address,undefined $(OMP) $(LINKED) -lpthread
$(B)/asan/%: $(B)/asan/%.o $(B)/test/main.o
	$(LINK_ASAN)
$(OUTSIDE:%=$(B)/asan/%): $(B)/asan/%: $(B)/test/%.o $(B)/test/main.o
	$(LINK_ASAN)
# On the emulated GPU: the kernel tests, and the trainers in their CUDA text; past the end of shared memory with asan.
$(B)/simt/%.o: test/simt/%.cu $(B)/simt.flags
	$(CCACHE) $(CXX) $(SIMT_FLAGS) $(if $(findstring wavefronts,$@),-fsanitize=thread) -x c++ -c $< -o $@
$(B)/simt_asan/%.o: test/simt/%.cu $(B)/simt.flags
	$(CCACHE) $(CXX) $(SIMT_FLAGS) -fno-omit-frame-pointer -fsanitize=address -x c++ -c $< -o $@
$(B)/simt/train_%_fp32.o: train_%.cu $(B)/simt.flags $(B)/mpi.flags
	$(CCACHE) $(CXX) $(SIMT_FLAGS) -DUSE_NCCL $(MPI_CFLAGS) -DPRECISION_FP32 -x c++ -c $< -o $@
$(B)/simt/train_%.o: train_%.cu $(B)/simt.flags $(B)/mpi.flags
	$(CCACHE) $(CXX) $(SIMT_FLAGS) -include test/simt/shared_flash.h -DUSE_NCCL $(MPI_CFLAGS) -x c++ -c $< -o $@
$(patsubst test/%.cu,$(B)/%,$(shell grep -lsE '(shared_flash|flash_problem)\.h' test/simt/test_*.cu)) \
    $(TRAINERS:%=$(B)/simt/%): $(B)/simt/shared_flash.o
$(B)/simt/%: $(B)/simt/%.o
	$(CXX) $(filter %.o,$^) -o $@ $(if $(findstring train_,$@),$(MPI_LIBS))
$(B)/simt_asan/%: $(B)/simt_asan/%.o
	$(CXX) -fsanitize=address $< -o $@

# The program of test/ranks/test_ranks.py, with and without MPI; no $(OPT), so that its sums keep their order
$(B)/comm_program $(B)/comm_program_alone: test/ranks/comm_program.cu $(B)/cpu.flags $(B)/mpi.flags
	$(CXX) $(CXX_BASE) -O2 $(OMP) $(if $(@:%alone=),$(MPI_CFLAGS)) -I. -MF $@.d -x c++ $< -x none -o $@ $(OMP) $(MPI_LIBS)
$(B)/comm_programcu: test/ranks/comm_program.cu $(B)/mpi.flags
	$(NVCC) $(NVCC_BASE) -arch=sm_80 -I. -MMD -MP -MF $@.d $< -o $@ $(CUDA_RANK_LIBS)
$(B)/fuzz: test/fuzz/fuzz_files.cu
	clang++ $(CXX_BASE) $(SANITIZE) -fsanitize=fuzzer -I. -MF $@.d -x c++ $< -o $@
# The ladders of dev/cuda; where no GPU is, nvcc only reads them.
$(B)/ladders/%_simt: dev/cuda/%.cu $(B)/simt.flags
	$(CXX) $(SIMT_FLAGS) -MF $@.d -x c++ $< -x none -o $@
$(B)/ladders/%cu: dev/cuda/%.cu $(B)/cuda.flags
	$(NVCC) $(NVCC_BASE) -arch=$(or $(ARCH),$(GPU_ARCH),sm_90a) $(if $(GPU_ARCH),,-ptx) -I. -MMD -MF $@.d $< -o $@
$(B)/ladders/%: dev/cuda/%.cu $(B)/cpu.flags
	$(CXX) $(CPU_FLAGS) -I. -MF $@.d -x c++ $< -x none -o $@ $(CPU_LIBS)

# targets that compile nothing themselves; `make help` prints what stands after ## ---------------------------
demo:      ## train four small models; how far does each extrapolate?
demo-bert: ## the same with train_bert, on masked bytes
million:   ## after make demo: its models in one window of 1,048,576 tokens
	@scripts/million.sh
demo-tasks: ## which encodings answer longer questions than they learned?
demo demo-bert demo-tasks:
	@dev/install.sh demo
	@"$$(dev/install.sh --python matplotlib numpy)" scripts/demo.py $(patsubst demo-%,%,$(@:demo=gpt2))
verdict:   ## published numbers to test here; ROW=name: is it reproduced?
	@"$$(dev/install.sh --python scipy || echo python3)" scripts/verdict.py $(ROW) $(ARGS)
test:      ## the quick tests (installs what is missing); ARGS='[tag]'
test-long: ## the rest of the tests
simt:      ## the CUDA text on an emulated GPU; ARGS: words of a test's name
ranks:     ## one run on several processes (part of make test-long)
asan:      ## the tests tagged [asan] under AddressSanitizer
# What is missing is installed before the Makefile looks for it: dev/test.py calls make again.
test test-long simt ranks asan: install
	@python3 dev/test.py $@ $(if $(ARGS),'$(ARGS)')
ladders:   ; @dev/install.sh ladders && python3 dev/test.py ladders    ## dev/cuda: kernels, the simplest first
edit-loop: ; @dev/edit_loop.sh $(ARGS)      ## what an edit costs: CPU seconds of make, with limits
fuzz:      ; @dev/fuzz.sh $(or $(FUZZ_SECONDS),60) $(ARGS)      ## libFuzzer at each parser (clang++; FUZZ_SECONDS=60)
attack:    train_gpt2 train_bert ; @python3 test/attack/attack.py $(ARGS)  ## runs starved and misled
one-file:  train_gpt2 ; @python3 dev/one_file.py $(ARGS)   ## dev/gpt2_cable.cpp beside train_gpt2: the same losses
mutations: ; @python3 test/mutations/mutate.py $(ARGS)  ## plants faults: does a test see them?
exports:   ; @dev/hf/exports.sh $(ARGS)     ## checkpoints in today's transformers, lm_eval, ... (PyPI, 5 GB)
lint:      ; @python3 dev/figures.py --check && python3 dev/lint.py   ## rules of the sources that no compiler checks
gpu-check: ; @python3 dev/gpu_check.py $(ARGS)      ## on a machine with a GPU: correctness, speed and memory
bench:     ; @dev/bench/run.sh         ## speed and memory, beside PyTorch
hashes:    ; @python3 dev/hashes.py $(ARGS)      ## the same weights from every compiler, processor and rank
install:   ; @dev/install.sh $(if $(ARGS),unit,test)            ## what the tests need from the system
clean:     ; @rm -rf $(B) $(TRAINERS) $(TRAINERS:%=%cu)          ## remove everything that was built
mpi-found: ; @$(if $(MPI_CFLAGS),echo "$(MPI_CFLAGS) $(MPI_LIBS)",echo "no MPI found" >&2; exit 1)
help:
	@sed -n 's/^\([a-z-]*\): .*## /make \1\t/p' Makefile | expand -t 17
	@sed -n '1s/.*targets. /\n/p; 2,12s/^# \{0,1\}//p' Makefile
.PHONY: all trace torch $(PLAIN) mpi-found demo-tasks mutations
.SECONDARY .DELETE_ON_ERROR:
-include $(wildcard $(B)/*.d $(B)/*/*.d $(B)/*/*/*.d)

// simt_fibers.h -- the second part of simt.h: the threads of a block as fibers, and how they wait for each other.
//
// A fiber is started once, by makecontext, and then goes from block to block. Switches are _setjmp and _longjmp, which,
// unlike swapcontext, make no system call. A launch that fails leaves its fibers in the middle of a kernel; the next
// one starts them again.
#pragma once

struct SimtCopy { char* to; int group; char data[16]; };       // a cp.async under way
struct SimtProduct {                                            // a wgmma under way
    float* d;
    const uint32_t* a;
    const char *a_tile, *b;
    int columns, row0;
    bool transposed;
};
struct SimtThread {
    jmp_buf state;
    char* stack = nullptr;
    void* fake_stack = nullptr;
    bool started = false, done = false;
    unsigned index = 0;                             // threadIdx.x
    const char *what = nullptr, *file = nullptr;    // where it waits; what is null while it can run
    int line = 0, barrier = -1;
    unsigned mask = 0;                              // the lanes that it waits for
    const void* in = nullptr;
    void* out = nullptr;
    std::vector<SimtCopy> copies;
    int groups = 0;                                 // cp.async groups committed
    std::vector<SimtProduct> products;
    bool fenced = false;                            // wgmma.fence, since the last wait
    bool copied = false;                            // cp.async without fence.proxy.async
};

constexpr size_t SIMT_STACK = 256 << 10, SIMT_MAX_SHARED = 227 << 10;
constexpr int SIMT_BARRIERS = 16;

// the warps that have come
struct SimtBarrier { std::vector<unsigned> warps; int threads; const char* file; int line; };
struct Simt {
    std::vector<SimtThread*> pool;          // the first blockDim.x are the block's threads
    std::vector<SimtThread*> ready[32];     // of each warp, those that can run
    unsigned ready_warps = 0;
    unsigned warp = 0;
    unsigned sticky = 0;
    SimtThread* current = nullptr;
    jmp_buf host;
    const void* host_stack = nullptr;
    size_t host_stack_bytes = 0;
    const std::function<void()>* body = nullptr;
    unsigned unfinished = 0;
    unsigned waiting[32] = {};              // a warp's lanes that wait in a collective
    SimtBarrier barriers[SIMT_BARRIERS];
    std::exception_ptr error;
    char* shared = nullptr;
    size_t shared_bytes = 0;
    uint64_t random = 0;

    Simt() {
        const char* seed = getenv("SIMT_SEED");
        random = 0x9E3779B97F4A7C15ull * (2 * strtoull(seed != nullptr ? seed : "1", nullptr, 10) + 1);
    }
    ~Simt() { for (SimtThread* t : pool) { delete t; } }
    uint64_t draw(uint64_t n) {             // 0 .. n-1, n < 2^32 (xorshift64*, Vigna 2016)
        random ^= random >> 12; random ^= random << 25; random ^= random >> 27;
        return (random * 0x2545F4914F6CDD1Dull >> 32) * n >> 32;
    }
};
inline Simt simt;
inline void* simt_dynamic_shared() { return simt.shared; }

// glibc's fortified longjmp takes a jump to another stack for an attack; _longjmp under its own name does not check
extern "C" [[noreturn]] void simt_longjmp(struct __jmp_buf_tag*, int) __asm__("_longjmp");

#if defined(SIMT_ASAN)
inline void simt_leave(void** fake, const void* stack, size_t bytes) {
    __sanitizer_start_switch_fiber(fake, stack, bytes);
}
inline void simt_arrive(void* fake, const void** stack, size_t* bytes) {
    __sanitizer_finish_switch_fiber(fake, stack, bytes);
}
inline void simt_unpoison(void* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
#else
inline void simt_leave(void**, const void*, size_t) {}
inline void simt_arrive(void*, const void**, size_t*) {}
inline void simt_unpoison(void*, size_t) {}
#endif

[[noreturn]] inline void simt_resume(SimtThread* t, void** fake) {
    simt.current = t;
    if (t == nullptr) {
        simt_leave(fake, simt.host_stack, simt.host_stack_bytes);
        simt_longjmp(simt.host, 1);
    }
    threadIdx.x = t->index;
    simt_leave(fake, t->stack, SIMT_STACK);
    simt_longjmp(t->state, 1);
}
// The thread to run next, null if none can: in `sticky` of 8 cases a random one of the last thread's warp, so that in
// some blocks one warp runs far ahead, and in some they stay close together.
__attribute__((noinline)) inline SimtThread* simt_take_ready() {
    if (simt.ready_warps == 0) { return nullptr; }
    if ((simt.ready_warps >> simt.warp & 1) == 0 || simt.draw(8) >= simt.sticky) {
        unsigned left = simt.ready_warps;
        for (uint64_t skip = simt.draw((uint64_t)__builtin_popcount(left)); skip > 0; skip--) { left &= left - 1; }
        simt.warp = (unsigned)__builtin_ctz(left);
    }
    std::vector<SimtThread*>& lanes = simt.ready[simt.warp];
    std::swap(lanes[simt.draw(lanes.size())], lanes.back());
    SimtThread* t = lanes.back();
    lanes.pop_back();
    if (lanes.empty()) { simt.ready_warps &= ~(1u << simt.warp); }
    return t;
}
inline void simt_wake(SimtThread* t) {
    t->what = nullptr;
    t->barrier = -1;
    simt.ready[t->index / 32].push_back(t);
    simt.ready_warps |= 1u << (t->index / 32);
}
inline void simt_forget_ready() {
    for (auto& lanes : simt.ready) { lanes.clear(); }
    simt.ready_warps = 0;
}
// The current thread waits; one of the ready threads runs (maybe the same one), or the host if there is none.
__attribute__((noinline)) inline void simt_sleep() {
    SimtThread* const me = simt.current;
    SimtThread* const next = simt_take_ready();
    if (next == me) { return; }
    if (_setjmp(me->state) == 0) { simt_resume(next, &me->fake_stack); }
    simt_arrive(me->fake_stack, nullptr, nullptr);
}
// The host waits until no thread can run.
__attribute__((noinline)) inline void simt_run_ready() {
    static void* fake;
    if (_setjmp(simt.host) == 0) { simt_resume(simt_take_ready(), &fake); }
    simt_arrive(fake, nullptr, nullptr);
}
// A fiber's life: one turn of the loop for each block that it is part of.
inline void simt_fiber() {
    SimtThread* me = simt.current;
    simt_arrive(nullptr, &simt.host_stack, &simt.host_stack_bytes);
    if (_setjmp(me->state) == 0) { simt_resume(nullptr, &me->fake_stack); }
    simt_arrive(me->fake_stack, nullptr, nullptr);
    for (;;) {
        try {
            (*simt.body)();
            me->done = true;
            simt.unfinished--;
        } catch (...) {
            simt.error = std::current_exception();
            simt_forget_ready();
        }
        simt_sleep();
    }
}
__attribute__((noinline)) inline void simt_start(SimtThread* t) {
    if (t->stack == nullptr) {              // with a guard page below it
        char* p = (char*)mmap(nullptr, SIMT_STACK + 4096, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p, 4096, PROT_NONE) != 0) {
            die(EXIT_OUT_OF_MEMORY, "no %zu bytes for a thread's stack", SIMT_STACK);
        }
        t->stack = p + 4096;
    }
    simt_unpoison(t->stack, SIMT_STACK);    // what a thread that was given up left there
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = t->stack;
    context.uc_stack.ss_size = SIMT_STACK;
    context.uc_link = nullptr;
    makecontext(&context, simt_fiber, 0);
    t->started = true;
    simt.current = t;
    void* fake = nullptr;
    if (_setjmp(simt.host) == 0) {
        simt_leave(&fake, t->stack, SIMT_STACK);
        setcontext(&context);
    }
    simt_arrive(fake, nullptr, nullptr);
}

// ----------------------------------------------------------------------------------------------------------
// waiting

// "warp 0: lanes 0-14 16: waiting in __syncwarp (FILE:12); lanes 15 17-31: returned", at most 8 warps, those that
// returned last
inline std::string simt_who_waits() {
    std::string s, returned;
    int shown = 0;
    for (unsigned first = 0; first < blockDim.x; first += 32) {
        std::map<std::string, std::string> lanes;
        std::string before;
        for (unsigned l = 0, end; l < 32; l = end) {
            auto place = [&](unsigned lane) {
                const SimtThread* t = simt.pool[first + lane];
                if (t->done || t->what == nullptr) { return std::string(t->done ? "returned" : "on its way"); }
                return strprintf("waiting in %s (%s:%d)", t->what, t->file, t->line);
            };
            const std::string here = place(l);
            for (end = l + 1; end < 32 && place(end) == here; end++) {}
            lanes[here] += end > l + 1 ? strprintf(" %u-%u", l, end - 1) : strprintf(" %u", l);
        }
        if (lanes.size() == 1 && lanes.count("returned") > 0) { returned += strprintf(" %u", first / 32); continue; }
        if (++shown > 8) { continue; }
        s += strprintf("\n    warp %u:", first / 32);
        for (const auto& place : lanes) { s += " lanes" + place.second + ": " + place.first + ";"; }
    }
    return s + (returned.empty() ? "" : "\n    returned: warps" + returned);
}
inline void simt_fail(const char* file, int line, const std::string& what) {
    die_at(file, line, EXIT_DEVICE, "%s%s", what.c_str(), simt_who_waits().c_str());
}

inline bool simt_same(const char* a, const char* b) { return a == b || strcmp(a, b) == 0; }

// All lanes of the mask meet, and the last one performs for all: in[l] and out[l] are what lane l gave, null outside
// the mask.
using SimtPerform = void (*)(const void* const* in, void* const* out);
inline void simt_collective(const char* what, unsigned mask, const void* in, void* out, SimtPerform perform,
                            const char* file, int line) {
    SimtThread* me = simt.current;
    const unsigned lane = me->index % 32, first = me->index - lane;
    if ((mask >> lane & 1) == 0) {
        simt_fail(file, line, strprintf("%s: lane %u calls it with mask 0x%08x", what, lane, mask));
    }
    me->what = what; me->file = file; me->line = line; me->mask = mask; me->in = in; me->out = out;
    unsigned& waiting = simt.waiting[first / 32];
    waiting |= 1u << lane;
    bool complete = (waiting & mask) == mask;
    for (unsigned l = 0; l < 32 && complete; l++) {
        const SimtThread* t = simt.pool[first + l];
        if (mask >> l & 1) {
            complete = t->line == line && t->mask == mask && simt_same(t->what, what) && simt_same(t->file, file);
        }
    }
    if (complete) {
        const void* in_of[32];
        void* out_of[32];
        for (unsigned l = 0; l < 32; l++) {
            const bool takes_part = (mask >> l & 1) != 0;
            in_of[l] = takes_part ? simt.pool[first + l]->in : nullptr;
            out_of[l] = takes_part ? simt.pool[first + l]->out : nullptr;
        }
        if (perform != nullptr) { perform(in_of, out_of); }
        waiting &= ~mask;
        for (unsigned l = 0; l < 32; l++) {
            if (mask >> l & 1) { simt_wake(simt.pool[first + l]); }
        }
    }
    simt_sleep();
}

// Barrier `id` of the block, for `threads` threads: a warp has arrived when all its lanes wait at one line. Barrier 0
// is __syncthreads, where all warps have to wait at the same line.
inline void simt_barrier(const char* what, int id, int threads, const char* file, int line) {
    SimtThread* me = simt.current;
    if (id < 0 || id >= SIMT_BARRIERS || threads < 32 || threads % 32 != 0 || threads > (int)blockDim.x) {
        simt_fail(file, line,
                  strprintf("%s(%d, %d): barriers are 0..%d, for a multiple of 32 threads of the block", what, id,
                            threads, SIMT_BARRIERS - 1));
    }
    me->what = what; me->file = file; me->line = line; me->barrier = id;
    bool warp_is_here = true;
    for (unsigned i = me->index / 32 * 32, end = i + 32; i < end && warp_is_here; i++) {
        const SimtThread* t = simt.pool[i];
        warp_is_here = t->barrier == id && t->line == line && simt_same(t->file, file);
    }
    if (warp_is_here) {
        SimtBarrier& b = simt.barriers[id];
        if (b.warps.empty()) { b.threads = threads; b.file = file; b.line = line; }
        if (b.threads != threads) {
            simt_fail(file, line,
                      strprintf("%s(%d, %d): the warps that wait there came with %d", what, id, threads, b.threads));
        }
        if (id == 0 && (b.line != line || !simt_same(b.file, file))) {
            simt_fail(file, line, "warps of a block come to different __syncthreads");
        }
        b.warps.push_back(me->index / 32);
        if (32 * (int)b.warps.size() == threads) {
            for (unsigned w : b.warps) {
                for (unsigned l = 0; l < 32; l++) { simt_wake(simt.pool[32 * w + l]); }
            }
            b.warps.clear();
        }
    }
    simt_sleep();
}

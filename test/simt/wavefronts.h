// wavefronts.h -- how often a kernel's accesses to shared memory have to be repeated because of bank conflicts, counted
// on the emulator.
//
// Shared memory has 32 banks of 4 bytes, and serves 128 bytes at a time: one word of each bank. An instruction of a
// warp takes one such wavefront if its lanes access 4 bytes each, four with 16 bytes each (as ldmatrix does), and more
// if several lanes access different words of one bank.
//
// The program is compiled with -fsanitize=thread, but not linked with ThreadSanitizer: the calls before each access
// come here instead. The code's address and the order in each lane tell which accesses are one instruction. g++ and
// nvcc may compile plain C++ differently: a struct of 16 bytes may be two accesses here.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>

struct SharedAccess { const void* code; uint32_t offset, block; uint16_t thread, bytes; };
inline std::vector<SharedAccess> shared_accesses;       // of the launches since the last count_wavefronts()
inline bool shared_recording = false;

__attribute__((no_sanitize_thread, noinline)) static void record_access(const void* code, const void* p, size_t bytes) {
    const uintptr_t at = (uintptr_t)p, begin = (uintptr_t)simt.shared;
    if (!shared_recording || at < begin || at + bytes > begin + simt.shared_bytes) { return; }
    shared_recording = false;                           // the vector's own accesses are not a kernel's
    const SharedAccess a = {code, (uint32_t)(at - begin), blockIdx.x, (uint16_t)threadIdx.x, (uint16_t)bytes};
    shared_accesses.push_back(a);
    shared_recording = true;
}

#define SHARED_HOOK(name, bytes)                                                                    \
    extern "C" __attribute__((no_sanitize_thread)) void name(void* p) {                             \
        record_access(__builtin_return_address(0), p, bytes);                                       \
    }
#define SHARED_HOOKS(bytes)                                                                         \
    SHARED_HOOK(__tsan_read##bytes, bytes) SHARED_HOOK(__tsan_write##bytes, bytes)                  \
    SHARED_HOOK(__tsan_unaligned_read##bytes, bytes) SHARED_HOOK(__tsan_unaligned_write##bytes, bytes)
SHARED_HOOKS(1)
SHARED_HOOKS(2)
SHARED_HOOKS(4)
SHARED_HOOKS(8)
SHARED_HOOKS(16)
#define SHARED_RANGE(name)                                                                          \
    extern "C" __attribute__((no_sanitize_thread)) void name(void* p, size_t bytes) {               \
        record_access(__builtin_return_address(0), p, bytes);                                       \
    }
SHARED_RANGE(__tsan_read_range)
SHARED_RANGE(__tsan_write_range)
// what else the compiler calls
extern "C" {
__attribute__((no_sanitize_thread)) void __tsan_init() {}
__attribute__((no_sanitize_thread)) void __tsan_func_entry(void*) {}
__attribute__((no_sanitize_thread)) void __tsan_func_exit() {}
__attribute__((no_sanitize_thread)) void __tsan_vptr_update(void*, void*) {}
__attribute__((no_sanitize_thread)) void __tsan_vptr_read(void*) {}
__attribute__((no_sanitize_thread)) int __tsan_atomic32_fetch_add(volatile int* p, int x, int) {
    return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);  // a shared_ptr's count
}
__attribute__((no_sanitize_thread)) char __tsan_atomic8_load(const volatile char* p, int) {
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);        // of a function's static variable: has it been made?
}
}

// Of one line of a kernel's source: instructions of a warp, the wavefronts that they took, and those without conflicts
struct Wavefronts { size_t instructions = 0, taken = 0, least = 0; };

// FILE:LINE of each address of the code: of the innermost frame that is not the emulator's
inline std::map<const void*, std::string> places_of(const std::map<const void*, Wavefronts>& codes) {
    extern char __executable_start;
    char program[4096] = "";
    if (readlink("/proc/self/exe", program, sizeof(program) - 1) < 0) { die(EXIT_DEVICE, "/proc/self/exe"); }
    std::string command = strprintf("addr2line -a -i -e '%s'", program);
    for (const auto& c : codes) {
        command += strprintf(" %#zx", (size_t)((const char*)c.first - 1 - &__executable_start));
    }
    FILE* f = popen(command.c_str(), "r");
    std::map<const void*, std::string> places;
    auto code = codes.end();
    for (char line[4096]; f != nullptr && fgets(line, sizeof(line), f) != nullptr;) {
        if (strncmp(line, "0x", 2) == 0) { code = code == codes.end() ? codes.begin() : std::next(code); continue; }
        const std::string s = std::string(line).substr(0, strcspn(line, " \n"));
        const size_t at = std::min(s.rfind("llmc/"), s.rfind("test/simt/test_"));
        if (at != std::string::npos && places[code->first].empty()) { places[code->first] = s.substr(at); }
    }
    if (f == nullptr || pclose(f) != 0) { die(EXIT_DEVICE, "addr2line (of binutils) does not run"); }
    return places;
}

// By line, what `run` did, which launches kernels and waits for them
template <class F> std::map<std::string, Wavefronts> count_wavefronts(F run) {
    shared_accesses.clear();
    shared_recording = true;
    run();
    shared_recording = false;
    // 1. the accesses of one instruction: of a warp, at one address of the code, each lane's k-th there
    using Lane = std::tuple<const void*, uint32_t, uint16_t>;                   // code, block, thread
    using Instruction = std::tuple<const void*, uint32_t, int, size_t>;         // code, block, warp, k
    std::map<Lane, size_t> times;
    std::map<Instruction, std::vector<SharedAccess>> instructions;
    for (const SharedAccess& a : shared_accesses) {
        const size_t k = times[Lane(a.code, a.block, a.thread)]++;
        instructions[Instruction(a.code, a.block, a.thread / 32, k)].push_back(a);
    }
    // 2. their wavefronts: 128 bytes at a time, for neighbouring lanes that access that much together
    std::map<const void*, Wavefronts> by_code;
    for (const auto& i : instructions) {
        Wavefronts& w = by_code[std::get<0>(i.first)];
        const unsigned lanes = 128 / std::max(4u, (unsigned)i.second[0].bytes);
        std::map<unsigned, std::array<std::set<uint32_t>, 32>> groups;          // of lanes: the words of each bank
        for (const SharedAccess& a : i.second) {
            for (uint32_t word = a.offset / 4; word <= (a.offset + a.bytes - 1) / 4; word++) {
                groups[a.thread % 32 / lanes][word % 32].insert(word);
            }
        }
        w.instructions++;
        for (const auto& group : groups) {
            size_t most = 0, words = 0;
            for (const auto& bank : group.second) {
                most = std::max(most, bank.size());
                words += bank.size();
            }
            w.taken += most;
            w.least += (words + 31) / 32;
        }
    }
    std::map<const void*, std::string> places = places_of(by_code);
    std::map<std::string, Wavefronts> by_line;
    for (const auto& c : by_code) {
        const std::string& place = places[c.first];
        Wavefronts& w = by_line[place.empty() ? "cp.async" : place];        // which is done when it is waited for
        w.instructions += c.second.instructions;
        w.taken += c.second.taken;
        w.least += c.second.least;
    }
    return by_line;
}

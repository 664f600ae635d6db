// trace.h -- checksums of every tensor after every kernel of a step: scripts/part.py finds by them where two runs part.
//
// `make trace` compiles the trainers with -include dev/trace.h: the macros at the end wrap two calls of train().
// CABLE_TRACE=FILE:STEP[:KERNEL:TENSOR] in the environment. Steps count from 1, kernels within a step too. FILE gets
//
//   step S SUM                               for each step: of the weights and moments after its update
//   kernel I NAME TENSOR SUM                 for each tensor that kernel I of step STEP has changed; I = 0, before the
//                                            step: for every tensor
//   contents TENSOR ELEMENT COLUMNS          what TENSOR held after kernel KERNEL is in FILE.bin; ELEMENT: bytes of one
//
// CABLE_FLIP=STEP:KERNEL:TENSOR:BIT flips a bit after that kernel, to test the tool. Only rank 0 is traced.
#pragma once

#include "../llmc/engine/run.h"

class Trace {
public:
    // now: the step, from 1
    template <class Activations> void begin_step(const Parameters& p, const Activations& acts, long long now) {
        if (!opened) { open(p, acts); }
        if (file == nullptr || (now != step && now != flip_step)) { return; }
        writes = now == step;
        flips = now == flip_step;
        kernel = -1;
        record("-", p.stream);
        after_launch = [](const char* name, Stream s) { the_trace().record(name, s); };
    }
    void end_step(long long now, Stream stream) {
        if (file == nullptr) { return; }
        after_launch = nullptr;
        uint64_t all = 0;
        for (const Tensor& t : tensors) { if (t.kept) { all = hash64(all, sum_of(t, stream)); } }
        fprintf(file, "step %lld %016llx\n", now, (unsigned long long)all);
        fflush(file);
    }
    static Trace& the_trace() {
        static Trace only;
        return only;
    }

private:
    struct Tensor {
        std::string name;
        char* data;                         // on the device
        size_t bytes, element, columns;
        bool kept;
        uint64_t sum;                       // when it was last looked at
    };
    bool opened = false;
    std::vector<Tensor> tensors;
    std::vector<char> host;
    FILE* file = nullptr;
    FILE* contents = nullptr;
    long long step = 0;                     // that is traced
    int dumped = -1;                        // the kernel after which dumped_tensor is written
    std::string dumped_tensor;
    long long flip_step = -1;
    int flip_kernel = -1;
    std::string flip_tensor;
    size_t flip_bit = 0;
    int kernel = -1;                        // the last one of this step
    bool writes = false;                    // lines of this step
    bool flips = false;                     // a bit in this step

    // Names the tensors of an allocation. element: their size; 0: as the table says. kept: they outlive a step
    void add(const std::string& prefix, void* data, const TensorTable& table, size_t element, bool kept) {
        for (size_t i = 0; data != nullptr && i < table.specs.size(); i++) {
            const TensorSpec& s = table.specs[i];
            const size_t size = element > 0 ? element : s.element;
            const size_t unit = element > 0 ? element : sizeof(float);          // of the table's offsets
            for (int l = 0; l < imax(s.layers, 1); l++) {
                const std::string layer = s.layers > 0 ? strprintf("[%d]", l) : "";
                char* at = (char*)data + table.offsets[i] * unit + (size_t)l * table.strides[i] * size;
                tensors.push_back({prefix + s.name + layer, at, s.layer_size() * size, size, s.row_size(), kept, 0});
            }
        }
    }
    template <class Activations> void open(const Parameters& p, const Activations& acts) {
        opened = true;
        const char* text = getenv("CABLE_TRACE");
        if (text == nullptr || comm().rank != 0) { return; }
        char path[4096], name[256] = "";
        const int fields = sscanf(text, "%4095[^:]:%lld:%d:%255s", path, &step, &dumped, name);
        check(fields == 2 || fields == 4, "CABLE_TRACE=%s: expected FILE:STEP[:KERNEL:TENSOR]", text);
        dumped_tensor = name;
        file = fopen(path, "w");
        check(file != nullptr, "%s: cannot create: %s", path, strerror(errno));
        if (fields == 4) {
            contents = fopen((std::string(path) + ".bin").c_str(), "w");
            check(contents != nullptr, "%s.bin: cannot create: %s", path, strerror(errno));
        }
        const char* flip = getenv("CABLE_FLIP");
        if (flip != nullptr) {
            const int parts = sscanf(flip, "%lld:%d:%255[^:]:%zu", &flip_step, &flip_kernel, name, &flip_bit);
            check(parts == 4, "CABLE_FLIP=%s: expected STEP:KERNEL:TENSOR:BIT", flip);
            flip_tensor = name;
        }
        add("", p.weights, p.table, sizeof(floatX), true);
        if ((void*)p.weights != (void*)p.master && !p.exchange.shares_master) {
            add("master.", p.master, p.table, sizeof(float), true);
        }
        for (const auto& moment : {std::make_pair("m.", p.m), std::make_pair("v.", p.v)}) {
            if (!p.exchange.shares) { add(moment.first, moment.second, p.table, sizeof(float), true); }
        }
        for (size_t k = 0; k < p.tree.size(); k++) {
            add(strprintf("gradient%zu.", k), p.tree[k], p.table, sizeof(float), false);
        }
        add("", acts.data, acts.table, 0, false);
        add("", acts.position_data, acts.position_table, 0, false);
    }
    uint64_t sum_of(const Tensor& t, Stream stream) {
        host.resize(t.bytes);
        copy_to_host(host.data(), t.data, t.bytes, stream);
        return checksum(host.data(), t.bytes);
    }
    void record(const char* text, Stream stream) {
        kernel++;
        const std::string name(text, strcspn(text, "<, "));
        for (Tensor& t : tensors) {
            uint64_t sum = sum_of(t, stream);
            if (flips && kernel == flip_kernel && t.name == flip_tensor && flip_bit / 8 < t.bytes) {
                host[flip_bit / 8] = (char)(host[flip_bit / 8] ^ 1 << flip_bit % 8);
                copy_to_device(t.data, host.data(), t.bytes, stream);
                sum = checksum(host.data(), t.bytes);
            }
            if (writes && kernel == dumped && t.name == dumped_tensor) {
                fwrite(host.data(), 1, t.bytes, contents);
                fflush(contents);
                fprintf(file, "contents %s %zu %zu\n", t.name.c_str(), t.element, t.columns);
            }
            if (!writes || (sum == t.sum && kernel > 0)) { continue; }
            t.sum = sum;
            fprintf(file, "kernel %d %s %s %016llx\n", kernel, name.c_str(), t.name.c_str(), (unsigned long long)sum);
        }
    }
};

#define start_step(run) (Trace::the_trace().begin_step(model, acts, (run).state.step + 1), start_step(run))
#define report_step(run, ...) \
    (report_step(run, __VA_ARGS__), Trace::the_trace().end_step((run).state.step, model.stream))

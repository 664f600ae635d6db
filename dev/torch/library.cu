// library.cu -- attention with any bias of --pos, and rope, as a C library: build/libcable.so on a CPU in float32,
// build/libcablecu.so in CUDA in bf16, build/libcablecu_fp32.so in float32. dev/torch/cable_torch.py calls it.
//
// A row (OC) belongs to one token: q, k and v, C = NH * HS each, then the encoding's columns, NH each (cable: z and u),
// then padding. The caller owns all memory, on the device of the library: cable_describe says how much. Every
// function returns null, or what is wrong, a text of this thread that its next call overwrites. Several threads may
// call at the same time.
#include "../../llmc/attention/choose.cuh"
#include "../../llmc/position/table.h"

struct CableCall {
    const char* position;                   // as --pos has it: "cable", "t5_clip:K=64"
    int B, T, NH, HS, OC;
    int causal;                             // or 0: bidirectional
    int T_train;                            // the default K of t5_clip follows from it
    int threads;                            // of OpenMP
    Stream stream;                          // null on a CPU
};

namespace {

// What an encoding is bound to, as a trainer's model has it (engine/model.cuh): one layer with one encoding
struct Bound {
    PositionConfig position;
    PositionTables declared;
    TensorTable params, acts;
    LayerPosition layer;

    // hooks: what it may change, and nothing else
    Bound(const CableCall& c, int hooks, float* tables = nullptr, float* dtables = nullptr, float* state = nullptr) {
        const bool fits = c.B > 0 && c.T > 0 && c.NH > 0 && c.HS > 0 && (int64_t)c.NH * c.HS <= 1 << 20 &&
                          c.T <= 1 << 28 && c.T_train > 0;
        check(fits, "expected at least 1 of each, T up to 2^28 and 2^20 channels, got B %d, T %d, %d heads of %d, "
              "T_train %d", c.B, c.T, c.NH, c.HS, c.T_train);
        position = parse_position(c.position, c.T_train);
        check(position.parts.size() == 1, "position %s: expected one encoding", c.position);
        const int found = encoding_traits(position.parts[0]).hooks;
        check((found & ~hooks) == 0, "position %s: expected %s", c.position, hooks == TURNS_QK ? "rope" : "a bias");
        const PositionShape shape = {1, c.NH, c.HS, c.B, c.T, c.causal != 0, false};
        declared = position_tables(position, shape);
        for (const TensorSpec& s : declared.params) { params.add(s); }
        for (const TensorSpec& s : declared.acts) { acts.add(s); }
        PositionView& v = layer.views[0];
        layer.count = 1;
        (PositionShape&)v = shape;
        v.run = &position;
        v.config = &position.parts[0];
        v.columns = 3 * shape.C() + declared.extra_columns;
        v.OC = c.OC;
        v.params = &params;
        v.acts = &acts;
        v.master = tables;
        v.grads = dtables;
        v.act_data = state;
    }
    Bound(const Bound&) = delete;           // the view points to its parts
    static constexpr int BIASES = ADDS_BIAS | COUNTS_GATES;
};

// Runs f. Errors are returned, and not thrown.
template <class F> const char* guarded(const CableCall& c, F f) {
    static thread_local std::string message;
    try {
        if (max_threads() != c.threads) { set_threads(c.threads); }     // PyTorch's are mostly these already
        f();
#if defined(SIMT)
        CUDA_CHECK(cudaStreamSynchronize(c.stream));        // PyTorch does not know the emulated stream
#endif
    } catch (const std::exception& e) {
        message = e.what();
        return message.c_str();
    }
    return nullptr;
}

// The rows of a call: wide enough, and for a GPU's loads each on a multiple of 16 bytes
void check_rows(const Bound& bound, const CableCall& c, const void* rows) {
    const bool aligned = !ON_GPU || ((size_t)rows % 16 == 0 && c.OC % PACK == 0);
    check(aligned && c.OC >= bound.layer.columns(), "rows: expected at least %d columns%s, got %d",
          bound.layer.columns(), ON_GPU ? ", and each row on a multiple of 16 bytes" : "", c.OC);
    if (ON_GPU) { check_head_size(bound.position, c.HS, true, device_shared_available()); }
}

}   // namespace

#define API extern "C" __attribute__((visibility("default")))

// For cable_turn where OC is 0. sizes, in float32 but for the first: the encoding's columns; its learned tables
// together; its state; the scratch of the forward and of the backward. text (room): a line for each table, "name offset
// rows columns", 0 columns for a vector
API const char* cable_describe(const CableCall* c, size_t sizes[5], char* text, size_t room) {
    return guarded(*c, [&] {
        const Bound bound(*c, c->OC == 0 ? TURNS_QK : Bound::BIASES);
        const size_t found[] = {(size_t)bound.declared.extra_columns, bound.params.total, bound.acts.total,
                                attention_forward_scratch(c->B, c->T, c->NH),
                                attention_backward_scratch(bound.position, c->B, c->T, c->NH, c->HS)};
        std::string lines;
        for (size_t i = 0; i < bound.params.specs.size(); i++) {
            const TensorSpec& s = bound.params.specs[i];
            lines += strprintf("%s %zu %zu %zu\n", s.name.c_str(), bound.params.offset(i), s.rows, s.cols);
        }
        check(lines.size() < room, "text: expected room for %zu bytes, got %zu", lines.size() + 1, room);
        std::copy(found, found + 5, sizes);
        strcpy(text, lines.c_str());
    });
}

// out (B,T,C), lse (B,NH,T) from rows (B,T,OC). state: zeros, where the backward finds what it wants
API const char* cable_forward(const CableCall* c, floatX* out, float* lse, float* state, float* scratch, floatX* rows,
                              float* tables) {
    return guarded(*c, [&] {
        const Bound bound(*c, Bound::BIASES, tables, nullptr, state);
        check_rows(bound, *c, rows);
        bound.layer.prepare_forward(rows, c->B, c->T, 0, c->stream);       // a bias only reads the rows
        const auto forward = c->causal ? attention_forward<Mask::Causal> : attention_forward<Mask::Both>;
        forward(out, lse, scratch, rows, bound.layer.bias(), c->B, c->T, 0, c->stream);
    });
}

// drows (B,T,OC) but for its padding, and adds to dtables. state: the forward's, which is overwritten
API const char* cable_backward(const CableCall* c, floatX* drows, float* dtables, float* state, float* scratch,
                               const floatX* dout, const floatX* rows, const floatX* out, const float* lse,
                               float* tables) {
    return guarded(*c, [&] {
        const Bound bound(*c, Bound::BIASES, tables, dtables, state);
        check_rows(bound, *c, rows);
        check_rows(bound, *c, drows);
        const auto backward = c->causal ? attention_backward<Mask::Causal> : attention_backward<Mask::Both>;
        backward(drows, scratch, dout, rows, out, lse, bound.layer.bias(), c->B, c->T, c->stream);
        bound.layer.prepare_backward(drows, rows, c->B, c->T, c->stream);
    });
}

// Turns q and k of rows (B,T,OC) in place, which may end after k; back: the gradient's
API const char* cable_turn(const CableCall* c, floatX* rows, float* state, int back) {
    return guarded(*c, [&] {
        const Bound bound(*c, TURNS_QK, nullptr, nullptr, state);
        check(bound.declared.extra_columns == 0, "position %s: expected rope by the token's number", c->position);
        bound.layer.prepare_forward(rows, back ? 0 : c->B, c->T, 0, c->stream);        // of no sequence: only the table
        if (back) { bound.layer.prepare_backward(rows, rows, c->B, c->T, c->stream); }
    });
}

// library.cu -- attention with any bias of --pos, and rope, as a C library: build/libcable.so on a CPU in float32,
// build/libcablecu.so in CUDA in bf16, build/libcablecu_fp32.so in float32. dev/torch/cable_torch.py calls it.
//
// A row (OC) belongs to one token: q, k and v, C = NH * HS each, then the encoding's columns, NH each (cable: z and u),
// then padding. The caller owns all memory, on the device of the library: cable_describe says how much. Every
// function returns null, or what is wrong, a text of this thread that its next call overwrites. Several threads may
// call at the same time.
#include "../../llmc/attention/choose.cuh"
#include "../../llmc/position/layer.cuh"

struct CableCall {
    const char* position;                   // as --pos has it: "cable", "t5_clip:K=64"
    int B, T, NH, HS, OC;
    int causal;                             // or 0: bidirectional
    int T_train;                            // the default K of t5_clip follows from it
    int threads;                            // of OpenMP, for this call
    Stream stream;                          // null on a CPU
};
// In float32 each, but for the columns
struct CableSizes {
    size_t columns;                         // of a row, after q, k and v
    size_t tables;                          // the learned tables together, each at its offset
    size_t state;                           // zeros before the forward, which leaves there what the backward reads
    size_t forward, backward;               // scratch of each pass
};

namespace {

// What an encoding is bound to, as a trainer's model has it (engine/model.cuh): one layer with one encoding
struct Bound {
    PositionConfig position;
    PositionTables declared;
    TensorTable params, acts;
    LayerPosition layer;
    int hooks = 0;

    explicit Bound(const CableCall& c) {
        const struct { const char* name; int value; } sizes[] = {
            {"B", c.B}, {"T", c.T}, {"heads", c.NH}, {"the head size", c.HS}, {"T_train", c.T_train}};
        for (const auto& s : sizes) { check(s.value > 0, "%s: expected at least 1, got %d", s.name, s.value); }
        check((int64_t)c.NH * c.HS <= 1 << 20 && c.T <= 1 << 28, "expected at most 2^20 channels and 2^28 tokens");
        position = parse_position(c.position, c.T_train);
        check(position.parts.size() == 1, "position %s: expected one encoding", c.position);
        hooks = encoding_traits(position.parts[0]).hooks;
        check((hooks & (CHANGES_EMBEDDINGS | SCALES_Q)) == 0, "position %s: expected a bias, rope or none", c.position);
        PositionShape shape = {1, c.NH, c.HS, c.B, c.T, c.causal != 0, false};
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
    }
    Bound(const Bound&) = delete;           // the view points to its parts
    const PositionView& bind(const float* tables, float* dtables, float* state) {
        PositionView& v = layer.views[0];
        v.master = const_cast<float*>(tables);              // read only: the update is the caller's
        v.grads = dtables;
        v.act_data = state;
        return v;
    }
};

// Runs f, its errors returned and not thrown
template <class F> const char* guarded(const CableCall& c, F f) {
    static thread_local std::string message;
    const char* result = nullptr;
#if defined(_OPENMP) && !defined(CUDA_BUILD)
    const int before = omp_get_max_threads();
    omp_set_num_threads(imax(c.threads, 1));
    SharedBuffer::key();
#endif
    try {
        f();
    } catch (const std::bad_alloc&) {
        result = "no memory is left";
    } catch (const std::exception& e) {
        message = e.what();
        result = message.c_str();
    }
#if defined(_OPENMP) && !defined(CUDA_BUILD)
    omp_set_num_threads(before);
#endif
    return result;
}

// The rows of a call: wide enough, and for a GPU's loads each on a multiple of 16 bytes
void check_rows(const Bound& bound, const CableCall& c, const void* rows) {
    check(c.OC >= bound.layer.columns(), "rows: expected at least %d columns, got %d", bound.layer.columns(), c.OC);
    const bool aligned = (size_t)rows % 16 == 0 && c.OC % PACK == 0;
    check(!ON_GPU || aligned, "rows: expected each to begin on a multiple of 16 bytes, got %d columns", c.OC);
    if (ON_GPU) { check_head_size(bound.position, c.HS, true, device_shared_available()); }
}

}   // namespace

#define API extern "C" __attribute__((visibility("default")))

// text (room): a line for each learned table, "name offset rows columns", 0 columns for a vector
API const char* cable_describe(const CableCall* c, CableSizes* sizes, char* text, size_t room) {
    return guarded(*c, [&] {
        Bound bound(*c);
        const size_t state = round_up(bound.acts.total, (size_t)64);
        *sizes = {(size_t)bound.declared.extra_columns, bound.params.total, state,
                  attention_forward_scratch(c->B, c->T, c->NH),
                  attention_backward_scratch(bound.position, c->B, c->T, c->NH, c->HS)};
        std::string lines;
        for (size_t i = 0; i < bound.params.specs.size(); i++) {
            const TensorSpec& s = bound.params.specs[i];
            lines += strprintf("%s %zu %zu %zu\n", s.name.c_str(), bound.params.offset(i), s.rows, s.cols);
        }
        check(lines.size() < room, "text: expected room for %zu bytes, got %zu", lines.size() + 1, room);
        memcpy(text, lines.c_str(), lines.size() + 1);
    });
}

// out (B,T,C), lse (B,NH,T) from rows (B,T,OC). state: zeros
API const char* cable_forward(const CableCall* c, floatX* out, float* lse, float* state, float* scratch, floatX* rows,
                              const float* tables) {
    return guarded(*c, [&] {
        Bound bound(*c);
        check_rows(bound, *c, rows);
        check((bound.hooks & TURNS_QK) == 0, "position %s: expected a bias or none", c->position);
        const PositionView& v = bound.bind(tables, nullptr, state);
        bound.layer.prepare_forward(rows, c->B, c->T, 0, c->stream);       // a bias only reads the rows
        const auto forward = c->causal ? attention_forward<true> : attention_forward<false>;
        forward(out, lse, scratch, rows, v, c->B, c->T, 0, c->stream);
    });
}

// drows (B,T,OC) but for its padding, and adds to dtables. state: the forward's, which is overwritten
API const char* cable_backward(const CableCall* c, floatX* drows, float* dtables, float* state, float* scratch,
                               const floatX* dout, const floatX* rows, const floatX* out, const float* lse,
                               const float* tables) {
    return guarded(*c, [&] {
        Bound bound(*c);
        check_rows(bound, *c, rows);
        check_rows(bound, *c, drows);
        const PositionView& v = bound.bind(tables, dtables, state);
        const auto backward = c->causal ? attention_backward<true> : attention_backward<false>;
        backward(drows, scratch, dout, rows, out, lse, v, c->B, c->T, c->stream);
        bound.layer.prepare_backward(drows, rows, c->B, c->T, c->stream);
    });
}

// Turns q and k of rows (B,T,OC) in place, which may end after k; back: the gradient's
API const char* cable_turn(const CableCall* c, floatX* rows, float* state, int back) {
    return guarded(*c, [&] {
        Bound bound(*c);
        check(bound.hooks == TURNS_QK && bound.declared.extra_columns == 0, "position %s: expected rope, turned by "
              "the token's number", c->position);
        bound.bind(nullptr, nullptr, state);
        bound.layer.prepare_forward(rows, back ? 0 : c->B, c->T, 0, c->stream);        // of no sequence: only the table
        if (back) { bound.layer.prepare_backward(rows, rows, c->B, c->T, c->stream); }
    });
}

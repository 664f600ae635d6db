// ranks/verify.h -- --verify_every K: finds bits that a memory or a processor has flipped, before they are saved.
//
// A hash of every weight and moment is kept after each update, and must be the same before the next update and before a
// save: a bit that flips while they are stored is always found. The gradient of every Kth step is computed twice and
// must have the same bits both times, as every sum has a fixed order. An error that both have in common is not found,
// nor is one in the update itself.
#pragma once

#include "gradients.cuh"
#include "replicas.cuh"

class Verifier {
public:
    int64_t every = 0;                              // K; 0: nothing is verified

    // A collective: the gradient of step `number`, from 1, that step() computes. Dies if a second one is different.
    template <class F> StepGradient gradient(Parameters& p, int64_t number, F step) {
        if (every == 0) { return step(); }
        if (state.empty()) { remember(p); }
        StepGradient g = step();
        if (number % every != 0) { return g; }
        std::vector<uint64_t> first;
        {
            const Timed timed(*this);
            first = hashes_of(gradient_pieces(p, g.grads), p.stream);
            g = step();
        }
        const auto again = gradient_pieces(p, g.grads);
        check_state(p, number - 1);                 // a weight that has changed explains a different gradient
        compare(p, again, first, strprintf("step %lld was computed twice, with two results", (long long)number));
        repeated++;
        return g;
    }
    // after an update
    void remember(Parameters& p) {
        if (every == 0) { return; }
        const Timed timed(*this);
        state = hashes_of(state_pieces(p), p.stream);
    }
    // Before the next update, and before a save: dies if a weight or a moment has changed since remember(). steps: done
    void check_state(Parameters& p, int64_t steps) {
        if (state.empty()) { return; }
        compare(p, state_pieces(p), state,
                strprintf("memory has changed since the end of step %lld", (long long)steps));
    }

    // what it has found and cost; "" if nothing was verified
    std::string report() const {
        if (state.empty()) { return ""; }
        return strprintf("verified: %lld steps computed twice, and every weight and moment after each update: no "
                         "flipped bit; this took %.1f %% of the time\n", (long long)repeated,
                         100 * seconds / (wall_seconds() - created));
    }

private:
    struct Timed {
        explicit Timed(Verifier& v) : v(v) {}
        ~Timed() { v.seconds += wall_seconds() - begun; }
        Verifier& v;
        const double begun = wall_seconds();
    };
    // part of a tensor
    struct Piece {
        const char* array;
        size_t block;
        TensorPiece of;
        HashedFloats floats;
    };
    std::vector<uint64_t> state;                    // the hashes of state_pieces()
    int64_t repeated = 0;                           // steps
    double seconds = 0;                             // that verifying took
    const double created = wall_seconds();

    template <class T>
    static void add(std::vector<Piece>& all, const char* array, size_t block, const TensorPiece& of, const T* data) {
        all.push_back({array, block, of, {(const float*)data, ceil_div(of.size * sizeof(T), sizeof(float))}});
    }
    // every weight, and the moments and float32 weights of this rank
    static std::vector<Piece> state_pieces(Parameters& p) {
        settle_weights(p);
        std::vector<Piece> all;
        for (size_t b = 0; b < p.owned.size(); b++) {
            for (const TensorPiece& of : p.table.pieces(p.table.blocks[b])) {
                add(all, "weights", b, of, p.weights + of.at);
            }
            for (const TensorPiece& of : p.table.pieces(p.owned[b])) {
                if ((void*)p.weights != (void*)p.master) {
                    add(all, "float32 weights", b, of, p.master + p.master_at(b, of.at));
                }
                add(all, "first moments", b, of, p.m + p.moment_at(b, of.at));
                add(all, "second moments", b, of, p.v + p.moment_at(b, of.at));
            }
        }
        return all;
    }
    static std::vector<Piece> gradient_pieces(const Parameters& p, const float* grads) {
        std::vector<Piece> all;
        for (size_t b = 0; b < p.owned.size(); b++) {
            for (const TensorPiece& of : p.table.pieces(p.owned[b])) { add(all, "gradient", b, of, grads + of.at); }
        }
        return all;
    }
    static std::vector<uint64_t> hashes_of(const std::vector<Piece>& pieces, Stream stream) {
        std::vector<HashedFloats> floats;
        for (const Piece& piece : pieces) { floats.push_back(piece.floats); }
        return replica_hashes(floats, stream);
    }
    void compare(const Parameters& p, const std::vector<Piece>& pieces, const std::vector<uint64_t>& before,
                 const std::string& what) {
        const Timed timed(*this);
        const std::vector<uint64_t> now = hashes_of(pieces, p.stream);
        const size_t i = (size_t)(std::mismatch(now.begin(), now.end(), before.begin()).first - now.begin());
        if (i == now.size()) { return; }
        const Piece& piece = pieces[i];
        const std::string layer = piece.block < 2 ? "" : strprintf(" of layer %zu", piece.block - 2);
        die(EXIT_DEVICE, "%s, first in the %s of %s%s: has a memory or a processor flipped a bit? Nothing was saved "
            "since. Continue from the last checkpoint with --resume 1, on another machine if this occurs again",
            what.c_str(), piece.array, p.table.specs[piece.of.tensor].name.c_str(), layer.c_str());
    }
};

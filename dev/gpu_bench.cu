// gpu_bench.cu -- times the tensor-core attention with each form of bias, and a bf16 product by cuBLASLt for
// comparison. One JSON object per line.
//
//   nvcc -std=c++17 -O3 -arch=sm_90a -DCAUSAL=1 -I. dev/gpu_bench.cu -lcublasLt -o gpu_bench  (CAUSAL=0: bidirectional)
//
// Three sets of normal random inputs take turns. After 10 repetitions to warm up, the median of 50 replays of a CUDA
// graph that repeats the kernel until it lasts a millisecond. FLOPs: forward 4 B NH T^2 HS (half of it when causal),
// backward 2.5 times that. All encodings of a shape are measured one after the other, so that a ratio to "none"
// compares neighbours in time.
#include <algorithm>
#include <string>
#include <vector>

#include "llmc/attention/flash/forward.cuh"
#include "llmc/attention/flash/backward.cuh"
#include "llmc/matmul.cuh"
#include "llmc/position/toeplitz.cuh"

constexpr int SETS = 3;
constexpr int WARM_UP = 10;
constexpr int REPLAYS = 50;
constexpr bool causal = CAUSAL;
const char* const direction_text = causal ? "causal" : "full";

// ----------------------------------------------------------------------------------------------------------
// data

__device__ inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
// normal draws; columns >= first are scaled, for the extra columns of qkv
__global__ void normal_kernel(bf16* x, size_t n, int columns, int first, float scale, uint32_t seed) {
    const GridSpan s = grid_span(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        const uint32_t a = mixed((uint32_t)i * 2 + 1 + seed * 0x9e3779b9u);
        const uint32_t b = mixed(a + 0x85ebca6bu + (uint32_t)(i >> 31));
        const float u = ((float)(a >> 8) + 0.5f) / 16777216.0f;
        const float v = (float)(b >> 8) / 16777216.0f;
        const float normal = sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
        x[i] = (bf16)((int)(i % columns) >= first ? normal * scale : normal);
    }
}

template <class X> struct Buffer {
    X* p = nullptr;
    size_t n = 0;
    Buffer() {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { device_free(p); }
    X* get(size_t count) {
        if (count > n) { device_free(p); p = nullptr; p = (X*)device_malloc(count * sizeof(X)); n = count; }
        return p;
    }
};

struct Shape { int tokens, T, C, HS; };
struct Buffers {
    Buffer<bf16> qkv[SETS], out[SETS], dout[SETS], dqkv;
    Buffer<float> lse[SETS], S_offset[SETS], g[SETS], slopes, table, dS, dg, dtable, scratch, key_norm;
    Buffer<double> S_origin[SETS];
    Buffer<FlashSpan> span[SETS];
};

// z and u of CABLE are the last columns of qkv: ReLU(0.5 N) softplus(N) is about 0.16 nat a token
void prepare(Buffers& b, FlashArgs (&args)[SETS], const Shape& s, Stream stream) {
    const int B = s.tokens / s.T;
    const int NH = s.C / s.HS;
    const int OC = round_up(3 * s.C + 2 * NH, 64);          // a row begins on a cache line, as the trainers' do
    const int entries = 2 * s.T + 256;
    const size_t n = (size_t)s.tokens * OC;
    const size_t m = (size_t)s.tokens * s.C;
    const size_t rows = (size_t)s.tokens * NH;
    const size_t BNH = (size_t)B * NH;
    std::vector<float> table((size_t)NH * entries);
    for (size_t i = 0; i < table.size(); i++) { table[i] = -0.01f * (float)(i % 97); }
    copy_to_device(b.table.get(table.size()), table.data(), table.size() * sizeof(float), stream);
    launch(alibi_slopes_kernel, Grid(1, 32, 0, stream), b.slopes.get((size_t)NH), NH, false, 1.0f);
    for (int k = 0; k < SETS; k++) {
        FlashArgs& p = args[k];
        p = FlashArgs{};
        bf16 *qkv = b.qkv[k].get(n), *dout = b.dout[k].get(m);
        launch(normal_kernel, Grid::over(n, stream), qkv, n, OC, 3 * s.C, 0.5f, (uint32_t)(2 * k + 1));
        launch(normal_kernel, Grid::over(m, stream), dout, m, s.C, s.C, 1.0f, (uint32_t)(2 * k + 2));
        float *S_offset = b.S_offset[k].get(rows), *g = b.g[k].get(rows);
        double* S_origin = b.S_origin[k].get(BNH * ceil_div(s.T, CABLE_CHUNK));
        cable_forward(S_offset, S_origin, g, qkv, {s.T, NH, s.HS, OC}, B, s.T, 0, CableStep::Relu, true, stream);
        p.qkv = qkv, p.out = b.out[k].get(m), p.lse = b.lse[k].get(rows), p.dout = dout, p.dqkv = b.dqkv.get(n);
        p.B = B, p.T = p.stride = s.T, p.NH = NH, p.HS = s.HS, p.OC = OC, p.scale = 1.0f / sqrtf((float)s.HS);
        p.slopes = b.slopes.p;
        p.S_offset = S_offset, p.S_origin = S_origin, p.g = g;
        p.table = b.table.p, p.table_entries = entries, p.table_zero = s.T + 128;
        p.dS = b.dS.get(rows), p.dg = b.dg.get(rows), p.dtable = b.dtable.get(BNH * entries);
    }
}

// ----------------------------------------------------------------------------------------------------------
// time

struct Timer {
    Stream stream;
    cudaEvent_t from, to;
    explicit Timer(Stream stream) : stream(stream) {
        CUDA_CHECK(cudaEventCreate(&from));
        CUDA_CHECK(cudaEventCreate(&to));
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;
    ~Timer() { cudaEventDestroy(from); cudaEventDestroy(to); }

    template <class F> float milliseconds(F f) {
        CUDA_CHECK(cudaEventRecord(from, stream));
        f();
        CUDA_CHECK(cudaEventRecord(to, stream));
        CUDA_CHECK(cudaEventSynchronize(to));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
        return ms;
    }
    // median milliseconds of f(set)
    template <class F> double median(F f) {
        for (int r = 0; r < WARM_UP; r++) { f(r % SETS); }
        const float once = milliseconds([&] { for (int r = 0; r < SETS; r++) { f(r); } }) / SETS;
        const int repetitions = SETS * std::clamp((int)(1.0f / (SETS * once)) + 1, 1, 40);
        cudaGraph_t graph;
        cudaGraphExec_t run;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int r = 0; r < repetitions; r++) { f(r % SETS); }
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&run, graph, 0));
        std::vector<float> ms;
        for (int r = 0; r < REPLAYS; r++) {
            const float x = milliseconds([&] { CUDA_CHECK(cudaGraphLaunch(run, stream)); });
            if (r > 0) { ms.push_back(x / repetitions); }      // the first replay uploads the graph
        }
        CUDA_CHECK(cudaGraphExecDestroy(run));
        CUDA_CHECK(cudaGraphDestroy(graph));
        std::sort(ms.begin(), ms.end());
        return ms[ms.size() / 2];
    }
};

// TFLOP/s of the trainer's bf16 product of 8192^3, which is cuBLASLt's
double matmul_tflops(Timer& timer) {
    constexpr size_t N = 8192;
    Buffer<bf16> inputs[SETS], out;
    for (int k = 0; k < SETS; k++) {
        launch(normal_kernel, Grid::over(2 * N * N, timer.stream), inputs[k].get(2 * N * N), 2 * N * N, 1, 1, 1.0f,
               (uint32_t)(77 + k));
    }
    out.get(N * N);
    const double ms = timer.median([&](int k) {
        const bf16* x = inputs[k].p;
        matmul_forward(out.p, view(x, N, N), view(x + N * N, N, N), nullptr, nullptr, timer.stream);
    });
    return 2.0 * N * N * N / ms * 1e-9;
}

// ----------------------------------------------------------------------------------------------------------
// one encoding at one shape

struct Bench {
    Timer& timer;
    Buffers& buffers;
    FlashArgs (&args)[SETS];
    Shape shape;
    double product;                 // TFLOP/s of the reference product

    void print(const char* pass, const char* pos, double ms, double live) const {
        const double products = std::string(pass) == "forward" ? 4.0 : 10.0;        // FLOPs per pair and channel
        const double work = products * shape.tokens * shape.T * shape.C * (causal ? 0.5 : 1.0);
        const double tflops = work / ms * 1e-9;
        printf("{\"key\": \"%s %s d%d T%d tokens%d C%d %s\", \"ms\": %.5f, \"tflops\": %.2f, \"share\": %.4f, "
               "\"live\": %.4f}\n", pass, direction_text, shape.HS, shape.T, shape.tokens, shape.C, pos, ms, tflops,
               tflops / product, live);
        fflush(stdout);
    }

    template <FlashBias Kind> void run(const char* pos, bool skipping = false) const {
        const size_t tiles = (size_t)args[0].B * args[0].NH * ceil_div(shape.T, FLASH_TILE);
        double live = 1.0;
        if constexpr (Kind == FlashBias::Distance) {
            for (int k = 0; skipping && k < SETS; k++) {
                FlashSpan* span = buffers.span[k].get(tiles);
                flash_skip<causal, Kind>(span, buffers.key_norm.get(2 * tiles), args[k], flash_skip_tau(shape.T),
                                      timer.stream);
                args[k].span = span;
                std::vector<FlashSpan> host(tiles);
                copy_to_host(host.data(), span, tiles * sizeof(FlashSpan), timer.stream);
                live = flash_live_share(host.data(), args[0].B * args[0].NH, shape.T, causal);
            }
        }
        // the time of a forward that skips tiles includes the bounds that decide which
        print("forward", pos, timer.median([&](int k) {
            if constexpr (Kind == FlashBias::Distance) {
                if (skipping) {
                    flash_skip<causal, Kind>(buffers.span[k].p, buffers.key_norm.p, args[k], flash_skip_tau(shape.T),
                                          timer.stream);
                }
            }
            flash_forward<causal, Kind>(args[k], timer.stream);
        }), live);
        float* scratch = buffers.scratch.get(flash_backward_scratch(Kind, args[0].B, shape.T, args[0].NH));
        print("backward", pos,
              timer.median([&](int k) { flash_backward<causal, Kind>(args[k], scratch, timer.stream); }), live);
        for (FlashArgs& p : args) { p.span = nullptr; }
    }
};

std::vector<Shape> shapes() {
    if (!causal) { return {{16384, 512, 768, 64}, {16384, 4096, 768, 64}, {16384, 4096, 2048, 128}}; }
    return {{16384, 512, 768, 64},     {16384, 1024, 768, 64},   {16384, 4096, 768, 64},
            {16384, 16384, 768, 64},   {16384, 1024, 2048, 128}, {16384, 4096, 2048, 128},
            {16384, 16384, 2048, 128}, {65536, 1024, 1024, 64},  {65536, 4096, 1024, 64}};
}

int main() {
    try {
        Stream stream;
        CUDA_CHECK(cudaStreamCreate(&stream));
        Timer timer(stream);
        const double product = matmul_tflops(timer);
        printf("{\"key\": \"matmul %s\", \"tflops\": %.2f}\n", direction_text, product);
        fflush(stdout);
        Buffers buffers;
        for (const Shape& shape : shapes()) {
            FlashArgs args[SETS];
            prepare(buffers, args, shape, stream);
            const Bench bench = {timer, buffers, args, shape, product};
            bench.run<FlashBias::None>("none");
            bench.run<FlashBias::Linear>("alibi");
            bench.run<FlashBias::Distance>("cable");
            if (shape.T >= 2048) { bench.run<FlashBias::Distance>("cable, skipping", true); }
            bench.run<FlashBias::LogDistance>("kcable");
            bench.run<FlashBias::Toeplitz>("t5");
        }
        CUDA_CHECK(cudaStreamSynchronize(stream));
    } catch (const std::exception& e) {
        fprintf(stderr, "gpu_bench: %s\n", e.what());
        return 1;
    }
    return 0;
}

// test_schedule.cu -- the learning rate at the corners of each schedule, against values worked out by hand.
#include "test/catch.h"
#include "llmc/engine/schedule.h"

namespace {
// peak 1, so that the value is the fraction
double rate(const char* schedule, int64_t warmup, int64_t steps, double final_lr, int64_t step) {
    return learning_rate(schedule, 1.0, warmup, steps, final_lr, step);
}
} // namespace

TEST_CASE("schedule: warm-up is lr * (step + 1) / warmup in all of them", "[schedule]") {
    for (const char* name : {"cosine", "linear", "constant", "wsd"}) {
        INFO(name);
        CHECK(rate(name, 4, 100, 0.1, 0) == Approx(0.25));
        CHECK(rate(name, 4, 100, 0.1, 2) == Approx(0.75));
        CHECK(rate(name, 4, 100, 0.1, 3) == Approx(1.0));
        CHECK(rate(name, 4, 100, 0.1, 4) == Approx(1.0)); // the first step after it is at the peak
        CHECK(rate(name, 0, 100, 0.1, 0) == Approx(1.0));
    }
}

TEST_CASE("schedule: decay", "[schedule]") {
    // warm-up 10, steps 110: a quarter of the decay is done at step 35, half at 60
    CHECK(rate("cosine", 10, 110, 0.1, 60) == Approx(0.55));
    CHECK(rate("cosine", 10, 110, 0.1, 35) == Approx(0.1 + 0.9 * 0.85355339059327373));
    CHECK(rate("cosine", 10, 110, 0.1, 110) == Approx(0.1));
    CHECK(rate("linear", 10, 110, 0.1, 35) == Approx(0.775));
    CHECK(rate("linear", 10, 110, 0.0, 110) == Approx(0.0).margin(1e-15));
    CHECK(rate("constant", 10, 110, 0.1, 109) == 1.0);
    // wsd: level until step 80 of 100, then 1 - sqrt; a quarter of the last 20 steps is step 85
    CHECK(rate("wsd", 10, 100, 0.0, 79) == 1.0);
    CHECK(rate("wsd", 10, 100, 0.0, 80) == 1.0);
    CHECK(rate("wsd", 10, 100, 0.0, 85) == Approx(0.5));
    CHECK(rate("wsd", 10, 100, 0.2, 85) == Approx(0.6));
    CHECK(rate("wsd", 10, 100, 0.2, 100) == Approx(0.2));
    CHECK(rate("wsd", 90, 100, 0.0, 90) == 1.0);                // and from the end of a longer warm-up: no drop
    CHECK(rate("wsd", 90, 100, 0.0, 95) == Approx(1 - std::sqrt(0.5)));
    // the paper's recipe
    CHECK(learning_rate("cosine", 6e-4, 750, 19073, 0.1, 749) == Approx(6e-4));
    CHECK(learning_rate("cosine", 6e-4, 750, 19073, 0.1, 19073) == Approx(6e-5));
}

TEST_CASE("schedule: a fraction of 1, the default, never decays", "[schedule]") {
    for (const char* name : {"cosine", "linear", "constant", "wsd"}) {
        for (int step : {0, 17, 50, 99, 100}) { CHECK(rate(name, 0, 100, 1.0, step) == 1.0); }
    }
}

TEST_CASE("schedule: odd shapes stay finite and between the end and the peak", "[schedule]") {
    for (const char* name : {"cosine", "linear", "constant", "wsd"}) {
        for (int64_t warmup : {0, 1, 5, 50}) {
            for (int64_t steps : {0, 1, 2, 5}) {
                for (int64_t step = 0; step <= steps + 60; step++) {
                    const double r = rate(name, warmup, steps, 0.1, step);
                    INFO(name << " warmup " << warmup << " steps " << steps << " step " << step);
                    CHECK((r > 0 && r <= 1)); // false for a NaN
                    if (step > steps && step >= warmup && std::string(name) != "constant") { CHECK(r == Approx(0.1)); }
                }
            }
        }
    }
}

TEST_CASE("schedule: an unknown name is refused", "[schedule]") {
    const char* said = "--schedule: expected one of cosine|linear|constant|wsd, got 'cosin'";
    CHECK(throws_with([] { rate("cosin", 0, 10, 1, 0); }, said) == EXIT_BAD_INPUT);
}

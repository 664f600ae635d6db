// test_guard.cu -- updates that must not be applied: non-finite values, spikes, and what must not be taken for one.
#include "test/catch.h"
#include "llmc/engine/schedule.h"
#include "llmc/base/math.h"

namespace {
const double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();
const double INFINITE = std::numeric_limits<double>::infinity();

double noisy_loss(int i) { return 3.0 + 0.05 * normal01(1, 1, (uint64_t)i); }
double noisy_norm(int i) { return 0.5 + 0.02 * normal01(1, 2, (uint64_t)i); }

Guard full_guard(double loss_limit, double norm_limit) {
    Guard g;
    g.skip_loss_z = loss_limit;
    g.skip_norm_z = norm_limit;
    for (int i = 0; i < GUARD_WINDOW; i++) { REQUIRE(!g.judge(noisy_loss(i), noisy_norm(i)).skip); }
    return g;
}
} // namespace

TEST_CASE("guard: isfinite means what it says in this binary", "[guard]") { CHECK(isfinite_works()); }

TEST_CASE("guard: the z-score is the distance from the window before the value, in its deviations", "[guard]") {
    Guard g;
    std::vector<double> seen;
    for (int i = 0; i < 300; i++) {
        const double x = noisy_loss(i);
        const Verdict v = g.judge(x, 1.0);
        INFO("step " << i);
        if (i < GUARD_WINDOW) {
            CHECK(std::isnan(v.loss_z));
        } else {
            long double sum = 0, squares = 0;
            for (int k = i - GUARD_WINDOW; k < i; k++) {
                const long double y = seen[(size_t)k];
                sum += y;
                squares += y * y;
            }
            const long double mean = sum / GUARD_WINDOW;
            const long double deviation = sqrtl(squares / GUARD_WINDOW - mean * mean);
            CHECK(v.loss_z == Approx((double)((x - mean) / deviation)).epsilon(1e-9));
            CHECK(v.norm_z == 0.0);
        }
        seen.push_back(x);
    }
}

TEST_CASE("guard: a window that is constant up to rounding raises no alarm", "[guard]") {
    Guard g;
    g.skip_loss_z = 3;
    for (int i = 0; i < 200; i++) { CHECK(!g.judge(i < 190 ? 0.1f : std::nextafter(0.1f, 1.0f), 1.0).skip); }
    CHECK(g.judge(0.2, 1.0).skip);
}

TEST_CASE("guard: non-finite steps are skipped, say why, and never enter the window", "[guard]") {
    for (double bad : {NOT_A_NUMBER, INFINITE, -INFINITE}) {
        for (bool in_loss : {true, false}) {
            Guard g = full_guard(0, 0); // spikes off: this guard is always on
            const Json before = g.to_json();
            const Verdict v = in_loss ? g.judge(bad, 0.5) : g.judge(3.0, bad);
            CHECK(v.skip);
            CHECK(v.reason.find(in_loss ? "non-finite loss" : "non-finite grad norm") == 0);
            CHECK(g.to_json()["loss"] == before["loss"]);
            CHECK(g.to_json()["norm"] == before["norm"]);
            CHECK(g.non_finite == 1);
            CHECK(!g.judge(3.0, 0.5).skip);
        }
    }
}

TEST_CASE("guard: MAX_BAD_STEPS skipped updates in a row are a divergence, one good one is not", "[guard]") {
    Guard g;
    for (int i = 0; i < MAX_BAD_STEPS - 1; i++) { g.judge(NOT_A_NUMBER, 1.0); }
    CHECK(!g.diverged());
    g.judge(3.0, 1.0);
    for (int i = 0; i < MAX_BAD_STEPS - 1; i++) { g.judge(3.0, INFINITE); }
    CHECK(!g.diverged());
    g.judge(3.0, INFINITE);
    CHECK(g.diverged());
    CHECK(g.non_finite == 2 * MAX_BAD_STEPS - 1);
}

TEST_CASE("guard: a spike is skipped when asked for, leaves the window alone, and is no spike downwards", "[guard]") {
    Guard off = full_guard(0, 0), on = full_guard(4, 4);
    CHECK(!off.judge(300.0, 0.5).skip);
    const Json before = on.to_json();
    const Verdict loss = on.judge(300.0, 0.5);
    CHECK(loss.skip);
    CHECK(loss.reason.find("loss 300") != std::string::npos);
    CHECK(loss.reason.find("--skip_loss_z 4") != std::string::npos);
    const Verdict norm = on.judge(3.0, 5000.0);
    CHECK(norm.skip);
    CHECK(norm.reason.find("--skip_norm_z 4") != std::string::npos);
    CHECK(norm.norm_z > 1000); // far beyond sqrt(127), which it could not exceed if the spike were in its own window
    CHECK(on.to_json()["loss"] == before["loss"]);
    CHECK(on.to_json()["norm"] == before["norm"]);
    CHECK(on.spikes == 2);
    CHECK(!on.judge(0.1, 0.01).skip);
}

TEST_CASE("guard: at z 6, of 10,000 steps of a falling, noisy loss only the spike is skipped", "[guard]") {
    Guard g;
    g.skip_loss_z = g.skip_norm_z = 6;
    int skipped = 0;
    for (int i = 0; i < 10000; i++) {
        const double loss = 3 + 7 * std::exp(-i / 300.0) + 0.05 * normal01(2, 1, (uint64_t)i);
        const bool spike = i == 5000;
        const bool skip = g.judge(spike ? loss * 100 : loss, noisy_norm(i)).skip;
        if (spike) { CHECK(skip); }
        skipped += skip;
    }
    CHECK(skipped == 1);
}

TEST_CASE("guard: a level that has moved is accepted before it ends the run", "[guard]") {
    static_assert(LEVEL_SHIFT_STEPS < MAX_BAD_STEPS, "a level shift would be taken for a divergence");
    for (const double loss_shift : {2.0, 0.0}) {
        const double norm_shift = 2.0 - loss_shift;
        INFO("loss + " << loss_shift << ", norm + " << norm_shift);
        Guard g = full_guard(4, 4);
        int skipped = 0;
        for (int i = 0; i < 400; i++) {
            skipped += g.judge(noisy_loss(i) + loss_shift, noisy_norm(i) + norm_shift).skip;
            REQUIRE(!g.diverged());
        }
        CHECK(skipped == LEVEL_SHIFT_STEPS - 1);
        CHECK(g.level_shifts == 1);
        // and the guard is awake again at the new level
        CHECK(g.judge(30.0, 0.5 + norm_shift).skip);
        CHECK(g.judge(3.0 + loss_shift, 30.0).skip);
    }
}

TEST_CASE("guard: state survives JSON bit for bit, at every phase of the window", "[guard]") {
    for (int before : {0, 1, 127, 128, 129, 300}) {
        Guard a, b;
        a.skip_loss_z = b.skip_loss_z = a.skip_norm_z = b.skip_norm_z = 3;
        for (int i = 0; i < before; i++) { a.judge(noisy_loss(i), noisy_norm(i)); }
        a.judge(NOT_A_NUMBER, 1.0);
        a.judge(100.0, 1.0);
        const std::string text = json_text(a.to_json());
        b.from_json(parse_json(text, "state.json"), "state.json");
        REQUIRE(a.loss.values.size() == b.loss.values.size());
        if (!a.loss.values.empty()) {
            CHECK(memcmp(a.loss.values.data(), b.loss.values.data(), a.loss.values.size() * sizeof(double)) == 0);
        }
        CHECK(json_text(b.to_json()) == text);
        for (int i = 0; i < 400; i++) { // with more spikes, so that the counters matter as well
            const double loss = i % 50 < 10 ? 50.0 : noisy_loss(1000 + i);
            const Verdict va = a.judge(loss, noisy_norm(i)), vb = b.judge(loss, noisy_norm(i));
            REQUIRE(va.skip == vb.skip);
            REQUIRE(memcmp(&va.loss_z, &vb.loss_z, sizeof(double)) == 0);
        }
        CHECK(json_text(a.to_json()) == json_text(b.to_json()));
    }
}

TEST_CASE("guard: damaged state is refused by name", "[guard]") {
    const Json good = full_guard(0, 0).to_json();
    Guard g;
    Json j = good;
    j.erase("norm");
    CHECK(throws_with([&] { g.from_json(j, "s.json"); }, "s.json: the key \"norm\" is missing") == EXIT_BAD_INPUT);
    j = good;
    j["loss"]["values"].push_back(1.0);
    throws_with([&] { g.from_json(j, "g"); }, "expected an array of at most 128, got ");
    j = good;
    j["loss"]["values"][5] = nullptr; // what a NaN would have been written as
    throws_with([&] { g.from_json(j, "g"); }, "expected numbers, got null");
    j = good;
    j["loss"]["next"] = 128;
    throws_with([&] { g.from_json(j, "g"); }, "\"next\": expected an integer from 0 to 127, got 128");
    j = good;
    j["norm"]["values"] = Json::array();
    j["norm"]["next"] = 1;
    throws_with([&] { g.from_json(j, "g"); }, "\"next\": expected an integer from 0 to 0, got 1");
    j = good;
    j["bad_in_a_row"] = -1;
    throws_with([&] { g.from_json(j, "g"); }, "bad_in_a_row");
}

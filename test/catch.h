// catch.h -- Catch2 version 2 (Debian 12, Ubuntu 22.04) or 3 (Ubuntu 24.04), whichever is installed.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include "llmc/base/common.h"

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Runs f, which must throw an Error whose message contains `text`; returns its exit code.
template <class F> int throws_with(F f, const std::string& text) {
    try {
        f();
    } catch (const Error& e) {
        INFO("message: " << e.what());
        INFO("expected: " << text);
        CHECK(contains(e.what(), text));
        return e.code;
    }
    FAIL("no error; expected one about '" << text << "'");
    return 0;
}

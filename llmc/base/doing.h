// base/doing.h -- what the main thread is doing, for the message of an allocation that fails.
#pragma once

#include <exception>

inline const char* doing = "starting";

// Set until the end of a block; after an exception it stays, for the message.
struct Doing {
    const char* before = doing;
    explicit Doing(const char* what) { doing = what; }
    Doing(const Doing&) = delete;
    Doing& operator=(const Doing&) = delete;
    ~Doing() { if (std::uncaught_exceptions() == 0) { doing = before; } }
};

// The main of the tests: with version 2 of Catch2 it is in the header, version 3 links its own. A static variable does
// what a trainer's main begins with.
#include "llmc/base/floats.h"
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
#endif

static const bool denormals_are_zero = (flush_denormals(), true);

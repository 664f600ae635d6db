// The main of the tests: with version 2 of Catch2 it is in the header, version 3 links its own.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
#endif

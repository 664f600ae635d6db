// base/emit.h -- included before the layers whose launchers an object of kernels defines (Makefile: KERNELS). Of the
// headers before it, such an object sees the declarations.
#pragma once

#include "device.h"

#undef KERNELS_ELSEWHERE
#undef LAUNCHER
#define LAUNCHER inline __attribute__((used))
#define KERNELS_HERE                    // defines launchers that are templates, too

// base/emit.h -- included before the layers whose launchers an object of kernels defines (Makefile: KERNELS).
#pragma once

#include "device.h"

#undef LAUNCHER
#define LAUNCHER inline __attribute__((used))
#define KERNELS_HERE                    // defines launchers that are templates, too

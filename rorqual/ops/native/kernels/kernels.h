// All kernels for one instruction set: a file isa_*.c defines ISA(name), its limits and what the compiler may use.
#include <stdint.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "simd.h"
#include "team.h"

#include "attention.h"
#include "cache.h"
#include "elementwise.h"
#include "linear.h"

#include "quantized.h"

// All kernels for one instruction set: a file isa_*.c defines ISA(name), its limits and what the compiler may use.
#include <stdint.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "simd.h"
#include "team.h"

#ifdef USE_AMX
// What _tile_loadconfig reads: rows of each of the eight tiles, and bytes of a row.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64))) tile_config_t;
#endif

#include "attention.h"
#include "cache.h"
#include "elementwise.h"

#include "operand.h"
#include "linear.h"
#include "quantized.h"
#include "integer.h"
#include "product.h"
#include "blocks.h"
#include "embedding.h"
#include "pack.h"
#include "decoder_blocks.h"
#include "moe.h"
#include "sample.h"
#include "narrow.h"

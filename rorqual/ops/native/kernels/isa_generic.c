// For any processor: the compiler's baseline, which on ARM includes NEON.
#define ISA(name) rorqual_##name##_generic
#define BLOCKS 1
#include "kernels.h"

// For any processor: the compiler's baseline, which on ARM includes NEON.
#define ISA(name) rorqual_##name##_generic
#include "kernels.h"

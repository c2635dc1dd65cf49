#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")
#define ISA(name) rorqual_##name##_avx2
#include "kernels.h"
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define ISA(name) rorqual_##name##_avx512
#include "kernels.h"
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma")
#define ISA(name) rorqual_##name##_avx512_bf16
#include "kernels.h"
#endif

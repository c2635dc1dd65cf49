#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma,amx-tile,amx-bf16,amx-int8")
#define ISA(name) rorqual_##name##_amx
#define USE_AMX
#define PREFETCH_TILES 8
#include "kernels.h"

#include <sys/syscall.h>
#include <unistd.h>

// The kernel lets a process use the tile registers only if it asks. Returns 0 when it may.
int rorqual_request_amx(void) { return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18); }
#endif

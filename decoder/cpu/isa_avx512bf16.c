/* The kernels for AVX-512 with dot products of bfloat16, and for matrix tiles, which need them too. */

#include "isa.h"

#ifdef X86_KERNELS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")

#define OP static inline __attribute__((always_inline))
#define BFLOAT16_DOT
#define FN(name) name##_avx512bf16
#define ISA_NAME "avx512-bf16"
#include "simd_avx512.h"
#include "kernels.h"
#include "amx.h"
#define AMX_EMULATED
#include "amx.h"
#endif

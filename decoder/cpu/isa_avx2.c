/* The kernels for AVX2 with fused multiply-adds. */

#include "isa.h"

#ifdef X86_KERNELS
#pragma GCC target("avx2,fma,f16c")

#define OP static inline __attribute__((always_inline))
#define FN(name) name##_avx2
#define ISA_NAME "avx2"
#include "simd_avx2.h"
#include "kernels.h"
#endif

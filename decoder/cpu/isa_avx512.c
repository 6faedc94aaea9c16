/* The kernels for AVX-512 with dot products of codes. */

#include "isa.h"

#ifdef X86_KERNELS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#define OP static inline __attribute__((always_inline))
#define FN(name) name##_avx512
#define ISA_NAME "avx512"
#include "simd_avx512.h"
#include "kernels.h"
#endif

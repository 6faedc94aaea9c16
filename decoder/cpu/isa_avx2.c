/* The kernels for AVX2 with fused multiply-adds. */

#include "isa.h"

#ifdef X86_KERNELS
#pragma GCC target("avx2,fma,f16c")

#define OP static inline __attribute__((always_inline))
#define WIDTH 8
#define FN(name) name##_avx2
#define ISA_NAME "avx2"
#define TILE_ROWS 3 /* 3 x 2 accumulators of two registers: 12 of 16 registers */
#define CODE_ROWS 2
#include "kernels.h"
#endif

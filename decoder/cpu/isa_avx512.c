/* The kernels for AVX-512 with dot products of codes. */

#include "isa.h"

#ifdef X86_KERNELS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#define OP static inline __attribute__((always_inline))
#define WIDTH 16
#define FN(name) name##_avx512
#define ISA_NAME "avx512"
#define TILE_ROWS 6 /* 6 x 2 accumulators hide the latency; more rows were not faster */
#define CODE_ROWS 6 /* 6 x 2 sums of codes, 6 x 2 totals, the scales and mins: 30 registers */
#include "kernels.h"
#endif

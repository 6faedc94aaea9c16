/* The kernels for AVX-512 with dot products of bfloat16, and the kernels for matrix tiles, which need AVX-512 too. */

#include "isa.h"

#ifdef X86_KERNELS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")

#define OP static inline __attribute__((always_inline))
#define BFLOAT16_DOT
#define WIDTH 16
#define FN(name) name##_avx512bf16
#define ISA_NAME "avx512-bf16"
#define TILE_ROWS 6 /* 6 x 2 accumulators hide the latency; more rows were not faster */
#define CODE_ROWS 6 /* 6 x 2 sums of codes, 6 x 2 totals, the scales and mins: 30 registers */
#include "kernels.h"
#include "amx.h"
#define AMX_EMULATED
#include "amx.h"
#endif

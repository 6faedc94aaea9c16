/* The passes for AVX-512. */
#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")
#define WIDTH 16
#define FN(name) name##_avx512
#include "lanes.h"
#endif

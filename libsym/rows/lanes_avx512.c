/* The passes for AVX-512. */
#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,popcnt")
#define LANES_512
#define LANES_NAME(name) name##_avx512
#include "lanes.h"
#endif

/* The passes for AVX2. */
#ifdef __x86_64__
#pragma GCC target("avx2,fma,f16c,popcnt")
#define WIDTH 8
#define FN(name) name##_avx2
#include "lanes.h"
#endif

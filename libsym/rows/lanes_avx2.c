/* The passes for AVX2. */
#ifdef __x86_64__
#pragma GCC target("avx2,popcnt")
#define LANES_256
#define LANES_NAME(name) name##_avx2
#include "lanes.h"
#endif

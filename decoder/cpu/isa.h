/* The kernels in each instruction set that this target can have, best first, and the choice among them. */

#ifndef SYMPHONY_ISA_H
#define SYMPHONY_ISA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "work.h"

#define OP static inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx2,fma")
#define FN(name) name##_avx512
#define ISA_NAME "avx512"
#include "simd_avx512.h"
#include "kernels.h"
#undef FN
#undef ISA_NAME
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define FN(name) name##_avx2
#define ISA_NAME "avx2"
#include "simd_avx2.h"
#include "kernels.h"
#undef FN
#undef ISA_NAME
#pragma GCC pop_options
#endif

#define FN(name) name##_plain
#define ISA_NAME "plain"
#include "simd_plain.h"
#include "kernels.h"
#undef FN
#undef ISA_NAME

/* The kernels of that name, or the best ones for null; null where this machine cannot run them. */
static const struct kernels *isa_choose(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if ((!name || !strcmp(name, "avx512")) && __builtin_cpu_supports("avx512f")) return &kernels_avx512;
    if ((!name || !strcmp(name, "avx2")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &kernels_avx2;
#endif
    return !name || !strcmp(name, "plain") ? &kernels_plain : NULL;
}

#endif

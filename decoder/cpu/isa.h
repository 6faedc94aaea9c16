/* The kernels in each instruction set that this target can have, best first, and the choice among them. */

#ifndef SYMPHONY_ISA_H
#define SYMPHONY_ISA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pack.h"
#include "work.h"

#define OP static inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <immintrin.h>

static int can_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

static int can_avx512bf16(void) { return can_avx512() && __builtin_cpu_supports("avx512bf16"); }
static int can_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
#define BFLOAT16_DOT
#define FN(name) name##_avx512bf16
#define ISA_NAME "avx512-bf16"
#include "simd_avx512.h"
#include "kernels.h"
#include "amx.h"
#define AMX_EMULATED
#include "amx.h"
#undef AMX_EMULATED
#undef FN
#undef ISA_NAME
#undef BFLOAT16_DOT
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#define FN(name) name##_avx512
#define ISA_NAME "avx512"
#include "simd_avx512.h"
#include "kernels.h"
#undef FN
#undef ISA_NAME
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define FN(name) name##_avx2
#define ISA_NAME "avx2"
#include "simd_avx2.h"
#include "kernels.h"
#undef FN
#undef ISA_NAME
#pragma GCC pop_options
#endif

/* Here the compiler decides what to inline: forced, it takes longer over this one than over all others together. */
#undef OP
#define OP static inline
#define FN(name) name##_plain
#define ISA_NAME "plain"
#include "simd_plain.h"
#include "kernels.h"
#undef FN
#undef ISA_NAME

static int can_plain(void) { return 1; }

static const struct isa {
    const struct kernels *kernels;
    int (*can)(void);
    int by_itself; /* chosen when no name is given */
} isas[] = {
#if defined(__x86_64__)
    {&kernels_tiles, can_amx, 1},
    {&kernels_avx512bf16, can_avx512bf16, 1},
    {&kernels_avx512, can_avx512, 1},
    {&kernels_avx2, can_avx2, 1},
    {&kernels_emulated, can_avx512bf16, 0},
#endif
    {&kernels_plain, can_plain, 1},
};

/* The kernels of that name, or the best ones for null; null where this machine cannot run them. */
static const struct kernels *isa_choose(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        const struct isa *isa = &isas[i];
        if (name ? !strcmp(name, isa->kernels->name) : isa->by_itself)
            if (isa->can()) return isa->kernels;
    }
    return NULL;
}

#endif

/* Instruction sets for which kernels are compiled, and a test of whether this machine has a set. */

#ifndef SYM_MACHINE_H
#define SYM_MACHINE_H

#include <sys/syscall.h>
#include <unistd.h>

/* Each set includes the sets before it. The `#pragma GCC target` of a unit may name only features that machine_has()
 * checks for the unit's set. */
enum instructions { PLAIN, AVX2, AVX512, AVX512_CODES, AVX512_BFLOAT16, TILES };

static inline int machine_has(enum instructions set) {
#ifdef __x86_64__
#define HAS __builtin_cpu_supports
    __builtin_cpu_init();
    if (set >= AVX2 && !(HAS("avx2") && HAS("fma") && HAS("f16c") && HAS("popcnt")))
        return 0;
    if (set >= AVX512 && !(HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl")))
        return 0;
    if ((set >= AVX512_CODES && !HAS("avx512vnni")) || (set >= AVX512_BFLOAT16 && !HAS("avx512bf16")))
        return 0;
    if (set < TILES)
        return 1;
#if __GNUC__ >= 11
    /* A process has to ask the Linux kernel for tiles, once for all its threads. */
    return HAS("amx-tile") && HAS("amx-int8") && HAS("amx-bf16") &&
           !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
#endif
#undef HAS
#endif
    return set == PLAIN;
}

#endif

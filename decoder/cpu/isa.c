/* Which instruction sets this machine has, best first, and the choice among them. */

#include <sys/syscall.h>
#include <unistd.h>

#include "isa.h"

#ifdef X86_KERNELS
static int can_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

static int can_avx512bf16(void) { return can_avx512() && __builtin_cpu_supports("avx512bf16"); }
static int can_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

/* The kernel gives a process tiles when it asks for them, once for all its threads. */
static int can_amx(void) {
#if __GNUC__ >= 11
    if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-int8") ||
        !__builtin_cpu_supports("amx-bf16"))
        return 0;
    return can_avx512bf16() && !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
#else
    return 0;
#endif
}
#endif

static int can_plain(void) { return 1; }

static const struct isa {
    const struct kernels *kernels;
    int (*can)(void);
    int by_itself; /* chosen when no name is given */
} isas[] = {
#ifdef X86_KERNELS
    {&kernels_tiles, can_amx, 1},   {&kernels_avx512bf16, can_avx512bf16, 1}, {&kernels_avx512, can_avx512, 1},
    {&kernels_avx2, can_avx2, 1},   {&kernels_emulated, can_avx512bf16, 0},
#endif
    {&kernels_plain, can_plain, 1},
};

const struct kernels *isa_choose(const char *name) {
#ifdef X86_KERNELS
    __builtin_cpu_init();
#endif
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        const struct isa *isa = &isas[i];
        if (name ? !strcmp(name, isa->kernels->name) : isa->by_itself)
            if (isa->can())
                return isa->kernels;
    }
    return NULL;
}

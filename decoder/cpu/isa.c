/* The choice of an instruction set that this machine has. The list begins with the best set. */

#include "isa.h"
#include "simd/machine.h"

static const struct isa {
    const struct kernels *kernels;
    enum instructions needs;
    int by_itself; /* whether isa_choose() may choose this set without a name */
} isas[] = {
#ifdef X86_KERNELS
    {&kernels_tiles, TILES, 1}, {&kernels_avx512bf16, AVX512_BFLOAT16, 1}, {&kernels_avx512, AVX512_CODES, 1},
    {&kernels_avx2, AVX2, 1},   {&kernels_emulated, AVX512_BFLOAT16, 0},
#endif
    {&kernels_plain, PLAIN, 1},
};

const struct kernels *isa_choose(const char *name) {
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        const struct isa *isa = &isas[i];
        if (name ? !strcmp(name, isa->kernels->name) : isa->by_itself)
            if (machine_has(isa->needs))
                return isa->kernels;
    }
    return NULL;
}

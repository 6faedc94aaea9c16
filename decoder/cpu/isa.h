/* The kernels of each instruction set of this architecture. Each set has a file of its own, isa_*.c. */

#ifndef SYMPHONY_ISA_H
#define SYMPHONY_ISA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* PLAIN_ONLY leaves out the kernels of x86. The rest compiles in seconds, for the short run of scripts/sanitize. */
#if defined(__x86_64__) && !defined(PLAIN_ONLY)
#define X86_KERNELS
#include <immintrin.h>
#endif

#include "panels.h"
#include "work.h"

/* Return the kernels `name`, or the best ones if `name` is null. Return null if this machine cannot run them. */
const struct kernels *isa_choose(const char *name);

extern const struct kernels kernels_plain;
#ifdef X86_KERNELS
extern const struct kernels kernels_tiles, kernels_emulated, kernels_avx512bf16, kernels_avx512, kernels_avx2;
#endif

#endif

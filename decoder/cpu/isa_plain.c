/* The kernels for any processor. */

#include "isa.h"

/* The compiler decides what to inline: forced, it takes longer over this unit than over all others together. */
#define OP static inline
#define FN(name) name##_plain
#define ISA_NAME "plain"
#include "simd_plain.h"
#include "kernels.h"

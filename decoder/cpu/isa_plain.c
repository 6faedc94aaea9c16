/* The kernels for any processor. */

#include "isa.h"

/* The compiler chooses the functions to inline. With forced inlining, this file takes longer to compile than all other
 * files together. */
#define OP static inline
#define WIDTH 4
#define FN(name) name##_plain
#define ISA_NAME "plain"
#define TILE_ROWS 2
#define CODE_ROWS 1
#include "kernels.h"

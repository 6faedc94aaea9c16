/* What the daemon's loop over steps needs of a connection: see hot.c. Shared with scheduler/loop.c, which gets the
 * functions as pointers, for it is another extension module. */
#ifndef SYM_HOT_H
#define SYM_HOT_H

#include <stdint.h>

/* A pred() of one token and its last row, as a decode loop makes it. */
typedef struct sym_hot_call {
    uint64_t id;
    int64_t slot;
    float *row; /* of the slot */
    int32_t token;
} sym_hot_call;

enum sym_hot_outcome {
    SYM_HOT_COLD = -1, /* what comes next on this connection is something else */
    SYM_HOT_NONE = 0,  /* nothing for this file */
    SYM_HOT_TAKEN = 1,
};

#endif

/* Answers to programs' calls, other than a single row of logits: numbers, and the answers to batches. cffi reads this
 * file: declarations only.
 *
 * The calls of one PRED_BATCH request are a *group*: one answer holds the replies of all of them. Each member whose
 * call is not over refers to the group. The run, or Python, ends the last of the calls, sends the answer and frees the
 * group. */
#ifndef SYM_GROUP_H
#define SYM_GROUP_H

#include "steps.h"

/* Numbers that answer a call in place of its row. The member owns them until its call is answered. */
typedef struct sym_numbers {
    sym_reducer *reducer;
    uint32_t answer_bytes, /* bytes of `answer` */
        block_bytes;       /* bytes of `block` */
    char *answer,          /* the numbers */
        *block;            /* the request for these numbers, a struct sym_reduction */
} sym_numbers;

/* Make numbers for a request. NULL: sym_reducer_read refuses the request, or there is no memory. */
sym_numbers *sym_numbers_new(const sym_hot_functions *hot, const char *block, uint32_t bytes, int32_t vocab_size);
void sym_numbers_free(const sym_hot_functions *hot, sym_numbers *numbers);

enum { SYM_GROUP_TEXT_BYTES = 512 /* most bytes of an error's message in a group */ };

typedef struct sym_group {
    uint64_t id;         /* id of the request */
    int32_t num,         /* calls of the batch */
        num_left;        /* calls that are not over yet */
    int32_t num_rows;    /* calls that are answered by a row */
    uint32_t room;       /* bytes reserved for each reply in `payload` */
    uint32_t num_bytes;  /* bytes of the answer, once the last call is over; 0 before */
    char *payload;       /* the replies, each laid out as in the ring */
} sym_group;

/* Make a group. `most_bytes`: the most bytes of numbers that one call needs. NULL: there is no memory. */
sym_group *sym_group_new(uint64_t id, int32_t num, uint32_t most_bytes);
void sym_group_free(sym_group *group);
/* Count one call less, without a reply: the program has gone, or the answer was sent. The group is freed with its last
 * call. Any thread may call this function. */
void sym_group_abandon(sym_group *group);

#endif

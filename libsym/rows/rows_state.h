/* Declarations that the files of the row arithmetic share: checks of a row, its order, marks in it, and the history. */
#ifndef SYM_ROWS_STATE_H
#define SYM_ROWS_STATE_H

#include "passes.h"
#include "rows.h"

/* -- rows.c -- */

/* Replaces `*row` by a copy in the thread's scratch memory, with -inf for tokens that are not `allowed` (a bitmask;
 * NULL: all are allowed, no copy). Returns 0, -EDOM or -ENOMEM. */
int row_only_allowed(const float **row, int64_t n, const void *allowed);
/* Finds the largest logit of the allowed tokens. -EDOM: the row has NaN or +inf. -ERANGE: all logits are -inf. */
int row_look(const float **row, int64_t n, const void *allowed, float *groups, float *max);

/* -- rank.c -- */

extern const sym_mark rank_everything;
/* Returns the first place in the order at which the sum of weights reaches `target`, or with `beyond` exceeds it. If
 * rounding keeps the sum below the target, returns the last place. `mass` is about the sum of all weights. `work` is
 * overwritten. */
sym_mark rank_mark(const sym_list *list, double mass, double target, int beyond, sym_list *work, uint64_t *room);
/* Returns a list of the largest logits of the groups. The list uses the memory of the scratch's `other`. */
sym_list rank_groups(struct scratch *scratch, int64_t n);
/* Keeps those entries of the scratch's list that rank no lower than the mark and weigh at least `lightest`. Sorts a
 * short list. */
void rank_keep(struct scratch *scratch, sym_mark mark, float lightest);
/* Puts the k best entries of a row into the scratch's list. The row's groups are in the scratch already. `rank_best`
 * sorts a short list; `rank_best_in_order` keeps the order of the indices. */
void rank_best(struct scratch *scratch, const float *row, int64_t n, int64_t k);
void rank_best_in_order(struct scratch *scratch, const float *row, int64_t n, int64_t k);
/* Returns the place of the k-th best entry of the scratch's list. Weights are ignored. Overwrites the groups. */
sym_mark rank_place(struct scratch *scratch, int64_t k);
/* Writes the weights of the k best entries of the scratch's list, best first. Returns the number of weights. */
int64_t rank_weights(struct scratch *scratch, int64_t k, float *weights);

/* -- history.c -- */

struct counted { /* counts of one token of the history; penalties change only the logits of such tokens */
    int32_t token;
    uint32_t num_seen, num_generated;
};

/* The tokens of one sampler, given and generated, with the settings of penalties and DRY. */
struct history {
    float repetition, presence, frequency;
    uint32_t window; /* number of latest tokens that these three count; 0: all */
    double dry_multiplier, dry_base;
    uint32_t dry_window, dry_allowed_length;
    char *breakers; /* a bit for each token that is a breaker; NULL: there are none */
    struct counted *counted;
    uint32_t num_counted, room_counted;
    uint32_t *places; /* hash table by token: 1 + index in `counted`; 0: empty */
    uint32_t num_places; /* a power of two, more than twice num_counted */
    int32_t *tokens; /* kept only for a window or for DRY */
    int32_t *repeated; /* as long as `tokens`, for DRY */
    int64_t num_tokens, num_before, room;
};

/* Adds a token. Returns 0, or -ENOMEM if the history is unchanged for lack of memory. */
int history_add(struct history *history, int32_t token, int is_generated);
/* Whether the history may change a row. */
int history_is_due(const struct history *history);
/* Changes a row of n logits: penalties, then DRY. Overwrites the lists of `scratch`. */
void history_adjust(const struct history *history, float *row, int64_t n, struct scratch *scratch);
void history_free(struct history *history);

#endif

/* What the arithmetic over rows shares: a row's look, its order, marks in it, and the tokens that were said. */
#ifndef SYM_ROWS_STATE_H
#define SYM_ROWS_STATE_H

#include "passes.h"
#include "rows.h"

/* -- rows.c -- */

/* The row with -inf for what is not allowed (`allowed`: bits, NULL for all), in the thread's room. 0, -EDOM, -ENOMEM */
int row_only_allowed(const float **row, int64_t n, const void *allowed);
/* `*max` of a row that is a distribution; else -EDOM: NaN or +inf; -ERANGE: all are -inf. */
int row_look(const float **row, int64_t n, const void *allowed, float *groups, float *max);

/* -- rank.c -- */

extern const sym_mark rank_everything;
/* The first place in the order where the weights so far reach `target` (`beyond`: are more than it). If all of them are
 * less (they may be rounded so), the last. `mass` is about the sum of all; `work` is overwritten. */
sym_mark rank_mark(const sym_list *list, double mass, double target, int beyond, sym_list *work, uint64_t *room);
/* The groups' largest as a list whose memory is the scratch's `other`. */
sym_list rank_groups(struct scratch *scratch, int64_t n);
/* Keeps what is best up to the mark; short lists are sorted, and stay so. */
void rank_keep(struct scratch *scratch, sym_mark mark, float lightest);
/* The k best of a row that was scanned into the scratch's groups, as its list: sorted if it is short, or in the order of
 * their indices. */
void rank_best(struct scratch *scratch, const float *row, int64_t n, int64_t k);
void rank_best_in_order(struct scratch *scratch, const float *row, int64_t n, int64_t k);
/* The place of the k-th best of the scratch's list, whatever the entries weigh. Overwrites the groups. */
sym_mark rank_place(struct scratch *scratch, int64_t k);
/* The weights of the k best of the scratch's list, best first: how many. */
int64_t rank_weights(struct scratch *scratch, int64_t k, float *weights);

/* -- history.c -- */

struct counted { /* a token of the history; only these are touched by penalties */
    int32_t token;
    uint32_t num_seen, num_generated;
};

/* The tokens of one sampler, given and generated, and what follows from them. */
struct history {
    float repetition, presence, frequency;
    uint32_t window; /* of these three: so many of the latest tokens; 0: all */
    double dry_multiplier, dry_base;
    uint32_t dry_window, dry_allowed_length;
    char *breakers; /* a bit for each token that a repetition ends at; NULL: none does */
    struct counted *counted;
    uint32_t num_counted, room_counted;
    uint32_t *places;    /* hashed by token: 1 + where in `counted`; 0: nothing */
    uint32_t num_places; /* a power of two, more than twice num_counted */
    int32_t *tokens;     /* of a window or of DRY, else none is kept */
    int32_t *repeated;   /* as long: DRY's */
    int64_t num_tokens, num_before, room;
};

/* Adds a token. 0 or -ENOMEM, and then nothing has changed. */
int history_add(struct history *history, int32_t token, int is_generated);
/* Whether a row is changed by it. */
int history_is_due(const struct history *history);
/* Changes a row of n logits: penalties, then DRY. `scratch` has no list yet. */
void history_adjust(const struct history *history, float *row, int64_t n, struct scratch *scratch);
void history_free(struct history *history);

#endif

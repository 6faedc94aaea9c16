/* A plan of one step while it is made, for policy.c and order.c. */
#ifndef SYM_PLAN_H
#define SYM_PLAN_H

#include "policy.h"

enum { DECODE, PREFILL };
enum { WANTS_MORE = 4 }; /* a bit of is_active, beside 1 << kind */

/* A share in one plan. */
struct branch {
    int32_t first, count; /* heap[first .. first + count): what is in it, the next one first */
    int32_t chosen;       /* of these: on the way to the call that is taken */
    int32_t arrival;      /* its first candidate */
    int32_t top;          /* of an account: the highest priority in it */
    int32_t active;       /* bits as in is_active */
    int32_t is_leaf, is_account, is_visited;
    int32_t is_passed; /* a call in it was not taken though it was its turn */
    double start, least, most; /* virtual time before the plan; of those in it that want more, and of all after it */
};

struct place {
    int64_t due_ns, level;
};

struct sym_scratch {
    int32_t max_candidates, max_shares;
    struct place *places;     /* [candidates] */
    struct branch *branches;  /* [shares] */
    int32_t *active;          /* [shares] those with candidates */
    int32_t *heap;            /* [candidates + shares] candidates in leaves, shares in others */
    int64_t num_compared;
};

struct plan {
    const sym_candidate *candidates;
    sym_share *shares;
    const sym_limits *limits;
    const sym_cost *cost;
    struct place *places; /* of the scratch, as what follows */
    struct branch *branches;
    int32_t *active, *heap;
    sym_scratch *scratch;
    int32_t *num_now;
    int32_t n, num_shares, num_active, num_calls;
    int32_t num_of[2]; /* candidates of each kind */
    int64_t number, now_ns;
    int64_t begun_ns; /* of the decode in the step that has gone on for longest */
    sym_work work;               /* of the step so far */
    double most_ns;              /* that it may take with prefills and decodes in it */
    double row_ns, wanted_ns, seen_ns; /* what one of each counts as service */
};

static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int kind_of(const sym_candidate *candidate) { return candidate->is_decode ? DECODE : PREFILL; }

static inline struct branch *account_of(struct plan *p, const sym_candidate *candidate) {
    int32_t parent = p->shares[candidate->share].parent;
    return &p->branches[parent < 0 ? candidate->share : parent];
}

/* Marks the shares of all candidates. */

/* order.c: where each candidate of the plan stands among those of its account. */
void sym_set_places(struct plan *p);

/* Heaps of one kind, over all shares with candidates. */
void sym_make_heaps(struct plan *p, int kind);

/* The call whose turn it is, or -1. */
int32_t sym_choose(struct plan *p, int kind);

/* Takes the chosen call out of the heaps, after it was served. */
void sym_take_out(struct plan *p, int32_t candidate);

#endif

/* The plan of one step while policy.c and order.c make it. */
#ifndef SYM_PLAN_H
#define SYM_PLAN_H

#include "policy.h"

#define SECOND 1000000000LL
#define PATIENCE (5 * SECOND) /* a call that has waited this long counts as due from then on */

enum { DECODE, PREFILL };
enum { WANTS_MORE = 4 }; /* bit of `is_active`: the share wanted more than the plan gave it */

/* A share, for the time of one plan. */
struct branch {
    int32_t first, count; /* its children or calls are heap[first .. first + count): a heap, whose top is next */
    int32_t chosen;       /* index in the heap: the child or call that `sym_choose` chose */
    int32_t arrival;      /* index of its first candidate */
    int32_t num_decodes, most_urgent, /* of an account: its decodes, and their highest priority */
        num_prefills;                 /* its prefills of at least this priority */
    int32_t top;          /* of an account: the highest priority of its candidates */
    int32_t active;       /* bits as in sym_share.is_active */
    int32_t is_leaf,      /* a program */
        is_account,       /* its children are programs */
        is_visited;       /* `sym_choose` has looked for overdue children already */
    int32_t is_passed;    /* one of its calls was next, and was passed over */
    double start,         /* virtual time before the plan */
        least,            /* smallest `start` of its children that want more; -1: none does */
        most;             /* largest virtual time of its children after the plan */
};

/* Rank of a candidate within its account. */
struct place {
    int64_t due_ns, /* deadline, or the time at which its patience ended */
        level;      /* priority, raised by waiting */
    int32_t is_held; /* a decode that is left out of the step for prefills of its burst */
};

struct sym_scratch {
    int32_t max_candidates, max_shares;
    struct place *places;     /* [max_candidates] rank of each candidate */
    struct branch *branches;  /* [max_shares] the branch of each share */
    int32_t *active;          /* [shares] numbers of the shares that have candidates */
    int32_t *heap; /* [candidates + shares] heaps of all branches: candidates in leaves, shares elsewhere */
    int64_t num_compared; /* comparisons of all plans so far */
};

struct plan {
    const sym_candidate *candidates;
    sym_share *shares;
    const sym_limits *limits;
    const sym_cost *cost;
    struct place *places; /* this array and the next three belong to `scratch` */
    struct branch *branches;
    int32_t *active, *heap;
    sym_scratch *scratch;
    int32_t *num_now; /* [n] entries of each candidate in the step */
    int32_t n, /* candidates */
        num_shares, /* shares of the tree */
        num_active, /* shares that have candidates */
        num_calls; /* calls in the step so far */
    int32_t num_of[2]; /* candidates of each kind */
    int32_t num_held; /* decodes that are held */
    int64_t number, /* serial number of this plan, which sym_share.last_plan notes */
        now_ns;
    int64_t begun_ns; /* smallest `begun_ns` of the decodes */
    sym_work work; /* work of the step so far */
    int is_burst; /* prefills of a burst fill the step */
    int is_another_thinking; /* an account without calls had decodes in the latest plans */
    double crowding; /* prefills of a burst that wait for each decode */
    double most_ns; /* time limit of a step with both decodes and prefills */
    double row_ns, /* service charged for a row */
        wanted_ns, /* service charged for a wanted row of logits */
        seen_ns; /* service charged for an entry that a decode sees */
};

static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int kind_of(const sym_candidate *candidate) { return candidate->is_decode ? DECODE : PREFILL; }

static inline struct branch *account_of(struct plan *p, const sym_candidate *candidate) {
    int32_t parent = p->shares[candidate->share].parent;
    return &p->branches[parent < 0 ? candidate->share : parent];
}

/* order.c: rank each candidate within its account. */
void sym_set_places(struct plan *p);

/* Make the heaps of all active shares, over the candidates of one kind. */
void sym_make_heaps(struct plan *p, int kind);

/* Return the next candidate to serve, or -1. */
int32_t sym_choose(struct plan *p, int kind);

/* Take the chosen candidate out of the heaps, after it was served or passed over. */
void sym_take_out(struct plan *p, int32_t candidate);

#endif

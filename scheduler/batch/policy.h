/* What the next step holds, and how long one may wait for those that are about to return: a pure function of arrays, the
 * same one in the daemon's loop and where a recorded trace is replayed. cffi reads this file: declarations only. */
#ifndef SYM_POLICY_H
#define SYM_POLICY_H

#include <stdint.h>

#define SYM_COST_KNOTS 11 /* 1, 2, 4, ... 1024 rows */
#define SYM_NO_DEADLINE INT64_MAX

/* What a step takes, in nanoseconds: see cost_model.py, which fits it. */
typedef struct sym_cost {
    double rows_ns[SYM_COST_KNOTS]; /* of a step of so many rows over no entries; between knots it is linear */
    double entry_ns;                /* for each distinct entry that its decodes read */
    double pair_ns;                 /* for each row of a prefill and entry that the row sees */
} sym_cost;

/* A call with entries to compute. */
typedef struct sym_candidate {
    int64_t since_ns;    /* when it became ready: a generation with each of its tokens anew */
    int64_t deadline_ns; /* SYM_NO_DEADLINE: it has none */
    int32_t share;       /* of its program: a leaf of the tree of shares */
    int32_t priority;
    int32_t length;      /* entries before those that are left */
    int32_t left;        /* entries of its stretch that are still to be computed; 1: a decode */
    int32_t is_digested; /* each of its entries has a row in memory of ours */
} sym_candidate;

/* Who service is shared between: a tree of users, the domains within them, and programs, the leaves. */
typedef struct sym_share {
    double used;    /* nanoseconds of service, over the weight: virtual time */
    double clock;   /* where those within it are: who comes back after a pause begins there */
    double weight;
    int32_t parent; /* -1: the root, which is share 0 */
    int32_t is_active; /* had a candidate in the last plan */
} sym_share;

typedef struct sym_limits {
    int32_t max_calls;    /* seats of a step */
    int32_t max_tokens;   /* rows of a step without a decode */
    int32_t min_chunk;    /* of a prefill, however slow the machine is */
    int32_t max_digested; /* rows of ours in a step */
    int64_t step_ns;      /* what a step may take with both decodes and prefills in it */
} sym_limits;

/* How long a step may be put off for calls that are about to come: a share of what the step takes, within bounds. */
typedef struct sym_wait {
    int64_t share_percent, min_ns, max_ns;
} sym_wait;

double sym_cost_of(const sym_cost *cost, int32_t num_rows, int64_t num_entries, int64_t num_pairs);

/* Fills num_now[n], entries of each candidate in the next step (0: none), and counts the service in `shares`. Gives the
 * number of calls in the step. `order` is scratch [n]. Candidates are in order of arrival. */
int32_t sym_policy_plan(const sym_candidate *candidates, int32_t n, sym_share *shares, int32_t num_shares,
                        const sym_limits *limits, const sym_cost *cost, int64_t now_ns, int32_t *num_now,
                        int32_t *order);

/* `step_ns`: what the next step is expected to take. */
int64_t sym_policy_wait_ns(const sym_wait *wait, int64_t step_ns);

#endif

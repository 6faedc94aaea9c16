/* What the next step holds, and how long one may wait for those that are about to return: a pure function of arrays, the
 * same one in the daemon's loop and where a recorded trace is replayed. cffi reads this file: declarations only. */
#ifndef SYM_POLICY_H
#define SYM_POLICY_H

#include <stdint.h>

#include "cost.h"

#define SYM_NO_DEADLINE 9223372036854775807

/* A call with entries to compute. */
typedef struct sym_candidate {
    int64_t since_ns; /* when it became ready: a generation with each of its tokens anew */
    int64_t deadline_ns; /* SYM_NO_DEADLINE: it has none */
    int64_t begun_ns; /* of a decode: when its loop had its first answer, or it came */
    int32_t share; /* of its program: a leaf of the tree of shares */
    int32_t priority;
    int32_t length; /* entries before those that are left */
    int32_t num_shared; /* of these, entries that a candidate before it reads, too: 0 where nobody knows */
    int32_t left; /* entries of its stretch that are still to be computed */
    int32_t is_decode; /* it is computed whole: the next token of a loop, with what a grammar forces; or one token */
    int32_t is_digested; /* each of its entries has a row in memory of ours */
} sym_candidate;

/* Who service is shared between: a tree of users, the accounts within them, and programs, the leaves. Within a share there
 * are programs or other shares, not both; what is right above programs is an account. A new share is zero but for its
 * weight and its parent. */
typedef struct sym_share {
    double used; /* nanoseconds of service, over the weight: virtual time */
    double clock; /* where those within it are: who comes back after a pause begins there */
    double weight; /* more than 0 */
    int64_t turns[2]; /* of decodes, of prefills: the plan in which it had its last place, or began to want one */
    int32_t parent; /* -1: the root, which is share 0 */
    int32_t is_active; /* had a candidate in the last plan: which kinds, and whether they wanted more than they had */
} sym_share;

typedef struct sym_limits {
    int32_t max_calls; /* seats of a step: 2 or more */
    int32_t max_tokens; /* rows of its prefills */
    int32_t min_chunk; /* rows of its prefills beside decodes, however slow the machine is */
    int32_t max_digested; /* rows of ours in a step, and guesses of drafts: min_chunk or more */
    int64_t step_ns; /* what a step may take with both decodes and prefills in it */
} sym_limits;

/* How long a step may be put off for calls that are about to come: a share of what the step takes, within bounds. */
typedef struct sym_wait {
    int64_t share_percent, min_ns, max_ns;
} sym_wait;

/* Memory of plans, for so many candidates and shares. Null: there is none. */
typedef struct sym_scratch sym_scratch;

sym_scratch *sym_scratch_new(int32_t max_candidates, int32_t max_shares);
void sym_scratch_free(sym_scratch *scratch);
/* Comparisons of all plans so far. */
int64_t sym_scratch_num_compared(const sym_scratch *scratch);

/* Fills num_now[n], entries of each candidate in the next step (0: none), and counts the service in `shares`. Gives the
 * number of calls in the step. Candidates are in order of arrival. */
int32_t sym_policy_plan(const sym_candidate *candidates, int32_t n, sym_share *shares, int32_t num_shares,
                        const sym_limits *limits, const sym_cost *cost, int64_t now_ns, int32_t *num_now,
                        sym_scratch *scratch);

/* What a step may take with these decodes in it, and others' prefills or guesses. */
double sym_policy_most_ns(const sym_limits *limits, const sym_cost *cost, const sym_work *decodes);

/* For calls of other accounts. `step_ns`: what the next step is expected to take. */
int64_t sym_policy_wait_ns(const sym_wait *wait, int64_t step_ns);

#endif

/* The policy: which calls the next step holds, and how long a step may wait for more calls. The policy is a pure
 * function of arrays. The daemon's loop and replays of recorded traces call the same function. cffi reads this file:
 * declarations only. */
#ifndef SYM_POLICY_H
#define SYM_POLICY_H

#include <stdint.h>

#include "cost.h"

#define SYM_NO_DEADLINE 9223372036854775807

/* A call with entries to compute. */
typedef struct sym_candidate {
    int64_t since_ns; /* time at which its stretch became ready; each token of a generation is a new stretch */
    int64_t deadline_ns; /* the call's deadline, or SYM_NO_DEADLINE */
    int64_t begun_ns; /* of a decode: time of its loop's first answer; before that, time of its arrival */
    int32_t share; /* the program's share, a leaf of the tree */
    int32_t priority;
    int32_t length; /* entries that the file has before the next entry to compute */
    int32_t num_shared; /* number of these entries that an earlier candidate reads, too; 0 if unknown */
    int32_t left; /* entries of its stretch that are still to be computed */
    int32_t is_decode; /* the stretch is computed whole: one token, or a generation's token with forced tokens */
    int32_t is_digested; /* each of its entries gives a row in the run's memory, which then becomes numbers or tokens */
} sym_candidate;

/* A share of the service. Shares are a tree: users, the accounts within them, and programs, which are the leaves. A
 * share holds programs or other shares, not both. The share right above programs is an account. A new share is zeros,
 * apart from its weight and its parent. */
typedef struct sym_share {
    double used; /* virtual time: nanoseconds of service, divided by the weight */
    double clock; /* virtual time of its children: a child that returns after a pause begins at this time */
    double weight; /* above 0 */
    int64_t last_plan[2]; /* [decodes, prefills] plan in which the share last had a place, or began to want one */
    int32_t parent; /* number of the parent; -1: the root, which is share 0 */
    int32_t is_active; /* bits about the last plan: 1 << kind for each kind of candidate that it had, and WANTS_MORE */
} sym_share;

typedef struct sym_limits {
    int32_t max_calls; /* seats of a step, at least 2 */
    int32_t max_tokens; /* most rows of prefills in a step */
    int32_t min_chunk; /* rows of prefills that a step may always have beside decodes, however slow the machine is */
    int32_t max_digested; /* most rows of `is_digested` prefills in a step, and most guesses of drafts; >= min_chunk */
    int64_t step_ns; /* time that a step with both decodes and prefills may take */
} sym_limits;

/* How long a step may wait for calls that are due: a percentage of the step's own time, within two bounds. */
typedef struct sym_wait {
    int64_t share_percent, min_ns, max_ns;
} sym_wait;

/* Working memory of the policy. */
typedef struct sym_scratch sym_scratch;

/* Make working memory for plans with at most `max_candidates` candidates and `max_shares` shares. NULL: there is no
 * memory. */
sym_scratch *sym_scratch_new(int32_t max_candidates, int32_t max_shares);
void sym_scratch_free(sym_scratch *scratch);
/* Return the number of comparisons of all plans so far. */
int64_t sym_scratch_num_compared(const sym_scratch *scratch);

/* Plan the next step. Write to num_now[n] the entries that each candidate computes (0: none), and charge the service to
 * `shares`. Return the number of calls in the step. Candidates are in order of arrival. */
int32_t sym_policy_plan(const sym_candidate *candidates, int32_t n, sym_share *shares, int32_t num_shares,
                        const sym_limits *limits, const sym_cost *cost, int64_t now_ns, int32_t *num_now,
                        sym_scratch *scratch);

/* Return the time that a step with these decodes may take once prefills or guesses of drafts are added. */
double sym_policy_most_ns(const sym_limits *limits, const sym_cost *cost, const sym_work *decodes);

/* Return how long calls may wait for streams of other accounts. `step_ns`: the expected time of the next step. */
int64_t sym_policy_wait_ns(const sym_wait *wait, int64_t step_ns);

#endif

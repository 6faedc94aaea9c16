/* The policy: which calls the next step holds. The stretch of a *decode* is computed whole. The stretch of a *prefill*
 * may be cut into chunks.
 *
 * Seats. If there is a prefill, one seat is reserved for prefills, and decodes may have all others. While there are
 * enough seats for all decodes, every decode is in the step that is not held (see below). Prefills also get the seats
 * that decodes leave free.
 *
 * Rows. A step has at most max_tokens rows of prefills. With decodes in the step, prefills have as many rows as keep
 * the step within a limit by the cost model, and at least min_chunk rows. The limit is step_ns, or BESIDE times the
 * time of the decodes alone if that is longer. One kind of prefill is not held back by the limit: a prefill that ends
 * with this step and was ready before any of the decodes had its first token. So calls that arrive together begin
 * together, and a decode waits for such prefills only at its own beginning. If all decodes belong to the account of the
 * prefill, the prefill may be ready TOGETHER times step_ns later, since a server reads the requests of a burst one
 * after the other.
 *
 * Bursts. If several prefills of an account wait beside its decodes, the limit is higher: the time of the decodes, and
 * EAGER times as much for each prefill after the first that waits for a decode of this account, up to LONGEST times
 * step_ns. Prefills of a lower priority than one of these decodes do not count. Of several accounts with decodes, the
 * one with the fewest such prefills for each decode decides, and the limit stays low if an account without calls now
 * had decodes in the last THINKING plans. So nobody's decodes wait for a burst of others.
 *
 * Full steps. An account is alone if no other account has calls, or had decodes in the last THINKING plans. A burst of
 * an account that is alone *fills the step* if two prefills or more have max_tokens rows together. The limit then holds
 * back none of them. A burst fills steps until its oldest decode had its first token LASTS times step_ns ago. After
 * that, its decodes go on at their usual pace. A burst fills no step while decodes lack seats. Some prefills do not
 * count: those of a lower priority than a decode, those that the run digests, and those with more than MOST_LONG times
 * max_tokens rows. Nor do prefills after so many entries that max_tokens of their rows take longer than PAUSE times
 * step_ns.
 *
 * Held decodes. Prefills of a burst that were ready at most TOGETHER times step_ns after the first token of its oldest
 * decode may fill a step alone. Decodes are then *held* if they would make the step longer by one part in WORTH: the
 * step goes without them. First tokens come sooner. The decodes lose little, because each step of the burst is many
 * times as long as a step of decodes alone. A decode is held while its wait and the longest full step of the burst take
 * at most HOLD such steps and at most PAUSE times step_ns. A decode whose deadline comes within PATIENCE is not held.
 * A file that was forked begins anew, so decodes of a beam search may be held for any later burst of their account. If
 * decodes waited for the whole burst, first tokens would come only 5 % sooner yet, and streams would stop for seconds.
 *
 * Shares. Where seats or rows are short, weighted fair queueing over the tree of shares divides the service. From the
 * root down to an account, the child with the least virtual time is next. The service of a call is its part of the
 * step's expected time.
 *
 * No credit. The clock of a share is the least virtual time among its children that wanted more service than they got.
 * A child that got all the service that it wanted continues from this clock if it is behind the clock. So idle time
 * gives no credit.
 *
 * Few debts. A decode gets its seat even if its share is ahead, while there are seats for all decodes. The same is true
 * of the prefill's seat. Such service could put a share far ahead of the clock, and the share would starve afterwards.
 * So no share may be ahead by more than MOST_AHEAD long steps, and a child that had no place for OVERDUE rounds is
 * served first.
 *
 * Order within an account. First comes the higher level: the priority, which rises while the call waits, up to the
 * highest priority in the account. Then comes the earlier deadline: a call without a deadline gets one by waiting. Then
 * comes the program with less virtual time, then the prefill with fewer entries left, and then the earlier call.
 *
 * Longest wait. Take a share and its siblings. Let W be the sum of all their weights, w the weight of the share, and K
 * their number. Take one kind of call. If the parent gets a place for this kind in every T plans, the share gets a
 * place in every
 *
 *     OVERDUE * W / w + K * T     plans (T, if it has no siblings)
 *
 * because the share is overdue after the first part, and at most K shares are overdue before it. T is 1 for the root. A
 * place of a prefill is min_chunk rows, or all rows that it still needs. An account gives its places to its calls in
 * order. After
 *
 *     max(PATIENCE, (highest priority - priority) / AGING, rounded up to seconds)
 *
 * no call that arrives later is served before the waiting call; the highest priority is that of the account during the
 * wait. Let N be the number of the account's calls of this kind when that time is over. The call gets one of the next N
 * places of the account. A prefill counts once for each min_chunk rows that it still needs. While all decodes have
 * seats, a decode waits for the step under way only, and a held decode no longer than it may be held.
 * tests/scheduler/fake_machine.py tests these bounds. */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

#define BESIDE 1.75 /* keeps 99 of 100 steps within twice the decodes' time: the model errs by a tenth */
#define EAGER 16 /* in a model of the loop, first tokens of a burst then come nearly as soon as if all decodes waited */
#define LONGEST 7.5
#define TOGETHER 25 /* half a second by default: a server reads some 150 requests in that time */
#define THINKING 8
#define LASTS 500 /* ten seconds by default */
#define MOST_LONG 4 /* a longer prefill alone would slow decodes for seconds */
#define PAUSE 50 /* a second by default */
#define HOLD 4 /* decodes in each fourth step save three quarters of the time that all of them would take */
#define WORTH 8 /* 32 streams of SmolLM2 make a step of 512 rows longer by 11 %: no pause is worth that */
#define MOST_AHEAD 16 /* long steps that a share may be ahead of the clock */
#define LATEST_CLOCK 1e12 /* beyond this, virtual times begin again: a double then still resolves nanoseconds */

sym_scratch *sym_scratch_new(int32_t max_candidates, int32_t max_shares) {
    sym_scratch *scratch = calloc(1, sizeof *scratch);
    if (scratch == NULL)
        return NULL;
    size_t candidates = (size_t)max_candidates, shares = (size_t)max_shares;
    scratch->max_candidates = max_candidates;
    scratch->max_shares = max_shares;
    scratch->places = calloc(candidates + 1, sizeof *scratch->places);
    scratch->branches = calloc(shares + 1, sizeof *scratch->branches);
    scratch->active = calloc(shares + 1, sizeof *scratch->active);
    scratch->heap = calloc(candidates + shares + 1, sizeof *scratch->heap);
    if (scratch->places && scratch->branches && scratch->active && scratch->heap)
        return scratch;
    sym_scratch_free(scratch);
    return NULL;
}

void sym_scratch_free(sym_scratch *scratch) {
    if (scratch == NULL)
        return;
    free(scratch->places);
    free(scratch->branches);
    free(scratch->active);
    free(scratch->heap);
    free(scratch);
}

int64_t sym_scratch_num_compared(const sym_scratch *scratch) { return scratch->num_compared; }

/* ---- active shares ---- */

/* Find the shares that have candidates, and count the candidates of each kind. */
static void find_active(struct plan *p) {
    memset(p->branches, 0, (size_t)p->num_shares * sizeof *p->branches);
    for (int32_t i = 0; i < p->n; i++) {
        const sym_candidate *candidate = &p->candidates[i];
        int kind = kind_of(candidate);
        p->num_of[kind]++;
        struct branch *account = account_of(p, candidate);
        if (!account->active || candidate->priority > account->top)
            account->top = candidate->priority;
        for (int32_t s = candidate->share; s >= 0 && !(p->branches[s].active & 1 << kind); s = p->shares[s].parent) {
            struct branch *branch = &p->branches[s];
            if (!branch->active) {
                branch->arrival = i;
                branch->is_leaf = s == candidate->share;
                branch->is_account = !branch->is_leaf;
                p->active[p->num_active++] = s;
            }
            branch->active |= 1 << kind;
        }
    }
    for (int32_t i = 0; i < p->num_active; i++) {
        int32_t s = p->active[i], parent = p->shares[s].parent;
        if (parent >= 0 && !p->branches[s].is_leaf)
            p->branches[parent].is_account = 0;
    }
}

/* Move all virtual times back towards 0 if the clock of an active share is beyond LATEST_CLOCK. */
static void renormalise(struct plan *p) {
    int is_late = 0;
    for (int32_t i = 0; i < p->num_active; i++)
        is_late |= p->shares[p->active[i]].clock > LATEST_CLOCK;
    if (!is_late)
        return;
    for (int32_t s = 0; s < p->num_shares; s++) {
        sym_share *share = &p->shares[s];
        double clock = share->parent < 0 ? 0 : p->shares[share->parent].clock;
        share->used = share->used > clock ? share->used - clock : 0;
    }
    for (int32_t s = 0; s < p->num_shares; s++)
        p->shares[s].clock = 0;
}

/* Set the virtual times before the plan. A share that returns, or got all that it wanted, begins at its parent's clock
 * or later. No share is more than MOST_AHEAD long steps ahead of that clock. */
static void begin(struct plan *p) {
    renormalise(p);
    const sym_work long_step = {.num_rows = p->limits->max_tokens};
    double step_ns = sym_cost_of(p->cost, &long_step);
    if (step_ns < (double)p->limits->step_ns)
        step_ns = (double)p->limits->step_ns;
    sym_share *root = &p->shares[0];
    p->number = at_least(root->last_plan[DECODE], root->last_plan[PREFILL]) + 1;
    for (int32_t i = 0; i < p->num_active; i++) {
        int32_t s = p->active[i];
        sym_share *share = &p->shares[s];
        struct branch *branch = &p->branches[s];
        for (int kind = DECODE; kind <= PREFILL; kind++)
            if (!(share->is_active & 1 << kind))
                share->last_plan[kind] = p->number;
        branch->least = branch->most = -1;
        if (share->parent < 0)
            continue;
        double clock = p->shares[share->parent].clock, most = clock + MOST_AHEAD * step_ns / share->weight;
        if (!(share->is_active & WANTS_MORE) && share->used < clock)
            share->used = clock;
        if (share->used > most)
            share->used = most;
        branch->start = share->used;
    }
}

/* ---- service ---- */

static sym_work work_of(const sym_candidate *candidate, int64_t num_now) {
    if (candidate->left == 1)
        return (sym_work){1, 1, candidate->length - candidate->num_shared, candidate->length, 0};
    return (sym_work){num_now, candidate->is_digested ? num_now : num_now == candidate->left, 0, 0,
                      num_now * candidate->length + num_now * (num_now + 1) / 2};
}

static sym_work together(const sym_work *a, const sym_work *b) {
    return (sym_work){a->num_rows + b->num_rows, a->num_wanted + b->num_wanted, a->num_entries + b->num_entries,
                      a->num_seen + b->num_seen, a->num_pairs + b->num_pairs};
}

static double cost_with(const struct plan *p, const sym_candidate *candidate, int64_t num_now) {
    sym_work more = work_of(candidate, num_now), whole = together(&p->work, &more);
    return sym_cost_of(p->cost, &whole);
}

/* Give a candidate `num_now` entries of the step, and charge the service to its shares. */
static void serve(struct plan *p, int32_t i, int64_t num_now) {
    const sym_candidate *candidate = &p->candidates[i];
    sym_work work = work_of(candidate, num_now);
    double ns = p->row_ns * (double)work.num_rows + p->wanted_ns * (double)work.num_wanted +
                p->seen_ns * (double)work.num_seen + p->cost->pair_ns * (double)work.num_pairs;
    p->work = together(&p->work, &work);
    p->num_now[i] = (int32_t)num_now;
    p->num_calls++;
    int is_whole = num_now >= at_most(candidate->left, p->limits->min_chunk);
    for (int32_t s = candidate->share; s >= 0; s = p->shares[s].parent) {
        sym_share *share = &p->shares[s];
        if (share->parent >= 0)
            share->used += ns / share->weight;
        if (share->parent < 0 || (is_whole && !p->branches[s].is_passed))
            share->last_plan[kind_of(candidate)] = p->number;
    }
}

/* Pass over a candidate that finds no rows, while other candidates may find some. The candidate's shares do not count
 * as having had a place. */
static void pass_over(struct plan *p, int32_t i) {
    for (int32_t s = p->candidates[i].share; s >= 0; s = p->shares[s].parent)
        p->branches[s].is_passed = 1;
}

double sym_policy_most_ns(const sym_limits *limits, const sym_cost *cost, const sym_work *decodes) {
    double beside_ns = BESIDE * sym_cost_of(cost, decodes), step_ns = (double)limits->step_ns;
    return beside_ns > step_ns ? beside_ns : step_ns;
}

/* Return whether an account without calls now had decodes in the latest plans: its program may call again at once. */
static int is_another_account_thinking(const struct plan *p) {
    for (int32_t s = 1; s < p->num_shares; s++) {
        int32_t parent = p->shares[s].parent;
        if (parent > 0 && !p->branches[s].active && !p->branches[parent].active &&
            p->shares[s].last_plan[DECODE] > at_least(0, p->number - THINKING))
            return 1;
    }
    return 0;
}

/* Return how many prefills of a burst wait for each decode, of the account for which they are fewest. */
static double crowding_of(struct plan *p) {
    for (int32_t i = 0; i < p->n; i++) {
        const sym_candidate *candidate = &p->candidates[i];
        struct branch *account = account_of(p, candidate);
        if (kind_of(candidate) == PREFILL)
            continue;
        if (!account->num_decodes++ || candidate->priority > account->most_urgent)
            account->most_urgent = candidate->priority;
        p->begun_ns = at_most(p->begun_ns, candidate->begun_ns);
    }
    for (int32_t i = 0; i < p->n; i++) {
        const sym_candidate *candidate = &p->candidates[i];
        struct branch *account = account_of(p, candidate);
        account->num_prefills += kind_of(candidate) == PREFILL && candidate->priority >= account->most_urgent;
    }
    p->is_another_thinking = is_another_account_thinking(p);
    double fewest = p->is_another_thinking ? 0 : -1;
    for (int32_t i = 0; i < p->num_active; i++) {
        const struct branch *branch = &p->branches[p->active[i]];
        if (!branch->num_decodes)
            continue;
        double each = (double)at_least(branch->num_prefills - 1, 0) / branch->num_decodes;
        if (fewest < 0 || each < fewest)
            fewest = each;
    }
    return fewest;
}

/* Return the time limit of a step with these decodes and with prefills. */
static double most_beside(const struct plan *p, const sym_work *decodes) {
    double burst_ns = sym_cost_of(p->cost, decodes) * (1 + EAGER * p->crowding);
    double longest_ns = LONGEST * (double)p->limits->step_ns, most_ns = sym_policy_most_ns(p->limits, p->cost, decodes);
    burst_ns = burst_ns < longest_ns ? burst_ns : longest_ns;
    return burst_ns > most_ns ? burst_ns : most_ns;
}

/* Return how many rows the next prefill may have, at most `most`. These rows keep the step within `most_ns`, or bring
 * the rows of all prefills (`given` so far) to min_chunk, whichever allows more. */
static int64_t rows_beside_decodes(const struct plan *p, const sym_candidate *candidate, int64_t most, int64_t given) {
    double step_ns = p->most_ns;
    int64_t fits = at_most(most, at_least(0, p->limits->min_chunk - given)), above = most + 1;
    if (cost_with(p, candidate, most) <= step_ns)
        return most;
    while (fits + 1 < above) {
        int64_t middle = fits + (above - fits) / 2;
        if (cost_with(p, candidate, middle) <= step_ns)
            fits = middle;
        else
            above = middle;
    }
    return fits;
}

/* Return whether all decodes belong to this prefill's account and have no higher priority, and no other account had
 * decodes shortly before. */
static int is_alone(struct plan *p, const sym_candidate *prefill) {
    const struct branch *account = account_of(p, prefill);
    return account->num_decodes == p->num_of[DECODE] && !p->is_another_thinking &&
           prefill->priority >= account->most_urgent;
}

/* Return whether a prefill was ready before the first token of any decode, or soon afterwards if it is alone. */
static int is_early(struct plan *p, const sym_candidate *prefill) {
    int64_t soon_ns = is_alone(p, prefill) ? TOGETHER * p->limits->step_ns : 0;
    return prefill->since_ns - soon_ns <= p->begun_ns;
}

static int64_t pause_ns(const struct plan *p) { return at_most(PAUSE * p->limits->step_ns, PATIENCE); }

/* Return the time of max_tokens rows of prefills like this one. */
static int64_t full_ns(const struct plan *p, const sym_candidate *prefill) {
    int64_t rows = p->limits->max_tokens, twice_seen = 2LL * prefill->length + at_most(prefill->left, rows) + 1;
    const sym_work work = {.num_rows = rows, .num_pairs = rows * twice_seen / 2};
    return (int64_t)sym_cost_of(p->cost, &work);
}

/* Return whether a burst of the account may have this prefill. */
static int is_of_burst(struct plan *p, const sym_candidate *candidate) {
    return kind_of(candidate) == PREFILL && !candidate->is_digested && is_alone(p, candidate) &&
           candidate->left <= MOST_LONG * p->limits->max_tokens && full_ns(p, candidate) <= pause_ns(p);
}

/* Return whether the limit on a step with decodes does not hold back a prefill with at most `most` rows in the step. */
static int is_unlimited(struct plan *p, const sym_candidate *candidate, int64_t most) {
    if (p->is_burst && is_of_burst(p, candidate))
        return 1;
    return is_early(p, candidate) && candidate->left <= most;
}

/* Hold the decodes that have waited `most_ns` at most. */
static void hold_decodes(struct plan *p, int64_t most_ns) {
    for (int32_t i = 0; i < p->n; i++) {
        const sym_candidate *candidate = &p->candidates[i];
        p->places[i].is_held = kind_of(candidate) == DECODE &&
                               candidate->deadline_ns - PATIENCE > candidate->since_ns &&
                               p->now_ns - candidate->since_ns <= most_ns;
        p->num_held += p->places[i].is_held;
    }
}

/* Find whether prefills of a burst fill the step. If the decodes would make that step much longer, hold decodes. */
static void find_burst(struct plan *p) {
    const sym_work full = {.num_rows = p->limits->max_tokens};
    sym_work with_decodes = full;
    int64_t num_rows = 0, num_early = 0, num_prefills = 0, longest_ns = 0;
    for (int32_t i = 0; i < p->n; i++) {
        const sym_candidate *candidate = &p->candidates[i];
        if (account_of(p, candidate)->num_decodes < p->num_of[DECODE])
            return;
        if (kind_of(candidate) == DECODE) {
            sym_work each = work_of(candidate, candidate->left);
            with_decodes = together(&with_decodes, &each);
        } else if (is_of_burst(p, candidate)) {
            num_rows += candidate->left;
            num_early += is_early(p, candidate) ? candidate->left : 0;
            num_prefills++;
            longest_ns = at_least(longest_ns, full_ns(p, candidate));
        }
    }
    int64_t more_ns = (int64_t)(sym_cost_of(p->cost, &with_decodes) - sym_cost_of(p->cost, &full));
    p->is_burst = num_prefills > 1 && num_rows >= p->limits->max_tokens && p->num_of[DECODE] < p->limits->max_calls &&
                  p->now_ns - p->begun_ns <= LASTS * p->limits->step_ns;
    if (!p->is_burst || num_early < p->limits->max_tokens || more_ns * WORTH < longest_ns)
        return;
    hold_decodes(p, at_most(pause_ns(p), HOLD * longest_ns) - longest_ns);
}

/* Set how much service is charged for a row, for a wanted row and for a seen entry: the part of the step's expected
 * time that each of them takes. So the charges of a step add up to its time. */
static void set_prices(struct plan *p) {
    int64_t num_ready = p->num_of[DECODE] - p->num_held, num_decodes = at_most(num_ready, p->limits->max_calls);
    int64_t left = 0, prefills = 0;
    sym_work work = {.num_wanted = num_decodes}, decodes = {0};
    for (int32_t i = 0; i < p->n; i++) {
        const sym_candidate *candidate = &p->candidates[i];
        if (p->places[i].is_held)
            continue;
        if (kind_of(candidate) == DECODE) {
            sym_work each = work_of(candidate, candidate->left);
            decodes = together(&decodes, &each);
        } else {
            left = at_most(left + candidate->left, p->limits->max_tokens);
            prefills++;
        }
    }
    if (num_decodes) {
        work.num_rows = decodes.num_rows * num_decodes / num_ready;
        work.num_entries = decodes.num_entries * num_decodes / num_ready;
    }
    if (num_decodes && prefills && !p->is_burst) {
        struct plan expected = {.work = work, .cost = p->cost, .limits = p->limits};
        expected.most_ns = most_beside(p, &expected.work);
        const sym_candidate all = {.left = (int32_t)at_least(left, 2)};
        left = at_most(left, rows_beside_decodes(&expected, &all, at_least(left, 1), 0));
    }
    const sym_work rows = {.num_rows = work.num_rows + left};
    const sym_work wanted = {.num_wanted = at_least(num_decodes, 1)};
    p->row_ns = sym_cost_of(p->cost, &rows) / (double)at_least(rows.num_rows, 1);
    p->wanted_ns = sym_cost_of(p->cost, &wanted) / (double)wanted.num_wanted;
    /* Decodes that read the same entries divide the cost of reading them. */
    double distinct = decodes.num_seen ? (double)decodes.num_entries / (double)decodes.num_seen : 0;
    p->seen_ns = p->cost->seen_ns + p->cost->entry_ns * distinct;
}

static void plan_decodes(struct plan *p) {
    int32_t seats = p->limits->max_calls - (p->num_of[PREFILL] > 0);
    if (p->num_of[DECODE] <= seats) {
        for (int32_t i = 0; i < p->n; i++)
            if (kind_of(&p->candidates[i]) == DECODE && !p->places[i].is_held)
                serve(p, i, p->candidates[i].left);
        return;
    }
    sym_make_heaps(p, DECODE);
    for (int32_t i; p->num_calls < seats && (i = sym_choose(p, DECODE)) >= 0; sym_take_out(p, i))
        serve(p, i, p->candidates[i].left);
}

static void plan_prefills(struct plan *p) {
    if (!p->num_of[PREFILL])
        return;
    sym_make_heaps(p, PREFILL);
    p->most_ns = most_beside(p, &p->work);
    int64_t given = 0, digested = 0, num_early = 0;
    for (int32_t i = 0; i < p->n; i++)
        num_early += kind_of(&p->candidates[i]) == PREFILL && is_unlimited(p, &p->candidates[i], p->limits->max_tokens);
    for (int32_t i; p->num_calls < p->limits->max_calls && (i = sym_choose(p, PREFILL)) >= 0; sym_take_out(p, i)) {
        const sym_candidate *candidate = &p->candidates[i];
        int64_t most = at_most(candidate->left, p->limits->max_tokens - given);
        if (candidate->is_digested)
            most = at_most(most, p->limits->max_digested - digested);
        if (!most) {
            pass_over(p, i);
            continue;
        }
        num_early -= is_unlimited(p, candidate, p->limits->max_tokens);
        int64_t num_now = most;
        if (p->num_of[DECODE] && !is_unlimited(p, candidate, most))
            num_now = rows_beside_decodes(p, candidate, most, given);
        if (!num_now && !num_early)
            break;
        if (!num_now) {
            pass_over(p, i);
            continue;
        }
        serve(p, i, num_now);
        given += num_now;
        digested += candidate->is_digested ? num_now : 0;
        if (given == p->limits->max_tokens)
            break;
    }
}

/* ---- state for the next plan ---- */

/* Note in each share whether it wanted more service, and set its clock. */
static void end(struct plan *p) {
    for (int32_t i = 0; i < p->n; i++)
        if (p->num_now[i] < p->candidates[i].left)
            for (int32_t s = p->candidates[i].share; s >= 0 && !(p->branches[s].active & WANTS_MORE);
                 s = p->shares[s].parent)
                p->branches[s].active |= WANTS_MORE;
    for (int32_t i = 0; i < p->num_active; i++) {
        int32_t s = p->active[i];
        if (p->shares[s].parent < 0)
            continue;
        struct branch *branch = &p->branches[s], *parent = &p->branches[p->shares[s].parent];
        if (branch->active & WANTS_MORE && (parent->least < 0 || branch->start < parent->least))
            parent->least = branch->start;
        if (p->shares[s].used > parent->most)
            parent->most = p->shares[s].used;
    }
    for (int32_t i = 0; i < p->num_active; i++) {
        sym_share *share = &p->shares[p->active[i]];
        const struct branch *branch = &p->branches[p->active[i]];
        /* If no child wanted more, the clock moves to the largest virtual time among them: all debts are forgiven. */
        double clock = branch->least >= 0 ? branch->least : branch->most;
        if (clock > share->clock)
            share->clock = clock;
    }
    for (int32_t s = 0; s < p->num_shares; s++)
        p->shares[s].is_active = p->branches[s].active;
}

int32_t sym_policy_plan(const sym_candidate *candidates, int32_t n, sym_share *shares, int32_t num_shares,
                        const sym_limits *limits, const sym_cost *cost, int64_t now_ns, int32_t *num_now,
                        sym_scratch *scratch) {
    struct plan p = {
        .candidates = candidates,
        .shares = shares,
        .limits = limits,
        .cost = cost,
        .places = scratch->places,
        .branches = scratch->branches,
        .active = scratch->active,
        .heap = scratch->heap,
        .scratch = scratch,
        .num_now = num_now,
        .n = n,
        .num_shares = num_shares,
        .now_ns = now_ns,
        .begun_ns = INT64_MAX,
    };
    memset(num_now, 0, (size_t)n * sizeof *num_now);
    find_active(&p);
    begin(&p);
    sym_set_places(&p);
    if (p.num_of[DECODE] && p.num_of[PREFILL]) {
        p.crowding = crowding_of(&p);
        find_burst(&p);
    }
    set_prices(&p);
    plan_decodes(&p);
    plan_prefills(&p);
    end(&p);
    return p.num_calls;
}

int64_t sym_policy_wait_ns(const sym_wait *wait, int64_t step_ns) {
    return at_most(at_least(step_ns * wait->share_percent / 100, wait->min_ns), wait->max_ns);
}

/* The order in which calls and shares are served: policy.c states its rules. Each share has a heap of its children or
 * calls, with the next child or call on top. */
#include "plan.h"

#define AGING 20 /* the level of a waiting call rises by this much each second */
#define OVERDUE 16 /* a share is overdue after this many rounds without a place; a round is W / w plans: see policy.c */

void sym_set_places(struct plan *p) {
    for (int32_t i = 0; i < p->n; i++) {
        const sym_candidate *candidate = &p->candidates[i];
        int64_t waited_ns = at_least(p->now_ns - candidate->since_ns, 0);
        struct place *place = &p->places[i];
        /* Levels rise once a second, so that calls of one priority are ordered by deadline in between. */
        place->level = at_most(account_of(p, candidate)->top, candidate->priority + AGING * (waited_ns / SECOND));
        place->due_ns = candidate->deadline_ns;
        if (waited_ns > PATIENCE)
            place->due_ns = at_most(place->due_ns, candidate->since_ns + PATIENCE);
        place->is_held = 0;
    }
}

/* Compare two calls by level and deadline. Negative: call `a` goes first; 0: virtual time and arrival decide. */
static int compare_calls(const struct plan *p, int32_t a, int32_t b) {
    const struct place *left = &p->places[a], *right = &p->places[b];
    if (left->level != right->level)
        return left->level > right->level ? -1 : 1;
    return left->due_ns < right->due_ns ? -1 : left->due_ns > right->due_ns;
}

static int came_before(const struct plan *p, int32_t a, int32_t b) {
    const int64_t left = p->candidates[a].since_ns, right = p->candidates[b].since_ns;
    return left != right ? left < right : a < b;
}

/* Return whether call `a` of a program goes before its call `b`, which has the same level and deadline. */
static int is_shorter(const struct plan *p, int32_t a, int32_t b) {
    const sym_candidate *left = &p->candidates[a], *right = &p->candidates[b];
    return left->is_decode || left->left == right->left ? came_before(p, a, b) : left->left < right->left;
}

static int is_before(struct plan *p, const struct branch *within, int32_t a, int32_t b) {
    p->scratch->num_compared++;
    if (within->is_leaf) {
        int order = compare_calls(p, a, b);
        return order ? order < 0 : is_shorter(p, a, b);
    }
    if (within->is_account) {
        int order = compare_calls(p, p->heap[p->branches[a].first], p->heap[p->branches[b].first]);
        if (order)
            return order < 0;
    }
    double left = p->shares[a].used, right = p->shares[b].used;
    return left != right ? left < right : came_before(p, p->branches[a].arrival, p->branches[b].arrival);
}

static void swap(int32_t *a, int32_t *b) {
    int32_t kept = *a;
    *a = *b;
    *b = kept;
}

static void sift_down(struct plan *p, struct branch *within, int32_t at) {
    int32_t *heap = p->heap + within->first;
    for (int32_t child; (child = 2 * at + 1) < within->count; at = child) {
        if (child + 1 < within->count && is_before(p, within, heap[child + 1], heap[child]))
            child++;
        if (!is_before(p, within, heap[child], heap[at]))
            return;
        swap(&heap[child], &heap[at]);
    }
}

static void sift_up(struct plan *p, struct branch *within, int32_t at) {
    int32_t *heap = p->heap + within->first;
    for (int32_t parent; at > 0 && is_before(p, within, heap[at], heap[parent = (at - 1) / 2]); at = parent)
        swap(&heap[at], &heap[parent]);
}

static void drop(struct plan *p, struct branch *within, int32_t at) {
    int32_t *heap = p->heap + within->first;
    heap[at] = heap[--within->count];
    if (at < within->count) {
        sift_up(p, within, at);
        sift_down(p, within, at);
    }
}

static void make_heap(struct plan *p, struct branch *within) {
    for (int32_t at = within->count / 2; at-- > 0;)
        sift_down(p, within, at);
}

void sym_make_heaps(struct plan *p, int kind) {
    for (int32_t i = 0; i < p->num_active; i++)
        p->branches[p->active[i]].count = p->branches[p->active[i]].is_visited = 0;
    for (int32_t i = 0; i < p->n; i++)
        p->branches[p->candidates[i].share].count += kind_of(&p->candidates[i]) == kind;
    for (int32_t i = 0; i < p->num_active; i++) {
        int32_t s = p->active[i], parent = p->shares[s].parent;
        if (parent >= 0 && p->branches[s].active & 1 << kind)
            p->branches[parent].count++;
    }
    int32_t first = 0;
    for (int32_t i = 0; i < p->num_active; i++) {
        struct branch *branch = &p->branches[p->active[i]];
        branch->first = first;
        first += branch->count;
        branch->count = 0;
    }
    for (int32_t i = 0; i < p->n; i++)
        if (kind_of(&p->candidates[i]) == kind) {
            struct branch *leaf = &p->branches[p->candidates[i].share];
            p->heap[leaf->first + leaf->count++] = i;
        }
    for (int32_t i = 0; i < p->num_active; i++) {
        int32_t s = p->active[i], parent = p->shares[s].parent;
        if (parent >= 0 && p->branches[s].active & 1 << kind) {
            struct branch *branch = &p->branches[parent];
            p->heap[branch->first + branch->count++] = s;
        }
    }
    /* Leaves come first: an account orders its programs by their next calls. */
    for (int32_t i = 0; i < p->num_active; i++)
        if (p->branches[p->active[i]].is_leaf)
            make_heap(p, &p->branches[p->active[i]]);
    for (int32_t i = 0; i < p->num_active; i++)
        if (!p->branches[p->active[i]].is_leaf)
            make_heap(p, &p->branches[p->active[i]]);
}

/* Return the index of the child that is overdue and has waited for the most plans; 0, the top of the heap, if no child
 * is overdue. */
static int32_t overdue(const struct plan *p, const struct branch *within, int kind) {
    double weights = 0;
    for (int32_t i = 0; i < within->count; i++)
        weights += p->shares[p->heap[within->first + i]].weight;
    int32_t found = 0;
    int64_t longest = 0;
    for (int32_t i = 0; i < within->count; i++) {
        const sym_share *share = &p->shares[p->heap[within->first + i]];
        int64_t waited = p->number - share->last_plan[kind];
        if (waited > longest && (double)waited * share->weight > OVERDUE * weights) {
            found = i;
            longest = waited;
        }
    }
    return found;
}

int32_t sym_choose(struct plan *p, int kind) {
    struct branch *branch = &p->branches[0];
    if (!branch->count)
        return -1;
    while (!branch->is_leaf) {
        branch->chosen = branch->is_visited || branch->is_account ? 0 : overdue(p, branch, kind);
        branch->is_visited = 1;
        branch = &p->branches[p->heap[branch->first + branch->chosen]];
    }
    branch->chosen = 0;
    return p->heap[branch->first];
}

void sym_take_out(struct plan *p, int32_t candidate) {
    int is_empty = 1; /* whether the chosen child leaves the heap: a call, or a share whose heap is empty */
    for (int32_t s = p->candidates[candidate].share; s >= 0; s = p->shares[s].parent) {
        struct branch *branch = &p->branches[s];
        if (is_empty)
            drop(p, branch, branch->chosen);
        else
            sift_down(p, branch, branch->chosen);
        is_empty = !branch->count;
    }
}

/* Facts that the scheduler sets in the run (shares, the cost model, the step's limit), and facts that it reads: counts,
 * steps and their seats. */
#include "loop_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int32_t sym_loop_new_share(sym_loop *loop, int32_t parent, double weight) {
    pthread_mutex_lock(&loop->lock);
    int32_t share = -ENOMEM;
    if (loop->num_free_shares > 0) {
        share = loop->free_shares[--loop->num_free_shares];
    } else {
        int32_t room = loop->room_shares;
        if (sym_make_room(&loop->free_shares, &room, loop->num_shares + 1, sizeof(int32_t)) == 0 &&
            sym_make_room(&loop->shares, &loop->room_shares, loop->num_shares + 1, sizeof(sym_share)) == 0)
            share = loop->num_shares++;
    }
    if (share >= 0)
        loop->shares[share] = (sym_share){.weight = weight, .parent = parent};
    pthread_mutex_unlock(&loop->lock);
    return share;
}

void sym_loop_set_weight(sym_loop *loop, int32_t share, double weight) {
    pthread_mutex_lock(&loop->lock);
    loop->shares[share].weight = weight;
    pthread_mutex_unlock(&loop->lock);
}

void sym_loop_free_share(sym_loop *loop, int32_t share) {
    pthread_mutex_lock(&loop->lock);
    loop->shares[share].is_active = 0;
    loop->free_shares[loop->num_free_shares++] = share;
    pthread_mutex_unlock(&loop->lock);
}

void sym_loop_set_cost(sym_loop *loop, const sym_cost *cost) {
    pthread_mutex_lock(&loop->lock);
    loop->cost = *cost;
    pthread_mutex_unlock(&loop->lock);
}

void sym_loop_set_step_ns(sym_loop *loop, int64_t step_ns) {
    pthread_mutex_lock(&loop->lock);
    loop->plan.limits.step_ns = step_ns;
    pthread_mutex_unlock(&loop->lock);
}

int sym_loop_is_stepping(sym_loop *loop) { return __atomic_load_n(&loop->stepping_since_ns, __ATOMIC_RELAXED) != 0; }

sym_counts sym_loop_counts(sym_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    const sym_counts counts = loop->counts;
    pthread_mutex_unlock(&loop->lock);
    return counts;
}

int32_t sym_loop_steps(sym_loop *loop, int64_t from, sym_step_record *records, int32_t max, sym_seat *seats,
                       int32_t max_seats) {
    int32_t n = 0, num_seats = 0;
    pthread_mutex_lock(&loop->lock);
    const int64_t end = loop->counts.num_steps;
    if (from < end - SYM_NUM_RECORDS)
        from = end - SYM_NUM_RECORDS;
    for (; from < end && n < max; from++) {
        sym_step_record record = loop->records[from % SYM_NUM_RECORDS];
        if (seats != NULL) {
            const int64_t known = loop->num_record_seats - SYM_NUM_SEATS;
            if (num_seats + record.num_calls > max_seats)
                break;
            if (record.first_seat < 0 || record.first_seat < known) {
                record.first_seat = -1; /* its seats were not recorded, or are overwritten */
            } else {
                for (int32_t i = 0; i < record.num_calls; i++)
                    seats[num_seats + i] = loop->record_seats[(record.first_seat + i) % SYM_NUM_SEATS];
                record.first_seat = num_seats;
                num_seats += record.num_calls;
            }
        }
        records[n++] = record;
    }
    pthread_mutex_unlock(&loop->lock);
    return n;
}

void sym_loop_trace(sym_loop *loop, int is_traced) {
    pthread_mutex_lock(&loop->lock);
    if (is_traced && loop->record_seats == NULL)
        loop->record_seats = calloc(SYM_NUM_SEATS, sizeof *loop->record_seats);
    loop->is_traced = is_traced && loop->record_seats != NULL;
    pthread_mutex_unlock(&loop->lock);
}

int64_t sym_loop_stepping_since(sym_loop *loop, int32_t *members, int32_t max, int32_t *num_members) {
    pthread_mutex_lock(&loop->lock);
    const int64_t since_ns = loop->stepping_since_ns;
    *num_members = 0;
    for (int32_t i = 0; since_ns != 0 && i < loop->num_seats && i < max; i++)
        members[(*num_members)++] = loop->seats[i].index;
    pthread_mutex_unlock(&loop->lock);
    return since_ns;
}

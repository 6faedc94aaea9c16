/* What the files of the loop share; see loop.c. */
#ifndef SYM_LOOP_STATE_H
#define SYM_LOOP_STATE_H

#include "loop.h"
#include "streams.h"

#include <pthread.h>
#include <stdatomic.h>

#define SYM_NUM_RECORDS 4096
#define SYM_NUM_SEATS 65536
#define SYM_LOW_ENTRIES 32 /* with room for fewer a member wants more */

/* One of a step's calls. */
struct seat {
    sym_member *member;
    int32_t index, num_now, num_wanted;
    int32_t first_out; /* its rows in `out` */
    int32_t is_decode;
    int32_t is_drawn, is_reduced; /* a token is to be drawn from the last of them; they are answered by numbers */
    int32_t is_folded;            /* all that its call attends to is known */
    int32_t is_over; /* before tokens are drawn: others may have its member by then */
};

/* A program's channel, whose ring is looked at between steps. */
struct watched {
    sym_server *server;
    int32_t num_members;
    int slept;
    int32_t num_asked,
        num_other; /* of its members in one look at the rings; those for which another's call came first */
};

/* Arrays of a batch, as long as steps have needed them. */
struct layout {
    int32_t *tokens, *positions, room_rows;
    int32_t *first_row, *start, *first_page, *wanted, room_chunks;
    const uint32_t **masks;
    size_t *mask_at;
    sym_mass *masses;
    int32_t *pages, room_pages;
    float **out;
    int32_t room_out;
    int32_t *copies, room_copies;
    uint32_t *mask_words;
    size_t room_mask_words;
    float **scratch;
    int32_t num_scratch;
    uint32_t *stamps, stamp; /* pages that decodes of this step have read already */
};

struct sym_loop {
    sym_loop_plan plan;
    sym_engine engine;
    pthread_mutex_t lock;
    pthread_cond_t has_work;
    int closed; /* atomic */
    _Atomic int32_t num_expected;
    /* Under the lock: */
    sym_member **members; /* each where it is as long as it lives */
    int32_t num_places, room_places;
    int32_t *free_places, num_free_places;
    int32_t *news, num_news;
    int must_tell, is_told; /* something that the scheduler has to act on; it was rung for */
    sym_streams *streams;
    int64_t looked_ns; /* at the rings, the latest time */
    struct watched *servers;
    int32_t num_servers, room_servers;
    sym_share *shares;
    int32_t num_shares, room_shares, *free_shares, num_free_shares;
    sym_cost cost;
    int is_traced, is_asleep;
    int64_t stepping_since_ns;
    sym_counts counts; /* `last_step_ns` is read without it, too */
    sym_step_record records[SYM_NUM_RECORDS];
    sym_seat *record_seats;
    int64_t num_record_seats;
    /* Of the thread that runs; others read `seats` under the lock, while a step is computed. */
    sym_candidate *candidates;
    int32_t *candidate_of, *num_now, room_candidates;
    sym_scratch *scratch; /* for so many candidates and shares */
    int32_t scratch_candidates, scratch_shares;
    struct seat *seats;
    int32_t num_seats, room_seats;
    struct layout layout;
    sym_batch batch;
    double predicted_ns;
    sym_work work;
    int32_t num_prefill_rows;
    _Atomic int64_t progress;
};

static inline int32_t pages_for(int32_t entries) { return (entries + SYM_PAGE_ENTRIES - 1) / SYM_PAGE_ENTRIES; }

/* Entries of the file that count. */
static inline int32_t entries(const sym_member *member) { return member->first + member->num_done; }

/* What a call asks for; nothing, of any other member. */
static inline const sym_asked *asked_of(const sym_member *member) {
    static const sym_asked nothing;
    return member->kind == SYM_CALL ? &member->asked : &nothing;
}

/* Room for `wanted` elements of `size` bytes: 0, or -1 without memory, and nothing changed. */
int sym_make_room(void *array, int32_t *room, int32_t wanted, size_t size);

/* times.c */
void sym_count_time(sym_times *times, int64_t ns);

/* members.c; all under the lock */
void sym_news_of(sym_loop *loop, int32_t index);
void sym_act_on(sym_loop *loop, int32_t index);
void sym_end_member(sym_loop *loop, int32_t index, int32_t why);
void sym_tell(sym_loop *loop);
void sym_wake_loop(sym_loop *loop);
void sym_ring(int fd);

/* A member's call, which came between two times, is in the run; it is over, and its program is told now (or it is not). Under
 * the lock. */
void sym_called(sym_loop *loop, sym_member *member, int64_t earliest_ns, int64_t latest_ns);
void sym_over(sym_loop *loop, sym_member *member, int is_answered, int64_t now_ns);

/* layout.c: what the next step holds. 0: nothing; or so many calls; or -ENOMEM. Under the lock. */
int32_t sym_lay_out(sym_loop *loop, int64_t now_ns);

/* generation.c; all but the draws under the lock. */
void sym_join_generation(sym_loop *loop, int32_t index);
/* Whether a generation with a draft would have what its grammar forces in the stretch that it is about to begin. */
int sym_waits_for_decisions(const sym_loop *loop);
/* If something is to be decided. */
void sym_call_guides(sym_loop *loop);
/* Its stretch has so many guesses at most. */
void sym_trim_draft(sym_member *member, int32_t most);
/* Its stretch was computed: what was not drawn of the guesses is wrong. */
void sym_end_draft(sym_generation *generation);
/* Its stretch is computed, or is decided about. 1: a token is to be drawn. */
int sym_complete_generation(sym_loop *loop, int32_t index, int64_t now_ns);
/* From each row that the draft turns out to be right about, and from the first where it is not. */
void sym_draw(const sym_hot_functions *hot, sym_member *member, float *const *rows);
/* What was drawn is sent, and computed in the next step; or it is the end. */
void sym_take_drawn(sym_loop *loop, int32_t index, int64_t now_ns);

/* results.c */
/* The first tokens of its stretch are part of the file from now on. */
void sym_count_entries(sym_loop *loop, int32_t index, int32_t num_entries, int64_t now_ns);
void sym_take_results(sym_loop *loop, int64_t step_ns, int error);
void sym_continue_with(sym_loop *loop, int32_t index, const sym_hot_call *call, int64_t earliest_ns, int64_t now_ns);

#endif

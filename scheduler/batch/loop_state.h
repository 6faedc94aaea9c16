/* State of the loop, shared by its C files. loop.c describes the run. */
#ifndef SYM_LOOP_STATE_H
#define SYM_LOOP_STATE_H

#include "loop.h"
#include "streams.h"

#include <pthread.h>
#include <stdatomic.h>

#define SYM_NUM_RECORDS 4096
#define SYM_NUM_SEATS 65536
#define SYM_LOW_ENTRIES 32 /* a member with room for fewer entries asks for more */

/* One call of the step under way. */
struct seat {
    sym_member *member;
    int32_t index,  /* the member's place in the run */
        num_now,    /* entries of the call in this step */
        num_wanted; /* rows of logits that the step computes for the call */
    int32_t first_out; /* index of the first of these rows in sym_batch.out */
    int32_t is_decode; /* the policy treated the call as a decode */
    int32_t is_drawn,  /* a generation draws tokens from the rows */
        is_reduced;    /* the rows become numbers */
    int32_t is_folded; /* the call's attention is complete, and is folded */
    int32_t is_over;   /* the member has left the step before draws begin; other threads may change it already */
};

/* A program's channel. The loop polls its ring between steps. */
struct watched {
    sym_server *server;
    int32_t num_members; /* members of this program in the run */
    int slept;           /* the loop watches the ring, so the program need not ring its doorbell */
    int32_t num_asked,   /* members that looked for their next call in the latest poll */
        num_other;       /* members among them that found a call of another file at the head of the ring */
};

/* Arrays of a step's batch, which grow as steps need. Fields mean the same as the fields with their names in sym_batch,
 * unless a comment says more. */
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
    uint32_t *stamps, /* [num_pages] the value of `stamp` when `was_read` last saw the page: see layout.c */
        stamp;        /* grows with each count of distinct pages */
};

struct sym_loop {
    sym_loop_plan plan;
    sym_engine engine;
    pthread_mutex_t lock;
    pthread_cond_t has_work;
    int closed; /* sym_loop_close was called; accessed atomically */
    _Atomic int32_t num_expected; /* calls of a request that are still being submitted */
    /* The lock protects the fields below. */
    sym_member **members; /* by place; a member's address does not change */
    int32_t num_places, room_places;
    int32_t *free_places, num_free_places;
    int32_t *news, num_news; /* places of members that have unread news */
    int must_tell, /* some news needs the scheduler */
        is_told;   /* `wake_fd` was rung, and the scheduler has not read the news yet */
    sym_streams *streams;
    int64_t looked_ns; /* time of the latest poll of the rings */
    struct watched *servers;
    int32_t num_servers, room_servers;
    sym_share *shares;
    int32_t num_shares, room_shares, *free_shares, num_free_shares;
    sym_cost cost;
    int is_traced, is_asleep;
    int64_t stepping_since_ns;
    sym_counts counts; /* `last_step_ns` is also read without the lock */
    sym_step_record records[SYM_NUM_RECORDS]; /* the latest steps: step n is at n % SYM_NUM_RECORDS */
    sym_seat *record_seats;                   /* [SYM_NUM_SEATS] the latest seats, while steps are traced; or null */
    int64_t num_record_seats;                 /* seats recorded so far */
    /* The step thread owns the fields below. Other threads read `seats` under the lock, while a step is computed. */
    sym_candidate *candidates;
    int32_t *candidate_of, /* place of each candidate's member */
        *num_now, /* entries of each candidate in the next step */
        room_candidates;
    sym_scratch *scratch; /* memory of the policy */
    int32_t scratch_candidates, /* candidates that `scratch` has room for */
        scratch_shares; /* shares that `scratch` has room for */
    struct seat *seats;
    int32_t num_seats, room_seats;
    struct layout layout;
    sym_batch batch;
    double predicted_ns; /* expected time of the step in `batch` */
    sym_work work; /* work of the step in `batch` */
    int32_t num_prefill_rows; /* rows of prefills in `batch` */
    _Atomic int64_t progress; /* see sym_loop_progress */
};

static inline int32_t pages_for(int32_t entries) { return (entries + SYM_PAGE_ENTRIES - 1) / SYM_PAGE_ENTRIES; }

/* Return the number of entries that the member's file has. */
static inline int32_t entries(const sym_member *member) { return member->first + member->num_done; }

/* Return the `asked` of a SYM_CALL, and zeros for other members. */
static inline const sym_asked *asked_of(const sym_member *member) {
    static const sym_asked nothing;
    return member->kind == SYM_CALL ? &member->asked : &nothing;
}

/* room.c: grow an array to at least `wanted` elements of `size` bytes. Return 0. -1: there is no memory, and the array
 * is unchanged. */
int sym_make_room(void *array, int32_t *room, int32_t wanted, size_t size);
/* Return a free place for a member; -1: there is no memory. Under the lock. */
int32_t sym_free_place(sym_loop *loop);

/* times.c: count a duration. */
void sym_count_time(sym_times *times, int64_t ns);

/* members.c. All of these functions are called under the lock. */
/* Add the member to the list of members with news. */
void sym_news_of(sym_loop *loop, int32_t index);
/* Add the member to the list of members with news, and have `sym_tell` wake the scheduler. */
void sym_act_on(sym_loop *loop, int32_t index);
/* End the member; `why` is a sym_member_end. */
void sym_end_member(sym_loop *loop, int32_t index, int32_t why);
/* Wake the scheduler if any news needs the scheduler. The next wake follows only after the scheduler has read the
 * news. */
void sym_tell(sym_loop *loop);
/* Wake the step thread if it sleeps. */
void sym_wake_loop(sym_loop *loop);
void sym_ring(int fd);

/* Tell the member's stream that a call has arrived, between the two times; or that the call is over (`is_answered`: the
 * program gets its answer now). Under the lock. */
void sym_called(sym_loop *loop, sym_member *member, int64_t earliest_ns, int64_t latest_ns);
void sym_over(sym_loop *loop, sym_member *member, int is_answered, int64_t now_ns);

/* Count the first `num_entries` tokens of the member's stretch as entries of its file. */
void sym_count_entries(sym_loop *loop, int32_t index, int32_t num_entries, int64_t now_ns);
/* Make a program's next call the stretch of its waiting member. The call arrived between the two times. */
void sym_continue_with(sym_loop *loop, int32_t index, const sym_hot_call *call, int64_t earliest_ns, int64_t now_ns);

/* group.c: answer a program's call that is computed. Return 0, or 1 if the scheduler has to answer it. Under the
 * lock. */
int sym_answer_program(sym_loop *loop, sym_member *member);

/* layout.c: choose the calls of the next step and fill `batch`. Return their number, or -ENOMEM. Under the lock. */
int32_t sym_lay_out(sym_loop *loop, int64_t now_ns);

/* generation.c. All of these functions but `sym_draw` are called under the lock. */
/* Begin the next stretch of a generation that has just joined. */
void sym_join_generation(sym_loop *loop, int32_t index);
/* Return whether a step is worth delaying for a grammar's decision: a generation with a draft, ready for the next step,
 * would add the forced tokens to its stretch. */
int sym_waits_for_decisions(const sym_loop *loop);
/* Ring `guide_fd` if a draw waits for a grammar's decision. */
void sym_call_guides(sym_loop *loop);
/* Cut the guesses in the member's stretch to at most `most`. */
void sym_trim_draft(sym_member *member, int32_t most);
/* Count as rejected the guesses of a computed stretch that were not drawn. */
void sym_end_draft(sym_generation *generation);
/* Take the grammar's decision about a generation's computed stretch, if the generation has a grammar. 1: the caller
 * draws a token. */
int sym_complete_generation(sym_loop *loop, int32_t index, int64_t now_ns);
/* Draw a token from each row, up to the first token that differs from the draft's guess. */
void sym_draw(const sym_hot_functions *hot, sym_member *member, float *const *rows);
/* Send the drawn tokens and begin the next stretch with them, or end the generation. */
void sym_take_drawn(sym_loop *loop, int32_t index, int64_t now_ns);

/* results.c: count entries, answer programs and draw tokens after a step. `error`: errno of a step that failed. */
void sym_take_results(sym_loop *loop, int64_t step_ns, int error);

#endif

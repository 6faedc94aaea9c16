/* The standing run: steps follow each other without the interpreter. loop.c describes it. cffi reads this file:
 * declarations only. */
#ifndef SYM_LOOP_H
#define SYM_LOOP_H

#include "generation.h"
#include "group.h"
#include "policy.h"
#include "steps.h"

enum sym_member_kind {
    SYM_CALL = 0,       /* the member ends with its one stretch */
    SYM_PROGRAM = 1,    /* a loop over pred(): the run answers each call, and takes the program's next one */
    SYM_GENERATION = 2, /* the run draws tokens from the last row of each stretch, and makes them the next stretch */
};

enum sym_member_state {
    SYM_GONE = 0,      /* the place is free */
    SYM_COMPUTING = 1, /* the member has entries to compute */
    SYM_WAITING = 2,   /* the program has its answer, and the run waits for its next call */
    SYM_UNDECIDED = 3, /* the row is computed, and the grammar has not yet decided which tokens may be drawn */
    SYM_ENDED = 4,     /* the scheduler takes the member back and settles it */
};

/* Why a member has ended. */
enum sym_member_end {
    SYM_END_NONE = 0,   /* the member has not ended */
    SYM_END_DONE = 1,   /* a call's stretch is computed, or a generation is over: its `finish` says why */
    SYM_END_ROOM = 2,   /* the next stretch needs more entries than are reserved */
    SYM_END_UNSENT = 3, /* a program's call is computed, and the scheduler has to send the answer */
    SYM_END_STEP = 4,   /* the step failed: `error` is its errno */
    SYM_END_ASKED = 5,  /* the scheduler asked the member to leave */
    SYM_END_DEADLINE = 6,
};

/* When a member leaves after the scheduler asked for it. */
enum sym_leave {
    SYM_STAY = 0,
    SYM_LEAVE_ANSWERED = 1, /* after the answer to its call, or after its next draw */
    /* At once, or with the step under way. The results of that step are dropped, except in a generation: there, the
     * entries still count, and one more token is drawn. */
    SYM_LEAVE_NOW = 2,
};

/* Optional parts of a SYM_CALL: an attention mask, a reduction in place of full rows, and attention sums. */
typedef struct sym_asked {
    const uint8_t *mask; /* packed bits of its attention mask: see EntryMask in attention.py; null: no mask */
    int32_t mask_rows, /* rows of the mask: 1 for all tokens, or one for each */
        mask_columns, /* entries that a row of the mask covers */
        mask_row_bytes; /* bytes of a row of the mask */
    int32_t answer_row_bytes; /* bytes that the reducer writes for each row */
    sym_reducer *reducer; /* turns each wanted row into numbers; null: the caller gets full rows */
    char *answer; /* receives the reducer's numbers, row after row */
    sym_mass mass; /* attention of the call's rows: each step adds to it; `sums` null: not asked for */
    float *folded; /* [1 or layers * KV heads][columns or pages]: zeros, then the folded `mass`; null: not folded */
    int32_t is_mass_summed, /* `folded` has one row, the sum over layers and KV heads */
        is_mass_by_page; /* `folded` has a column for each page, not for each entry */
} sym_asked;

/* The loop of a SYM_PROGRAM over one file, and its call under way. */
typedef struct sym_decode {
    uint64_t handle; /* the file's handle in the program's calls */
    int64_t slot; /* result slot of the call under way; -1: its answer has numbers and no row */
    sym_group *group; /* batch that the call under way belongs to; null: the call is answered alone */
    int32_t number; /* the call's index within `group` */
    sym_numbers *numbers; /* numbers that answer the call under way; null: its row answers it */
    /* The loop sets the fields below. */
    float *row; /* row of `slot`, for each call after the first */
    int32_t token; /* token of the call under way, for each call after the first */
    int32_t server_index, /* index of the program's channel in `sym_loop.servers` */
        is_rung; /* the program's ring has a request for the gate, and the scheduler does not know it yet */
    int64_t answered_ns, /* time of the latest answer */
        num_calls; /* calls answered since the member joined */
} sym_decode;

/* One file in the run, and the call that appends to it. */
typedef struct sym_member {
    /* The caller sets these fields before the member joins. The caller owns all memory that these fields point to, and
     * keeps that memory in place until it has taken the member back. */
    int64_t number; /* serial number of the call in traces */
    int64_t since_ns, /* time at which the present stretch became ready to be computed */
        deadline_ns; /* the call's deadline, or SYM_NO_DEADLINE */
    int64_t arrived_ns; /* time at which the call arrived */
    int64_t asked_ns; /* time at which the stretch was asked for; for the first stretch, the call's arrival */
    int64_t begun_ns; /* time of the first answer since the member joined; until then, time of joining */
    int32_t kind, /* a sym_member_kind */
        share, /* the program's share: a leaf of the tree of shares */
        priority, /* the call's priority */
        program; /* pid of the program */
    int64_t connection; /* number that sym_loop_connect returned; -1: none */
    uint32_t stream; /* the call's stream: see streams.c */
    int32_t num_rows; /* number of wanted rows of logits: the rows of the stretch's last tokens */
    float *const *rows; /* [num_rows] memory for the rows; null: the loop's own, for a reduction or a draw */
    sym_server *server; /* the program's channel; null for a SYM_CALL */
    uint64_t call_id; /* request id of the call under way */
    const int32_t *pages; /* frames of the file's pages and of the reserved pages, in order */
    const int32_t *copies; /* [num_copies][3] source frame, target frame, entries: copied before the first step */
    const int32_t *tokens, /* [num_tokens] the stretch */
        *positions; /* [num_tokens] positions of the tokens; null: consecutive from `position` */
    int32_t num_tokens, num_copies;
    int32_t position; /* position of the file's next entry */
    int32_t first; /* number of the file's entries when the member joined */
    int32_t capacity; /* number of entries that the file has room for, `first` included */
    int32_t slack; /* the member asks for more room this many entries later than others: see SYM_LOW_ENTRIES */
    int32_t max_rows; /* rows that the limit of its program still allows; 0: the program has no limit on tokens */
    int32_t *log; /* [capacity - first] receives the tokens of entries that count; null for a SYM_CALL */
    union {
        sym_asked asked; /* SYM_CALL */
        sym_decode decode; /* SYM_PROGRAM */
        sym_generation *generation; /* SYM_GENERATION */
    };
    /* The loop sets the fields below. */
    int32_t state, /* a sym_member_state */
        end, /* a sym_member_end */
        error, /* errno of a failed step, reduction or draw; 0: none */
        leave; /* a sym_leave */
    int32_t num_computed; /* tokens of the stretch that are computed */
    int32_t num_done; /* entries appended since the member joined, which count as part of the file */
    int32_t is_under_way; /* the call counts as under way in its stream */
    int32_t in_step, /* the step under way holds the member, or a thread draws for it */
        has_news, /* `sym_loop.news` lists the member */
        is_low, /* room for few entries is left: see SYM_LOW_ENTRIES */
        was_told_low; /* the scheduler knows that `is_low` is set */
    int64_t compute_ns; /* time of all steps that held the member, summed */
    int64_t queue_ns; /* time in which the member had entries to compute and was in no step */
    int64_t stepped_ns; /* end of its last step */
    int64_t told_ns; /* part of `compute_ns` that earlier stretches took */
    int64_t num_steps, /* steps that held the member */
        num_rows_computed; /* rows computed in those steps, whether or not their entries count */
} sym_member;

/* One step, for the cost model and for traces. */
typedef struct sym_step_record {
    int64_t began_ns, ended_ns; /* begin and end of the step, by CLOCK_MONOTONIC */
    sym_work work; /* what the step computed */
    double predicted_ns; /* time that the cost model expected */
    int64_t first_seat; /* index of its first seat in the caller's array; -1: its seats are unknown */
    int32_t num_prefill_rows, /* rows of prefills */
        num_calls; /* calls in the step */
} sym_step_record;

/* One call in a step, for traces. */
typedef struct sym_seat {
    int64_t call; /* serial number of the call in traces */
    int32_t num_now, /* entries of the call that the step computes */
        length; /* entries of the file before these entries */
    int64_t arrived_ns; /* time at which the call arrived */
} sym_seat;

/* Histogram of durations. Bucket i counts durations above sym_time_bound_ns(i - 1) and up to sym_time_bound_ns(i). The
 * last bucket counts all longer durations. */
#define SYM_NUM_TIMES 42
typedef struct sym_times {
    int64_t num[SYM_NUM_TIMES], sum_ns; /* sum of all durations */
} sym_times;

/* Counters of the run since it was made. */
typedef struct sym_counts {
    int64_t num_steps, /* steps that succeeded */
        step_ns, /* time of these steps, summed */
        last_step_ns, /* time of the latest step */
        num_tokens, /* rows computed */
        num_prefill_tokens, /* rows of prefills among them */
        num_taken, /* calls that the run took out of rings */
        num_calls_in_steps; /* calls of each step, summed over the steps */
    int64_t num_undecided; /* times that a step left out a generation whose grammar had not decided yet */
    int64_t num_wakes; /* times that the loop woke the scheduler */
    int64_t num_sleeps; /* times that the loop slept for want of work */
    int64_t waited_ns; /* time that steps waited for calls of streams that were due */
    int64_t sizes[9]; /* steps by number of calls: 1, 2, 3-4, 5-8, ... 65-128, more */
    sym_times steps; /* times of steps */
    sym_times stretches, /* times from the request for a stretch until it was computed */
        waits; /* part of these times in which the stretch was in no step */
    int32_t max_calls, /* most calls in one step */
        max_programs; /* most programs in one step */
} sym_counts;

/* News of one member: its state and its counters as of now. */
typedef struct sym_news {
    int32_t index, /* the member's place in the run */
        state, /* a sym_member_state */
        num_done, /* as in sym_member */
        is_low, /* the member needs more room soon; reported once, and again after sym_loop_extend */
        is_rung; /* the program's ring has a request for the gate */
    int32_t has_ended; /* the caller may take the member back: it has ended, and no step under way holds it */
    int64_t answered_ns; /* time of the latest answer, while the run waits for the program's next call; else 0 */
    int32_t num_entries; /* entries of the file that count, `first` included */
    int64_t num_calls, /* as in sym_decode; 0 for the other kinds */
        compute_ns, queue_ns; /* as in sym_member */
    int64_t num_steps, num_rows_computed; /* as in sym_member */
} sym_news;

typedef struct sym_loop sym_loop;

typedef struct sym_loop_plan {
    const sym_hot_functions *hot; /* functions of libsym */
    int32_t vocab_size, /* floats in a row of logits */
        num_pages; /* number of frames; `sym_member.pages` has only lower numbers */
    sym_limits limits;
    sym_wait wait;
} sym_loop_plan;

/* Return the time by CLOCK_MONOTONIC. */
int64_t sym_now_ns(void);

/* Make a loop. NULL: there is no memory. */
sym_loop *sym_loop_new(const sym_loop_plan *plan);
void sym_loop_free(sym_loop *loop);

/* The engine of a running loop: its decoder and threads, and the eventfds that the loop rings. Members may join before
 * the loop has an engine. */
typedef struct sym_engine {
    sym_step_function *step;
    sym_decoder *decoder; /* first argument of `step` */
    sym_parallel_function *parallel; /* draws and reduces between steps; null: the loop's own thread does that */
    sym_decoder *crew; /* first argument of `parallel`: the decoder, or a crew of threads without a model */
    int wake_fd, /* rung when there is news for the scheduler */
        guide_fd; /* rung when a grammar has to decide what may be drawn */
} sym_engine;

/* Run steps until `sym_loop_close`. */
void sym_loop_run(sym_loop *loop, const sym_engine *engine);
/* Any thread may call this function and all functions below. */
void sym_loop_close(sym_loop *loop);

/* A call that begins: a new member joins with this call, or a program's waiting member goes on with this call. */
typedef struct sym_beginning {
    int32_t index; /* place of the waiting member; -1: `member` joins, and its place is written here */
    const sym_member *member; /* the new member; null: the fields below describe the call */
    const sym_server *server; /* the program's channel, which has to be the waiting member's */
    uint64_t handle; /* the file's handle, which has to be the waiting member's */
    sym_hot_call call;
    int32_t position; /* position of the call's token; -1: the file's next position */
    sym_group *group; /* as in sym_decode */
    int32_t number; /* as in sym_decode */
    sym_numbers *numbers; /* as in sym_decode */
} sym_beginning;

/* Begin all of the calls before the next step, and return 1. 0: nothing has changed, because a member does not wait for
 * its call, or because there is no memory. */
int sym_loop_begin(sym_loop *loop, sym_beginning *calls, int32_t num);
/* Let a member join. Return its place, or -ENOMEM. */
int32_t sym_loop_join(sym_loop *loop, const sym_member *member);
/* Ask a member to leave; `how` is a sym_leave. 1: the member has ended, and the caller may take it back. 0: the member
 * will end later, and there will be news. */
int sym_loop_leave(sym_loop *loop, int32_t index, int how);
/* End a program's member that waits for the next call. 1: the member has ended. 0: the next call has arrived already,
 * or the member ended before. */
int sym_loop_leave_waiting(sym_loop *loop, int32_t index);
/* Copy a member that has ended to `member`, and free its place. The loop may have kept the program from ringing its
 * doorbell, so the caller looks at the ring. */
void sym_loop_take_back(sym_loop *loop, int32_t index, sym_member *member);
/* Return the place of the member that computes a program's call with this id, searching from `from` on; -1: there is no
 * such member. All calls of a group have one id. */
int32_t sym_loop_find(sym_loop *loop, const sym_server *server, uint64_t call_id, int32_t from);
/* The outcome of a group's call whose member has left the run. */
typedef struct sym_noted {
    int32_t number, /* the call's index within the group */
        err; /* errno of a failed call; 0: the call succeeded */
    int64_t slot, /* result slot of the call's row; -1: no slot */
        num_entries; /* entries of its file */
    const char *payload; /* numbers, or the text of the error */
    uint32_t bytes; /* bytes of the payload, which is cut to the group's room */
} sym_noted;

/* Record that one call of a group has ended. Return 1 if it was the group's last call: then the caller sends the group's
 * payload and calls `sym_group_abandon`. */
int sym_loop_note(sym_loop *loop, sym_group *group, const sym_noted *noted);
/* Give a member more room. `pages` begins with the frames that the member had before. `log` receives the tokens that
 * are in the old log. */
void sym_loop_extend(sym_loop *loop, int32_t index, const int32_t *pages, int32_t *log, int32_t capacity);
/* Read one member's news. The news stays unread for `sym_loop_news`. */
void sym_loop_look(sym_loop *loop, int32_t index, sym_news *news);
/* Read the news of at most `max` members, and return their number. `all`: of every member that has news; otherwise only
 * of members that need the scheduler. */
int32_t sym_loop_news(sym_loop *loop, sym_news *news, int32_t max, int all);
/* Return the sym_connection of a program whose ring has a request for the gate, and mark that news as read. NULL: there
 * is none. */
void *sym_loop_take_rung(sym_loop *loop);
/* Return whether no member needs the scheduler. If so, the loop rings `wake_fd` again for the next news. */
int sym_loop_is_quiet(sym_loop *loop);
/* Return the number of places, free ones included. The next member that joins gets a free place, or place number
 * `sym_loop_num_places`. */
int32_t sym_loop_num_places(const sym_loop *loop);
/* Return a counter that grows whenever appended entries become part of their file. */
int64_t sym_loop_progress(const sym_loop *loop);
/* Expect `more` further calls of a request that is being submitted; below 0: expect fewer calls. Takes no lock. */
void sym_loop_expect(sym_loop *loop, int32_t more);
/* Begin to follow the streams of a connection. Return its number, or -1 if there is no memory. */
int64_t sym_loop_connect(sym_loop *loop);
void sym_loop_disconnect(sym_loop *loop, int64_t connection);

/* Take the draws that wait for a grammar's decision. `drawn` receives pairs: a call's serial number, and the token that
 * was drawn last (-1: none yet). Return the number of pairs, at most `max`. */
int32_t sym_loop_drawn(sym_loop *loop, int64_t *drawn, int32_t max);
/* Decide a generation's next draw. The `forced` tokens come first. Then the text is over (`is_over`), or a token is
 * drawn from the `allowed` tokens. The caller keeps both arrays in place until the next decision. */
void sym_loop_decide(sym_loop *loop, sym_generation *generation, const int32_t *forced, int32_t num_forced,
                     const void *allowed, int is_over);

/* Make a share below `parent`. Return its number, or -ENOMEM. */
int32_t sym_loop_new_share(sym_loop *loop, int32_t parent, double weight);
void sym_loop_set_weight(sym_loop *loop, int32_t share, double weight);
void sym_loop_free_share(sym_loop *loop, int32_t share);
void sym_loop_set_cost(sym_loop *loop, const sym_cost *cost);
/* Set `sym_limits.step_ns`. */
void sym_loop_set_step_ns(sym_loop *loop, int64_t step_ns);
sym_counts sym_loop_counts(sym_loop *loop);
/* Return the upper bound of a bucket of sym_times. There are two bounds for each power of two, from 65 us to 69 s. */
int64_t sym_time_bound_ns(int32_t index);
/* Copy the records of the steps with serial numbers from `from` on, as far as the loop still has these records. Return
 * the number of records. `seats` receives the seats of these steps, unless `seats` is null. */
int32_t sym_loop_steps(sym_loop *loop, int64_t from, sym_step_record *records, int32_t max, sym_seat *seats,
                       int32_t max_seats);
/* Record the seats of steps, or stop recording them. */
void sym_loop_trace(sym_loop *loop, int is_traced);
/* Return whether the decoder is computing a step. */
int sym_loop_is_stepping(sym_loop *loop);
/* Return the time at which the step under way began; 0: there is no step. Write the places of its members. */
int64_t sym_loop_stepping_since(sym_loop *loop, int32_t *members, int32_t max, int32_t *num_members);

#endif

/* The standing run: steps that follow each other without the interpreter. loop.c says how. cffi reads this file:
 * declarations only. */
#ifndef SYM_LOOP_H
#define SYM_LOOP_H

#include "generation.h"
#include "policy.h"
#include "steps.h"

enum sym_member_kind {
    SYM_CALL = 0,       /* over with its stretch */
    SYM_PROGRAM = 1,    /* a loop over pred(): answered here, and the program's next call is waited for */
    SYM_GENERATION = 2, /* what it draws from its last row is its next stretch */
};

enum sym_member_state {
    SYM_GONE = 0, /* nobody has this place */
    SYM_COMPUTING = 1,
    SYM_WAITING = 2,   /* a program has its answer, and its next call is to come */
    SYM_UNDECIDED = 3, /* its row is there, and what may be drawn from it is not decided yet */
    SYM_ENDED = 4,     /* the rest is the scheduler's */
};

enum sym_member_end {
    SYM_END_NONE = 0,
    SYM_END_DONE = 1,   /* the stretch of a call is computed; a generation is over, as it says */
    SYM_END_ROOM = 2,   /* more entries than are reserved */
    SYM_END_UNSENT = 3, /* the answer to a program found no room in the ring: the row is still to be sent */
    SYM_END_STEP = 4,   /* its step failed: `error`, an errno */
    SYM_END_ASKED = 5,  /* the scheduler wants it back */
    SYM_END_DEADLINE = 6,
};

/* Why a member is to leave. */
enum sym_leave {
    SYM_STAY = 0,
    SYM_LEAVE_ANSWERED = 1, /* when what it computes is answered, or the next token is drawn */
    SYM_LEAVE_NOW = 2, /* what it computes counts no more; of a generation it does, and the next token is drawn */
};

/* Of a call: what its tokens see, and what is answered instead of rows. */
typedef struct sym_asked {
    const uint8_t *mask; /* null, or bits: see EntryMask in call.py */
    int32_t mask_rows, mask_columns, mask_row_bytes;
    int32_t answer_row_bytes;
    sym_reducer *reducer; /* or null */
    char *answer;         /* of the reducer */
    sym_mass mass;        /* what its rows attend to is added up here; without `sums` nobody asks */
    float *folded; /* or null: zeros; in the end [1, or for each layer and KV head][columns or pages] of it */
    int32_t is_mass_summed, is_mass_by_page;
} sym_asked;

/* Of a program: its file, and its calls, of which each has a result slot. */
typedef struct sym_decode {
    uint64_t handle; /* of the file, in the program's calls */
    int64_t slot;
    /* Set by the loop. */
    float *row;    /* of a call that came from a ring */
    int32_t token; /* the same */
    int32_t server_index, is_rung, padding;
    int64_t answered_ns, num_calls;
} sym_decode;

/* One file that grows, by a call. */
typedef struct sym_member {
    /* Set before it joins. What is pointed to stays the caller's, and where it is, until the member is taken back. */
    int64_t number; /* of the call: for traces */
    int64_t since_ns, deadline_ns;
    int64_t arrived_ns; /* the call; `since_ns`: what is to be computed next */
    int64_t asked_ns; /* its stretch: before it joined, for the first one of a call */
    int64_t begun_ns; /* the first answer since it joined, once that is there; before, when it joined */
    int32_t kind, share, priority, program; /* program: a number for each that is connected */
    int64_t connection;
    uint32_t stream; /* of its call */
    int32_t num_rows; /* of the last tokens of the stretch: these are wanted */
    float *const *rows; /* [num_rows]; null: in memory of the loop, to be reduced or drawn from at once */
    sym_server *server; /* null: of a call */
    uint64_t call_id; /* of the call that is being computed */
    const int32_t *pages;
    const int32_t *copies; /* [num_copies][3], before its first step */
    const int32_t *tokens, *positions; /* [num_tokens]: its stretch; no positions: they go on from `position` */
    int32_t num_tokens, num_copies;
    int32_t position; /* of the next entry */
    int32_t first; /* entries of the file when it joined */
    int32_t capacity; /* entries that there is room for */
    int32_t slack; /* it wants more room for so many entries later than others do */
    int32_t max_rows; /* that may be computed, for its program has a limit on tokens; 0: has none */
    int32_t *log; /* [capacity - first]: the tokens of entries that count; null: of a call that is known */
    union {
        sym_asked asked;            /* SYM_CALL */
        sym_decode decode;          /* SYM_PROGRAM */
        sym_generation *generation; /* SYM_GENERATION */
    };
    /* Set by the loop. */
    int32_t state, end, error, leave;
    int32_t num_computed; /* of the stretch */
    int32_t num_done; /* entries that count */
    int32_t is_under_way; /* its call, for its stream */
    int32_t in_step, has_news, is_low, was_told_low;
    int64_t compute_ns;
    int64_t queue_ns; /* that it could have been computed and was in no step */
    int64_t stepped_ns; /* when its last step ended */
    int64_t told_ns; /* of `compute_ns`: what stretches before this one took */
    int64_t num_steps, num_rows_computed; /* that it was in, and in them, whatever became of the rows */
} sym_member;

/* A step, for the cost model and for traces. */
typedef struct sym_step_record {
    int64_t began_ns, ended_ns;
    sym_work work;
    double predicted_ns;
    int64_t first_seat; /* its first seat's place in what was asked for; -1: they are not known */
    int32_t num_prefill_rows, num_calls;
} sym_step_record;

/* A call in a step: for traces. */
typedef struct sym_seat {
    int64_t call; /* its number */
    int32_t num_now, length;
    int64_t arrived_ns;
} sym_seat;

/* How many took how long: up to sym_time_bound_ns(0), up to the next bound, ..., or more. */
#define SYM_NUM_TIMES 42
typedef struct sym_times {
    int64_t num[SYM_NUM_TIMES], sum_ns;
} sym_times;

typedef struct sym_counts {
    int64_t num_steps, step_ns, last_step_ns, num_tokens, num_prefill_tokens, num_taken, num_calls_in_steps;
    int64_t num_undecided; /* seats that were left empty for a decision */
    int64_t num_wakes; /* times that the loop woke the scheduler */
    int64_t num_sleeps; /* times that the loop slept for want of work */
    int64_t waited_ns; /* for calls that were about to return */
    int64_t sizes[9]; /* steps of 1, 2, 3-4, 5-8, ... 65-128, more calls */
    sym_times steps;
    sym_times stretches, waits; /* from when one was asked for until it was computed; of that, in no step */
    int32_t max_calls, max_programs;
} sym_counts;

/* A member now; `is_low`: it has little room left, told once for each room. */
typedef struct sym_news {
    int32_t index, state, num_done, is_low, is_rung;
    int32_t has_ended;   /* it may be taken back: what has ended in the step under way is looked at still */
    int64_t answered_ns; /* when its program got its answer, while its next call is to come; or 0 */
    int32_t num_entries; /* of the file, that count */
    int64_t num_calls, compute_ns, queue_ns;
    int64_t num_steps, num_rows_computed;
} sym_news;

typedef struct sym_loop sym_loop;

typedef struct sym_loop_plan {
    const sym_hot_functions *hot;
    int32_t vocab_size, num_pages;
    sym_limits limits;
    sym_wait wait;
} sym_loop_plan;

/* CLOCK_MONOTONIC. */
int64_t sym_now_ns(void);

/* Null: no memory. */
sym_loop *sym_loop_new(const sym_loop_plan *plan);
void sym_loop_free(sym_loop *loop);

/* What computes its steps, and eventfds: `wake_fd` is rung when there is news, `guide_fd` when something was drawn that is
 * to be decided about. Members may join before that. */
typedef struct sym_engine {
    sym_step_function *step;
    sym_decoder *decoder;
    sym_parallel_function *parallel; /* draws and reduces, between steps; null: the loop's own thread does it all */
    sym_decoder *crew; /* whose threads these are: the decoder, or one without a model */
    int wake_fd, guide_fd;
} sym_engine;

/* Runs steps until it is closed. */
void sym_loop_run(sym_loop *loop, const sym_engine *engine);
/* All others from any other thread. */
void sym_loop_close(sym_loop *loop);

/* A member joins: its place, or -ENOMEM. */
int32_t sym_loop_join(sym_loop *loop, const sym_member *member);
/* It is to leave. 1: it has ended, and may be taken back; 0: it will, and there will be news. */
int sym_loop_leave(sym_loop *loop, int32_t index, int how);
/* A program that has its answer leaves. 1: it has ended; 0: its next call has come, or it has ended before. */
int sym_loop_leave_waiting(sym_loop *loop, int32_t index);
/* A member that has ended, as it is in the end; its place is free. The loop may have kept its program from ringing: the
 * caller looks at the ring. */
void sym_loop_take_back(sym_loop *loop, int32_t index, sym_member *member);
/* A call that came by another way, from a server, by a handle; `position` as it said, or -1. 1: taken over; 0: the member
 * does not wait for it. */
int sym_loop_inject(sym_loop *loop, int32_t index, const sym_server *server, uint64_t handle, const sym_hot_call *call,
                    int32_t position);
/* The program's call that is being computed, by its id: the place of its member, or -1. */
int32_t sym_loop_find(sym_loop *loop, const sym_server *server, uint64_t call_id);
/* More room: `pages` begins as before, and `log` gets what was noted. */
void sym_loop_extend(sym_loop *loop, int32_t index, const int32_t *pages, int32_t *log, int32_t capacity);
/* One member, of which there are the same news as before. */
void sym_loop_look(sym_loop *loop, int32_t index, sym_news *news);
/* The news of at most `max` members, of `all` or of those for which something is to be done: how many. */
int32_t sym_loop_news(sym_loop *loop, sym_news *news, int32_t max, int all);
/* Who carries out the calls of a program that a member has rung for, which nobody is told of any more; NULL: none has. */
void *sym_loop_take_rung(sym_loop *loop);
/* Nothing is to be done for a member: whoever was told of something is told anew of what comes. */
int sym_loop_is_quiet(sym_loop *loop);
/* Places that there are: a member that joins gets one of them, or the next. */
int32_t sym_loop_num_places(const sym_loop *loop);
/* Grows with everything that counts. */
int64_t sym_loop_progress(const sym_loop *loop);
/* So many more calls of one request (or fewer) are about to come. Does not wait for the loop. */
void sym_loop_expect(sym_loop *loop, int32_t more);
/* A connection, whose streams are waited for: its number, or -1 without memory. */
int64_t sym_loop_connect(sym_loop *loop);
void sym_loop_disconnect(sym_loop *loop, int64_t connection);

/* What guides are asked: [][2] number of the call, token that was drawn (-1: none yet); how many. */
int32_t sym_loop_drawn(sym_loop *loop, int64_t *drawn, int32_t max);
/* For the next draw of a generation that was asked for: `forced` tokens come first, then what is `allowed`, or the end. All
 * stays where it is until the draw after that one. */
void sym_loop_decide(sym_loop *loop, sym_generation *generation, const int32_t *forced, int32_t num_forced,
                     const void *allowed, int is_over);

int32_t sym_loop_new_share(sym_loop *loop, int32_t parent, double weight);
void sym_loop_set_weight(sym_loop *loop, int32_t share, double weight);
void sym_loop_free_share(sym_loop *loop, int32_t share);
void sym_loop_set_cost(sym_loop *loop, const sym_cost *cost);
void sym_loop_set_step_ns(sym_loop *loop, int64_t step_ns);
sym_counts sym_loop_counts(sym_loop *loop);
/* The bound number `index` of a sym_times: two for each power of two, from 65 us to 69 s. */
int64_t sym_time_bound_ns(int32_t index);
/* Steps from number `from` on that are still known: how many are copied; `seats` may be null. */
int32_t sym_loop_steps(sym_loop *loop, int64_t from, sym_step_record *records, int32_t max, sym_seat *seats,
                       int32_t max_seats);
void sym_loop_trace(sym_loop *loop, int is_traced);
int sym_loop_is_stepping(sym_loop *loop);
/* Since when the step under way has been computed, or 0; its members' places. */
int64_t sym_loop_stepping_since(sym_loop *loop, int32_t *members, int32_t max, int32_t *num_members);

#endif

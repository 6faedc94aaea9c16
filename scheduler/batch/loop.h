/* Steps that follow each other without the interpreter: see loop.c. cffi reads this file: declarations only. */
#ifndef SYM_LOOP_H
#define SYM_LOOP_H

#include "steps.h"

enum sym_member_state {
    SYM_COMPUTING = 0, /* `token` is there: part of the next step */
    SYM_WAITING = 1,   /* a program has its answer, and its next call is to come */
    SYM_ENDED = 2,
};

enum sym_member_end {
    SYM_END_NONE = 0,
    SYM_END_STOP_TOKEN = 1,
    SYM_END_LENGTH = 2,
    SYM_END_ROOM = 3,   /* no entries are reserved any more */
    SYM_END_UNSENT = 4, /* the answer found no room in the ring: `token` (generated) or the row is still to be sent */
    SYM_END_DRAW = 5,   /* no token could be drawn, or the drawn one not be noted: `draw_error` */
};

/* One file that grows by a token a step. The first part is set before the run. */
typedef struct sym_member {
    sym_server *server;
    uint64_t handle;     /* of the file, in the program's calls */
    uint64_t call_id;    /* of the call that is being computed */
    int64_t slot;        /* its result slot */
    float *row;          /* where its logits go */
    const int32_t *pages;
    int32_t *log;        /* [capacity - first] the tokens of the entries computed */
    sym_sampler *sampler; /* null: the tokens come from a program's calls */
    uint64_t draw_index; /* of the next draw */
    const int32_t *stop_tokens;
    int32_t num_stop_tokens, num_to_emit;
    int32_t token, position; /* of the next entry */
    int32_t first;           /* entries before the run */
    int32_t capacity;        /* entries that there is room for */
    int32_t is_quick;        /* its program comes back within the wait: the others wait for it */
    /* Set by the run. */
    int32_t state, end, draw_error;
    int32_t num_done; /* entries computed: atomic, read by others at any time */
    int64_t num_calls, compute_ns;
} sym_member;

#define SYM_MAX_MEMBERS 256

typedef struct sym_run sym_run;

/* How long a run waits for programs that usually come back soon: a share of the last step's time, within bounds. */
typedef struct sym_run_wait {
    int64_t share_percent, min_ns, max_ns;
} sym_run_wait;

/* Null: no memory. `members` and what the pointers point to stay the caller's, and where they are. `wake_fd`: an eventfd
 * that is rung when something has come for the gate while the loop was the one to look. */
sym_run *sym_run_new(const sym_hot_functions *hot, sym_step_function *step, sym_decoder *decoder, sym_member *members,
                     int32_t num_members, const int32_t *copies, int32_t num_copies, sym_run_wait wait, int wake_fd);
void sym_run_free(sym_run *loop);

/* Runs steps until a member has ended, nobody has anything to compute, or somebody stops it. 0, or an errno: the last
 * step failed, and what it was to compute is still to be computed. */
int sym_run_execute(sym_run *loop);
/* From another thread: end after the step under way. */
void sym_run_stop(sym_run *loop);
/* From another thread: a call that came by another way; `position` as it said, or -1. 1: taken over; 0: the member does
 * not wait for it. */
int sym_run_inject(sym_run *loop, int32_t member, const sym_hot_call *call, int32_t position);
/* Entries that all members computed so far, from any thread. */
int64_t sym_run_progress(const sym_run *loop);
int32_t sym_member_num_done(const sym_member *member);

int64_t sym_run_num_taken(const sym_run *loop); /* calls out of the programs' rings */
int64_t sym_run_num_steps(const sym_run *loop);
int64_t sym_run_step_ns(const sym_run *loop);
int64_t sym_run_last_step_ns(const sym_run *loop);
/* Steps that held so many calls. */
int64_t sym_run_steps_of(const sym_run *loop, int32_t num_calls);

#endif

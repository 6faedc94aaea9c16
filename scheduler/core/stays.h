/* Stays: branches in the run that have no objects in Python. cffi reads this file: declarations only.
 *
 * A stay does for C what a `Member` does for Python. A stay begins with a call for a few tokens and the last row, which
 * the run answers, and continues with the program's next calls. C ends the stay when its branch is closed. Python
 * handles all other cases: room that is used up, an answer that found no room, a failed step, or another call on the
 * file. `Stays.adopt` makes a member of the stay first. */
#ifndef SYM_STAYS_H
#define SYM_STAYS_H

#include "connection.h"
#include "loop.h"

enum {
    SYM_STAY_TOKENS = SYM_PAGE_ENTRIES,  /* most tokens of a stay's first call */
    SYM_STAY_LOG = 2 * SYM_PAGE_ENTRIES, /* most entries of a stay: those tokens, and the entries reserved ahead */
    SYM_STAY_SLACK = 24                  /* `sym_member.slack`: asks for room late, as most branches fit in a page */
};

typedef struct sym_stay {
    sym_member member; /* the member as it joined; once it has left the run, its final state */
    sym_news counted;  /* counters of the work that is committed and counted already */
    sym_connection *connection;
    core_table *table; /* the branch */
    uint64_t handle;   /* handle of the branch */
    int32_t index;     /* the member's place in the run */
    int32_t tokens[SYM_STAY_TOKENS],    /* tokens of the first call */
        positions[SYM_STAY_TOKENS];     /* positions of the first call, if it gives any */
    int32_t copy[3],                    /* the member's copies: at most one */
        log[SYM_STAY_LOG];              /* the member's log */
    float *row;            /* row of the first call's result slot */
    int32_t *pages;        /* [room] the member's frames */
    int32_t room;          /* elements of `pages` */
    struct sym_stay *next; /* next in the list of free stays */
} sym_stay;

/* Return the stay at a place in the run. NULL: no stay is there. */
sym_stay *sym_stay_at(const sym_gate *gate, int32_t index);
/* Return the stay of a branch, or NULL. */
sym_stay *sym_stay_of(const core_table *table);
/* Commit and count what the run has computed for a stay. 0: there is no memory for that now. */
int sym_stay_show(sym_gate *gate, sym_stay *stay);
/* Call `sym_stay_show` for all stays, or (`copying`) only for stays that hold the source page of a copy. */
void sym_stays_show(sym_gate *gate, int copying);
/* Return the place of the first stay at or behind place `from`, of one connection or (NULL) of all; -1: there is
 * none. */
int32_t sym_stays_next(const sym_gate *gate, const sym_connection *connection, int32_t from);
/* Give a stay to Python, which has made a member of it and frees its memory. */
void sym_stay_adopted(sym_gate *gate, sym_stay *stay);
void sym_stay_free(sym_stay *stay);
void sym_gate_free(sym_gate *gate);

#endif

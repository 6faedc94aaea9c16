/* Stays: branches in the run. cffi reads this file: declarations only.
 *
 * A stay is what `Member` is in Python: a call for one token and its last row, which the run answers, and what follows it.
 * A stay ends here when its branch is closed. Whatever else becomes of it (room that is used up, an answer that finds no
 * room, a step that fails, another call on its file) is Python's: `Stays.adopt` makes a member of it first. */
#ifndef SYM_STAYS_H
#define SYM_STAYS_H

#include "connection.h"
#include "loop.h"

enum { SYM_STAY_LOG = 64, SYM_STAY_SLACK = 24 /* most are closed before their page is full */ };

typedef struct sym_stay {
    sym_member member; /* as it joined; once it has left, as it was in the end */
    sym_news counted;  /* work that is committed and counted already */
    sym_connection *connection;
    core_table *table;
    uint64_t handle;
    int32_t index; /* its place in the run */
    int32_t token, position, copy[3], log[SYM_STAY_LOG];
    float *row;
    int32_t *pages;
    int32_t room;
    struct sym_stay *next; /* of those that nobody has */
} sym_stay;

/* NULL: no branch has that place in the run. */
sym_stay *sym_stay_at(const sym_gate *gate, int32_t index);
sym_stay *sym_stay_of(const core_table *table);
/* Counts what is computed, and commits it; 0: no memory for that now. */
int sym_stay_show(sym_gate *gate, sym_stay *stay);
/* The same for all of them that are in the run, or for those alone that hold a page which they copied from. */
void sym_stays_show(sym_gate *gate, int copying);
/* The next stay from that place on, of a connection or (NULL) of all: its place, or -1. */
int32_t sym_stays_next(const sym_gate *gate, const sym_connection *connection, int32_t from);
/* Python has a member for it from now on, and gives its memory back. */
void sym_stay_adopted(sym_gate *gate, sym_stay *stay);
void sym_stay_free(sym_stay *stay);
void sym_gate_free(sym_gate *gate);

#endif

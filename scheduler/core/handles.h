/* Shared by the files of this room. */
#ifndef SYM_HANDLES_H
#define SYM_HANDLES_H

#include "stays.h"

/* Room for one more handle: 0, no memory. */
int sym_handles_grow(sym_connection *connection);
/* A new handle, which there is room for. */
uint64_t sym_handles_add(sym_connection *connection, core_table *table, int is_seen);
/* Its branches have so many pages more. */
void sym_branches_grow(sym_connection *connection, int64_t num_pages);
/* Ends the daemon where the core says what can't be: the books are wrong. Its files on disk are whole. */
void sym_must(core_outcome outcome, const char *what, const core_table *file);
/* A stay with room for so many page numbers; NULL: no memory. */
sym_stay *sym_stay_new(sym_gate *gate, int32_t num_pages);
/* Room for a stay at that place in the run, of which there are few; 0: no memory. */
int sym_gate_has_place(sym_gate *gate, int32_t index);
/* A branch joins the run with a call for one token and its row. */
core_outcome sym_stay_begin(sym_connection *connection, core_table *table, const sym_taken *request, int32_t token,
                            int32_t position, int is_position_given);
/* A file in the run, anybody's, whose member waits for one more of them. `position`: -1, it goes on. */
core_outcome sym_go_on(sym_connection *connection, core_table *table, const sym_taken *request, int32_t token,
                       int32_t position);
/* A branch leaves the run, where its program has the answer and thinks. */
core_outcome sym_stay_end(sym_stay *stay);
/* As `core_branch_close`, and the handle is gone. */
core_outcome sym_branch_close(sym_connection *connection, uint64_t number, core_table *branch);

#endif

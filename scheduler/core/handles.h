/* Declarations that the C files of scheduler/core share. */
#ifndef SYM_HANDLES_H
#define SYM_HANDLES_H

#include "stays.h"

/* Make room for `num` more handles. 0: there is no memory. */
int sym_handles_grow(sym_connection *connection, int64_t num);
/* Add a handle, and return its number. The caller has made room for the handle. */
uint64_t sym_handles_add(sym_connection *connection, core_table *table, int is_seen, int is_writable);
/* Add `num_pages`, which may be below 0, to the page count of a connection's unseen branches. */
void sym_branches_grow(sym_connection *connection, int64_t num_pages);
/* End the daemon if `outcome` is a failure: the core's books are wrong. The files on disk are intact. */
void sym_must(core_outcome outcome, const char *what, const core_table *file);
/* Take a free stay, or make one, with room for `num_pages` page numbers. NULL: there is no memory. */
sym_stay *sym_stay_new(sym_gate *gate, int32_t num_pages);
/* Make room in `stays` for a place in the run. 0: there is no memory. */
int sym_gate_has_place(sym_gate *gate, int32_t index);
/* A pred() of at most a page of tokens and the last row, with checked arguments. The room for its entries is not
 * checked yet. */
typedef struct sym_predicted {
    core_table *file;
    uint64_t handle, /* handle of the file */
        id;          /* id of the request */
    uint32_t stream; /* stream of the call */
    int32_t num_tokens, num_positions;     /* num_tokens, or 0: positions continue from the last entry */
    int64_t last_position; /* position of the last token, for a file that is not in the run */
    int32_t tokens[SYM_STAY_TOKENS], positions[SYM_STAY_TOKENS];
    const char *block; /* request for numbers in place of the row, a struct sym_reduction; NULL: the row is wanted */
    uint32_t block_bytes; /* bytes of `block` */
    sym_numbers *numbers; /* memory for those numbers, or NULL */
} sym_predicted;

/* Reserve room for a branch's call, and make the stay that joins the run. The caller has called
 * `sym_gate_has_place`. */
core_outcome sym_stay_begin(sym_connection *connection, const sym_predicted *call, int64_t slot, sym_stay **begun);
/* Note a stay's place in the run, which it has joined. */
void sym_stay_joined(sym_stay *stay, int32_t index);
/* Undo `sym_stay_begin` for a stay that has not joined. */
core_outcome sym_stay_undo(sym_stay *stay);
/* Begin a PRED or a PRED_BATCH. */
core_outcome sym_predict(sym_connection *connection, const sym_taken *request, const char *payload);
core_outcome sym_predict_batch(sym_connection *connection, const sym_taken *request, const char *payload);
/* Take a branch out of the run, if its program has the answer and the run waits for the next call. */
core_outcome sym_stay_end(sym_stay *stay);

#endif

/* What the files of this room share. */
#ifndef SYM_HANDLES_H
#define SYM_HANDLES_H

#include "connection.h"

/* Room for one more handle: 0, no memory. */
int sym_handles_grow(sym_connection *connection);
/* A new handle, which there is room for. */
uint64_t sym_handles_add(sym_connection *connection, core_table *table, int is_seen);
/* As `core_branch_close`, and the handle is gone. */
core_outcome sym_branch_close(sym_connection *connection, uint64_t number, core_table *branch);

#endif

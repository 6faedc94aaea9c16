/* A program's connection: its handles, and the calls that are carried out without the interpreter. cffi reads this file:
 * declarations only.
 *
 * Rules:
 *
 *  - The trio thread alone calls what is here. Nothing waits, locks, or calls back.
 *  - A call is carried out whole, or it is *cold*: nothing has changed, and the gate begins it in Python. What makes a
 *    call cold is in calls.c, beside each operation.
 *  - A handle of a *branch* (see kvfs/core) has no object in Python. One that is *seen* has: Python says when. */
#ifndef SYM_CONNECTION_H
#define SYM_CONNECTION_H

#include "core.h"
#include "steps.h"

enum { SYM_NUM_OPERATIONS = 64 };

typedef struct sym_stay sym_stay;
typedef struct sym_loop sym_loop;

/* Usage of calls. Python adds it to its counters, and sets it to zero. */
typedef struct sym_usage {
    int64_t calls, tokens, steps, compute_ns, queue_ns;
} sym_usage;

/* The part that all connections share. */
typedef struct sym_gate {
    core_files *files;
    sym_loop *loop;
    const sym_hot_functions *hot;
    int64_t max_positions, max_entries;
    int32_t vocab_size;
    int32_t is_closed; /* nothing joins the run without Python */
    int64_t num_calls[SYM_NUM_OPERATIONS]; /* that were carried out here */
    int64_t last_call; /* odd numbers, for traces; Python's are even */
    struct sym_connection *used; /* connections whose usage Python has not counted */
    /* Where the trio thread sleeps: see waiting.c. */
    core_pool *pool;
    struct sym_connection **by_doorbell;
    int32_t num_doorbells; /* that there is room for */
    int32_t wake_fd; /* the run's; -1: it does not run */
    int32_t is_rung; /* by Python, which has something to do for the run */
    /* Branches in the run. */
    sym_stay **stays; /* by place */
    sym_stay *free_stays;
    int32_t room, num_stays;
} sym_gate;

typedef struct sym_handle {
    uint64_t number; /* 0: none */
    core_table *table;
    int32_t is_seen;
} sym_handle;

typedef struct sym_connection {
    sym_gate *gate;
    core_holdings *holdings; /* of its user */
    core_maker maker; /* of its files without a name */
    uint64_t last_handle; /* numbers are not used twice */
    sym_handle *handles; /* by number: a table with open addresses */
    int64_t room, num_handles, num_seen;
    int64_t num_swept; /* places that `sym_branches_close` has looked at */
    int64_t num_pages; /* of branches that Python has no handles of */
    double page_seconds, since_s; /* that those had, until `since_s`, when `num_pages` changed last */
    sym_server *server;
    int32_t doorbell; /* 0: its calls come by Python alone */
    int64_t in_run; /* its number there */
    int32_t share, program, waits_for_slots;
    sym_usage used;
    struct sym_connection *next_used;
    int32_t is_used; /* in the gate's list of those */
} sym_connection;

/* A connection is zeros at first. */
void sym_connection_free(sym_connection *connection);
/* A handle on a table of Python's; 0: no memory. */
uint64_t sym_handle_new(sym_connection *connection, core_table *table);
/* NULL: no such handle is open. */
core_table *sym_handle_find(const sym_connection *connection, uint64_t number);
/* Python has an object of it from now on. */
void sym_handle_seen(sym_connection *connection, uint64_t number);
void sym_handle_forget(sym_connection *connection, uint64_t number);
/* The numbers of those that are open, or of some of them alone: how many, `max` at most. */
enum { SYM_ALL_HANDLES, SYM_UNSEEN_HANDLES, SYM_KNOWN_FILES /* Python has the file, if not the handle */ };
int64_t sym_handles_list(const sym_connection *connection, int which, uint64_t *numbers, int64_t max);
/* Of the branches that nobody knows those that were not used for longest, the first of them first. */
int64_t sym_branches_idle(const sym_connection *connection, uint64_t *numbers, int64_t max);
/* Closes so many branches that Python has not seen: how many. -1: what the core says can't be. When the program has gone: it
 * goes on where it was the last time, and may leave some. */
int64_t sym_branches_close(sym_connection *connection, int64_t max);
/* Of branches that it has or had, while Python had no handle of them. */
double sym_branches_page_seconds(const sym_connection *connection);
/* The pages of those that it has, one branch after the other: `num_pages`, which there is room for. */
void sym_branches_pages(const sym_connection *connection, int32_t *pages);
/* A descriptor that has something to say, as epoll_wait(2) has it. */
typedef struct sym_woken {
    int32_t fd;
    uint32_t events;
} sym_woken;

enum { SYM_MAX_WOKEN = 64 };

/* Sleeps as epoll_wait(2) does on an epoll of EPOLLONESHOT: how many are `woken`, or -errno. Calls that come meanwhile and need no
 * interpreter are carried out; of these nobody is told. It ends early where the core has news for Python. */
int sym_gate_wait(sym_gate *gate, int epoll_fd, double timeout_s, sym_woken woken[SYM_MAX_WOKEN]);
/* It looks at that connection, too; 0: no memory. */
int sym_gate_listen(sym_gate *gate, sym_connection *connection, int32_t doorbell);
void sym_gate_ignore(sym_gate *gate, sym_connection *connection);
/* A `sym_serve_function`; the bits of the operations that it may carry out. */
int sym_connection_serve(void *connection, const sym_taken *request, const char *payload, int64_t answer[4]);
uint64_t sym_connection_operations(void);

#endif

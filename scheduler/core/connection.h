/* A program's connection: its handles, and the calls that C carries out without the interpreter. cffi reads this file:
 * declarations only.
 *
 * Rules:
 *
 *  - Only the trio thread calls these functions. They never wait, lock, or call back.
 *  - C carries out a call completely, or the call is *cold*: nothing has changed, and the gate begins it in Python.
 *    calls.c lists what makes a call cold.
 *  - A handle is *seen* if Python has an object of it. Python says so with `sym_handle_seen`. A handle of a *branch*
 *    (see kvfs/core) is unseen at first. */
#ifndef SYM_CONNECTION_H
#define SYM_CONNECTION_H

#include "core.h"
#include "steps.h"

enum { SYM_NUM_OPERATIONS = 64 };

typedef struct sym_stay sym_stay;
typedef struct sym_loop sym_loop;

/* Usage by calls that Python has not counted yet. Python adds it to its counters, and sets it to zero. */
typedef struct sym_usage {
    int64_t calls, tokens_in, tokens, steps, compute_ns, queue_ns;
} sym_usage;

/* State that all connections share. */
typedef struct sym_gate {
    core_files *files;
    sym_loop *loop;
    const sym_hot_functions *hot;
    int64_t max_positions, /* positions of the model's context */
        max_entries;       /* most entries of a file that a call appends to */
    int32_t vocab_size;
    int32_t is_closed;     /* only Python may put calls into the run */
    int64_t num_calls[SYM_NUM_OPERATIONS]; /* calls of each operation that C has carried out */
    int64_t last_call;     /* serial number of the latest call in traces: odd, as Python uses the even ones */
    struct sym_connection *used; /* list of connections with usage that Python has not counted */
    /* The sleep of the trio thread: see waiting.c. */
    core_pool *pool;
    struct sym_connection **by_doorbell; /* connections by the descriptor of their doorbell */
    int32_t num_doorbells; /* elements of `by_doorbell` */
    int32_t wake_fd;       /* the run's eventfd; -1: there is no run */
    int32_t is_rung;       /* Python has rung `wake_fd` itself: it has members to settle */
    /* Stays. */
    sym_stay **stays;      /* [room] by the member's place in the run; NULL: no stay is there */
    sym_stay *free_stays;  /* list of stays that wait for another use */
    int32_t room, num_stays;
} sym_gate;

typedef struct sym_handle {
    uint64_t number; /* number in the program's calls; 0: the place is free */
    core_table *table;
    int32_t is_seen; /* Python has an object of the handle */
} sym_handle;

typedef struct sym_connection {
    sym_gate *gate;
    core_holdings *holdings; /* what the daemon keeps for the user of the program */
    core_maker maker;        /* maker of the branches that the program forks */
    uint64_t last_handle;    /* number of the newest handle: numbers are not used twice */
    sym_handle *handles;     /* [room] hash table by number, with open addressing */
    int64_t room, num_handles,   /* open handles */
        num_seen;      /* handles that Python has seen */
    int64_t num_swept; /* places of `handles` that `sym_branches_close` has passed */
    int64_t num_pages; /* pages of the branches whose handles are unseen */
    double page_seconds, /* page-seconds of those branches up to `since_s` */
        since_s;         /* time at which `num_pages` changed last */
    sym_server *server;
    int32_t doorbell;  /* eventfd that the program rings; 0: Python alone takes its calls */
    int64_t in_run;    /* number that sym_loop_connect returned */
    int32_t share,     /* share of its calls in the run */
        program,       /* pid of the program */
        waits_for_slots; /* some of its calls wait for result slots */
    uint32_t program_id; /* id of the program: see core_table */
    sym_usage used;
    struct sym_connection *next_used;
    int32_t is_used;   /* the connection is in the list `sym_gate.used` */
} sym_connection;

/* Free the handles of a connection. The caller makes a connection as zeros. */
void sym_connection_free(sym_connection *connection);
/* Open a handle on a table that Python has. Return its number; 0: there is no memory. */
uint64_t sym_handle_new(sym_connection *connection, core_table *table, int is_writable);
/* Return the table of an open handle. NULL: no handle has this number. */
core_table *sym_handle_find(const sym_connection *connection, uint64_t number);
/* Note that Python has an object of the handle from now on. */
void sym_handle_seen(sym_connection *connection, uint64_t number);
void sym_handle_forget(sym_connection *connection, uint64_t number);
/* Write the numbers of open handles, at most `max`, and return how many. `which` chooses all handles, the unseen
 * handles, or the handles whose file Python has. */
enum { SYM_ALL_HANDLES, SYM_UNSEEN_HANDLES, SYM_KNOWN_FILES /* the handle itself may be unseen */ };
int64_t sym_handles_list(const sym_connection *connection, int which, uint64_t *numbers, int64_t max);
/* Write the handles of the least recently used unseen branches, at most `max`, the least recent first. Return how
 * many. */
int64_t sym_branches_idle(const sym_connection *connection, uint64_t *numbers, int64_t max);
/* Close at most `max` unseen branches of a program that has gone, and return how many. The function continues where it
 * stopped last, and leaves out branches that only Python can close. -1: the core's books are wrong. */
int64_t sym_branches_close(sym_connection *connection, int64_t max);
/* Return the page-seconds of all branches, present and past, for the time in which their handles were unseen. */
double sym_branches_page_seconds(const sym_connection *connection);
/* Write the pages of the unseen branches, branch by branch. The caller has room for `num_pages`. */
void sym_branches_pages(const sym_connection *connection, int32_t *pages);
/* A descriptor with events, as epoll_wait(2) reports it. */
typedef struct sym_woken {
    int32_t fd;
    uint32_t events;
} sym_woken;

enum { SYM_MAX_WOKEN = 64 };
enum {
    SYM_FREE_BYTES = 256, /* a request of at most this size is not charged to its user while it is under way */
    SYM_CALL_BYTES = 1536 /* bytes that each call of a batch is charged for its objects in Python */
};

/* Sleep as epoll_wait(2) does, on an epoll whose descriptors have EPOLLONESHOT. Return the number of `woken`
 * descriptors, or -errno. Calls that arrive meanwhile and need no interpreter are carried out and not reported. The
 * sleep ends early if the core has news for Python. */
int sym_gate_wait(sym_gate *gate, int epoll_fd, double timeout_s, sym_woken woken[SYM_MAX_WOKEN]);
/* Have `sym_gate_wait` carry out the calls of a connection, whose program rings `doorbell`. 0: there is no memory. */
int sym_gate_listen(sym_gate *gate, sym_connection *connection, int32_t doorbell);
void sym_gate_ignore(sym_gate *gate, sym_connection *connection);
/* Carry out a request if that needs no Python: a `sym_serve_function`. */
int sym_connection_serve(void *connection, const sym_taken *request, const char *payload, int64_t answer[4]);
/* Return the operations that `sym_connection_serve` may carry out, a bit for each. */
uint64_t sym_connection_operations(void);

#endif

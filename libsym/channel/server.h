/* The daemon's half of a channel: the functions that Python calls. server.c and hot.c describe them. cffi reads this
 * file: declarations only. */
#ifndef SYM_SERVER_H
#define SYM_SERVER_H

#include "region.h"
#include "steps.h"

#define SYM_MAX_TAKEN 64
#define SYM_UNSENT 4096
#define SYM_MAX_OPEN 2048

/* The answer to a request that was carried out, for which the ring had no space. */
typedef struct sym_unsent {
    uint64_t id;
    int64_t args[4];
} sym_unsent;

sym_server *sym_server_new(char *base, const sym_plan *plan, int bell_fd, uint32_t version);
void sym_server_free(sym_server *server);
void sym_server_close(sym_server *server);

char *sym_server_inbox(sym_server *server);
char *sym_server_taken(sym_server *server);
int64_t sym_server_num_open(sym_server *server);
/* From now on, lets `serve` carry out requests of some operations, if it can. `operations` has a bit for each such
 * operation. */
void sym_server_serve_by(sym_server *server, sym_serve_function *serve, void *connection, uint64_t operations);
/* The answer that the caller has to send later, after sym_server_take has returned SYM_UNSENT. */
sym_unsent sym_server_unsent(sym_server *server);
int sym_server_take(sym_server *server, uint32_t most, int ignore_new);
int sym_server_drain(sym_server *server, int doorbell_fd);
void *sym_server_served_by(sym_server *server);
int sym_server_arm(sym_server *server, int ignore_requests);
int sym_server_clear_doorbell(int doorbell_fd);

int sym_server_push(sym_server *server, uint64_t id, int32_t err, uint32_t flags, int64_t a0, int64_t a1, int64_t a2,
                    int64_t a3, const char *payload, uint32_t payload_bytes);
int sym_server_push_now(sym_server *server, uint64_t id, uint32_t flags, int64_t a0, int64_t a1, int64_t a2,
                        const char *payload, uint32_t payload_bytes, const char *more, uint32_t more_bytes);
void sym_server_set_backlog(sym_server *server, int waiting);

void sym_server_want_slots(sym_server *server);
int64_t sym_server_take_rows(sym_server *server, uint32_t num_rows);
void sym_server_free_rows(sym_server *server, uint32_t first, uint32_t num_rows);
void sym_server_settle_rows(sym_server *server, uint32_t num_rows);
uint64_t sym_server_request_bytes(sym_server *server);
uint64_t sym_server_reply_bytes(sym_server *server);
uint32_t sym_server_held_rows(sym_server *server);
int64_t sym_server_given_rows(sym_server *server);
int64_t sym_server_lent_rows(sym_server *server);

int sym_server_take_hot(sym_server *server, uint64_t handle, int32_t position, const int *stop, sym_hot_call *call);
int sym_server_answer_hot(sym_server *server, uint64_t id, int64_t slot, int64_t num_entries);
int sym_server_watch(sym_server *server);
int sym_server_unwatch(sym_server *server, int slept);
const sym_hot_functions *sym_hot(void); /* the functions that the run calls */

#endif

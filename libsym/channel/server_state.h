/* The daemon's half of a channel: what its files share. */
#ifndef SYM_SERVER_STATE_H
#define SYM_SERVER_STATE_H

#include "ring.h"
#include "server.h"

#include <pthread.h>

struct sym_server {
    struct sym_region *region; /* mapped and unmapped by the owner of this struct */
    char *base;
    sym_plan plan;
    pthread_mutex_t receive_lock;
    /* under receive_lock: */
    uint64_t submit_head; /* ours, as complete_tail: the copies in the region are for the client */
    int receiver_has;     /* the receiver took requests, and has not come back for more: later ones have to wait */
    pthread_mutex_t push_lock;
    /* under push_lock: */
    uint64_t complete_tail;
    int queueing;
    int closed; /* set under both locks */
    int bell_fd;
    _Atomic int64_t num_open; /* requests taken and not yet answered for the last time */
    _Atomic int64_t num_given_rows;   /* slots that calls took, ever */
    _Atomic int64_t num_settled_rows; /* of those: their call failed, or was answered and they are the program's */
    /* the receiver's: */
    uint64_t inbox_at, inbox_end; /* frames between the two are copied out and not yet looked at */
    sym_serve_function *serve; /* what it may carry out: `served`, a bit for each operation */
    void *served_by;
    uint64_t served;
    int is_armed; /* it sleeps until the doorbell rings */
    int pushed;   /* what has become of the last answer; `unsent`, where it found no room: 1 */
    sym_unsent unsent;
    sym_taken taken[SYM_MAX_TAKEN];
    char inbox[SYM_RING_BYTES]; /* frames are copied here before anybody looks at them */
};

/* Under receive_lock: bytes in the ring that nobody has taken; -EPROTO: the tail is not in the ring. */
static inline int64_t submitted_bytes(const sym_server *server) {
    const uint64_t tail = atomic_load_explicit(&server->region->submit_tail, memory_order_acquire);
    const uint64_t bytes = tail - server->submit_head;
    return bytes > SYM_RING_BYTES || bytes % SYM_FRAME_ALIGN != 0 ? -EPROTO : (int64_t)bytes;
}

/* Under receive_lock: everything before `head` was taken out of the ring. */
void sym_server_took_requests(sym_server *server, uint64_t head);

/* Moves everything submitted into the inbox and makes room for more: the bytes moved, or -EPROTO. */
int64_t sym_server_receive(sym_server *server);

#endif

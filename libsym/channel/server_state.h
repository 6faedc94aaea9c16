/* The daemon's half of a channel: declarations that its files share. */
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
    uint64_t submit_head; /* the daemon trusts this field and `complete_tail`; the region has copies for the client */
    int receiver_has; /* the receiver has taken requests and may still work on them: later requests have to wait */
    pthread_mutex_t push_lock;
    /* under push_lock: */
    uint64_t complete_tail;
    int queueing;
    int closed; /* set under both locks */
    int bell_fd;
    _Atomic int64_t num_open; /* requests that were taken, and whose last answer was not sent yet */
    _Atomic int64_t num_given_rows; /* slots that calls have taken since the connection was made */
    _Atomic int64_t num_settled_rows; /* the part of num_given_rows whose calls have failed or were answered */
    /* used by the receiver alone: */
    uint64_t inbox_at, inbox_end; /* the frames between these positions are not checked yet */
    sym_serve_function *serve; /* carries out requests of the operations in `served` */
    void *served_by;
    uint64_t served;
    int is_armed; /* the receiver sleeps until the doorbell rings */
    int pushed; /* outcome of the last push of an answer; 1: the ring had no space, `unsent` has the answer */
    sym_unsent unsent;
    sym_taken taken[SYM_MAX_TAKEN];
    char inbox[SYM_RING_BYTES]; /* frames are copied here before they are checked */
};

/* Under receive_lock: bytes in the ring that were not taken yet; -EPROTO: the tail is not in the ring. */
static inline int64_t submitted_bytes(const sym_server *server) {
    const uint64_t tail = atomic_load_explicit(&server->region->submit_tail, memory_order_acquire);
    const uint64_t bytes = tail - server->submit_head;
    return bytes > SYM_RING_BYTES || bytes % SYM_FRAME_ALIGN != 0 ? -EPROTO : (int64_t)bytes;
}

/* Under receive_lock: notes that all requests before `head` were taken, and wakes clients that wait for space. */
void sym_server_took_requests(sym_server *server, uint64_t head);

/* Copies all submitted requests into the inbox, and frees their space in the ring. Returns the number of bytes, or
 * -EPROTO. */
int64_t sym_server_receive(sym_server *server);

#endif

/* Streams: which calls are due, and how long a step waits for such calls. streams.c describes the method. All times are
 * nanoseconds of the caller's clock. */
#ifndef SYM_STREAMS_H
#define SYM_STREAMS_H

#include "policy.h"

typedef struct sym_streams sym_streams;

/* The calls that a step would hold if it began now. */
typedef struct sym_ready {
    int32_t num_calls;
    int32_t account; /* share of the account of these calls; SYM_SEVERAL: several accounts; SYM_NOBODY: no calls */
    int32_t is_hurried; /* one of the calls has a deadline or a priority */
    int64_t began_ns; /* beginning of the wait */
} sym_ready;

enum { SYM_NOBODY = -1, SYM_SEVERAL = -2 };

sym_streams *sym_streams_new(void);
void sym_streams_free(sym_streams *streams);

/* Begin to follow a connection. Return its number, or -1 if there is no memory. No number is used twice. The functions
 * below ignore -1 and the number of a connection that has gone. */
int64_t sym_streams_connect(sym_streams *streams);
void sym_streams_disconnect(sym_streams *streams, int64_t connection);

enum {
    SYM_NO_STREAM = 0x10000, /* a call whose answer no program waits for: its stream is never expected */
    SYM_NAMELESS /* streams of calls without a name have this number or a higher one; names have 16 bits */
};

/* Note that a call of a stream has arrived, between the two times. `share`: the share that pays for it. Return the
 * stream. If the call names no stream (0), this function chooses one. */
uint32_t sym_streams_called(sym_streams *streams, int64_t connection, uint32_t stream, int32_t share,
                            int64_t earliest_ns, int64_t latest_ns);
/* Note that a call is over. `is_answered`: its program gets the answer now. */
void sym_streams_over(sym_streams *streams, int64_t connection, uint32_t stream, int is_answered, int64_t now_ns);

/* Return the time until which the step should wait; `now_ns`: the step should begin immediately. `latest` is the work
 * of the latest step, which had `num_calls` calls: the time of a step of any size is estimated from it. */
int64_t sym_streams_wait_until(sym_streams *streams, const sym_ready *ready, const sym_wait *wait,
                               const sym_limits *limits, const sym_cost *cost, const sym_work *latest,
                               int32_t num_calls, const sym_share *shares, int64_t now_ns);

/* End a wait. Time that calls of one account waited in vain for streams of another account is charged to those streams'
 * shares. */
void sym_streams_charge(sym_streams *streams, const sym_ready *ready, sym_share *shares, int64_t now_ns);

#endif

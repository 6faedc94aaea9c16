/* Which calls are about to come: see streams.c. Times are nanoseconds of one clock, and of that of whoever asks. */
#ifndef SYM_STREAMS_H
#define SYM_STREAMS_H

#include "policy.h"

typedef struct sym_streams sym_streams;

/* What a step would hold if it began now. */
typedef struct sym_ready {
    int32_t num_calls;
    int32_t account; /* whose calls they are; SYM_SEVERAL: of several; SYM_NOBODY: there is none */
    int32_t is_hurried; /* a call of them has a deadline, or a priority */
    int64_t began_ns; /* when the wait has begun */
} sym_ready;

enum { SYM_NOBODY = -1, SYM_SEVERAL = -2 };

sym_streams *sym_streams_new(void);
void sym_streams_free(sym_streams *streams);

/* A connection: its number, which no other one has had, or -1 without memory. What is told of one that has gone, or of -1,
 * is nothing. */
int64_t sym_streams_connect(sym_streams *streams);
void sym_streams_disconnect(sym_streams *streams, int64_t connection);

/* Streams have 16 bits. Of a call that nobody waits for, which is never expected; and from here on of calls that name none. */
enum { SYM_NO_STREAM = 0x10000, SYM_NAMELESS };

/* A call of a stream has come between two times, and counts to that share: the stream, also where the call names none (0). A
 * call is over, and its program is told now (or is not). */
uint32_t sym_streams_called(sym_streams *streams, int64_t connection, uint32_t stream, int32_t share,
                            int64_t earliest_ns, int64_t latest_ns);
void sym_streams_over(sym_streams *streams, int64_t connection, uint32_t stream, int is_answered, int64_t now_ns);

/* Until when a step is best put off, as far as is known now; now_ns: it is not. `latest`: what the latest step held, in
 * `num_calls` calls, so that it is known what one of so many calls takes. */
int64_t sym_streams_wait_until(sym_streams *streams, const sym_ready *ready, const sym_wait *wait,
                               const sym_limits *limits, const sym_cost *cost, const sym_work *latest,
                               int32_t num_calls, const sym_share *shares, int64_t now_ns);

/* A wait is over: what of it was for streams that did not come is service of their shares. */
void sym_streams_charge(sym_streams *streams, const sym_ready *ready, sym_share *shares, int64_t now_ns);

#endif

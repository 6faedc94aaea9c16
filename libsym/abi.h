/* The system-call ABI: what a LIP and the daemon share. Everything else is private to one side.
 *
 * A connection is one Unix socket (who is the peer, is it alive), one sealed memfd (this layout) and one
 * eventfd (the doorbell that wakes the daemon). All numbers are in the machine's own byte order: both sides
 * run on it.
 *
 *   offset 0        struct sym_region            4096 bytes
 *   states_offset   one u32 for each result slot
 *   submit_offset   ring of requests             client -> daemon
 *   complete_offset ring of replies              daemon -> client
 *   slots_offset    result slots: float32 rows of vocab_size logits
 *
 * A ring is bytes; head and tail only grow (position = value modulo the ring's size); the producer moves the
 * tail, the consumer the head. A frame is a 64-byte header and its payload, padded to 64 bytes, and may wrap
 * at the end of the ring; since rings and frames are multiples of 64, a header never wraps.
 *
 * The daemon trusts nothing in here: it keeps the geometry, its heads and its tails in private memory, only
 * stores them here, and copies what it reads before it looks at it.
 */
#ifndef SYM_ABI_H
#define SYM_ABI_H

#include <stdatomic.h>
#include <stdint.h>

#define SYM_MAGIC 0x314d5953u /* "SYM1" */
#define SYM_ABI_VERSION 2u

#define SYM_FRAME_ALIGN 64u
#define SYM_RING_BYTES (2u << 20)      /* a power of two; holds two frames of the largest size */
#define SYM_MAX_FRAME_BYTES (1u << 20) /* header and payload */
#define SYM_HEADER_BYTES 4096u
#define SYM_MIN_SLOTS 64u
#define SYM_MAX_SLOTS 1024u
#define SYM_RANGE_END INT64_MAX /* KV_EXTRACT: where the file ends */

/* First message on the socket, from the client; then the daemon's, with {memfd, eventfd} when err is 0. */
struct sym_greeting {
    uint32_t magic, version;
    uint64_t reserved;
};

struct sym_welcome {
    uint32_t magic, version;
    int32_t err;         /* errno; 0: welcome */
    uint32_t text_bytes; /* of the reason that follows, UTF-8 */
};

enum sym_op {
    SYM_KV_CREATE = 1,
    SYM_KV_OPEN = 2,
    SYM_KV_CLOSE = 3,
    SYM_KV_FORK = 4,
    SYM_KV_REMOVE = 5,
    SYM_KV_TRUNCATE = 6,
    SYM_KV_STAT = 7,
    SYM_KV_LIST = 8,
    SYM_KV_RENAME = 9,
    SYM_KV_CHMOD = 10,
    SYM_KV_READ = 11,
    SYM_KV_DU = 12,
    SYM_PRED = 13,
    SYM_TOKENIZE = 14,
    SYM_DETOKENIZE = 15,
    SYM_CHAT_TEMPLATE = 16,
    SYM_MODEL_INFO = 17,
    SYM_STAT = 18,
    SYM_PING = 19,
    SYM_KV_EXTRACT = 20,
    SYM_KV_MERGE = 21,
    SYM_KV_LOCK = 22,
    SYM_KV_UNLOCK = 23,
    SYM_CHECK = 24,
    SYM_CONFINE = 25,
};

enum sym_flag {
    SYM_ROWS_NONE = 1, /* PRED */
    SYM_ROWS_LAST = 2,
    SYM_ROWS_ALL = 4,
    SYM_OPEN_WRITE = 1,       /* KV_OPEN */
    SYM_TOKENIZE_SPECIAL = 1, /* TOKENIZE */
    SYM_REBASE = 1,           /* KV_EXTRACT, KV_MERGE */
    SYM_LOCK_SHARED = 1,      /* KV_LOCK */
    SYM_LOCK_NOWAIT = 2,
};

enum sym_slot_state {
    SYM_SLOT_FREE = 0, /* stored by the client when its last view of the row is gone */
    SYM_SLOT_HELD = 1, /* stored by the daemon when it gives the slot to a call */
};

struct sym_request {
    uint32_t frame_bytes; /* header and payload, without the padding */
    uint16_t op;
    uint16_t reserved0;
    uint32_t flags;
    uint32_t reserved1;
    uint64_t id; /* comes back in the reply; 0: the client will not look at the reply */
    uint64_t handle;
    int64_t args[4];
};

struct sym_reply {
    uint32_t frame_bytes;
    int32_t err; /* errno; then the payload is the message, UTF-8 */
    uint64_t id;
    int64_t args[4];
    uint64_t reserved[2];
};

struct sym_region {
    /* Written once, by the daemon, before the client sees the region. */
    uint32_t magic, version;
    uint64_t region_bytes;
    uint64_t states_offset;
    uint64_t submit_offset, submit_bytes;
    uint64_t complete_offset, complete_bytes;
    uint64_t slots_offset, slot_bytes;
    uint32_t slot_count, vocab_size;

    /* One cache line for each writer. */
    _Alignas(64) _Atomic uint64_t submit_tail;   /* client */
    _Alignas(64) _Atomic uint64_t complete_head; /* client */
    _Alignas(64) _Atomic uint64_t submit_head;   /* daemon */
    _Alignas(64) _Atomic uint64_t complete_tail; /* daemon */

    _Alignas(64) _Atomic uint32_t daemon_asleep; /* daemon sets before it sleeps; whoever clears it rings */
    _Atomic uint32_t backlog;                    /* daemon: replies wait for room, ring when you made some */
    _Atomic uint32_t gone;                       /* daemon: nothing will come any more */
    _Atomic uint32_t daemon_cpu;                 /* a hint: where it ran when it last took requests */

    _Alignas(64) _Atomic uint32_t complete_seq; /* futex: the daemon adds one with every reply */
    _Atomic uint32_t complete_waiters;          /* client: somebody sleeps on complete_seq */

    _Alignas(64) _Atomic uint32_t space_seq; /* futex: the daemon adds one when it made room for requests */
    _Atomic uint32_t space_waiters;          /* client: this many sleep on space_seq */
};

_Static_assert(sizeof(struct sym_greeting) == 16, "greeting");
_Static_assert(sizeof(struct sym_welcome) == 16, "welcome");
_Static_assert(sizeof(struct sym_request) == 64, "request header");
_Static_assert(sizeof(struct sym_reply) == 64, "reply header");
_Static_assert(sizeof(struct sym_region) <= SYM_HEADER_BYTES, "region header");

#endif

/* The system-call ABI: what a LIP and the daemon share. Everything else is private to one side.
 *
 * A connection is one Unix socket (who is the peer, is it alive), one sealed memfd (this layout), the doorbell, an
 * eventfd that wakes the daemon, and the bell, a pipe that wakes a client which cannot sleep on a futex because it
 * waits for other things, too (an event loop). Both are rung by writing 8 bytes, a number 1. All numbers are in the
 * machine's own byte order: both sides run on it.
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
#define SYM_ABI_VERSION 8u
#define SYM_ABI_OLDEST 5u /* the daemon serves clients from this version on: libsym-abi(7) has the rules */

#define SYM_FRAME_ALIGN 64u
#define SYM_RING_BYTES (2u << 20)      /* a power of two; holds two frames of the largest size */
#define SYM_MAX_FRAME_BYTES (1u << 20) /* header and payload */
#define SYM_HEADER_BYTES 4096u
#define SYM_MIN_SLOTS 64u
#define SYM_MAX_SLOTS 1024u
#define SYM_RANGE_END INT64_MAX /* KV_EXTRACT: where the file ends */
#define SYM_ANY_OWNER (-1)      /* KV_CLAIM: a file of any user is opened */
#define SYM_NO_TIMEOUT (-1)     /* RECV, KV_PRESSURE: waits for ever; TRACE: until it is cancelled */
#define SYM_MAX_BATCH 256       /* PRED_BATCH: calls */
#define SYM_MAX_ADVICE 16       /* KV_ADVISE: pieces in one call; more of them contradict each other */
#define SYM_MAX_PRIORITY 100    /* PRED, GENERATE, KV_ADVISE: and -100 is the least */

/* First message on the socket, from the client; then the daemon's, with {memfd, doorbell, bell} when err is 0. */
struct sym_greeting {
    uint32_t magic, version;
    uint32_t oldest; /* the client speaks all versions from this one on; 0: `version` alone */
    uint32_t reserved;
};

struct sym_welcome {
    uint32_t magic;
    uint32_t version;    /* that both speak from now on; with an err: the daemon's, or as an older client reads it */
    int32_t err;         /* errno; 0: welcome */
    uint32_t text_bytes; /* of the reason that follows, UTF-8 */
};

/* What a request asks for. */
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
    SYM_PRED_BATCH = 26,
    SYM_GENERATE = 27,
    SYM_CANCEL = 28,
    SYM_SEND = 29,
    SYM_RECV = 30,
    SYM_SUBSCRIBE = 31,
    SYM_UNSUBSCRIBE = 32,
    SYM_GETRUSAGE = 33,
    SYM_KV_ADVISE = 34,
    SYM_KV_SYNC = 35,
    SYM_VOCABULARY = 36,
    SYM_KV_CLAIM = 37,
    SYM_KV_NAME = 38,
    SYM_KV_MKDIR = 39,
    SYM_CHAT_TOKENS = 40,
    SYM_SCRUB = 41,
    SYM_TRACE = 42,
    SYM_PROGRAMS = 43,
    SYM_SPAWN = 44,
    SYM_WAIT = 45,
    SYM_KILL = 46,
    SYM_KV_HOT = 47,
    SYM_KV_PRESSURE = 48,
};

enum sym_flag {
    SYM_ROWS_NONE = 1,        /* PRED: append without asking for a distribution */
    SYM_ROWS_LAST = 2,        /* PRED: the distribution after the last token */
    SYM_ROWS_ALL = 4,         /* PRED: one distribution after every token */
    SYM_MASKED = 8,           /* PRED: a struct sym_mask follows the positions */
    SYM_REDUCED = 16,         /* PRED: a struct sym_reduction follows: rows are answered by numbers, not by slots */
    SYM_ATTENTION = 32,       /* PRED: a struct sym_attention follows: what is attended to is answered, too */
    SYM_OPEN_WRITE = 1,       /* KV_OPEN, KV_CLAIM, KV_NAME: for appending and truncating, too */
    SYM_FORK_ENDED = 1,       /* KV_FORK: without a turn of a conversation whose answer is under way */
    SYM_TOKENIZE_SPECIAL = 1, /* TOKENIZE: special tokens spelled out in the text become one token each */
    SYM_REBASE = 1,           /* KV_EXTRACT, KV_MERGE: entries get positions from 0 on */
    SYM_LOCK_SHARED = 1,      /* KV_LOCK: together with others that share it */
    SYM_LOCK_NOWAIT = 2,      /* KV_LOCK: fail with EWOULDBLOCK rather than wait */
    SYM_SCRUB_REPAIR = 1,     /* SCRUB: write anew what is in memory; cut a file before what is not */
};

/* SEND, RECV: what the data are. */
enum sym_message_kind { SYM_TEXT = 0, SYM_BYTES = 1, SYM_JSON = 2 };

/* KV_DU: which of the two, args[0]. */
enum sym_du { SYM_DU_ROWS = 0, SYM_DU_TOTAL = 1 };

/* KV_ADVISE: what to do with the pages of a file. */
enum sym_advice {
    SYM_ADVISE_PIN = 1, /* value: milliseconds; 0: until it is unpinned */
    SYM_ADVISE_UNPIN = 2,
    SYM_ADVISE_COLD = 3,
    SYM_ADVISE_WILLNEED = 4,
    SYM_ADVISE_TTL = 5,      /* value: milliseconds; 0: for ever */
    SYM_ADVISE_PRIORITY = 6, /* value: -100 to 100 */
};

/* KV_PRESSURE: what there is too little of. */
enum sym_pressure_kind { SYM_PRESSURE_MEMORY = 1, SYM_PRESSURE_QUOTA = 2 };

/* One piece of advice. */
struct sym_advised {
    int64_t advice, value;
};

/* PRED with SYM_ATTENTION: what has a number. */
enum sym_attention_to { SYM_ATTENTION_ENTRIES = 1, SYM_ATTENTION_PAGES = 2 };

/* PRED with SYM_ATTENTION: of what each number is the sum, beside all new tokens. */
enum sym_attention_by {
    SYM_ATTENTION_BY_SUM = 1,   /* all heads of all layers */
    SYM_ATTENTION_BY_LAYER = 2, /* the query heads of one KV head of one layer */
};

/* GENERATE: why it ended. */
enum sym_finish {
    SYM_FINISH_LENGTH = 1,
    SYM_FINISH_STOP_TOKEN = 2,
    SYM_FINISH_STOP_TEXT = 3,
    SYM_FINISH_GRAMMAR = 4, /* it allows nothing more */
    SYM_FINISH_CANCELLED = 5,
    SYM_FINISH_DEADLINE = 6,
};

/* PRED: which of the earlier entries the new ones see, besides themselves by causality.
 * Followed by `num_rows` rows of ceil(num_columns / 32) words, entry i being bit i % 32 of word i / 32.
 * num_rows is 1 (for all new tokens alike; num_columns = the file's length before them) or the number n of new
 * tokens (then num_columns = that length + n, and each token sees at least itself). */
struct sym_mask {
    uint32_t num_rows, num_columns;
};

/* PRED: how much the new tokens attend to each entry of the file, their own included, or to each page. */
struct sym_attention {
    uint32_t to, by; /* enum sym_attention_to, enum sym_attention_by */
    uint32_t reserved0, reserved1;
};

/* The answer, in the reply's payload behind reduced rows; followed by floats [layers][kv_heads][columns], or [columns] where
 * the sum was asked for: then layers and kv_heads are 0. Columns are entries or pages, those of the new tokens included. */
struct sym_attended {
    uint32_t layers, kv_heads, columns;
    uint32_t entries; /* of the file after the call */
};

/* How `stream` becomes the number of a draw. With G = 0x9e3779b97f4a7c15, all modulo 2^64, let mix(z) be splitmix64's
 * z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9, z = (z ^ z >> 27) * 0x94d049bb133111eb, z ^ z >> 31. Then the i-th draw (from 0
 * on) uses mix(stream + (i + 1) * G) >> 11, divided by 2^53. A seed's stream begins at mix(seed + G), and stands at
 * mix(seed + G) + n * G after n draws. */
enum sym_sampling_flag {
    SYM_SAMPLING_ALLOWED = 1,
    SYM_SAMPLING_STREAM = 2, /* without it `stream` is a seed, and the i-th draw uses mix(seed + i + G): before 7 */
    SYM_SAMPLING_MORE = 4,   /* a struct sym_sampling_more with its texts comes next */
};

/* How a token is drawn: what sampler.c does with a row of logits. Followed, if flagged so, by a struct
 * sym_sampling_more with `breaker_bytes` bytes of texts, then by `num_bias` struct sym_bias, then
 * `num_before` + `num_generated` int32 tokens for the penalties, then, if flagged so, ceil(vocab_size / 32) words
 * with a bit for each token that may be drawn. All zero with temperature 0: the argmax. */
struct sym_sampling {
    double temperature;
    double top_p;             /* 1: off */
    double min_p;             /* 0: off */
    float repetition_penalty; /* of tokens before and generated; 1: off */
    float presence_penalty;   /* of tokens generated; 0: off */
    float frequency_penalty;  /* of tokens generated, each time; 0: off */
    uint32_t top_k;           /* 0: off */
    uint64_t stream;          /* where the numbers stand that are drawn with: see SYM_SAMPLING_STREAM */
    uint32_t num_bias, num_before, num_generated;
    uint32_t flags; /* enum sym_sampling_flag */
};

/* All zero: nothing of it. Windows are of tokens before and generated, the latest ones; 0: of all. Each of the breakers'
 * texts, UTF-8, ends with a NUL; every token whose bytes have one of them in it is a breaker. */
struct sym_sampling_more {
    double typical_p;                  /* 0 or 1: off */
    double dry_multiplier, dry_base;   /* multiplier 0: off */
    double mirostat_tau, mirostat_eta; /* in bits; and how far an error of one bit moves the limit */
    uint32_t mirostat;                 /* version 1 or 2; 0: off */
    uint32_t penalty_window;           /* of the repetition, presence and frequency penalties */
    uint32_t dry_window, dry_allowed_length;
    uint32_t breaker_bytes, reserved;
};

struct sym_bias {
    int32_t token;
    float bias; /* added to its logit; -inf: never */
};

/* PRED: what a row is answered by instead of a result slot. Followed by `num_named` int32 tokens, then, if
 * `has_sampling`, a struct sym_sampling with what follows it (row i of ROWS_ALL is the i-th draw). */
struct sym_reduction {
    uint32_t top_k, num_named, has_sampling, reserved;
};

/* The answer, once for each row, in the reply's payload; followed by `top_k` struct sym_scored, likeliest first,
 * then by `num_named` float log-probabilities. */
struct sym_reduced {
    int32_t sampled; /* -1: none was asked for */
    float sampled_logprob; /* under the model's own distribution: before temperature, penalties and limits */
    float entropy;
    float logsumexp; /* a token's logit is its log-probability plus this */
};

struct sym_scored {
    int32_t token;
    float logprob;
};

enum sym_slot_state {
    SYM_SLOT_FREE = 0, /* stored by the client when its last view of the row is gone */
    SYM_SLOT_HELD = 1, /* stored by the daemon when it gives the slot to a call */
};

struct sym_request {
    uint32_t frame_bytes; /* header and payload, without the padding */
    uint16_t op;
    uint16_t stream; /* the thread or task that waits for the answer; 0: unknown. A hint: see libsym-abi(7) */
    uint32_t flags;
    uint32_t reserved1;
    uint64_t id; /* comes back in the reply; 0: the client will not look at the reply */
    uint64_t handle;
    int64_t args[4];
};

enum sym_reply_flag { SYM_MORE = 1 /* the reply to this id is not over: others follow */ };

struct sym_reply {
    uint32_t frame_bytes;
    int32_t err; /* errno; then the payload is the message, UTF-8 */
    uint64_t id;
    int64_t args[4];
    uint32_t flags, reserved0;
    uint64_t reserved1;
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
    _Atomic uint32_t bell_wanted; /* client: an event loop waits; the daemon clears it and rings the bell */
    _Atomic uint32_t slots_wanted; /* daemon: a call waits for slots; whoever frees some clears it and rings */

    _Alignas(64) _Atomic uint32_t space_seq; /* futex: the daemon adds one when it made room for requests */
    _Atomic uint32_t space_waiters; /* client: this many sleep on space_seq */
};

_Static_assert(sizeof(struct sym_greeting) == 16, "greeting");
_Static_assert(sizeof(struct sym_welcome) == 16, "welcome");
_Static_assert(sizeof(struct sym_request) == 64, "request header");
_Static_assert(sizeof(struct sym_reply) == 64, "reply header");
_Static_assert(sizeof(struct sym_advised) == 16, "advised");
_Static_assert(sizeof(struct sym_mask) == 8, "mask");
_Static_assert(sizeof(struct sym_attention) == 16, "attention");
_Static_assert(sizeof(struct sym_attended) == 16, "attended");
_Static_assert(sizeof(struct sym_sampling) == 64, "sampling");
_Static_assert(sizeof(struct sym_sampling_more) == 64, "more of sampling");
_Static_assert(sizeof(struct sym_reduction) == 16, "reduction");
_Static_assert(sizeof(struct sym_reduced) == 16, "reduced");
_Static_assert(sizeof(struct sym_region) <= SYM_HEADER_BYTES, "region header");

#endif

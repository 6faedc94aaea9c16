/* The system-call ABI: the definitions that a LIP and the daemon share. Everything else is private to one side.
 *
 * A connection has four parts. A Unix socket identifies the peer and shows whether it is alive. A sealed memfd has the
 * layout below. The doorbell, an eventfd, wakes the daemon. The bell, a pipe, wakes a client whose event loop waits for
 * several descriptors, and so cannot sleep on a futex. To ring the doorbell or the bell, write the number 1 as 8 bytes.
 * All numbers are in the machine's own byte order: both sides run on the same machine.
 *
 *   offset 0        struct sym_region            4096 bytes
 *   states_offset   one u32 for each result slot
 *   submit_offset   ring of requests             client -> daemon
 *   complete_offset ring of replies              daemon -> client
 *   slots_offset    result slots: float32 rows of vocab_size logits
 *
 * A ring is an array of bytes. The producer moves the tail, the consumer the head. Head and tail only grow: a position
 * in the ring is either value modulo the ring's size. A frame of a ring is one message: a 64-byte header and its
 * payload, padded to a multiple of 64 bytes. A frame may wrap at the end of the ring. A header never wraps, since rings
 * and frames are multiples of 64.
 *
 * The daemon trusts no byte of the region. The daemon keeps the geometry, its heads and its tails in private memory;
 * the region has copies for the client. The daemon copies the client's bytes before it checks them.
 */
#ifndef SYM_ABI_H
#define SYM_ABI_H

#include <stdatomic.h>
#include <stdint.h>

#define SYM_MAGIC 0x314d5953u /* "SYM1" */
#define SYM_ABI_VERSION 8u
#define SYM_ABI_OLDEST 5u /* oldest client version that the daemon serves; rules: libsym-abi(7) */

#define SYM_FRAME_ALIGN 64u
#define SYM_RING_BYTES (2u << 20)      /* a power of two, with space for two frames of the largest size */
#define SYM_MAX_FRAME_BYTES (1u << 20) /* header and payload */
#define SYM_HEADER_BYTES 4096u
#define SYM_MIN_SLOTS 64u
#define SYM_MAX_SLOTS 1024u
#define SYM_RANGE_END INT64_MAX /* KV_EXTRACT: the end of the file */
#define SYM_ANY_OWNER (-1)      /* KV_CLAIM: open a file of any user */
#define SYM_NO_TIMEOUT (-1)     /* RECV, KV_PRESSURE: wait for ever; TRACE: until the trace is cancelled */
#define SYM_MAX_BATCH 256       /* PRED_BATCH: most calls in one request */
#define SYM_MAX_FORKS 32        /* KV_FORK: most files in one call */
#define SYM_MAX_ADVICE 16       /* KV_ADVISE: most pieces of advice in one call; more would contradict each other */
#define SYM_MAX_PRIORITY 100    /* PRED, GENERATE, KV_ADVISE: priorities are -100 to 100 */

/* First message on the socket, sent by the client. The daemon answers with a welcome. If its err is 0, the welcome
 * carries the memfd, the doorbell and the bell. */
struct sym_greeting {
    uint32_t magic, version;
    uint32_t oldest; /* the client speaks all versions from `oldest` to `version`; 0: `version` alone */
    uint32_t reserved;
};

struct sym_welcome {
    uint32_t magic;
    uint32_t version; /* of this connection; in a refusal the daemon's newest or oldest version */
    int32_t err; /* errno; 0: welcome */
    uint32_t text_bytes; /* length of the reason that follows, in UTF-8 */
};

/* Operations that a request asks for. */
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
    SYM_KV_FETCH = 49,
    SYM_FLEET_PLACE = 50,
    SYM_FLEET_MACHINES = 51,
    SYM_KV_CHANGES = 52,
    SYM_USE_MODEL = 53,
};

enum sym_flag {
    SYM_ROWS_NONE = 1, /* PRED: append without asking for a distribution */
    SYM_ROWS_LAST = 2, /* PRED: the distribution after the last token */
    SYM_ROWS_ALL = 4, /* PRED: one distribution after every token */
    SYM_MASKED = 8, /* PRED: a struct sym_mask follows the positions */
    SYM_REDUCED = 16, /* PRED: a struct sym_reduction follows; the reply has numbers in place of slots */
    SYM_ATTENTION = 32, /* PRED: a struct sym_attention follows; the reply has the attention, too */
    SYM_OPEN_WRITE = 1, /* KV_OPEN, KV_CLAIM, KV_NAME: also allow appending and truncating */
    SYM_FORK_ENDED = 1, /* KV_FORK: leave out a turn whose answer is still being generated */
    SYM_TOKENIZE_SPECIAL = 1, /* TOKENIZE: special tokens spelled out in the text become one token each */
    SYM_REBASE = 1, /* KV_EXTRACT, KV_MERGE: entries get positions from 0 on */
    SYM_LOCK_SHARED = 1, /* KV_LOCK: share the lock with other shared holders */
    SYM_LOCK_NOWAIT = 2, /* KV_LOCK: fail with EWOULDBLOCK rather than wait */
    SYM_FLEET_BEGIN = 1, /* FLEET_PLACE: the program will begin there, so later choices count it */
    SYM_SCRUB_REPAIR = 1, /* SCRUB: rewrite damaged pages from memory; cut files in front of lost pages */
};

/* SEND, RECV: type of the data. */
enum sym_message_kind { SYM_TEXT = 0, SYM_BYTES = 1, SYM_JSON = 2 };

/* KV_DU: args[0] asks for the rows, for the total, or for a total of each model's files. */
enum sym_du { SYM_DU_ROWS = 0, SYM_DU_TOTAL = 1, SYM_DU_MODELS = 2 };

/* KV_ADVISE: advice on a file. */
enum sym_advice {
    SYM_ADVISE_PIN = 1, /* value: milliseconds; 0: until UNPIN */
    SYM_ADVISE_UNPIN = 2,
    SYM_ADVISE_COLD = 3,
    SYM_ADVISE_WILLNEED = 4,
    SYM_ADVISE_TTL = 5, /* value: milliseconds; 0: for ever */
    SYM_ADVISE_PRIORITY = 6, /* value: -100 to 100 */
};

/* KV_PRESSURE: the resource that runs short. */
enum sym_pressure_kind { SYM_PRESSURE_MEMORY = 1, SYM_PRESSURE_QUOTA = 2 };

/* One piece of advice. */
struct sym_advised {
    int64_t advice, value;
};

/* PRED with SYM_ATTENTION: whether each number is about an entry or about a page. */
enum sym_attention_to { SYM_ATTENTION_ENTRIES = 1, SYM_ATTENTION_PAGES = 2 };

/* PRED with SYM_ATTENTION: the heads that each number sums over. All numbers sum over the new tokens, too. */
enum sym_attention_by {
    SYM_ATTENTION_BY_SUM = 1, /* all heads of all layers */
    SYM_ATTENTION_BY_LAYER = 2, /* the query heads of one KV head of one layer */
};

/* GENERATE: why the generation ended. */
enum sym_finish {
    SYM_FINISH_LENGTH = 1,
    SYM_FINISH_STOP_TOKEN = 2,
    SYM_FINISH_STOP_TEXT = 3,
    SYM_FINISH_GRAMMAR = 4, /* the grammar allows nothing more */
    SYM_FINISH_CANCELLED = 5,
    SYM_FINISH_DEADLINE = 6,
};

/* PRED: which earlier entries the new tokens see. The structure is followed by `num_rows` rows of
 * ceil(num_columns / 32) words. Entry i is bit i % 32 of word i / 32. Let `length` be the file's length before the
 * call, and n the number of new tokens. With num_rows = 1 and num_columns = length, the row holds for all new tokens,
 * which see each other by causality. With num_rows = n and num_columns = length + n, each token has its own row, and
 * sees at least itself. */
struct sym_mask {
    uint32_t num_rows, num_columns;
};

/* PRED: asks how much the new tokens attend to each entry of the file, or to each page. New entries count, too. */
struct sym_attention {
    uint32_t to, by; /* enum sym_attention_to, enum sym_attention_by */
    uint32_t reserved0, reserved1;
};

/* The shape of the attention, in the reply's payload behind reduced rows. The floats follow this structure:
 * [layers][kv_heads][columns]. If the request asked for the sum, layers and kv_heads are 0, and the floats are
 * [columns]. A column is an entry or a page. Entries of the new tokens are included. */
struct sym_attended {
    uint32_t layers, kv_heads, columns;
    uint32_t entries; /* the file's length after the call */
};

/* Flags of a sampling. SYM_SAMPLING_STREAM decides how `stream` becomes the random number of a draw. All arithmetic is
 * modulo 2^64. Let G = 0x9e3779b97f4a7c15, and let mix(z) be the function of splitmix64:
 *
 *     z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9, z = (z ^ z >> 27) * 0x94d049bb133111eb, z ^ z >> 31
 *
 * The i-th draw, counted from 0, uses mix(stream + (i + 1) * G) >> 11, divided by 2^53. A seed's stream begins at
 * mix(seed + G). After n draws it is mix(seed + G) + n * G. */
enum sym_sampling_flag {
    SYM_SAMPLING_ALLOWED = 1,
    SYM_SAMPLING_STREAM = 2, /* unset (versions before 7): `stream` is a seed, the i-th draw uses mix(seed + i + G) */
    SYM_SAMPLING_MORE = 4, /* a struct sym_sampling_more with its texts follows */
};

/* How a token is drawn from a row of logits (sampler.c). These parts follow the structure, in this order: with
 * SYM_SAMPLING_MORE, a struct sym_sampling_more and `breaker_bytes` bytes of texts; `num_bias` struct sym_bias;
 * `num_before` + `num_generated` int32 tokens for the penalties; with SYM_SAMPLING_ALLOWED, ceil(vocab_size / 32) words
 * with a bit for each token that may be drawn. If all fields are zero, including the temperature, the argmax is
 * drawn. */
struct sym_sampling {
    double temperature;
    double top_p; /* 1: off */
    double min_p; /* 0: off */
    float repetition_penalty; /* for tokens before and generated; 1: off */
    float presence_penalty; /* for generated tokens; 0: off */
    float frequency_penalty; /* for each occurrence among generated tokens; 0: off */
    uint32_t top_k; /* 0: off */
    uint64_t stream; /* state of the random numbers: see SYM_SAMPLING_STREAM */
    uint32_t num_bias, num_before, num_generated;
    uint32_t flags; /* enum sym_sampling_flag */
};

/* More settings of a sampling. Zeros turn all of them off. A window is a count of the latest tokens, given or
 * generated; 0: all. The breakers are UTF-8 texts, each ended by a NUL. A token whose bytes contain one of the texts is
 * a breaker. */
struct sym_sampling_more {
    double typical_p; /* 0 or 1: off */
    double dry_multiplier, dry_base; /* multiplier 0: off */
    double mirostat_tau, mirostat_eta; /* target surprise in bits; how far an error of one bit moves the limit */
    uint32_t mirostat; /* version 1 or 2; 0: off */
    uint32_t penalty_window; /* for the repetition, presence and frequency penalties */
    uint32_t dry_window, dry_allowed_length;
    uint32_t breaker_bytes, reserved;
};

struct sym_bias {
    int32_t token;
    float bias; /* added to the token's logit; -inf: the token is never drawn */
};

/* PRED: asks for some numbers of each row in place of a result slot. `num_named` int32 tokens follow. Then, if
 * `has_sampling`, a struct sym_sampling with its own parts follows. With ROWS_ALL, row i is the i-th draw. */
struct sym_reduction {
    uint32_t top_k, num_named, has_sampling, reserved;
};

/* The numbers of one row. The reply's payload has such a structure for each row. `top_k` struct sym_scored follow each
 * structure, likeliest first, and then `num_named` float log-probabilities. */
struct sym_reduced {
    int32_t sampled; /* -1: the request has no sampling */
    float sampled_logprob; /* under the model's own distribution: before temperature, penalties and limits */
    float entropy;
    float logsumexp; /* add this to a log-probability to get the logit */
};

struct sym_scored {
    int32_t token;
    float logprob;
};

enum sym_slot_state {
    SYM_SLOT_FREE = 0, /* the client stores this when its last view of the row is gone */
    SYM_SLOT_HELD = 1, /* the daemon stores this when a call gets the slot */
};

struct sym_request {
    uint32_t frame_bytes; /* header and payload, without the padding */
    uint16_t op;
    uint16_t stream; /* the thread or task that waits for the reply; 0: unknown. A hint: see libsym-abi(7) */
    uint32_t flags;
    uint32_t reserved1;
    uint64_t id; /* returned in the reply; 0: the client ignores the reply */
    uint64_t handle;
    int64_t args[4];
};

enum sym_reply_flag { SYM_MORE = 1 /* more replies to this id follow */ };

struct sym_reply {
    uint32_t frame_bytes;
    int32_t err; /* errno; if it is not 0, the payload is the message, in UTF-8 */
    uint64_t id;
    int64_t args[4];
    uint32_t flags, reserved0;
    uint64_t reserved1;
};

struct sym_region {
    /* The daemon writes these once, before the client sees the region. */
    uint32_t magic, version;
    uint64_t region_bytes;
    uint64_t states_offset;
    uint64_t submit_offset, submit_bytes;
    uint64_t complete_offset, complete_bytes;
    uint64_t slots_offset, slot_bytes;
    uint32_t slot_count, vocab_size;

    /* One cache line for each writer. */
    _Alignas(64) _Atomic uint64_t submit_tail; /* client */
    _Alignas(64) _Atomic uint64_t complete_head; /* client */
    _Alignas(64) _Atomic uint64_t submit_head; /* daemon */
    _Alignas(64) _Atomic uint64_t complete_tail; /* daemon */

    _Alignas(64) _Atomic uint32_t daemon_asleep; /* daemon: about to sleep; a client clears this and rings */
    _Atomic uint32_t backlog; /* daemon: replies wait for space; the client rings after reading some */
    _Atomic uint32_t gone; /* daemon: no more replies will arrive */
    _Atomic uint32_t daemon_cpu; /* a hint: the CPU on which the daemon last took requests */

    _Alignas(64) _Atomic uint32_t complete_seq; /* futex: the daemon adds one with every reply */
    _Atomic uint32_t complete_waiters; /* client: a thread sleeps on complete_seq */
    _Atomic uint32_t bell_wanted; /* client: an event loop waits; the daemon clears this and rings the bell */
    _Atomic uint32_t slots_wanted; /* daemon: a call waits for slots; a client that frees slots clears this and rings */

    _Alignas(64) _Atomic uint32_t space_seq; /* futex: the daemon adds one when the ring has space for requests again */
    _Atomic uint32_t space_waiters; /* client: number of threads that sleep on space_seq */
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

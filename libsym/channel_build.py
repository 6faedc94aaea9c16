"""Builds `libsym._channel`: the C halves of the channel and the arithmetic over rows of logits."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

from cffi import FFI

HERE = Path(__file__).resolve().parent

SOURCES = ("abi.h", "ring.h", "server.c", "hot.h", "hot.c", "client.c", "rows.c", "rank.c", "sampler.c")

# What Python sees. Structs stay opaque except for the fields that it reads; cffi lets go of the GIL in every call.
DECLARATIONS = """
#define SYM_MAGIC ...
#define SYM_ABI_VERSION ...
#define SYM_RING_BYTES ...
#define SYM_MAX_FRAME_BYTES ...
#define SYM_MIN_SLOTS ...
#define SYM_MAX_SLOTS ...
#define SYM_RANGE_END ...

enum sym_op {
    SYM_KV_CREATE, SYM_KV_OPEN, SYM_KV_CLOSE, SYM_KV_FORK, SYM_KV_REMOVE, SYM_KV_TRUNCATE, SYM_KV_STAT, SYM_KV_LIST,
    SYM_KV_RENAME, SYM_KV_CHMOD, SYM_KV_READ, SYM_KV_DU, SYM_PRED, SYM_TOKENIZE, SYM_DETOKENIZE, SYM_CHAT_TEMPLATE,
    SYM_MODEL_INFO, SYM_STAT, SYM_PING, SYM_KV_EXTRACT, SYM_KV_MERGE, SYM_KV_LOCK, SYM_KV_UNLOCK, SYM_CHECK,
    SYM_CONFINE, SYM_PRED_BATCH, SYM_GENERATE, SYM_CANCEL, SYM_SEND, SYM_RECV, SYM_SUBSCRIBE, SYM_UNSUBSCRIBE,
    SYM_GETRUSAGE, SYM_KV_ADVISE, SYM_KV_SYNC, SYM_VOCABULARY, SYM_KV_CLAIM, SYM_KV_NAME, SYM_KV_MKDIR,
    SYM_CHAT_TOKENS, ...
};
enum sym_flag {
    SYM_ROWS_NONE, SYM_ROWS_LAST, SYM_ROWS_ALL, SYM_OPEN_WRITE, SYM_TOKENIZE_SPECIAL, SYM_REBASE, SYM_LOCK_SHARED,
    SYM_LOCK_NOWAIT, ...
};

typedef struct { uint64_t region_bytes, slots_offset, slot_bytes; uint32_t slot_count, vocab_size; ...; } sym_plan;
int sym_region_plan(uint32_t vocab_size, uint64_t limit_bytes, sym_plan *plan);

#define SYM_MAX_TAKEN ...

typedef struct sym_server sym_server;
sym_server *sym_server_new(char *base, const sym_plan *plan, int bell_fd);
void sym_server_free(sym_server *server);
char *sym_server_inbox(sym_server *server);
char *sym_server_taken(sym_server *server);
int64_t sym_server_num_open(sym_server *server);
int sym_server_take(sym_server *server, uint32_t most, int ignore_new);
int sym_server_arm(sym_server *server, int ignore_requests);
int sym_server_clear_doorbell(int doorbell_fd);
int sym_server_push(sym_server *server, uint64_t id, int32_t err, uint32_t flags, int64_t a0, int64_t a1, int64_t a2,
                    int64_t a3, const char *payload, uint32_t payload_bytes);
int sym_server_push_now(sym_server *server, uint64_t id, int32_t err, uint32_t flags, int64_t a0, int64_t a1,
                        int64_t a2, int64_t a3, const char *payload, uint32_t payload_bytes);
void sym_server_want_slots(sym_server *server);
void sym_server_set_backlog(sym_server *server, int waiting);
int64_t sym_server_take_rows(sym_server *server, uint32_t num_rows);
void sym_server_free_rows(sym_server *server, uint32_t first, uint32_t num_rows);
void sym_server_settle_rows(sym_server *server, uint32_t num_rows);
uint32_t sym_server_held_rows(sym_server *server);
int64_t sym_server_given_rows(sym_server *server);
int64_t sym_server_lent_rows(sym_server *server);
void sym_server_close(sym_server *server);

typedef struct { ...; } sym_hot_call;
int sym_server_take_hot(sym_server *server, uint64_t handle, int32_t position, const int *stop,
                        sym_hot_call *call);
int sym_server_answer_hot(sym_server *server, uint64_t id, int64_t slot, int64_t num_entries);
int sym_server_watch(sym_server *server);
int sym_server_unwatch(sym_server *server, int slept);

typedef struct sym_client sym_client;
sym_client *sym_client_new(int memfd, uint64_t region_bytes, int socket_fd, int doorbell_fd, int bell_fd);
uint32_t sym_client_vocab_size(sym_client *client);
uint32_t sym_client_slot_count(sym_client *client);
uint64_t sym_client_slot_bytes(sym_client *client);
int sym_client_dead(sym_client *client);
void sym_client_tell(sym_client *client, uint16_t op, uint64_t handle, int now);
void sym_client_close(sym_client *client);
void sym_client_disown(sym_client *client);
void sym_client_drop(sym_client *client);

typedef struct sym_answer {
    int64_t args[4]; int32_t err; uint32_t flags, payload_bytes; int32_t claimed; char payload[];
    struct sym_answer *next, *parts; ...;
} sym_answer;
const float *sym_answer_rows(sym_answer *answer);
int sym_answer_split(sym_answer *batch, uint32_t most);
void sym_answer_drop(sym_answer *answer);

typedef struct { sym_answer *answers; ...; } sym_call;
sym_call *sym_call_new(sym_client *client, uint16_t op, uint32_t flags, uint64_t handle, int64_t a0, int64_t a1,
                       int64_t a2, int64_t a3);
int sym_call_run(sym_call *call, const char *payload, uint32_t payload_bytes);
int sym_call_start(sym_call *call, const char *payload, uint32_t payload_bytes);
sym_answer *sym_call_take(sym_call *call);
void sym_call_cancel(sym_call *call);
void sym_call_drop(sym_call *call);

typedef struct {
    int64_t args[4]; int32_t err; uint32_t flags, payload_bytes, is_whole; char payload[...]; sym_answer *answer; ...;
} sym_result;
int sym_client_call(sym_client *client, sym_result *result, uint16_t op, uint32_t flags, uint64_t handle, int64_t a0,
                    int64_t a1, int64_t a2, int64_t a3, const char *payload, uint32_t payload_bytes);
int sym_result_wait(sym_result *result, const char *payload, uint32_t payload_bytes);
void sym_result_drop(sym_result *result);

typedef struct sym_loop sym_loop;
sym_loop *sym_loop_new(sym_client *client);
int sym_loop_fd(sym_loop *loop);
int sym_loop_submit(sym_loop *loop, sym_call *call, uint64_t tag, const char *payload, uint32_t payload_bytes);
void sym_loop_want_nothing(sym_loop *loop);
int sym_loop_take(sym_loop *loop, uint64_t *tags, int most);
int sym_loop_arm(sym_loop *loop);
void sym_loop_drop(sym_loop *loop);

struct sym_reduced { int32_t sampled; float sampled_logprob, entropy, logsumexp; };
struct sym_scored { int32_t token; float logprob; };
int sym_rows_use(int vector_bits);
int64_t sym_row_argmax(const float *row, int64_t n, const void *allowed);
int sym_row_logsumexp(const float *row, int64_t n, const void *allowed, double *result);
int sym_row_entropy(const float *row, int64_t n, const void *allowed, double *result);
int sym_row_softmax(const float *row, int64_t n, const void *allowed, float *out);
int sym_row_topk(const float *row, int64_t n, const void *allowed, int64_t k, int32_t *indices, double *logprobs);
int sym_row_reduce(const float *row, int64_t n, uint32_t top_k, const int32_t *named, uint32_t num_named,
                   struct sym_reduced *head, struct sym_scored *top, float *named_logprobs);
int64_t sym_row_sample(const float *row, int64_t n, const void *allowed, double temperature, int64_t top_k,
                       double top_p, double min_p, double u);

typedef struct sym_sampler sym_sampler;
int64_t sym_sampling_bytes(const char *block, uint64_t bytes, uint32_t vocab_size);
sym_sampler *sym_sampler_new(const char *block, uint64_t bytes, uint32_t vocab_size);
void sym_sampler_free(sym_sampler *sampler);
int sym_sampler_note(sym_sampler *sampler, int32_t token);
int64_t sym_sampler_draw(sym_sampler *sampler, const float *row, const void *allowed, uint64_t index);
double sym_uniform(uint64_t seed);
"""


def source() -> str:
    """The C files as one text, each line still known to the compiler by its own file and number."""
    parts = [f'#line 1 "libsym/{name}"\n{(HERE / name).read_text()}' for name in SOURCES]
    parts.append(
        f"/* lanes.h, which rows.c includes, is {crc32((HERE / 'lanes.h').read_bytes()):08x}: built anew with it */"
    )
    return "\n".join(parts)


ffi = FFI()
ffi.cdef(DECLARATIONS)
ffi.set_source(
    "libsym._channel",
    source(),
    include_dirs=[str(HERE)],
    depends=[str(path) for path in sorted(HERE.glob("*.h"))],
    # No contraction: a row must give the same bits whether or not this machine has fused multiply-adds.
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=off"],
    libraries=["m"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)

"""Builds `libsym._channel`: the C halves of the channel and the arithmetic over rows of logits."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent

SOURCES = ("abi.h", "ring.h", "server.c", "client.c", "rows.c")

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
    SYM_MODEL_INFO, SYM_STAT, SYM_PING, SYM_KV_EXTRACT, SYM_KV_MERGE, SYM_KV_LOCK, SYM_KV_UNLOCK, SYM_CHECK, SYM_CONFINE,
    SYM_PRED_BATCH, SYM_GENERATE, SYM_CANCEL, SYM_SEND, SYM_RECV, SYM_SUBSCRIBE, SYM_UNSUBSCRIBE, SYM_GETRUSAGE,
    SYM_KV_ADVISE, SYM_KV_SYNC, SYM_VOCABULARY, ...
};
enum sym_flag {
    SYM_ROWS_NONE, SYM_ROWS_LAST, SYM_ROWS_ALL, SYM_OPEN_WRITE, SYM_TOKENIZE_SPECIAL, SYM_REBASE, SYM_LOCK_SHARED,
    SYM_LOCK_NOWAIT, ...
};

typedef struct { uint64_t region_bytes, slots_offset, slot_bytes; uint32_t slot_count, vocab_size; ...; } sym_plan;
int sym_region_plan(uint32_t vocab_size, uint64_t limit_bytes, sym_plan *plan);

typedef struct sym_server sym_server;
sym_server *sym_server_new(char *base, const sym_plan *plan);
void sym_server_free(sym_server *server);
char *sym_server_inbox(sym_server *server);
int64_t sym_server_receive(sym_server *server);
int sym_server_arm(sym_server *server, int ignore_requests);
int sym_server_clear_doorbell(int doorbell_fd);
int sym_server_push(sym_server *server, uint64_t id, int32_t err, int64_t a0, int64_t a1, int64_t a2, int64_t a3,
                    const char *payload, uint32_t payload_bytes);
void sym_server_set_backlog(sym_server *server, int waiting);
int64_t sym_server_take_rows(sym_server *server, uint32_t num_rows);
void sym_server_free_rows(sym_server *server, uint32_t first, uint32_t num_rows);
uint32_t sym_server_held_rows(sym_server *server);
void sym_server_close(sym_server *server);

typedef struct sym_client sym_client;
typedef struct { int32_t err; int64_t args[4]; char *payload; uint32_t payload_bytes; int32_t claimed; ...; } sym_call;
sym_client *sym_client_new(int memfd, uint64_t region_bytes, int socket_fd, int doorbell_fd);
uint32_t sym_client_vocab_size(sym_client *client);
uint32_t sym_client_slot_count(sym_client *client);
uint64_t sym_client_slot_bytes(sym_client *client);
int sym_client_dead(sym_client *client);
void sym_client_close_later(sym_client *client, uint64_t handle);
void sym_client_close(sym_client *client);
void sym_client_disown(sym_client *client);
void sym_client_drop(sym_client *client);
sym_call *sym_call_new(sym_client *client, uint16_t op, uint32_t flags, uint64_t handle, int64_t a0, int64_t a1,
                       int64_t a2, int64_t a3);
int sym_call_run(sym_call *call, const char *payload, uint32_t payload_bytes);
const float *sym_call_rows(sym_call *call);
void sym_call_drop(sym_call *call);

int64_t sym_row_argmax(const float *row, int64_t n);
int sym_row_logsumexp(const float *row, int64_t n, double *result);
int sym_row_entropy(const float *row, int64_t n, double *result);
int sym_row_softmax(const float *row, int64_t n, float *out);
int sym_row_topk(const float *row, int64_t n, int64_t k, int32_t *indices, double *logprobs);
int64_t sym_row_sample(const float *row, int64_t n, double temperature, int64_t top_k, double top_p, double min_p,
                       double u);
double sym_uniform(uint64_t seed);
"""


def source() -> str:
    """The C files as one text, each line still known to the compiler by its own file and number."""
    parts = [f'#line 1 "libsym/{name}"\n{(HERE / name).read_text()}' for name in SOURCES]
    return "\n".join(parts)


ffi = FFI()
ffi.cdef(DECLARATIONS)
ffi.set_source(
    "libsym._channel",
    source(),
    include_dirs=[str(HERE)],
    # No contraction: a row must give the same bits whether or not this machine has fused multiply-adds.
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=off"],
    libraries=["m"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)

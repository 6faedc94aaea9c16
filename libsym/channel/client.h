/* The LIP's half of a channel: the functions that Python calls. The files client*.c describe them. cffi reads this
 * file: declarations only. */
#ifndef SYM_CLIENT_H
#define SYM_CLIENT_H

#include <stdint.h>

#define SYM_RESULT_BYTES 512

typedef struct sym_client sym_client;
typedef struct sym_call sym_call;
typedef struct sym_event_loop sym_event_loop;

/* One reply, copied out of the ring. */
typedef struct sym_answer {
    struct sym_answer *next;  /* next answer in a call's queue, or next part of a batch */
    struct sym_answer *parts; /* parts of a split batch that the caller has not taken yet */
    sym_client *client;
    const float *rows; /* first row of a reply to PRED; NULL: there are no rows, or the slots are out of range */
    uint64_t id;       /* the call's id */
    uint16_t op, num_handles; /* number of handles in the reply; their numbers are consecutive */
    int32_t claimed; /* the reply's slots, handle or message have another owner now */
    int32_t err;
    uint32_t flags;
    int64_t args[4];
    uint32_t payload_bytes;
    char payload[];
} sym_answer;

#define SYM_TOKENS_AT_ONCE 64

/* Tokens of several replies to a GENERATE. The call's last reply is never among them. */
typedef struct sym_tokens {
    int64_t first_entries, entries; /* the file's length after the first of the replies, and after the last */
    uint32_t num_tokens, num_replies;
    int32_t tokens[SYM_TOKENS_AT_ONCE];
} sym_tokens;

/* The result of a whole call, which Python reads at once. `answer` is the reply itself, if it owns slots, handles or a
 * message, or is longer than `payload`. A caller that takes over the reply sets `answer` to NULL. */
typedef struct sym_result {
    int64_t args[4];
    int32_t err;
    uint32_t flags, payload_bytes, is_whole;
    char payload[SYM_RESULT_BYTES];
    sym_call *call;
    sym_answer *answer;
} sym_result;

sym_client *sym_client_new(int memfd, uint64_t region_bytes, int socket_fd, int doorbell_fd, int bell_fd);
uint32_t sym_client_vocab_size(sym_client *client);
uint32_t sym_client_slot_count(sym_client *client);
uint64_t sym_client_slot_bytes(sym_client *client);
int sym_client_gone(sym_client *client);
void sym_client_tell(sym_client *client, uint16_t op, uint64_t handle, int now);
void sym_client_close(sym_client *client);
void sym_client_disown(sym_client *client);
void sym_client_drop(sym_client *client);

sym_call *sym_call_new(sym_client *client, uint16_t op, uint32_t flags, uint64_t handle, int64_t a0, int64_t a1,
                       int64_t a2, int64_t a3);
int sym_call_run(sym_call *call, const char *payload, uint32_t payload_bytes);
int sym_call_start(sym_call *call, const char *payload, uint32_t payload_bytes);
sym_answer *sym_call_take(sym_call *call);
int sym_call_tokens(sym_call *call, sym_tokens *found);
void sym_call_forget(sym_call *call, uint32_t num_replies);
void sym_call_cancel(sym_call *call);
void sym_call_drop(sym_call *call);

int sym_client_call(sym_client *client, sym_result *result, uint16_t op, uint32_t flags, uint64_t handle, int64_t a0,
                    int64_t a1, int64_t a2, int64_t a3, const char *payload, uint32_t payload_bytes);
int sym_result_wait(sym_result *result, const char *payload, uint32_t payload_bytes);
void sym_result_drop(sym_result *result);

int sym_answer_split(sym_answer *batch, uint32_t most);
void sym_answer_drop(sym_answer *answer);

sym_event_loop *sym_event_loop_new(sym_client *client);
int sym_event_loop_fd(sym_event_loop *loop);
int sym_event_loop_submit(sym_event_loop *loop, sym_call *call, uint64_t tag, uint16_t stream, const char *payload,
                          uint32_t payload_bytes);
void sym_event_loop_want_nothing(sym_event_loop *loop);
int sym_event_loop_take(sym_event_loop *loop, uint64_t *tags, int most);
int sym_event_loop_arm(sym_event_loop *loop);
void sym_event_loop_drop(sym_event_loop *loop);

#endif

/* Calls: from the request to the last reply. */
#include "client_state.h"

#include <stdlib.h>

/* Makes a call without sending it. NULL: the connection was closed, or there is no memory. */
sym_call *sym_call_new(sym_client *client, uint16_t op, uint32_t flags, uint64_t handle, int64_t a0, int64_t a1,
                       int64_t a2, int64_t a3) {
    sym_call *call = calloc(1, sizeof *call);
    if (call == NULL || !client_ref(client)) {
        free(call);
        return NULL;
    }
    const int64_t args[4] = {a0, a1, a2, a3};
    memcpy(call->request_args, args, sizeof args);
    call->client = client;
    call->answers_end = &call->answers;
    call->op = op;
    call->flags = flags;
    call->handle = handle;
    return call;
}

/* Submits the request if it was not sent yet, and waits for a reply that the caller has not taken yet. 0: there is a
 * reply, or the call is over. -EINTR: let Python handle its signals, then call again. Any other error is final. */
static int run_call(sym_call *call, const char *payload, uint32_t payload_bytes, int is_awaited) {
    sym_client *client = call->client;
    if (disowned(client))
        return -EBADF;
    if (payload_bytes > SYM_MAX_FRAME_BYTES - sizeof(struct sym_request))
        return -EMSGSIZE;
    if (!client_enter(client))
        return has_news(call) ? 0 : -ENOTCONN;
    int rc = 0;
    while (rc == 0 && atomic_load(&call->state) == CALL_NEW) {
        if (atomic_load(&client->dead) != 0 || atomic_load(&client->region->gone) != 0)
            rc = -ENOTCONN;
        else if ((rc = client_try_submit(client, call, NULL, payload, payload_bytes)) == -EAGAIN)
            rc = client_wait_room(client, padded(sizeof(struct sym_request) + (uint64_t)payload_bytes));
        else if (rc == -EBUSY)
            rc = client_wait_entry(client);
    }
    if (rc == 0 && is_awaited)
        rc = client_wait_reply(client, call);
    if (rc == -ENOTCONN && atomic_load(&client->dead) == 0)
        client_declare_dead(client, ENOTCONN);
    client_leave(client);
    return rc;
}

int sym_call_run(sym_call *call, const char *payload, uint32_t payload_bytes) {
    return run_call(call, payload, payload_bytes, 1);
}

/* Submits the request. Waits for space in the ring, but not for the reply. */
int sym_call_start(sym_call *call, const char *payload, uint32_t payload_bytes) {
    return run_call(call, payload, payload_bytes, 0);
}

static sym_answer *take_answer(sym_call *call) {
    pthread_mutex_lock(&call->client->table_lock);
    sym_answer *answer = call->answers;
    if (answer != NULL) {
        call->answers = answer->next;
        if (call->answers == NULL)
            call->answers_end = &call->answers;
        atomic_fetch_sub(&call->num_answers, 1);
    }
    pthread_mutex_unlock(&call->client->table_lock);
    return answer;
}

/* Takes the oldest reply, which the caller owns from now on. NULL: no reply has come yet. */
sym_answer *sym_call_take(sym_call *call) { return disowned(call->client) ? NULL : take_answer(call); }

/* Waits for a reply to a generation, as sym_call_run does, and copies the tokens of all replies that have come. The
 * generation was started before. The call keeps the replies until `sym_call_forget`. So if Ctrl-C interrupts the
 * caller, the next sym_call_tokens returns them again. Returns 0 with no replies if the caller has to use sym_call_take
 * for the next reply. */
int sym_call_tokens(sym_call *call, sym_tokens *found) {
    found->num_tokens = found->num_replies = 0;
    const int rc = sym_call_run(call, "", 0);
    if (rc != 0)
        return rc;
    pthread_mutex_lock(&call->client->table_lock);
    for (const sym_answer *answer = call->answers; answer != NULL; answer = answer->next) {
        const uint32_t count = answer->payload_bytes / sizeof(int32_t);
        if (answer->err != 0 || !(answer->flags & SYM_MORE) || found->num_tokens + count > SYM_TOKENS_AT_ONCE)
            break;
        memcpy(found->tokens + found->num_tokens, answer->payload, count * sizeof(int32_t));
        if (found->num_replies++ == 0)
            found->first_entries = answer->args[1];
        found->entries = answer->args[1];
        found->num_tokens += count;
    }
    pthread_mutex_unlock(&call->client->table_lock);
    return 0;
}

/* Drops the oldest replies, after the caller has noted their tokens. */
void sym_call_forget(sym_call *call, uint32_t num_replies) {
    while (num_replies-- > 0)
        sym_answer_drop(sym_call_take(call));
}

static void cancel_call(sym_call *call) {
    sym_client *client = call->client;
    if (atomic_load(&call->state) != CALL_PENDING || atomic_load(&client->dead) != 0)
        return;
    pthread_mutex_lock(&client->table_lock);
    const int pending = atomic_load(&call->state) == CALL_PENDING && !call->is_cancelled;
    call->is_cancelled |= pending; /* sent only once: a second unlock could release a lock that was taken later */
    if (pending && call->op == SYM_KV_LOCK)
        client_put_off(client, SYM_KV_UNLOCK, call->handle, 0);
    else if (pending)
        client_put_off(client, SYM_CANCEL, 0, (int64_t)call->id);
    pthread_mutex_unlock(&client->table_lock);
    if (pending)
        client_send_later(client);
}

/* Asks the daemon to end a call. Never waits. The daemon may grant a lock at this moment. So for a KV_LOCK this sends
 * an unlock, which ends the wait, and releases the lock if it was granted. */
void sym_call_cancel(sym_call *call) {
    if (!disowned(call->client))
        cancel_call(call);
}

static void drop_call(sym_call *call) {
    sym_client *client = call->client;
    cancel_call(call);
    pthread_mutex_lock(&client->table_lock);
    struct entry *entry = &client->table[call->id & (MAX_CALLS - 1)];
    if (call->id != 0 && entry->id == call->id)
        entry->call = NULL;
    call_forget_ready(call);
    pthread_mutex_unlock(&client->table_lock);
    for (sym_answer *answer; (answer = take_answer(call)) != NULL;)
        answer_free(answer);
    if (others_wait_for(call->op))
        client_send_later(client);
    free(call);
    client_unref(client);
}

/* Frees a call in any state. A call that is not over is cancelled, and later replies are dropped. Never waits. */
void sym_call_drop(sym_call *call) {
    if (!disowned(call->client)) /* in a fork's child, the parent owns the slots and handles */
        drop_call(call);
}

/* -- a whole call with one reply, in one C function -- */

static void keep_result(sym_result *result, sym_answer *answer) {
    const int fits = answer->payload_bytes <= SYM_RESULT_BYTES;
    memcpy(result->args, answer->args, sizeof result->args);
    result->err = answer->err;
    result->flags = answer->flags;
    result->payload_bytes = answer->payload_bytes;
    result->is_whole = fits && answer->op != SYM_PRED_BATCH && !answer_owns_something(answer);
    if (fits)
        memcpy(result->payload, answer->payload, answer->payload_bytes);
    if (result->is_whole)
        answer_free(answer);
    else
        result->answer = answer;
}

/* Waits for the reply of a call, also after an interruption, as sym_call_run does. 0: `result` has the reply, and the
 * call is freed. */
int sym_result_wait(sym_result *result, const char *payload, uint32_t payload_bytes) {
    const int rc = sym_call_run(result->call, payload, payload_bytes);
    if (rc != 0)
        return rc;
    keep_result(result, take_answer(result->call)); /* not in a fork's child: sym_call_run has checked */
    drop_call(result->call);
    result->call = NULL;
    return 0;
}

/* Makes a whole call. After an error `result` may own the call: pass it to sym_result_drop. */
int sym_client_call(sym_client *client, sym_result *result, uint16_t op, uint32_t flags, uint64_t handle, int64_t a0,
                    int64_t a1, int64_t a2, int64_t a3, const char *payload, uint32_t payload_bytes) {
    result->answer = NULL;
    result->call = sym_call_new(client, op, flags, handle, a0, a1, a2, a3);
    return result->call == NULL ? -ENOTCONN : sym_result_wait(result, payload, payload_bytes);
}

void sym_result_drop(sym_result *result) {
    if (result->call != NULL)
        sym_call_drop(result->call);
    if (result->answer != NULL)
        sym_answer_drop(result->answer);
    result->call = NULL;
    result->answer = NULL;
}

/* The LIP's half of a channel: what Python calls. How it works is told in client.h. */
#include "client_loops.h"

static int region_is_sane(const struct sym_region *region, uint64_t region_bytes) {
    sym_plan plan;
    return region->magic == SYM_MAGIC && region->version == SYM_ABI_VERSION && region->region_bytes == region_bytes &&
           region->submit_bytes == SYM_RING_BYTES && region->complete_bytes == SYM_RING_BYTES &&
           region->slot_count <= SYM_MAX_SLOTS && sym_region_plan(region->vocab_size, 0, &plan) == 0 &&
           region->slot_bytes == plan.slot_bytes && region->states_offset == plan.states_offset &&
           region->submit_offset == plan.submit_offset && region->complete_offset == plan.complete_offset &&
           region->slots_offset == plan.slots_offset &&
           region->slots_offset + region->slot_count * region->slot_bytes <= region_bytes;
}

/* Maps the region and takes over the other descriptors. NULL with errno: they are still the caller's. */
sym_client *sym_client_new(int memfd, uint64_t region_bytes, int socket_fd, int doorbell_fd, int bell_fd) {
    if (region_bytes < SYM_HEADER_BYTES) {
        errno = EPROTO;
        return NULL;
    }
    char *base = mmap(NULL, region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    if (base == MAP_FAILED)
        return NULL;
    struct sym_region *region = (struct sym_region *)(void *)base;
    sym_client *client = calloc(1, sizeof *client);
    if (client == NULL || !region_is_sane(region, region_bytes)) {
        errno = client == NULL ? ENOMEM : EPROTO;
        free(client);
        munmap(base, region_bytes);
        return NULL;
    }
    client->region = region;
    client->base = base;
    sym_region_plan(region->vocab_size, 0, &client->plan);
    client->plan.region_bytes = region_bytes;
    client->plan.slot_count = region->slot_count;
    client->socket_fd = socket_fd;
    client->doorbell_fd = doorbell_fd;
    client->bell_fd = bell_fd;
    client->owner = getpid();
    atomic_init(&client->refs, 1);
    pthread_mutex_init(&client->submit_lock, NULL);
    pthread_mutex_init(&client->table_lock, NULL);
    for (uint32_t i = 0; i < MAX_CALLS; i++)
        client->free_indices[i] = MAX_CALLS - 1 - i;
    client->num_free = MAX_CALLS;
    return client;
}

uint32_t sym_client_vocab_size(sym_client *client) { return client->plan.vocab_size; }

uint32_t sym_client_slot_count(sym_client *client) { return client->plan.slot_count; }

uint64_t sym_client_slot_bytes(sym_client *client) { return client->plan.slot_bytes; }

int sym_client_dead(sym_client *client) { return atomic_load(&client->dead); }

/* Ends the connection: the daemon sees the socket close, waiters wake with an error, rows stay readable. */
void sym_client_close(sym_client *client) {
    if (disowned(client) || !client_ref(client))
        return;
    declare_dead(client, ESHUTDOWN);
    atomic_store(&client->dead, ESHUTDOWN);
    /* A leader that parks in shared memory is woken through it; the word only has to change. */
    atomic_fetch_add(&client->region->complete_seq, 1);
    futex_op(&client->region->complete_seq, FUTEX_WAKE, INT_MAX, NULL);
    pthread_mutex_lock(&client->table_lock);
    if (client->socket_fd >= 0)
        shutdown(client->socket_fd, SHUT_RDWR);
    const int unused = client->users == 0;
    pthread_mutex_unlock(&client->table_lock);
    if (unused)
        close_unused(client);
    client_unref(client);
}

/* In the child of a fork: lets go of the socket, or the daemon would not see the parent's end. */
void sym_client_disown(sym_client *client) {
    if (!disowned(client))
        return;
    close_descriptors(client);
}

void sym_client_drop(sym_client *client) {
    if (disowned(client))
        return; /* views of its rows may live on, and the counts are not to be relied on */
    sym_client_close(client);
    client_unref(client);
}

/* A request whose answer nobody waits for; with the next call, or `now` if there is room. Never waits: finalizers and
 * cancelled tasks call it. */
void sym_client_tell(sym_client *client, uint16_t op, uint64_t handle, int now) {
    if (disowned(client) || !client_ref(client))
        return;
    if (atomic_load(&client->dead) == 0) { /* else the daemon has closed everything itself */
        pthread_mutex_lock(&client->table_lock);
        put_off(client, op, handle, 0);
        pthread_mutex_unlock(&client->table_lock);
        if (now)
            send_later(client);
    }
    client_unref(client);
}

/* -- calls -- */

/* NULL: the connection was closed, or there is no memory. */
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

/* Submits the request and waits for a reply that nobody has taken. 0: there is one, or the call is over; -EINTR: let
 * Python handle its signals, then call again; else it failed for good. */
static int run_call(sym_call *call, const char *payload, uint32_t payload_bytes, int is_awaited) {
    sym_client *client = call->client;
    if (disowned(client))
        return -EBADF;
    if (payload_bytes > SYM_MAX_FRAME_BYTES - sizeof(struct sym_request))
        return -EMSGSIZE;
    if (!enter(client))
        return has_news(call) ? 0 : -ENOTCONN;
    int rc = 0;
    while (rc == 0 && atomic_load(&call->state) == CALL_NEW) {
        if (atomic_load(&client->dead) != 0 || atomic_load(&client->region->gone) != 0)
            rc = -ENOTCONN;
        else if ((rc = try_submit(client, call, NULL, payload, payload_bytes)) == -EAGAIN)
            rc = wait_room(client, padded(sizeof(struct sym_request) + (uint64_t)payload_bytes));
        else if (rc == -EBUSY)
            rc = wait_entry(client);
    }
    if (rc == 0 && is_awaited)
        rc = wait_reply(client, call);
    if (rc == -ENOTCONN && atomic_load(&client->dead) == 0)
        declare_dead(client, ENOTCONN);
    leave(client);
    return rc;
}

int sym_call_run(sym_call *call, const char *payload, uint32_t payload_bytes) {
    return run_call(call, payload, payload_bytes, 1);
}

/* As sym_call_run, and does not wait for the reply; for room it does. */
int sym_call_start(sym_call *call, const char *payload, uint32_t payload_bytes) {
    return run_call(call, payload, payload_bytes, 0);
}

/* The oldest reply that nobody has taken: the caller's from now on. NULL: there is none now. */
sym_answer *sym_call_take(sym_call *call) {
    if (disowned(call->client))
        return NULL;
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

/* Tells the daemon that nobody wants more of this. A lock may be granted in this moment: an unlock ends the wait for it,
 * and the lock if it is held. Never waits. */
void sym_call_cancel(sym_call *call) {
    sym_client *client = call->client;
    if (disowned(client) || atomic_load(&client->dead) != 0)
        return;
    pthread_mutex_lock(&client->table_lock);
    const int pending = atomic_load(&call->state) == CALL_PENDING && !call->is_cancelled;
    call->is_cancelled |= pending; /* once: a second unlock could end a lock that was taken since */
    if (pending && call->op == SYM_KV_LOCK)
        put_off(client, SYM_KV_UNLOCK, call->handle, 0);
    else if (pending)
        put_off(client, SYM_CANCEL, 0, (int64_t)call->id);
    pthread_mutex_unlock(&client->table_lock);
    if (pending)
        send_later(client);
}

/* Ends a call whatever its state: it is cancelled if it is not over, and what still comes is thrown away. Never waits. */
void sym_call_drop(sym_call *call) {
    sym_client *client = call->client;
    if (disowned(client))
        return; /* a fork's child: the slots and handles are the parent's */
    sym_call_cancel(call);
    pthread_mutex_lock(&client->table_lock);
    struct entry *entry = &client->table[call->id & (MAX_CALLS - 1)];
    if (call->id != 0 && entry->id == call->id)
        entry->call = NULL;
    forget_ready(call);
    pthread_mutex_unlock(&client->table_lock);
    for (sym_answer *answer; (answer = sym_call_take(call)) != NULL;)
        sym_answer_free(answer);
    if (others_wait_for(call->op))
        send_later(client);
    free(call);
    client_unref(client);
}

/* -- replies -- */

void sym_answer_drop(sym_answer *answer) {
    sym_client *client = answer->client;
    if (disowned(client))
        return;
    const int gives_back = others_wait_for(answer->op) && owns_something(answer) && client_ref(client);
    sym_answer_free(answer);
    if (gives_back) {
        send_later(client);
        client_unref(client);
    }
}

/* The first of the rows in a reply to PRED; NULL if the slots named are not there. */
const float *sym_answer_rows(sym_answer *answer) {
    const sym_plan *plan = &answer->client->plan;
    const int64_t first = answer->args[0], count = answer->args[1];
    if (first < 0 || count < 1 || first >= plan->slot_count || count > plan->slot_count - first)
        return NULL;
    return (const float *)(const void *)(answer->client->base + plan->slots_offset +
                                         (uint64_t)first * plan->slot_bytes);
}

/* Splits the reply to a PRED_BATCH: each part owns its own slots from now on, the whole owns the parts. Their number;
 * -EPROTO: there are more than `most`, or it is none; -ENOMEM. */
int sym_answer_split(sym_answer *batch, uint32_t most) {
    struct sym_reply reply;
    sym_answer **end = &batch->parts;
    uint32_t at = 0, num_parts = 0;
    int rc = batch->op == SYM_PRED_BATCH && batch->err == 0 && !batch->claimed ? 0 : -EPROTO;
    while (rc == 0 && at < batch->payload_bytes) {
        const uint32_t begin = at;
        rc = num_parts < most ? next_part(batch, &at, &reply) : -EPROTO;
        if (rc != 0)
            break;
        const uint32_t payload_bytes = reply.frame_bytes - (uint32_t)sizeof reply;
        sym_answer *part = new_answer(batch->client, &reply, payload_bytes);
        if (part == NULL) {
            rc = -ENOMEM;
            break;
        }
        part->op = SYM_PRED;
        memcpy(part->payload, batch->payload + begin + sizeof reply, payload_bytes);
        *end = part;
        end = &part->next;
        num_parts++;
    }
    batch->claimed |= rc == 0;
    for (sym_answer *part = batch->parts; rc != 0 && part != NULL; part = part->next)
        part->claimed = 1; /* the slots stay the whole's */
    return rc == 0 ? (int)num_parts : rc;
}

/* -- one call, one reply, in one crossing -- */

#define RESULT_BYTES 512

/* What Python reads at once. `answer`: the reply itself, if it owns something or is longer than `payload`; whoever takes
 * it sets this to NULL. */
typedef struct sym_result {
    int64_t args[4];
    int32_t err;
    uint32_t flags, payload_bytes, is_whole;
    char payload[RESULT_BYTES];
    sym_call *call;
    sym_answer *answer;
} sym_result;

static void keep_result(sym_result *result, sym_answer *answer) {
    const int fits = answer->payload_bytes <= RESULT_BYTES;
    memcpy(result->args, answer->args, sizeof result->args);
    result->err = answer->err;
    result->flags = answer->flags;
    result->payload_bytes = answer->payload_bytes;
    result->is_whole = fits && answer->op != SYM_PRED_BATCH && !owns_something(answer);
    if (fits)
        memcpy(result->payload, answer->payload, answer->payload_bytes);
    if (result->is_whole)
        sym_answer_free(answer);
    else
        result->answer = answer;
}

/* Goes on with a call that was interrupted: as sym_call_run; 0: the result is there and the call is gone. */
int sym_result_wait(sym_result *result, const char *payload, uint32_t payload_bytes) {
    const int rc = sym_call_run(result->call, payload, payload_bytes);
    if (rc != 0)
        return rc;
    sym_answer *answer = sym_call_take(result->call);
    if (answer == NULL)
        return -EBADF; /* forked in this moment */
    keep_result(result, answer);
    sym_call_drop(result->call);
    result->call = NULL;
    return 0;
}

/* A whole call. On an error `result` may own the call: give it to sym_result_drop. */
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

/* Replies as objects: each owns its slots, handles or message, and gives them back once. */
#include "client_state.h"

#include <stdlib.h>

/* -- ownership -- */

static void release_slots(sym_client *client, int64_t first, int64_t count) {
    _Atomic uint32_t *states = (_Atomic uint32_t *)(void *)(client->base + client->plan.states_offset);
    const int64_t slot_count = client->plan.slot_count;
    if (first < 0 || first >= slot_count || count < 0 || count > slot_count - first)
        return;
    for (int64_t slot = first; slot < first + count; slot++)
        atomic_store_explicit(&states[slot], SYM_SLOT_FREE, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&client->region->slots_wanted, memory_order_relaxed) != 0 &&
        atomic_exchange(&client->region->slots_wanted, 0) != 0) {
        pthread_mutex_lock(&client->submit_lock); /* the doorbell is closed under this lock */
        ring_fd(client->doorbell_fd);
        pthread_mutex_unlock(&client->submit_lock);
    }
}

/* Reads the reply at `*at` in the payload of a batch's reply, and moves `*at` to the next. Returns 0, or -EPROTO if the
 * payload ends there or is malformed. */
static int next_part(const sym_answer *batch, uint32_t *at, struct sym_reply *reply) {
    if (*at > batch->payload_bytes || batch->payload_bytes - *at < sizeof *reply)
        return -EPROTO;
    memcpy(reply, batch->payload + *at, sizeof *reply);
    if (reply->frame_bytes < sizeof *reply || reply->frame_bytes > batch->payload_bytes - *at)
        return -EPROTO;
    *at += (uint32_t)padded(reply->frame_bytes);
    return 0;
}

int answer_owns_something(const sym_answer *answer) {
    return !answer->claimed && answer->err == 0 &&
           (answer->num_handles > 0 || answer->op == SYM_PRED_BATCH || answer->op == SYM_RECV ||
            (answer->op == SYM_PRED && answer->args[0] >= 0 && answer->args[1] > 0));
}

/* Frees a reply, and gives back its slots, handles or message unless they were claimed. The caller holds no lock. */
void answer_free(sym_answer *answer) {
    sym_client *client = answer->client;
    for (sym_answer *part; (part = answer->parts) != NULL;) {
        answer->parts = part->next;
        answer_free(part);
    }
    if (answer_owns_something(answer)) {
        struct sym_reply part;
        if (answer->op == SYM_PRED)
            release_slots(client, answer->args[0], answer->args[1]);
        if (answer->op == SYM_PRED_BATCH)
            for (uint32_t at = 0; next_part(answer, &at, &part) == 0;)
                if (part.err == 0)
                    release_slots(client, part.args[0], part.args[1]);
        if (answer->num_handles > 0) {
            pthread_mutex_lock(&client->table_lock);
            for (uint16_t number = 0; number < answer->num_handles; number++)
                client_put_off(client, SYM_KV_CLOSE, (uint64_t)answer->args[0] + number, 0);
            pthread_mutex_unlock(&client->table_lock);
        }
        if (answer->op == SYM_RECV) { /* the program has not got the message: it goes back into the mailbox */
            pthread_mutex_lock(&client->table_lock);
            client_put_off(client, SYM_CANCEL, 0, (int64_t)answer->id);
            pthread_mutex_unlock(&client->table_lock);
        }
    }
    free(answer);
    client_unref(client);
}

sym_answer *answer_new(sym_client *client, const struct sym_reply *reply, uint32_t payload_bytes) {
    sym_answer *answer = malloc(sizeof *answer + payload_bytes);
    if (answer == NULL || !client_ref(client)) {
        free(answer);
        return NULL;
    }
    *answer = (sym_answer){
        .client = client, .id = reply->id, .err = reply->err, .flags = reply->flags, .payload_bytes = payload_bytes};
    memcpy(answer->args, reply->args, sizeof answer->args);
    return answer;
}

void sym_answer_drop(sym_answer *answer) {
    sym_client *client = answer->client;
    if (disowned(client))
        return;
    const int gives_back = others_wait_for(answer->op) && answer_owns_something(answer) && client_ref(client);
    answer_free(answer);
    if (gives_back) {
        client_send_later(client);
        client_unref(client);
    }
}

/* Notes the operation that a reply answers, and finds its rows. */
void answer_is_of(sym_answer *answer, uint16_t op, uint16_t num_handles) {
    const sym_plan *plan = &answer->client->plan;
    const int64_t first = answer->args[0], count = answer->args[1];
    answer->op = op;
    answer->num_handles = num_handles;
    if (op == SYM_PRED && first >= 0 && count >= 1 && first < plan->slot_count && count <= plan->slot_count - first)
        answer->rows = (const float *)(const void *)(answer->client->base + plan->slots_offset +
                                                     (uint64_t)first * plan->slot_bytes);
}

/* Splits the reply to a PRED_BATCH. From now on each part owns its slots, and the batch owns the parts. Returns the
 * number of parts; -EPROTO if the batch has more than `most` parts, or is not the reply to a PRED_BATCH; -ENOMEM. */
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
        sym_answer *part = answer_new(batch->client, &reply, payload_bytes);
        if (part == NULL) {
            rc = -ENOMEM;
            break;
        }
        answer_is_of(part, SYM_PRED, 0);
        memcpy(part->payload, batch->payload + begin + sizeof reply, payload_bytes);
        *end = part;
        end = &part->next;
        num_parts++;
    }
    batch->claimed |= rc == 0;
    for (sym_answer *part = batch->parts; rc != 0 && part != NULL; part = part->next)
        part->claimed = 1; /* the batch still owns the slots */
    return rc == 0 ? (int)num_parts : rc;
}

/* Answers of programs' calls: a row, numbers, or one answer to a whole batch. The replies of a group lie in one array,
 * each with room for an error's message. When the last reply is written, the gaps between the replies are closed.
 *
 * These functions run under the run's lock, except `sym_group_abandon`: when the daemon ends, Python may collect a call
 * later than the run. */
#include "loop_state.h"

#include "abi.h"

#include <stdlib.h>
#include <string.h>

static uint32_t padded(uint32_t bytes) { return (bytes + SYM_FRAME_ALIGN - 1) & ~(SYM_FRAME_ALIGN - 1); }

/* ---- numbers in place of a row */

sym_numbers *sym_numbers_new(const sym_hot_functions *hot, const char *block, uint32_t bytes, int32_t vocab_size) {
    sym_reducer *reducer = hot->read_reducer(block, bytes, (uint32_t)vocab_size);
    const size_t answer_bytes = reducer == NULL ? 0 : (size_t)hot->reduced_bytes(reducer);
    sym_numbers *numbers = reducer == NULL ? NULL : malloc(sizeof *numbers + answer_bytes + bytes);
    if (numbers == NULL) {
        if (reducer != NULL)
            hot->free_reducer(reducer);
        return NULL;
    }
    char *answer = (char *)(numbers + 1);
    *numbers = (sym_numbers){reducer, (uint32_t)answer_bytes, bytes, answer, answer + answer_bytes};
    memcpy(numbers->block, block, bytes);
    return numbers;
}

void sym_numbers_free(const sym_hot_functions *hot, sym_numbers *numbers) {
    if (numbers == NULL)
        return;
    hot->free_reducer(numbers->reducer);
    free(numbers);
}

/* ---- groups */

sym_group *sym_group_new(uint64_t id, int32_t num, uint32_t most_bytes) {
    const uint32_t text = most_bytes > SYM_GROUP_TEXT_BYTES ? most_bytes : SYM_GROUP_TEXT_BYTES;
    const uint32_t room = (uint32_t)sizeof(struct sym_reply) + padded(text);
    sym_group *group = calloc(1, sizeof *group);
    char *payload = group == NULL ? NULL : calloc((size_t)num, room);
    if (payload == NULL) {
        free(group);
        return NULL;
    }
    *group = (sym_group){.id = id, .num = num, .num_left = num, .room = room, .payload = payload};
    return group;
}

void sym_group_free(sym_group *group) {
    free(group->payload);
    free(group);
}

static void close_gaps(sym_group *group) {
    for (int32_t number = 0; number < group->num; number++) {
        struct sym_reply reply;
        const char *from = group->payload + (size_t)number * group->room;
        memcpy(&reply, from, sizeof reply);
        memmove(group->payload + group->num_bytes, from, padded(reply.frame_bytes));
        group->num_bytes += padded(reply.frame_bytes);
    }
}

/* Count one call of the group as over. Return 1 if it was the last call. */
static int is_over(sym_group *group) { return __atomic_sub_fetch(&group->num_left, 1, __ATOMIC_ACQ_REL) == 0; }

/* Write the reply of a call that is over. Return 1 if this call was the group's last: `num_left` then stays 1 until the
 * answer is sent. */
static int note(sym_group *group, int32_t number, struct sym_reply reply, const char *payload, uint32_t bytes) {
    if (group->num_bytes != 0) /* the answer is complete, and found no room in the ring before */
        return 1;
    char *to = group->payload + (size_t)number * group->room;
    reply.id = (uint64_t)number;
    reply.frame_bytes = (uint32_t)sizeof reply + bytes;
    memcpy(to, &reply, sizeof reply);
    if (bytes > 0)
        memcpy(to + sizeof reply, payload, bytes);
    group->num_rows += reply.err == 0 && reply.args[0] >= 0;
    if (!is_over(group))
        return 0;
    group->num_left = 1; /* stands for the answer, which is not sent yet */
    close_gaps(group);
    return 1;
}

/* Write a member's reply into its group, and send the answer after the last reply. Return 1 if the answer found no
 * room. */
static int answer_in_group(sym_loop *loop, sym_member *member, sym_group *group) {
    const sym_numbers *numbers = member->decode.numbers;
    const struct sym_reply reply = {.args = {member->decode.slot, 1, entries(member)}};
    if (!note(group, member->decode.number, reply, numbers == NULL ? NULL : numbers->answer,
              numbers == NULL ? 0 : numbers->answer_bytes))
        return 0;
    if (loop->plan.hot->answer_all(member->server, group->id, group->num, group->payload, group->num_bytes,
                                   (uint32_t)group->num_rows) != 0)
        return 1;
    sym_group_free(group);
    return 0;
}

int sym_answer_program(sym_loop *loop, sym_member *member) {
    const sym_hot_functions *hot = loop->plan.hot;
    sym_decode *decode = &member->decode;
    sym_numbers *numbers = decode->numbers;
    int rc;
    if (member->error != 0)
        return 1;
    if (decode->group != NULL)
        rc = answer_in_group(loop, member, decode->group);
    else if (numbers != NULL)
        rc = hot->push(member->server, member->call_id, 0, decode->slot, 1, entries(member), numbers->answer,
                       numbers->answer_bytes, NULL, 0);
    else
        rc = hot->answer(member->server, member->call_id, decode->slot, entries(member));
    if (rc != 0)
        return 1;
    sym_numbers_free(hot, numbers);
    decode->numbers = NULL;
    decode->group = NULL;
    return 0;
}

int sym_loop_note(sym_loop *loop, sym_group *group, const sym_noted *noted) {
    const struct sym_reply reply = {.err = noted->err, .args = {noted->slot, noted->err == 0, noted->num_entries}};
    const uint32_t most = group->room - (uint32_t)sizeof reply;
    pthread_mutex_lock(&loop->lock);
    const int is_last = note(group, noted->number, reply, noted->payload, noted->bytes < most ? noted->bytes : most);
    pthread_mutex_unlock(&loop->lock);
    return is_last;
}

void sym_group_abandon(sym_group *group) {
    if (is_over(group))
        sym_group_free(group);
}

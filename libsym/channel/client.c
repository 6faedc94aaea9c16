/* The LIP's half of a channel: a connection, from sym_client_new to its last reference. client_state.h describes how
 * the parts work together. */
#include "client_state.h"

#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>

static void close_descriptors(sym_client *client) {
    close_fd(&client->socket_fd);
    close_fd(&client->doorbell_fd);
    close_fd(&client->bell_fd);
}

/* Drops a reference. The last one frees everything but the struct. The struct is never freed, and takes 40 KB for each
 * connection of a process: Python finalizes the objects of a garbage cycle in any order, so a file's finalizer may
 * still use the struct. */
void client_unref(sym_client *client) {
    if (atomic_fetch_sub(&client->refs, 1) != 1)
        return;
    munmap(client->base, client->plan.region_bytes);
    close_descriptors(client);
    free(client->later);
    client->later = NULL;
    client->base = NULL;
    client->region = NULL;
}

/* Closes the descriptors if no thread uses them. The caller holds no lock. The doorbell is also used under submit_lock,
 * so this function takes both locks. */
static void close_unused(sym_client *client) {
    pthread_mutex_lock(&client->submit_lock);
    pthread_mutex_lock(&client->table_lock);
    if (client->users == 0)
        close_descriptors(client);
    pthread_mutex_unlock(&client->table_lock);
    pthread_mutex_unlock(&client->submit_lock);
}

/* Keeps the descriptors open until client_leave(). Returns 0 if they were closed already. */
int client_enter(sym_client *client) {
    pthread_mutex_lock(&client->table_lock);
    const int open = client->socket_fd >= 0;
    client->users += open;
    pthread_mutex_unlock(&client->table_lock);
    return open;
}

void client_leave(sym_client *client) {
    pthread_mutex_lock(&client->table_lock);
    const int last = --client->users == 0 && atomic_load(&client->dead) == ESHUTDOWN;
    pthread_mutex_unlock(&client->table_lock);
    if (last)
        close_unused(client);
}

void client_declare_dead(sym_client *client, int reason) {
    int alive = 0;
    if (!atomic_compare_exchange_strong(&client->dead, &alive, reason))
        return;
    pthread_mutex_lock(&client->table_lock);
    for (uint32_t i = 0; i < MAX_CALLS; i++)
        if (client->table[i].id != 0 && client->table[i].call != NULL)
            wake_thread(thread_of(client->table[i].call)); /* each waiting thread checks `dead` again */
    notify_loops(client);
    pthread_mutex_unlock(&client->table_lock);
}

int client_socket_hung_up(sym_client *client) {
    struct pollfd poll_fd = {.fd = client->socket_fd, .events = POLLRDHUP};
    return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) != 0;
}

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

/* Maps the region and takes over the other descriptors. On failure returns NULL with errno; then the caller keeps the
 * descriptors. */
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

/* Whether the daemon has ended, even if no call has noticed that yet. */
int sym_client_gone(sym_client *client) {
    if (disowned(client) || !client_ref(client))
        return 1;
    int gone = 1;
    if (client_enter(client)) {
        gone = atomic_load(&client->region->gone) != 0 || client_socket_hung_up(client);
        client_leave(client);
    }
    client_unref(client);
    return gone;
}

/* Ends the connection. The daemon sees the socket close, waiting threads wake with an error, and rows stay readable. */
void sym_client_close(sym_client *client) {
    if (disowned(client) || !client_ref(client))
        return;
    client_declare_dead(client, ESHUTDOWN);
    atomic_store(&client->dead, ESHUTDOWN);
    /* A leader parks on complete_seq, so any change of this word wakes the leader. */
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

/* In the child of a fork: closes the descriptors. An open socket here would hide the parent's end from the daemon. */
void sym_client_disown(sym_client *client) {
    if (!disowned(client))
        return;
    close_descriptors(client);
}

void sym_client_drop(sym_client *client) {
    if (disowned(client))
        return; /* views of the client's rows may live on in the child, where the counts may be wrong */
    sym_client_close(client);
    client_unref(client);
}

/* Sends a request without a reply: with the next call, or immediately if `now` is set and the ring has space. Never
 * waits, because finalizers and cancelled tasks call this. */
void sym_client_tell(sym_client *client, uint16_t op, uint64_t handle, int now) {
    if (disowned(client) || !client_ref(client))
        return;
    if (atomic_load(&client->dead) == 0) { /* if the connection has ended, the daemon has closed the handles */
        pthread_mutex_lock(&client->table_lock);
        client_put_off(client, op, handle, 0);
        pthread_mutex_unlock(&client->table_lock);
        if (now)
            client_send_later(client);
    }
    client_unref(client);
}

/* Memory of the gate, and of stays, which are used again. */
#include "handles.h"

#include <stdlib.h>
#include <string.h>

void sym_stay_free(sym_stay *stay) {
    free(stay->pages);
    free(stay);
}

void sym_gate_free(sym_gate *gate) {
    for (sym_stay *stay = gate->free_stays, *next; stay; stay = next) {
        next = stay->next;
        sym_stay_free(stay);
    }
    for (int32_t at = 0; at < gate->room; at++)
        if (gate->stays[at])
            sym_stay_free(gate->stays[at]);
    free(gate->stays);
    gate->stays = NULL;
    gate->free_stays = NULL;
    gate->room = gate->num_stays = 0;
    free(gate->by_doorbell);
    gate->by_doorbell = NULL;
    gate->num_doorbells = 0;
}

int sym_gate_listen(sym_gate *gate, sym_connection *connection, int32_t doorbell) {
    if (doorbell == 0)
        return 1; /* 0 means no doorbell: see sym_connection.doorbell */
    if (doorbell >= gate->num_doorbells) {
        int32_t num = 2 * doorbell;
        sym_connection **more = realloc(gate->by_doorbell, (size_t)num * sizeof(sym_connection *));
        if (!more)
            return 0;
        memset(more + gate->num_doorbells, 0, (size_t)(num - gate->num_doorbells) * sizeof(sym_connection *));
        gate->by_doorbell = more;
        gate->num_doorbells = num;
    }
    gate->by_doorbell[doorbell] = connection;
    connection->doorbell = doorbell;
    return 1;
}

void sym_gate_ignore(sym_gate *gate, sym_connection *connection) {
    if (connection->doorbell)
        gate->by_doorbell[connection->doorbell] = NULL;
    connection->doorbell = 0;
}

sym_stay *sym_stay_new(sym_gate *gate, int32_t num_pages) {
    sym_stay *stay = gate->free_stays;
    if (!stay) {
        stay = calloc(1, sizeof *stay);
        if (!stay)
            return NULL;
        gate->free_stays = stay;
    }
    if (stay->room < num_pages) {
        int32_t *pages = realloc(stay->pages, 2 * (size_t)num_pages * sizeof *pages);
        if (!pages)
            return NULL;
        stay->pages = pages;
        stay->room = 2 * num_pages;
    }
    gate->free_stays = stay->next;
    return stay;
}

int sym_gate_has_place(sym_gate *gate, int32_t index) {
    if (index < gate->room)
        return 1;
    int32_t room = 2 * index + 16;
    sym_stay **stays = realloc(gate->stays, (size_t)room * sizeof *stays);
    if (!stays)
        return 0;
    memset(stays + gate->room, 0, (size_t)(room - gate->room) * sizeof *stays);
    gate->stays = stays;
    gate->room = room;
    return 1;
}

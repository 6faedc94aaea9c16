/* Growing arrays, and places of members. */
#include "loop_state.h"

#include <stdlib.h>
#include <string.h>

int sym_make_room(void *array, int32_t *room, int32_t wanted, size_t size) {
    if (wanted <= *room)
        return 0;
    int32_t more = *room < 16 ? 16 : *room;
    while (more < wanted)
        more *= 2;
    void *longer;
    memcpy(&longer, array, sizeof longer); /* `array` points to a pointer of any type */
    longer = realloc(longer, (size_t)more * size);
    if (longer == NULL)
        return -1;
    memcpy(array, &longer, sizeof longer);
    *room = more;
    return 0;
}

int32_t sym_free_place(sym_loop *loop) {
    if (loop->num_free_places > 0)
        return loop->free_places[--loop->num_free_places];
    const int32_t index = loop->num_places;
    int32_t room[3] = {loop->room_places, loop->room_places, loop->room_places};
    if (sym_make_room(&loop->members, &room[0], index + 1, sizeof(sym_member *)) != 0 ||
        sym_make_room(&loop->free_places, &room[1], index + 1, sizeof(int32_t)) != 0 ||
        sym_make_room(&loop->news, &room[2], index + 1, sizeof(int32_t)) != 0)
        return -1;
    loop->room_places = room[0];
    sym_member *place = calloc(1, sizeof *place);
    if (place == NULL)
        return -1;
    loop->members[index] = place;
    loop->num_places++;
    return index;
}

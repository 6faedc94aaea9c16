/* The division of the work for mass into groups and blocks, which mass.h describes. */

#include "mass.h"

#include <errno.h>
#include <stdlib.h>

#include "arrays.h"

static int add_groups(struct mass_plan *p, const sym_batch *b, long chunk, long height) {
    long end = b->first_row[chunk + 1];
    int error = 0;
    for (long row = b->first_row[chunk]; row < end && !error; row += height) {
        long rows = at_most(height, end - row);
        error = grow(&p->groups, p->num_groups, &p->room_groups, sizeof *p->groups);
        if (error)
            break;
        p->groups[p->num_groups++] =
            (struct mass_group){(int32_t)chunk, (int32_t)row, (int32_t)rows, (int32_t)p->num_levels};
        p->num_levels += rows;
    }
    return error;
}

static int add_blocks(struct mass_plan *p, const sym_batch *b, long chunk, long first_group) {
    long end = b->start[chunk] + b->first_row[chunk + 1] - b->first_row[chunk];
    int error = 0;
    for (long entry = 0; entry < end && !error; entry += BLOCK) {
        error = grow(&p->blocks, p->num_blocks, &p->room_blocks, sizeof *p->blocks);
        if (!error)
            p->blocks[p->num_blocks++] =
                (struct mass_block){(int32_t)chunk, (int32_t)entry, (int32_t)at_most(BLOCK, end - entry),
                                    (int32_t)first_group, (int32_t)p->num_groups};
    }
    return error;
}

int make_mass_plan(struct mass_plan *p, const sym_batch *b, long height, long level_floats) {
    int error = 0;
    p->num_groups = p->num_blocks = p->num_levels = 0;
    for (long c = 0; b->masses && c < b->num_chunks && !error; c++) {
        long first_group = p->num_groups;
        if (!b->masses[c].sums)
            continue;
        error = add_groups(p, b, c, height);
        if (!error)
            error = add_blocks(p, b, c, first_group);
    }
    if (error || p->num_levels <= p->room_levels)
        return error;
    p->room_levels = 0;
    error = regrow(&p->levels, (size_t)(p->num_levels * level_floats) * sizeof *p->levels);
    if (!error)
        p->room_levels = p->num_levels;
    return error;
}

void free_mass_plan(struct mass_plan *p) {
    free(p->groups);
    free(p->blocks);
    free(p->levels);
}

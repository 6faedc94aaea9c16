/* Plan of mass, which a step computes for the chunks that ask for it. A group is some rows of such a chunk. A block is
 * some entries that these rows see. All groups are measured first. Then the mass of each block is added up, group by
 * group. */

#ifndef SYMPHONY_MASS_H
#define SYMPHONY_MASS_H

#include "work.h"

/* Consecutive rows of one chunk. */
struct mass_group {
    int32_t chunk, first_row, rows; /* rows of the batch */
    int32_t level; /* index of the group's first row in `levels` */
};

struct mass_block {
    int32_t chunk, first_entry, entries;
    int32_t first_group, end_group; /* groups of its chunk */
};

/* `levels` has the results of measure() for each KV head of each group: [max, share][rows of the group][query heads of
 * the KV head]. */
struct mass_plan {
    struct mass_group *groups;
    struct mass_block *blocks;
    float *levels;
    long num_groups, num_blocks, num_levels;
    long room_groups, room_blocks, room_levels;
};

/* Plan the mass of a batch. A group has up to `height` rows, and a row has `level_floats` levels. Return 0, or an
 * errno. */
int make_mass_plan(struct mass_plan *p, const sym_batch *b, long height, long level_floats);
void free_mass_plan(struct mass_plan *p);

#endif

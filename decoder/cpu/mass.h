/* What a step computes beside for chunks that ask how much each entry is attended to: their rows in groups, and the blocks
 * of entries that these see. Groups are measured first, then each block goes through the groups in order. */

#ifndef SYMPHONY_MASS_H
#define SYMPHONY_MASS_H

#include "work.h"

/* Consecutive rows of one chunk. */
struct mass_group {
    int32_t chunk, first_row, rows; /* rows of the batch */
    int32_t level; /* of its first row in `levels` */
};

struct mass_block {
    int32_t chunk, first_entry, entries;
    int32_t first_group, end_group; /* of its chunk */
};

/* `levels`: of each group, for each KV head, what measure() gives: [max, share][rows of it][query heads of one]. */
struct mass_plan {
    struct mass_group *groups;
    struct mass_block *blocks;
    float *levels;
    long num_groups, num_blocks, num_levels;
    long room_groups, room_blocks, room_levels;
};

/* `height` rows a group, `level_floats` for each row. 0, or an errno. */
int make_mass_plan(struct mass_plan *p, const sym_batch *b, long height, long level_floats);
void free_mass_plan(struct mass_plan *p);

#endif

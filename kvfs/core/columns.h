/* cffi reads this file: declarations only.
 *
 * The state of pages, frames and files. `columns.py` makes an array of each field: a *column*. A column is indexed by a
 * page number, a frame number, or a file's row. No other list of columns exists. Zero bytes are the default of each
 * column (none, never, false), so untouched memory describes an unused page.
 *
 * Writers: only the trio thread writes a column, unless its comment names workers. A worker writes only to pages that
 * it holds references on. Any thread may read.
 *
 * Invariants. `PagePool.check` raises if one of them is broken:
 *
 * 1. `refcount` is the number of times that tables, snapshots, imports and assemblies refer to the page. A page number
 *    of the running model is in the free list if and only if its count is 0.
 * 2. A page without references has zeros in `fill`, `num_reserved`, `has_digest`, `frame`, `slot`, `num_on_disk`,
 *    `num_written` and `is_suspect`. Other columns may be stale.
 * 3. 0 <= `fill` <= 32, and no table has an entry at or above `fill`. A page with a digest is full.
 * 4. `frame` and `page` are inverse to each other. A frame is free, holds one page, or is about to hold one.
 * 5. The pool's counts of shared, pinned and kept pages agree with `refcount`, `pins` and `kept_until`.
 * 6. 0 <= `num_on_disk` <= 32. A page with entries on disk has a slot, and so has a suspect page. Two pages of the
 *    running model never share a slot.
 * 7. A table and its pages have the same `arena`. A page of arena 255 has no frame.
 */
#ifndef KVFS_COLUMNS_H
#define KVFS_COLUMNS_H

#include <stdint.h>

/* A number that may be missing. The complement of the number is stored, so zero bytes mean that no number is stored. */
typedef struct {
    int32_t complement;
} number_or_none;

enum { PAGE_SLOTS = 32, DIGEST_SIZE = 32 };

/* Columns of pages, by page number. */
typedef struct {
    /* Owner: PagePool. */
    int32_t *refcount;                /* references by all holders together */
    int32_t *pins;                    /* pins on the page; a pinned page keeps its frame */
    uint8_t *arena;                   /* 0: the running model's arena; 255: another model's page, on disk alone */
    int8_t *fill;                     /* entries that the page holds or awaits: the next append begins behind them */
    int8_t *num_reserved;             /* entries that a reservation appends in place, at the end of the page */
    number_or_none *row;              /* row of the file that used the page last */
    double *last_use;                 /* time.monotonic() when the last pin ended; 0: never */
    int32_t (*tokens)[PAGE_SLOTS];    /* written by workers for new pages that no other thread knows */
    int32_t (*positions)[PAGE_SLOTS]; /* written like `tokens` */
    uint8_t (*digest)[DIGEST_SIZE];   /* written by workers for full pages; workers that race write the same bytes */
    _Bool *has_digest;                /* set by workers after `digest` */
    /* Owner: Frames. */
    number_or_none *frame; /* the frame that the page is in */
    /* Owner: KeptPages. */
    double *kept_until; /* end of the advice that keeps the page in memory; a past time: no advice */
    /* Owner: PageSlots. */
    number_or_none *slot; /* the page's slot on disk */
    uint64_t *checksum;   /* checksum of that slot */
    int8_t *num_on_disk;  /* number of the page's first entries that the slot holds */
    int8_t *num_written;  /* entries that the write under way covers; the value of `num_on_disk` after the write */
    _Bool *is_suspect;    /* a power cut may destroy the slot, which has the only copy of the page */
    int32_t *generation;  /* number of times that the page number was freed */
} page_columns;

/* Columns of frames, by frame number. */
typedef struct {
    number_or_none *page; /* the page that the frame holds */
    int64_t *generation;  /* incremented when the frame stops holding its page: see `looking.py` */
    int64_t *bytes_in;    /* owner of the bytes: 1 + an account number; 0: zeros; -1: several owners */
} frame_columns;

enum { LATEST_GAPS = 8 };

/* Columns of files that programs have open, by row. The tiers use them to decide which files stay in memory: see
 * `residents.py`. `num_uses` tells how many gaps are known. */
typedef struct {
    double *last_use_s;                   /* end of the last use; during a use, its beginning */
    double *num_uses;                     /* 1 + the number of gaps that were counted */
    double *gap_s;                        /* mean gap; set from the first gap on */
    double *gap_spread_s;                 /* mean distance of gaps from `gap_s`; set from the second gap on */
    double (*latest_gaps_s)[LATEST_GAPS]; /* in no order; 0: no gap yet */
    int32_t *num_users;                   /* handles of programs on the file */
    int32_t *priority;
    _Bool *is_cold;           /* advice: the file is evicted before others, until its next use */
    double *pinned_until_s;   /* the file is not evicted before this time */
    double *wanted_until_s;   /* a use before this time is likely: other files are evicted first */
    int32_t *went_down;       /* pages that were evicted since the last use */
    number_or_none *next_row; /* if this row is unused: the next unused row */
    uint64_t *table;          /* address of the file's table; 0: the row is unused */
    int64_t *changed;         /* number of the file's last change; 0: it has none: see changes.c */
} row_columns;

#endif

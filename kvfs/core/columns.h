/* cffi reads this file: declarations only.
 *
 * The state of pages, frames and files. `columns.py` makes an array of each field, a *column*, indexed by a page's number, a
 * frame's, or a file's row; no other list of columns exists. Zero bytes are every default (none, never, false): memory that
 * nobody has written is a page that nobody has had.
 *
 * Writers: the trio thread alone writes a column, except where "workers" says otherwise. A worker writes only to pages
 * that it holds references on. Any thread may read.
 *
 * Invariants. `PagePool.check` raises if one of them is broken:
 *
 *  1. `refcount` is the number of mentions by tables, snapshots, imports and assemblies. A number of the running model
 *     is in the free list exactly if its count is 0.
 *  2. A page without references has zeros in `fill`, `num_reserved`, `has_digest`, `frame`, `slot`, `num_on_disk`,
 *     `num_written` and `is_suspect`. Other columns may be stale.
 *  3. 0 <= `fill` <= 32, and tables have no entry at or above it. A page with a digest is full.
 *  4. `frame` and `page` are inverse to each other. A frame is free, or holds one page, or is about to hold one.
 *  5. The pool's figures of shared, pinned and kept pages are counts of `refcount`, `pins` and `kept_until`.
 *  6. 0 <= `num_on_disk` <= 32. A page with entries on disk has a slot, and so has a suspect. Two pages of the running
 *     model never have one slot.
 *  7. A table's pages are of the table's `arena`. A page of no arena has no frame.
 */
#ifndef KVFS_COLUMNS_H
#define KVFS_COLUMNS_H

#include <stdint.h>

/* A number that may be missing. Its complement is stored: 0 is none. */
typedef struct {
    int32_t complement;
} number_or_none;

enum { PAGE_SLOTS = 32, DIGEST_SIZE = 32 };

/* By page number. */
typedef struct {
    /* PagePool's. */
    int32_t *refcount;                /* references of all holders */
    int32_t *pins;                    /* while there are any the page keeps its frame */
    uint8_t *arena;                   /* whose page it is: 0, the running model's; 255, of a model without an arena */
    int8_t *fill;                     /* slots that hold an entry, or are reserved for one: the frontier of appends */
    int8_t *num_reserved;             /* slots, up to the page's end, reserved in place and not computed */
    number_or_none *row;              /* the file that used the page last, by its row among the residents */
    double *last_use;                 /* time.monotonic() when the last pin went; 0: never */
    int32_t (*tokens)[PAGE_SLOTS];    /* workers: of new pages that nobody else knows */
    int32_t (*positions)[PAGE_SLOTS]; /* workers: the same */
    uint8_t (*digest)[DIGEST_SIZE];   /* workers: of full pages; two that meet write the same bytes */
    _Bool *has_digest;                /* workers: after `digest` */
    /* Frames'. */
    number_or_none *frame;            /* where the page is in memory */
    /* Kept's. */
    double *kept_until;               /* until when advice keeps the page in memory; a past time is none */
    /* OnDisk's. */
    number_or_none *slot;             /* where the page is on disk */
    uint64_t *checksum;               /* of that slot */
    int8_t *num_on_disk;              /* the page's first entries that the slot holds */
    int8_t *num_written;              /* the same, of the write that is under way */
    _Bool *is_suspect;                /* a power cut may take the slot, and the page is nowhere else */
    int32_t *generation;              /* counts how often the number was given back */
} page_columns;

/* By frame. */
typedef struct {
    number_or_none *page; /* the page that the frame holds */
    int64_t *generation;  /* rises when the frame stops holding its page: see `looking.py` */
    int64_t *bytes_in;    /* one more than the account whose bytes are there; 0: zeros; -1: of several */
} frame_columns;

enum { LATEST_GAPS = 8 };

/* By row: a file that somebody has, and what is known of it for deciding who stays in memory. See `residents.py`.
 * `num_uses` says which gaps are known. */
typedef struct {
    double *last_use_s;                    /* when its last use ended, or began if it has not */
    double *num_uses;                      /* one, and one for each gap that counted */
    double *gap_s;                         /* the mean gap, from the first on */
    double *gap_spread_s;                  /* how far gaps are from the mean, from the second on */
    double (*latest_gaps_s)[LATEST_GAPS]; /* in no order; 0: none */
    int32_t *num_users;                    /* programs' handles on it */
    int32_t *priority;
    _Bool *is_cold;                        /* it goes before others, by advice, until it is used again */
    double *pinned_until_s;                /* it does not go before */
    double *wanted_until_s;                /* until then it is likely to be needed: others go before it */
    int32_t *went_down;                    /* pages that left memory since its last use */
    number_or_none *next_row;              /* of a row that nobody has: the next of those */
    uint64_t *table;                       /* the address of the file's table; 0: nobody has the row */
} row_columns;

#endif

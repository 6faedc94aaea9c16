/* cffi reads this file: declarations only.
 *
 * The core: what a call does to page tables, to references on pages, and to accounts. `columns.h` has the columns that it
 * reads and writes, `free_list.h` the numbers and frames that are free.
 *
 * Rules:
 *
 *  - The trio thread alone calls the core, and nothing in it waits, locks, or calls back. What Python has to do after a
 *    call is in `core_pool.news`, and Python does it before anything else.
 *  - A call that returns anything but CORE_DONE has changed nothing, but for CORE_BROKEN.
 *  - A slot below `fill` never changes while its page has more than one reference. A table may append in place if it
 *    ends exactly at the page's fill, or if it alone refers to the page; every other table appends to a copy.
 *  - Bytes never cross owners. `bytes_in` says whose bytes a frame holds; a page with bytes of others is *stale*, and
 *    zeroed before anything is computed into it.
 *  - What an account is charged its parents are charged, too: once for each distinct page.
 *  - A *reservation* is room for entries behind a table's last. Nobody sees them before `core_commit`, and `core_abort`
 *    takes the room back. There is one at a time.
 *  - All pages of a table are of one arena, and of one size.
 *
 * No work depends on the size of the pool or on the number of tables: a call looks at the pages that it names, and at
 * those of the table that it names.
 */
#ifndef KVFS_CORE_H
#define KVFS_CORE_H

#include "columns.h"
#include "counts.h"
#include "free_list.h"

#include <stdint.h>

enum { CORE_NOBODY = -1, CORE_NO_ARENA = 255, CORE_NAME_BYTES = 512, CORE_FREE_NAMES = 128, CORE_GAPS = 64 };

typedef enum {
    CORE_DONE,
    CORE_OVER_QUOTA, /* of an account, or of one of its parents */
    CORE_NO_PAGES,   /* no numbers are free */
    CORE_NO_FRAMES,
    CORE_NO_MEMORY,
    CORE_BROKEN, /* a page is none, or a reference is given back that nobody had: a fault of the caller */
    CORE_COLD,   /* Python has to do it */
} core_outcome;

/* Of `core_pool.news`. */
enum {
    CORE_RING = 1,    /* for the pager: few frames are free, or pages were let go that may be awaited */
    CORE_LEFT = 2,    /* `left` has pages */
    CORE_CHARGED = 4, /* accounts that are watched were charged, or got something back: `told`, by `next_told` */
};

/* Sizes of pages. Pages of other models have numbers one after the other. */
typedef struct {
    int64_t first, stop, page_bytes;
} core_size;

typedef struct {
    int64_t page_bytes; /* of the others */
    int64_t num_others;
    core_size *others;
} core_sizes;

/* Kinds of things that a user makes the daemon keep: see `holdings.py`. Files and domains stay when the user's programs
 * have ended. One part in CORE_HANDLES_PART of the bound is left to other things: a removal takes handles. */
enum {
    CORE_FILE,
    CORE_HANDLE,
    CORE_OPEN,
    CORE_PLAIN,
    CORE_DOMAIN,
    CORE_VERSION,
    CORE_CALL,
    CORE_REQUEST,
    CORE_FRAME,
    CORE_MESSAGE,
    CORE_TOPIC,
    CORE_TEXT,
    CORE_CONNECTION,
    CORE_KINDS,
    CORE_HANDLES_PART = 8
};

/* Bytes of one thing of each kind. */
extern const int64_t core_weights[13];

typedef struct {
    int64_t limit_bytes; /* below 0: no limit */
    int64_t num_bytes, num_of[13], bytes_of[13];
} core_holdings;

/* What all accounts are charged beside pages, and the account that a call found without room last. */
typedef struct {
    int64_t num_files, other_bytes;
    int64_t refused;                    /* its number */
    int64_t wanted_bytes, wanted_files; /* more than it may have; both 0: its user's holdings are full */
} core_total;

typedef struct core_account core_account;
struct core_account {
    int64_t number;
    core_account *parent; /* NULL: a uid's */
    core_account *next_told;
    page_counts pages;
    const core_sizes *sizes;
    int64_t page_bytes;  /* of the pages that are counted, together */
    int64_t other_bytes; /* of plain files, attributes, and what symbolic links lead to */
    int64_t num_files, num_tables;
    int64_t most_bytes, most_files; /* below 0: no limit */
    core_holdings *holdings;        /* of a uid's */
    core_total *total;
    _Bool is_ended; /* a domain that is none any more: nothing new is charged to it */
    _Bool is_watched, has_news, is_told; /* is_told: in the pool's list of those */
};

/* A page that lost its last reference, and what it had: the core has forgotten both. */
typedef struct {
    int32_t page, slot; /* -1: none */
    double kept_until;
} core_left;

typedef struct core_table core_table;

typedef struct {
    page_columns page;
    frame_columns frame;
    row_columns row;
    int32_t num_rows, row_room; /* rows that were ever given out, and that there is memory for */
    number_or_none free_row;
    page_counts references; /* floor 1 */
    page_counts pins;
    free_list *numbers, *frames;
    int64_t num_coming;   /* frames that are taken and hold no page yet */
    int64_t num_promised; /* free frames that are somebody's already, who waits for more of them */
    int64_t low_water;    /* free frames: CORE_RING when there are fewer */
    int64_t num_wanted;   /* pages that were allocated last, or that there was no room for */
    _Bool is_awaited;     /* a call waits for frames */
    int32_t news;
    core_account *told;
    core_left *left;
    int64_t num_left, left_room;
    int32_t *scratch;
    int64_t scratch_room;
    core_table *tables, *free_tables;
    core_table *used; /* files that Python has to be told of: see `core_note_use` */
    double gaps_s[CORE_GAPS];
    int32_t num_gaps; /* that forks ended, and that are not in Python's statistics yet: the first so many */
} core_pool;

/* Numbers of inodes, and branches. Python's tree has one of these. */
typedef struct {
    int64_t next_number;
    int64_t num_branches;
    int64_t num_names; /* files that the disk has room for: looked at less often than files are made */
} core_files;

/* Who makes a branch. */
typedef struct {
    core_account *account; /* pays for it */
    uint32_t uid, gid;
} core_maker;

/* The entries of a KV file, and the reservation behind them. */
struct core_table {
    core_pool *pool;
    core_account *account;
    int32_t *slots; /* page numbers: the table's own, those that are reserved, and the copy of the last one */
    uint8_t *stale; /* of those, behind them: whether the page holds bytes of others until it is zeroed */
    int64_t length; /* committed entries */
    int32_t num_pages, num_reserved_pages, room;
    int32_t row; /* among the residents; -1 */
    uint8_t arena;
    _Bool is_reserved, is_pinned;
    double page_seconds, since_s; /* until `since_s`, when the number of pages changed last */
    core_table *source;           /* the table that this one is a fork of: still that if its `generation` is equal */
    uint64_t source_generation, generation;
    core_table *older, *next; /* of all that there ever were, and of those that are nobody's */
    /* The reservation's. */
    int64_t start, num_entries;
    int64_t owner;       /* the account's number when it was made */
    int32_t target;      /* the copy of the last page, which takes its place; -1: the table appends in place */
    int32_t num_copied;  /* entries to be copied there */
    int32_t tail_page;   /* where entry `start` is appended in place; -1: it begins a page */
    int32_t marked_page; /* whose `num_reserved` says so; -1 */
    int32_t num_zeroed;  /* places in `slots` whose turn to be zeroed has come */
    /* The file's. */
    int64_t number; /* its inode's */
    int64_t hits;   /* opens, forks and reads */
    int64_t cuts;   /* truncations */
    double heat, used_s; /* see kvfs/heat.py */
    core_table *next_used;
    _Bool is_used; /* in the pool's list of those */
    int32_t place; /* in the scheduler's run; -1: none */
    void *stay;    /* the scheduler's, while a branch is there */
    _Bool is_odd;  /* a fork has more of it than its entries: Python makes it */
    /* A branch's: a file without a name that one handle has, and that Python has no objects of. */
    _Bool is_branch;
    uint32_t mode, uid, gid;
    int64_t forked_from, forked_length; /* the number of the file that it was forked from, and its entries then */
    int64_t fewest;                     /* entries that it ever had */
    int64_t changes;
    int64_t made_ns, changed_ns; /* CLOCK_REALTIME */
};

/* CLOCK_MONOTONIC. */
double core_now_s(void);
int64_t core_names_bytes(int64_t num_files);
/* Of each of these pages, which are of one file. */
int64_t core_page_bytes(const core_sizes *sizes, const int32_t *pages, int64_t num);

_Bool core_may_hold(const core_holdings *holdings, int32_t kind, int64_t num, int64_t num_bytes);
core_outcome core_hold(core_holdings *holdings, int32_t kind, int64_t num, int64_t num_bytes);

/* Whether the account may grow by so many other bytes: a uid has 2^56 at most, and all have 2^61, so no sum overflows. */
_Bool core_may_count(const core_account *account, int64_t other_bytes);

/* Whether there is room for so many more files, and other bytes, in all of them. */
_Bool core_has_room_for_files(const core_account *account, int64_t num, int64_t other_bytes);
core_outcome core_charge_files(core_account *account, int64_t num);
core_outcome core_charge_bytes(core_account *account, int64_t num_bytes);

/* Whether the account and its parents have room for so many pages that none of them holds, of `page_bytes` each. */
_Bool core_has_room(const core_account *account, int64_t num_pages, int64_t page_bytes);
/* The same for those of these pages that each of them does not hold, and for other bytes and names besides. */
_Bool core_has_room_for(core_account *account, const int32_t *pages, int64_t num, int64_t other_bytes,
                        int64_t num_files);

/* The end of a pool: what the core took for it. Columns, counts and lists are its maker's. */
void core_close(core_pool *pool);

/* References. `frames`: of `free_list_take`, counted as coming; NULL: the core takes them. `may_wait`: where not so many
 * are free the pages have none. `stale`: which hold bytes of others. */
core_outcome core_allocate(core_pool *pool, core_account *account, int64_t num, const int32_t *frames, _Bool may_wait,
                           int32_t *pages, uint8_t *stale);
void core_bind(core_pool *pool, int64_t owner, const int32_t *pages, int64_t num, const int32_t *frames,
               uint8_t *stale);
core_outcome core_retain(core_pool *pool, core_account *account, const int32_t *pages, int64_t num);
core_outcome core_release(core_pool *pool, core_account *account, const int32_t *pages, int64_t num);
core_outcome core_move(core_pool *pool, core_account *account, core_account *to, const int32_t *pages, int64_t num);
/* The same without a limit, and without the pool: of what was there before the daemon. */
core_outcome core_charge(core_account *account, const int32_t *pages, int64_t num);
core_outcome core_refund(core_account *account, const int32_t *pages, int64_t num);
/* Pages give their frames back; one without a frame, or one that is named twice, does no harm. */
core_outcome core_give_frames(core_pool *pool, const int32_t *pages, int64_t num);

/* Tables. NULL: there is no memory. */
core_table *core_table_new(core_pool *pool, core_account *account, uint8_t arena, int64_t length, const int32_t *pages,
                           int64_t num_pages);
/* `at`: the fork. */
core_outcome core_fork(core_table *source, core_account *account, core_table **at);
/* The table is a fork of the source, as it was once. */
void core_comes_from(core_table *table, core_table *source);
core_outcome core_change_owner(core_table *table, core_account *account);
core_outcome core_truncate(core_table *table, int64_t length);
/* The table is gone with this, and so is the pointer. */
core_outcome core_table_close(core_table *table);
/* The row of the table that this one is a fork of, while that is open. */
int32_t core_source_row(const core_table *table);
/* Pages that the table used last are its source's again, or nobody's. Whether there were any. */
_Bool core_leave(core_table *table, const int32_t *pages, int64_t num);
double core_page_seconds(const core_table *table);

/* Branches. Each of these calls is CORE_COLD where Python would do more than the core can, or refuse. */
/* The entries of the source that there are now. */
core_outcome core_branch(core_table *source, core_files *files, const core_maker *maker, uint32_t mode,
                         core_table **at);
core_outcome core_branch_truncate(core_table *branch, int64_t length);
/* The table is gone with this, and so is the pointer. */
core_outcome core_branch_close(core_table *branch, core_files *files);
/* Room for one entry and so many behind it, pinned in memory, with nobody else's bytes. */
core_outcome core_branch_reserve(core_table *branch, int32_t token, const int32_t *position, int64_t num_ahead);
/* Entries of it were committed. */
void core_branch_changed(core_table *branch);
/* Python has objects of it from now on. */
void core_branch_seen(core_table *branch, core_files *files);
/* The next branch behind that table, in an order of its own; NULL: the first one, and none. */
core_table *core_next_branch(const core_pool *pool, const core_table *table);
/* The file is used: see kvfs/heat.py. */
void core_note_use(core_table *table, double now_s);

/* Rows. The table gets one, and is used now. CORE_NO_MEMORY: all that there are are files'. */
core_outcome core_row_new(core_table *table, double now_s);
/* The file loses its last user. Pages that it used last, and the use, are its source's, or nobody's. */
void core_row_remove(core_table *table);
/* A use of the file begins: how long it was not used, 0 if that is not worth counting. */
double core_begin_use(core_pool *pool, int32_t row, double now_s);

/* The position of an entry that is there or reserved; -1 before the first. */
int32_t core_position(const core_table *table, int64_t entry);

/* The reservation, of so many entries; without positions these go on from the last entry's. Then `num_ahead` entries more,
 * whose tokens are not known yet, and whose positions go on. */
core_outcome core_reserve(core_table *table, const int32_t *tokens, const int32_t *positions, int64_t num,
                          int64_t num_ahead);
core_outcome core_extend(core_table *table, int64_t num_ahead);
core_outcome core_commit(core_table *table, const int32_t *tokens, int64_t num);
core_outcome core_abort(core_table *table);
/* How many of its pages are in memory, up to the first that is not: those of the file, and then the new ones. */
int32_t core_num_there(const core_table *table);
/* Its pages are in memory and stay there, until it is over or `core_unpin`: a use of the file. */
void core_pin(core_table *table);
core_outcome core_unpin(core_table *table);
/* Frames for its new pages that have none, as many; and back from all new ones, which hold nothing yet. */
void core_give_room(core_table *table, const int32_t *frames);
core_outcome core_forget_room(core_table *table);
/* Pages to be zeroed before its first `num` entries are computed, each told once: how many. */
int64_t core_pages_to_zero(core_table *table, int64_t num, int32_t *pages);
/* The page numbers that cover it, from the file's first entry on. */
void core_reserved_pages(const core_table *table, int32_t *pages);
/* The copy that a step makes first: from a frame, to a frame, so many entries. 0: there is none. */
_Bool core_copy(const core_table *table, int32_t copy[3]);
/* Frames of the first pages; 0: one is not in memory. */
_Bool core_frames(const core_table *table, int64_t num_pages, int32_t *frames);

#endif

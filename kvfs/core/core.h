/* cffi reads this file: declarations only.
 *
 * The core changes page tables, references on pages, and accounts, on behalf of calls. `columns.h` has the columns that
 * it reads and writes. `free_list.h` has the free page numbers and frames.
 *
 * Rules:
 *
 * - Only the trio thread calls the core, and nothing in the core waits, locks, or calls back. A call leaves tasks for
 *   Python in `core_pool.news`. Python does these tasks before anything else.
 * - A call that returns an error has changed nothing, unless the error is CORE_BROKEN.
 * - An entry below `fill` never changes while its page has more than one reference. A table appends in place if it
 *   ends exactly at the page's fill, or if it holds the only reference to the page. Every other table appends to a copy
 *   of the page.
 * - Bytes never cross owners. `bytes_in` says which account's bytes a frame holds. A page with another account's bytes
 *   is *stale*. The page is zeroed before anything is computed into it.
 * - A charge to an account is also charged to its parents: once for each distinct page.
 * - A *reservation* is room for entries behind a table's last entry. The reserved entries are invisible until
 *   `core_commit`. `core_abort` frees the room. A table has one reservation at a time.
 * - All pages of a table belong to one arena and have one size.
 *
 * The cost of a call does not depend on the size of the pool or on the number of tables. A call looks only at the pages
 * and at the table that it names.
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
    CORE_OVER_QUOTA, /* an account, or one of its parents, is at its quota */
    CORE_NO_PAGES,   /* no page numbers are free */
    CORE_NO_FRAMES,
    CORE_NO_MEMORY,
    CORE_BROKEN, /* a page number is invalid, or a reference is freed twice: a bug of the caller */
    CORE_COLD,   /* Python has to carry out the call */
} core_outcome;

/* Flags of `core_pool.news`. */
enum {
    CORE_RING = 1,    /* wake the pager: few frames are free, or pages were freed that a call may await */
    CORE_LEFT = 2,    /* `left` has pages */
    CORE_CHARGED = 4, /* `told` lists watched accounts whose charge has changed, linked by `next_told` */
    CORE_CHANGED = 8, /* files have changed, and a call waits for that */
};

/* The page size of another model. Accounts know the model's pages by consecutive numbers, from `first` to `stop` - 1. */
typedef struct {
    int64_t first, stop, page_bytes;
} core_size;

typedef struct {
    int64_t page_bytes; /* page size for all other page numbers */
    int64_t num_others;
    core_size *others;
} core_sizes;

/* Kinds of things that the daemon keeps for a user: see `holdings.py`. Files and domains outlive the user's programs.
 * So 1 / CORE_HANDLES_PART of the user's bound is reserved for all other kinds: without handles a user could not remove
 * files. */
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

/* Weight in bytes of one thing of each kind. */
extern const int64_t core_weights[13];

typedef struct {
    int64_t limit_bytes; /* below 0: no limit */
    int64_t num_bytes, num_of[13], bytes_of[13];
} core_holdings;

/* Charges of all accounts together, pages excepted. Also the account that lacked room in the last refused call. */
typedef struct {
    int64_t num_files, other_bytes;
    int64_t refused;                    /* number of the account that lacked room */
    int64_t wanted_bytes, wanted_files; /* what the refused call asked for; both 0: the user's holdings are full */
} core_total;

typedef struct core_account core_account;
struct core_account {
    int64_t number;
    core_account *parent; /* NULL for a uid's account */
    core_account *next_told;
    page_counts pages;
    const core_sizes *sizes;
    int64_t page_bytes;  /* bytes of the distinct pages that `pages` counts */
    int64_t other_bytes; /* bytes of plain files, attributes, and targets of symbolic links */
    int64_t num_files, num_tables;
    int64_t most_bytes, most_files; /* below 0: no limit */
    core_holdings *holdings;        /* only in a uid's account */
    core_total *total;
    _Bool is_ended;                      /* the domain was removed, so nothing new is charged to the account */
    _Bool is_watched, has_news, is_told; /* is_told: the account is in `core_pool.told` */
};

/* A page that lost its last reference, with the slot and the advice that the core has removed from its columns. */
typedef struct {
    int32_t page, slot; /* slot: -1 for none */
    double kept_until;
} core_left;

typedef struct core_table core_table;

enum { CORE_JOURNAL = 8192 };

/* A change: what a file is now, or was when it went. */
typedef struct {
    int64_t number; /* inode number; 0: the table is no file */
    int64_t origin; /* inode number of the file that the file was forked from; 0: none */
    int64_t length;
    int64_t shared; /* first entries that the file has had in common with its origin since the fork */
    int64_t account;
    int32_t row; /* -1: the file is gone */
    int32_t num_pages, num_in_memory;
    uint32_t uid, program;
    _Bool is_name; /* the inode lost a name or its content, and may live on: later changes say so */
} core_change;

typedef struct {
    page_columns page;
    frame_columns frame;
    row_columns row;
    int32_t num_rows, row_room; /* `num_rows` were ever used; `row_room` have memory */
    number_or_none free_row;
    page_counts references; /* with the floor 1, so `num_above` counts shared pages */
    page_counts pins;
    free_list *numbers, *frames;
    int64_t num_coming;   /* frames that are taken and do not hold a page yet */
    int64_t num_promised; /* free frames that are promised to a ticket that waits for more frames */
    int64_t low_water;    /* number of free frames below which the core sets CORE_RING */
    int64_t num_wanted;   /* pages that the last allocation asked for, whether or not it succeeded */
    int64_t page_bytes;   /* size of the pages with a frame, and of new pages */
    int64_t base;         /* accounts know page p of this pool as page `base` + p: each pool has numbers of its own */
    _Bool is_awaited;     /* a call waits for frames */
    int32_t news;
    core_account *told;
    core_left *left;
    int64_t num_left, left_room;
    int32_t *scratch;
    int64_t scratch_room;
    core_table *tables, *free_tables;
    core_table *used; /* files that were used, as a list for Python: see `tell_use` in branches.c */
    double gaps_s[CORE_GAPS];
    int32_t num_gaps; /* gaps in `gaps_s`: forks have ended them, and Python has not counted them yet */
    core_change *journal; /* the last changes; NULL: no call has asked for changes yet */
    int64_t first_change, last_change; /* numbers of the change before the journal, and of its newest change */
    int64_t read_change;               /* newest change that a call has read */
    _Bool is_watched;                  /* a call waits for a change */
} core_pool;

/* Counters of files. Python's tree has one `core_files`. */
typedef struct {
    int64_t next_number;
    int64_t num_branches;
    int64_t num_names; /* how many more files fitted on the disk when the disk was last measured */
} core_files;

/* The user that makes a branch, and the account that pays. */
typedef struct {
    core_account *account; /* pays for the branch */
    uint32_t uid, gid;
} core_maker;

/* The page table of a KV file, and the reservation behind its entries. */
struct core_table {
    core_pool *pool;
    core_account *account;
    int32_t *slots; /* page numbers: the table's pages, the reserved pages, and the copy of the last page */
    uint8_t *stale; /* for each place in `slots` that is reserved: whether the page is stale */
    int64_t length; /* committed entries */
    int32_t num_pages, num_reserved_pages, room;
    int32_t row; /* row in `row_columns`; -1: none */
    uint8_t arena;
    _Bool is_reserved, is_pinned;
    double page_seconds, since_s; /* page-seconds up to `since_s`, when the number of pages changed last */
    core_table *source;           /* source of a fork; valid while the source's `generation` is unchanged */
    uint64_t source_generation, generation;
    core_table *older, *next; /* `older` links the list of all tables, `next` links the list of unused tables */
    /* The reservation. */
    int64_t start, num_entries;
    int64_t owner;       /* number of the account when the reservation was made */
    int32_t target;      /* copy that will replace the last page; -1: the table appends in place */
    int32_t num_copied;  /* entries to copy to `target` */
    int32_t tail_page;   /* page where entry `start` is appended in place; -1: the entry begins a page */
    int32_t marked_page; /* page whose `num_reserved` this reservation has set; -1: none */
    int32_t num_zeroed;  /* places in `slots` that `core_pages_to_zero` has examined */
    /* The KV file. */
    int64_t number;      /* inode number */
    int64_t forked_from; /* inode number of the source of the fork; 0: the file is no fork */
    int64_t shared;      /* first entries that the file has had in common with its source since the fork */
    uint32_t uid;        /* owner of the file */
    uint32_t program;    /* id of the program that opened the file for writing last; 0: none */
    int64_t hits;        /* opens, forks and reads */
    int64_t cuts;        /* truncations */
    double heat, used_s; /* see kvfs/volume/heat.py */
    core_table *next_used;
    _Bool is_used; /* the table is in the pool's list of used files */
    int32_t place; /* member's index in the scheduler's run; -1: none */
    void *stay;    /* the scheduler's stay, while a branch is in the run */
    _Bool is_odd;  /* a fork has to copy more than entries, such as turns: Python makes the fork */
    /* A branch: an unnamed file that one handle has open. Python has no objects for a branch. */
    _Bool is_branch;
    uint32_t mode, gid;
    int64_t forked_length; /* length of the source at the fork */
    int64_t fewest;        /* smallest number of entries that the branch ever had */
    int64_t changes;
    int64_t made_ns, changed_ns; /* CLOCK_REALTIME */
};

/* Return the time by CLOCK_MONOTONIC. */
double core_now_s(void);
int64_t core_names_bytes(int64_t num_files);
/* Return the size in bytes of each of these pages. The pages belong to one file, so all have the same size. Here and
 * below, `base` is that of the pages' pool. */
int64_t core_page_bytes(const core_sizes *sizes, int64_t base, const int32_t *pages, int64_t num);

_Bool core_may_hold(const core_holdings *holdings, int32_t kind, int64_t num, int64_t num_bytes);
core_outcome core_hold(core_holdings *holdings, int32_t kind, int64_t num, int64_t num_bytes);

/* Return whether the account may grow by `other_bytes` without an overflow of a sum. The bound is 2^56 bytes for a uid,
 * and 2^61 bytes for all accounts together. */
_Bool core_may_count(const core_account *account, int64_t other_bytes);

/* Return whether the account itself, without its parents, has room for `num_bytes`, and for the names of `num_files`. */
_Bool core_may_have(const core_account *account, int64_t num_bytes, int64_t num_files);

/* Return whether the account and its parents have room for `num` more files and `other_bytes` more bytes. */
_Bool core_has_room_for_files(const core_account *account, int64_t num, int64_t other_bytes);
core_outcome core_charge_files(core_account *account, int64_t num);
core_outcome core_charge_bytes(core_account *account, int64_t num_bytes);

/* Return whether the account and its parents have room for `num_pages` more pages of `page_bytes` each. None of these
 * accounts holds the pages yet. */
_Bool core_has_room(const core_account *account, int64_t num_pages, int64_t page_bytes);
/* Return whether the account and each of its parents have room for `other_bytes`, for `num_files` names, and for the
 * pages. Pages that one of these accounts holds already need no room in that account. */
_Bool core_has_room_for(core_account *account, int64_t base, const int32_t *pages, int64_t num, int64_t other_bytes,
                        int64_t num_files);

/* Free the memory that the core allocated for the pool. Columns, counts and free lists belong to the pool's maker. */
void core_close(core_pool *pool);

/* References. The caller has taken `frames` with `free_list_take`, and counted them in `num_coming`. NULL: the core
 * takes frames. With `may_wait`, the pages get no frames if too few are free. `stale` tells which pages hold another
 * account's bytes. */
core_outcome core_allocate(core_pool *pool, core_account *account, int64_t num, const int32_t *frames, _Bool may_wait,
                           int32_t *pages, uint8_t *stale);
void core_bind(core_pool *pool, int64_t owner, const int32_t *pages, int64_t num, const int32_t *frames,
               uint8_t *stale);
core_outcome core_retain(core_pool *pool, core_account *account, const int32_t *pages, int64_t num);
core_outcome core_release(core_pool *pool, core_account *account, const int32_t *pages, int64_t num);
core_outcome core_move(core_pool *pool, core_account *account, core_account *to, const int32_t *pages, int64_t num);
/* Charge pages to an account, or refund them. No limit applies, and the pool does not change. The pages belong to files
 * that an earlier daemon kept. */
core_outcome core_charge(core_account *account, int64_t base, const int32_t *pages, int64_t num);
core_outcome core_refund(core_account *account, int64_t base, const int32_t *pages, int64_t num);
/* Free the frames of pages. Pages without a frame, and pages that are named twice, are allowed. */
core_outcome core_give_frames(core_pool *pool, const int32_t *pages, int64_t num);

/* Tables. `core_table_new` returns NULL if there is no memory. */
core_table *core_table_new(core_pool *pool, core_account *account, uint8_t arena, int64_t length, const int32_t *pages,
                           int64_t num_pages);
/* Make a fork of the source. `at` receives the fork. */
core_outcome core_fork(core_table *source, core_account *account, core_table **at);
/* Note that the table is a fork of the present version of the source. */
void core_comes_from(core_table *table, core_table *source);
core_outcome core_change_owner(core_table *table, core_account *account);
core_outcome core_truncate(core_table *table, int64_t length);
/* Close the table. The pointer is invalid from then on. */
core_outcome core_table_close(core_table *table);
/* Return the row of the table's source, if the source is still open. */
int32_t core_source_row(const core_table *table);
/* For those of `pages` that the table used last, record the table's source as the last user. If the source is gone,
 * record no user. Return whether the table used any of `pages` last. */
_Bool core_leave(core_table *table, const int32_t *pages, int64_t num);
double core_page_seconds(const core_table *table);

/* Branches. Each of these functions returns CORE_COLD if only Python can carry out, or refuse, the call. */
/* Fork the entries that the source has now. */
core_outcome core_branch(core_table *source, core_files *files, const core_maker *maker, uint32_t mode,
                         core_table **at);
core_outcome core_branch_truncate(core_table *branch, int64_t length);
/* Close the branch. The pointer is invalid from then on. */
core_outcome core_branch_close(core_table *branch, core_files *files);
/* Reserve at most one page of entries, and `num_ahead` entries behind them, as `core_reserve` does. The pages are
 * pinned in memory, and hold no other account's bytes. */
core_outcome core_branch_reserve(core_table *branch, const int32_t *tokens, const int32_t *positions, int64_t num,
                                 int64_t num_ahead);
/* Note that entries of the branch were committed. */
void core_branch_changed(core_table *branch);
/* Note that Python has objects of the branch from now on. */
void core_branch_seen(core_table *branch, core_files *files);
/* Return the branch after `table` in the pool's list, or the first branch if `table` is NULL. NULL: no branch
 * follows. */
core_table *core_next_branch(const core_pool *pool, const core_table *table);
/* Note a use of the file: see kvfs/volume/heat.py. */
void core_note_use(core_table *table, double now_s);

/* Rows. `core_row_new` gives the table a row, and notes a use now. CORE_NO_MEMORY: all rows are taken. */
core_outcome core_row_new(core_table *table, double now_s);
/* Free the row of a file that loses its last user. The table's source inherits the time of the last use, and the pages
 * that the table used last. */
void core_row_remove(core_table *table);
/* Begin a use of the file. Return the gap before it; 0: the gap is too short to count. */
double core_begin_use(core_pool *pool, int32_t row, double now_s);
/* Count one more use of the file, after a gap of `gap_s` seconds. A replay of a trace counts the same way. */
void core_note_gap(row_columns *of, int32_t row, double gap_s);

/* Changes. Note a change of the file, if a call may not know of it yet. */
void core_changed(const core_table *table);
void core_row_changed(core_pool *pool, int32_t row);
/* Note which inode a table is the content of. */
void core_is_file(core_table *table, int64_t number, uint32_t uid);
/* Note that a file is about to lose its row. */
void core_gone(core_table *table);
/* Note that the inode lost a name, or this content. */
void core_name_gone(core_table *table);
/* Begin to read all files, and then what has changed. Return the number of the last change. -1: there is no memory. */
int64_t core_begin_changes(core_pool *pool);
/* Count a change of no file, and return its number. */
int64_t core_change_of_none(core_pool *pool);
/* Describe files, from row `*row` on: look at most at `max` rows. Move `*row`, and return the number of files. */
int64_t core_all_files(const core_pool *pool, int32_t *row, core_change *found, int64_t max);
/* Write at most `max` changes after change `*since`. Move `*since`, and return the number of changes. -1: the journal
 * does not have change `*since` any more, or never had it. */
int64_t core_changes(core_pool *pool, int64_t *since, core_change *found, int64_t max);

/* Return the position of a committed or reserved entry; -1 for the entry before the first entry. */
int32_t core_position(const core_table *table, int64_t entry);

/* Reserve `num` entries; default positions continue from the last entry. Then reserve `num_ahead` more entries, with
 * unknown tokens and consecutive positions. */
core_outcome core_reserve(core_table *table, const int32_t *tokens, const int32_t *positions, int64_t num,
                          int64_t num_ahead);
core_outcome core_extend(core_table *table, int64_t num_ahead);
core_outcome core_commit(core_table *table, const int32_t *tokens, int64_t num);
core_outcome core_abort(core_table *table);
/* Return how many pages are in memory before the first page that is not. Pages of the file come first, then pages of
 * its reservation. */
int32_t core_num_there(const core_table *table);
/* Pin the pages, which are all in memory, until the reservation ends or `core_unpin` is called. A pinned reservation is
 * a use of the file. */
void core_pin(core_table *table);
core_outcome core_unpin(core_table *table);
/* Give each new page that lacks a frame one of `frames`. `core_forget_room` takes the frames of all new pages away. */
void core_give_room(core_table *table, const int32_t *frames);
core_outcome core_forget_room(core_table *table);
/* Write to `pages` the pages that must be zeroed before the first `num` entries are computed. Each page is reported
 * once. Return their number. */
int64_t core_pages_to_zero(core_table *table, int64_t num, int32_t *pages);
/* Write the numbers of all pages of the file and its reservation to `pages`. */
void core_reserved_pages(const core_table *table, int32_t *pages);
/* Describe in `copy` the copy that a step makes first: source frame, target frame, number of entries. Return 0 if there
 * is no copy. */
_Bool core_copy(const core_table *table, int32_t copy[3]);
/* Write the frames of the first `num_pages` pages. Return 0 if one of these pages is not in memory. */
_Bool core_frames(const core_table *table, int64_t num_pages, int32_t *frames);

#endif

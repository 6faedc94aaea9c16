#include "kept_names.h"
#include "shim.h"

#include <stdlib.h>
#include <string.h>

#define BUCKETS 65536
#define MOST_IN_LIST 8 /* names of one hash: users can find names that collide */

typedef struct kept {
    struct kept *next;
    uint64_t parent;
    uint64_t num_lookups; /* lookups that Python has not counted yet */
    size_t length;
    struct fuse_entry_out answer;
    char name[];
} kept;

static kept *by_name[BUCKETS];  /* lists, the newest name first */
static kept *by_inode[BUCKETS]; /* one name each: 13 MB of short names in all, 29 MB of the longest */

static kept **list_of(uint64_t parent, const char *name, size_t length) {
    uint64_t hash = 14695981039346656037u ^ parent; /* FNV-1a */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)name[i]) * 1099511628211u;
    return &by_name[(hash ^ hash >> 32) % BUCKETS];
}

static kept **place_of(uint64_t inode) { return &by_inode[inode % BUCKETS]; }

static kept *found(uint64_t parent, const char *name, size_t length) {
    kept *each = *list_of(parent, name, length);
    while (each && (each->parent != parent || each->length != length || memcmp(each->name, name, length) != 0))
        each = each->next;
    return each;
}

static void drop(kept *gone) {
    kept **place = list_of(gone->parent, gone->name, gone->length);
    while (*place != gone)
        place = &(*place)->next;
    *place = gone->next;
    *place_of(gone->answer.nodeid) = NULL;
    if (gone->num_lookups)
        kvfs_looked_up(gone->answer.nodeid, gone->num_lookups);
    free(gone);
}

void kvfs_drop_name(uint64_t inode) {
    kept *one = *place_of(inode);
    if (one && one->answer.nodeid == inode)
        drop(one);
}

void kvfs_keep_name(uint64_t parent, const char *name, size_t length, const struct fuse_entry_out *answer) {
    if (!answer->nodeid || !answer->attr_valid)
        return;
    kept **list = list_of(parent, name, length), **place = place_of(answer->nodeid);
    if (*place) /* another hard link, or another inode */
        drop(*place);
    kept *oldest = *list;
    for (int i = 1; oldest && i < MOST_IN_LIST; i++)
        oldest = oldest->next;
    if (oldest)
        drop(oldest);
    kept *new = malloc(sizeof *new + length);
    if (!new)
        return;
    *new = (kept){*list, parent, 0, length, *answer};
    memcpy(new->name, name, length);
    *list = *place = new;
}

void kvfs_keep_listing(uint64_t parent, const char *listing, size_t bytes) {
    const char *end = listing + bytes;
    while (listing < end) {
        struct fuse_direntplus entry; /* copied, because the listing may lie at any address */
        memcpy(&entry, listing, sizeof entry);
        kvfs_keep_name(parent, listing + FUSE_NAME_OFFSET_DIRENTPLUS, entry.dirent.namelen, &entry.entry_out);
        listing += FUSE_DIRENTPLUS_SIZE(&entry);
    }
}

const struct fuse_entry_out *kvfs_kept_name(uint64_t parent, const char *name) {
    kept *one = found(parent, name, strlen(name));
    if (!one)
        return NULL;
    one->num_lookups++;
    return &one->answer;
}

void kvfs_drop_names(void) {
    for (size_t i = 0; i < BUCKETS; i++) {
        free(by_inode[i]);
        by_name[i] = by_inode[i] = NULL;
    }
}

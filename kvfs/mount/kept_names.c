#include "kept_names.h"
#include "shim.h"

#include <stdlib.h>
#include <string.h>

#define BUCKETS 65536
#define MAX_NAMES BUCKETS /* some 14 MB */

typedef struct kept {
    struct kept *next_by_name, *next_by_inode;
    uint64_t parent;
    uint64_t num_lookups; /* lookups that Python has not counted yet */
    size_t length;
    struct fuse_entry_out answer;
    char name[];
} kept;

static kept *by_name[BUCKETS], *by_inode[BUCKETS];
static size_t num_names;

static kept **bucket_of_name(uint64_t parent, const char *name, size_t length) {
    uint64_t hash = 14695981039346656037u ^ parent; /* FNV-1a */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)name[i]) * 1099511628211u;
    return &by_name[(hash ^ hash >> 32) % BUCKETS];
}

static kept **bucket_of_inode(uint64_t inode) { return &by_inode[inode % BUCKETS]; }

static kept *found(uint64_t parent, const char *name, size_t length) {
    kept *each = *bucket_of_name(parent, name, length);
    while (each && (each->parent != parent || each->length != length || memcmp(each->name, name, length) != 0))
        each = each->next_by_name;
    return each;
}

static void drop(kept *gone) {
    kept **place = bucket_of_name(gone->parent, gone->name, gone->length);
    while (*place != gone)
        place = &(*place)->next_by_name;
    *place = gone->next_by_name;
    place = bucket_of_inode(gone->answer.nodeid);
    while (*place != gone)
        place = &(*place)->next_by_inode;
    *place = gone->next_by_inode;
    num_names--;
    if (gone->num_lookups)
        kvfs_looked_up(gone->answer.nodeid, gone->num_lookups);
    free(gone);
}

void kvfs_drop_name(uint64_t inode) {
    kept *each = *bucket_of_inode(inode);
    while (each && each->answer.nodeid != inode)
        each = each->next_by_inode;
    if (each)
        drop(each);
}

void kvfs_keep_name(uint64_t parent, const char *name, size_t length, const struct fuse_entry_out *answer) {
    if (!answer->nodeid || !answer->attr_valid)
        return;
    kvfs_drop_name(answer->nodeid); /* perhaps another hard link */
    kept **of_name = bucket_of_name(parent, name, length), **of_inode = bucket_of_inode(answer->nodeid);
    if (num_names == MAX_NAMES) {
        if (!*of_name)
            return;
        drop(*of_name);
    }
    kept *new = malloc(sizeof *new + length);
    if (!new)
        return;
    *new = (kept){*of_name, *of_inode, parent, 0, length, *answer};
    memcpy(new->name, name, length);
    *of_name = *of_inode = new;
    num_names++;
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
        for (kept *each = by_name[i], *next; each; each = next) {
            next = each->next_by_name;
            free(each);
        }
        by_name[i] = by_inode[i] = NULL;
    }
    num_names = 0;
}

/* Names whose next lookups C answers, with the answers. */
#ifndef KVFS_KEPT_NAMES_H
#define KVFS_KEPT_NAMES_H

#include <linux/fuse.h>
#include <stddef.h>
#include <stdint.h>

/* Keep a name's answer if it grants the attributes: until the inode's attributes change, it is the right one. */
void kvfs_keep_name(uint64_t parent, const char *name, size_t length, const struct fuse_entry_out *answer);

/* Keep the names of an answer to READDIRPLUS. */
void kvfs_keep_listing(uint64_t parent, const char *listing, size_t bytes);

/* Return the kept answer for one more lookup, or NULL. */
const struct fuse_entry_out *kvfs_kept_name(uint64_t parent, const char *name);

/* Drop the name of an inode, and have Python count its lookups (`kvfs_looked_up`). */
void kvfs_drop_name(uint64_t inode);

/* Drop all names. The kernel has none of their inodes any more. */
void kvfs_drop_names(void);

#endif

/* Functions by which shim.c and Python call each other. cffi reads this file, so it has declarations only. */
#ifndef KVFS_SHIM_H
#define KVFS_SHIM_H

#define FUSE_USE_VERSION 35
#include <fuse_lowlevel.h>
#include <stdint.h>

enum {
    ANSWER_LATER = -10001, /* Python will call kvfs_answer */
    ANSWER_DATA = -10002,  /* the answer is at kvfs_data */
    OUT_BYTES = 4096,
};

extern char kvfs_out[OUT_BYTES];
extern const void *kvfs_data;
extern size_t kvfs_data_bytes;
extern long kvfs_linger_ns;

void kvfs_answer(fuse_req_t req, int status);
void kvfs_watch(fuse_req_t req);
uint32_t kvfs_uid(fuse_req_t req);
int kvfs_withdraw(uint64_t inode);
const char *kvfs_find_libfuse(const char *pyfuse3);
int kvfs_session_captured(void);
void kvfs_forget_session(void);

/* In Python */
int kvfs_lookup(fuse_req_t req, uint64_t parent, const char *name);
void kvfs_looked_up(uint64_t inode, uint64_t num_lookups);
void kvfs_forget(uint64_t inode, uint64_t num_lookups);
int kvfs_getattr(fuse_req_t req, uint64_t inode, int has_file);
int kvfs_setattr(fuse_req_t req, uint64_t inode, int fields, int has_file, uint64_t file, uint32_t mode, uint32_t uid,
                 uint32_t gid, int64_t size, int64_t atime_s, int64_t atime_ns, int64_t mtime_s, int64_t mtime_ns);
int kvfs_readlink(fuse_req_t req, uint64_t inode);
int kvfs_mknod(fuse_req_t req, uint64_t parent, const char *name, uint32_t mode, uint32_t device, uint32_t uid,
               uint32_t gid);
int kvfs_symlink(fuse_req_t req, const char *target, uint64_t parent, const char *name, uint32_t uid, uint32_t gid);
int kvfs_link(fuse_req_t req, uint64_t inode, uint64_t parent, const char *name, uint32_t uid);
int kvfs_unlink(fuse_req_t req, uint64_t parent, const char *name);
int kvfs_rmdir(fuse_req_t req, uint64_t parent, const char *name);
int kvfs_rename(fuse_req_t req, uint64_t parent, const char *name, uint64_t new_parent, const char *new_name,
                unsigned flags);
int kvfs_create(fuse_req_t req, uint64_t parent, const char *name, uint32_t mode, int flags, uint32_t uid, uint32_t gid,
                int32_t pid);
int kvfs_open(fuse_req_t req, uint64_t inode, int flags, uint32_t uid, int32_t pid);
int kvfs_read(fuse_req_t req, uint64_t file, int64_t offset, size_t size);
int kvfs_write(fuse_req_t req, uint64_t file, int64_t offset, const char *bytes, size_t size);
int kvfs_flush(fuse_req_t req, uint64_t file, int pid);
int kvfs_fsync(fuse_req_t req, uint64_t file);
int kvfs_release(fuse_req_t req, uint64_t file);
int kvfs_flock(fuse_req_t req, uint64_t file, int operation);
int kvfs_copy_file_range(fuse_req_t req, uint64_t source, int64_t source_offset, uint64_t target, int64_t target_offset,
                         uint64_t size);
int kvfs_fallocate(fuse_req_t req, uint64_t file, int mode, int64_t offset, int64_t size);
int kvfs_opendir(fuse_req_t req, uint64_t inode);
int kvfs_readdir(fuse_req_t req, uint64_t listing, int64_t offset, size_t size);
int kvfs_releasedir(fuse_req_t req, uint64_t listing);
int kvfs_fsyncdir(fuse_req_t req, uint64_t listing);
int kvfs_statfs(fuse_req_t req, uint64_t inode);
int kvfs_getxattr(fuse_req_t req, uint64_t inode, const char *name, size_t size);
int kvfs_listxattr(fuse_req_t req, uint64_t inode, size_t size);
int kvfs_setxattr(fuse_req_t req, uint64_t inode, const char *name, const char *value, size_t size, int flags,
                  uint32_t uid);
int kvfs_removexattr(fuse_req_t req, uint64_t inode, const char *name, uint32_t uid);
void kvfs_interrupted(fuse_req_t req);

#endif

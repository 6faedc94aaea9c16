/* A minimal FUSE file system: it passes the requests of one thread to a directory, and lets the kernel keep nothing.
 * shell.py compares the mount with it.
 *
 *     passthrough DIRECTORY MOUNT
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define FUSE_USE_VERSION 35
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

#define BUCKETS (1 << 16)

typedef struct node {
    int file; /* O_PATH */
    ino_t number;
    uint64_t lookups;
    struct node *next;
} node;

static node root = {.lookups = 1}, *nodes[BUCKETS];

static node *node_of(fuse_ino_t inode) { return inode == FUSE_ROOT_ID ? &root : (node *)inode; }
static int file_of(fuse_ino_t inode) { return node_of(inode)->file; }
static const char *path_of(fuse_ino_t inode) {
    static char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file_of(inode));
    return path;
}
static void done(fuse_req_t req, int result) { fuse_reply_err(req, result < 0 ? errno : 0); }

static int find(fuse_ino_t parent, const char *name, struct fuse_entry_param *entry) {
    memset(entry, 0, sizeof *entry);
    int file = openat(file_of(parent), name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0 || fstatat(file, "", &entry->attr, AT_EMPTY_PATH) < 0)
        return -1;
    node **bucket = &nodes[entry->attr.st_ino % BUCKETS], *found = *bucket;
    while (found && found->number != entry->attr.st_ino)
        found = found->next;
    if (found) {
        close(file);
    } else {
        if (!(found = malloc(sizeof *found)))
            err(1, "malloc");
        *found = (node){.file = file, .number = entry->attr.st_ino, .next = *bucket};
        *bucket = found;
    }
    found->lookups++;
    entry->ino = (fuse_ino_t)found;
    return 0;
}

static void reply_entry(fuse_req_t req, int result, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param entry;
    if (result < 0 || find(parent, name, &entry) < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_entry(req, &entry);
}

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name) { reply_entry(req, 0, parent, name); }

static void forget(fuse_ino_t inode, uint64_t num_lookups) {
    node *gone = node_of(inode), **place = &nodes[gone->number % BUCKETS];
    if (gone == &root || (gone->lookups -= num_lookups))
        return;
    while (*place != gone)
        place = &(*place)->next;
    *place = gone->next;
    close(gone->file);
    free(gone);
}

static void on_forget(fuse_req_t req, fuse_ino_t inode, uint64_t num_lookups) {
    forget(inode, num_lookups);
    fuse_reply_none(req);
}

static void on_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *each) {
    for (size_t i = 0; i < count; i++)
        forget(each[i].ino, each[i].nlookup);
    fuse_reply_none(req);
}

static void on_getattr(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    (void)file;
    struct stat attr;
    if (fstatat(file_of(inode), "", &attr, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_attr(req, &attr, 0);
}

static struct timespec time_of(int fields, int set, int set_now, struct timespec given) {
    return fields & set_now ? (struct timespec){0, UTIME_NOW} : fields & set ? given : (struct timespec){0, UTIME_OMIT};
}

static void on_setattr(fuse_req_t req, fuse_ino_t inode, struct stat *attr, int fields, struct fuse_file_info *file) {
    const char *path = path_of(inode);
    const uid_t uid = fields & FUSE_SET_ATTR_UID ? attr->st_uid : (uid_t)-1;
    const gid_t gid = fields & FUSE_SET_ATTR_GID ? attr->st_gid : (gid_t)-1;
    const struct timespec times[] = {
        time_of(fields, FUSE_SET_ATTR_ATIME, FUSE_SET_ATTR_ATIME_NOW, attr->st_atim),
        time_of(fields, FUSE_SET_ATTR_MTIME, FUSE_SET_ATTR_MTIME_NOW, attr->st_mtim),
    };
    if ((fields & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID) &&
         fchownat(file_of(inode), "", uid, gid, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) < 0) ||
        (fields & FUSE_SET_ATTR_MODE && chmod(path, attr->st_mode) < 0) ||
        (fields & FUSE_SET_ATTR_SIZE && truncate(path, attr->st_size) < 0) ||
        (fields & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME) && utimensat(AT_FDCWD, path, times, 0) < 0))
        fuse_reply_err(req, errno);
    else
        on_getattr(req, inode, file);
}

static void on_readlink(fuse_req_t req, fuse_ino_t inode) {
    char target[4097];
    ssize_t size = readlinkat(file_of(inode), "", target, sizeof target - 1);
    target[size < 0 ? 0 : size] = 0;
    if (size < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_readlink(req, target);
}

static void on_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode) {
    reply_entry(req, mkdirat(file_of(parent), name, mode), parent, name);
}

static void on_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name) {
    reply_entry(req, symlinkat(target, file_of(parent), name), parent, name);
}

static void on_link(fuse_req_t req, fuse_ino_t inode, fuse_ino_t parent, const char *name) {
    reply_entry(req, linkat(AT_FDCWD, path_of(inode), file_of(parent), name, AT_SYMLINK_FOLLOW), parent, name);
}

static void on_unlink(fuse_req_t req, fuse_ino_t parent, const char *name) {
    done(req, unlinkat(file_of(parent), name, 0));
}

static void on_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name) {
    done(req, unlinkat(file_of(parent), name, AT_REMOVEDIR));
}

static void on_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name,
                      unsigned flags) {
    done(req, renameat2(file_of(parent), name, file_of(new_parent), new_name, flags));
}

static void on_open(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    int opened = open(path_of(inode), (file->flags & ~O_NOFOLLOW) | O_CLOEXEC);
    file->fh = (uint64_t)opened;
    if (opened < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_open(req, file);
}

static void on_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *file) {
    struct fuse_entry_param entry;
    int opened = openat(file_of(parent), name, file->flags | O_CREAT | O_CLOEXEC, mode);
    file->fh = (uint64_t)opened;
    if (opened < 0 || find(parent, name, &entry) < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_create(req, &entry, file);
}

static void on_read(fuse_req_t req, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file) {
    (void)inode;
    struct fuse_bufvec source = FUSE_BUFVEC_INIT(size);
    source.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
    source.buf[0].fd = (int)file->fh;
    source.buf[0].pos = offset;
    fuse_reply_data(req, &source, FUSE_BUF_SPLICE_MOVE);
}

static void on_write(fuse_req_t req, fuse_ino_t inode, const char *bytes, size_t size, off_t offset,
                     struct fuse_file_info *file) {
    (void)inode;
    ssize_t written = pwrite((int)file->fh, bytes, size, offset);
    if (written < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_write(req, (size_t)written);
}

static void on_release(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    (void)inode;
    done(req, close((int)file->fh));
}

static void on_fsync(fuse_req_t req, fuse_ino_t inode, int datasync, struct fuse_file_info *file) {
    (void)inode, (void)datasync;
    done(req, fsync((int)file->fh));
}

static void on_opendir(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    int opened = openat(file_of(inode), ".", O_RDONLY | O_CLOEXEC);
    DIR *listing = opened < 0 ? NULL : fdopendir(opened);
    file->fh = (uint64_t)listing;
    if (!listing)
        fuse_reply_err(req, errno);
    else
        fuse_reply_open(req, file);
}

static void on_readdirplus(fuse_req_t req, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file) {
    DIR *listing = (DIR *)file->fh;
    char out[size];
    size_t used = 0;
    if (offset != telldir(listing))
        seekdir(listing, offset);
    for (struct dirent *each; (each = readdir(listing));) {
        struct fuse_entry_param entry = {.attr = {.st_ino = each->d_ino, .st_mode = (mode_t)each->d_type << 12}};
        const int is_dots = strcmp(each->d_name, ".") == 0 || strcmp(each->d_name, "..") == 0;
        if (fuse_add_direntry_plus(req, NULL, 0, each->d_name, NULL, 0) > size - used)
            break;
        if (!is_dots && find(inode, each->d_name, &entry) < 0)
            continue;
        used += fuse_add_direntry_plus(req, out + used, size - used, each->d_name, &entry, each->d_off);
    }
    fuse_reply_buf(req, out, used);
}

static void on_releasedir(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    (void)inode;
    done(req, closedir((DIR *)file->fh));
}

static void on_statfs(fuse_req_t req, fuse_ino_t inode) {
    struct statvfs space;
    if (fstatvfs(file_of(inode), &space) < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_statfs(req, &space);
}

static const struct fuse_lowlevel_ops operations = {
    .lookup = on_lookup,
    .forget = on_forget,
    .forget_multi = on_forget_multi,
    .getattr = on_getattr,
    .setattr = on_setattr,
    .readlink = on_readlink,
    .mkdir = on_mkdir,
    .symlink = on_symlink,
    .link = on_link,
    .unlink = on_unlink,
    .rmdir = on_rmdir,
    .rename = on_rename,
    .create = on_create,
    .open = on_open,
    .read = on_read,
    .write = on_write,
    .release = on_release,
    .fsync = on_fsync,
    .opendir = on_opendir,
    .readdirplus = on_readdirplus,
    .releasedir = on_releasedir,
    .statfs = on_statfs,
};

int main(int count, char **words) {
    if (count != 3)
        errx(2, "usage: passthrough DIRECTORY MOUNT");
    if ((root.file = open(words[1], O_PATH | O_DIRECTORY)) < 0)
        err(1, "%s", words[1]);
    umask(0);
    char *options[] = {words[0], "-odefault_permissions", NULL};
    struct fuse_args arguments = FUSE_ARGS_INIT(2, options);
    struct fuse_session *session = fuse_session_new(&arguments, &operations, sizeof operations, NULL);
    if (!session || fuse_set_signal_handlers(session) || fuse_session_mount(session, words[2]))
        return 1;
    int status = fuse_session_loop(session);
    fuse_session_unmount(session);
    fuse_session_destroy(session);
    return status < 0;
}

/* The least that a FUSE file system in C can be, to compare with: libfuse's low-level interface, one thread, files in
 * memory, one directory. Nothing is cached in the kernel but file contents: entries and attributes are valid for no
 * time at all, as on the mount that it is compared with.
 *
 *     gcc -O2 minimal_fuse.c -o minimal_fuse $(pkg-config --cflags --libs fuse3) && ./minimal_fuse -f DIR
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define FUSE_USE_VERSION 35
#include <fuse_lowlevel.h>

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_FILES (1 << 20)
#define NUM_BUCKETS (1 << 16)

struct file {
    char *name; /* NULL: removed */
    struct stat attr;
    char *bytes;
    size_t capacity;
    struct file *next;
};

static struct file *files[MAX_FILES];
static size_t num_files = 2; /* numbers 0 and 1 (the root) are no files */
static struct file *buckets[NUM_BUCKETS];
static struct stat root;

static struct file **find(const char *name) {
    unsigned hash = 5381;
    for (const char *at = name; *at; at++)
        hash = hash * 33 ^ (unsigned char)*at;
    struct file **link = &buckets[hash % NUM_BUCKETS];
    while (*link && strcmp((*link)->name, name))
        link = &(*link)->next;
    return link;
}

static struct fuse_entry_param entry_of(const struct stat *attr) {
    struct fuse_entry_param entry;
    memset(&entry, 0, sizeof entry);
    entry.ino = attr->st_ino;
    entry.attr = *attr;
    return entry;
}

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name) {
    (void)parent;
    struct file *file = *find(name);
    if (!file) {
        fuse_reply_err(req, ENOENT);
        return;
    }
    struct fuse_entry_param entry = entry_of(&file->attr);
    fuse_reply_entry(req, &entry);
}

static void on_getattr(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info) {
    (void)info;
    fuse_reply_attr(req, number == FUSE_ROOT_ID ? &root : &files[number]->attr, 0);
}

static int resize(struct file *file, size_t size) {
    if (size > file->capacity) {
        size_t capacity = file->capacity ? file->capacity : 4096;
        while (capacity < size)
            capacity *= 2;
        char *bytes = file->bytes ? mremap(file->bytes, file->capacity, capacity, MREMAP_MAYMOVE)
                                  : mmap(NULL, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (bytes == MAP_FAILED)
            return ENOSPC;
        file->bytes = bytes;
        file->capacity = capacity;
    }
    file->attr.st_size = (off_t)size;
    file->attr.st_blocks = (blkcnt_t)((size + 511) / 512);
    return 0;
}

static void on_setattr(fuse_req_t req, fuse_ino_t number, struct stat *attr, int to_set, struct fuse_file_info *info) {
    (void)info;
    struct file *file = number == FUSE_ROOT_ID ? NULL : files[number];
    if (file && to_set & FUSE_SET_ATTR_SIZE && resize(file, (size_t)attr->st_size)) {
        fuse_reply_err(req, ENOSPC);
        return;
    }
    fuse_reply_attr(req, file ? &file->attr : &root, 0);
}

static struct file *make(const char *name, mode_t mode) {
    struct file *file = calloc(1, sizeof *file);
    if (!file)
        abort();
    file->name = strdup(name);
    file->attr.st_ino = num_files;
    file->attr.st_mode = mode;
    file->attr.st_nlink = 1;
    file->attr.st_uid = getuid();
    clock_gettime(CLOCK_REALTIME, &file->attr.st_mtim);
    file->attr.st_atim = file->attr.st_ctim = file->attr.st_mtim;
    files[num_files++] = *find(name) = file;
    return file;
}

static void on_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *info) {
    (void)parent;
    struct fuse_entry_param entry = entry_of(&make(name, mode)->attr);
    fuse_reply_create(req, &entry, info);
}

static void on_unlink(fuse_req_t req, fuse_ino_t parent, const char *name) {
    (void)parent;
    struct file **link = find(name), *file = *link;
    if (!file) {
        fuse_reply_err(req, ENOENT);
        return;
    }
    *link = file->next;
    if (file->bytes)
        munmap(file->bytes, file->capacity);
    free(file->name);
    memset(file, 0, offsetof(struct file, next));
    fuse_reply_err(req, 0);
}

static void on_open(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info) {
    if (info->flags & O_TRUNC)
        resize(files[number], 0);
    fuse_reply_open(req, info);
}

static void on_read(fuse_req_t req, fuse_ino_t number, size_t size, off_t offset, struct fuse_file_info *info) {
    (void)info;
    const struct file *file = files[number];
    size_t end = (size_t)file->attr.st_size, from = (size_t)offset;
    if (from >= end)
        fuse_reply_buf(req, NULL, 0);
    else
        fuse_reply_buf(req, file->bytes + from, size < end - from ? size : end - from);
}

static void on_write(fuse_req_t req, fuse_ino_t number, const char *bytes, size_t size, off_t offset,
                     struct fuse_file_info *info) {
    (void)info;
    struct file *file = files[number];
    size_t end = (size_t)offset + size;
    if (end > (size_t)file->attr.st_size && resize(file, end)) {
        fuse_reply_err(req, ENOSPC);
        return;
    }
    memcpy(file->bytes + offset, bytes, size);
    fuse_reply_write(req, size);
}

static void on_readdirplus(fuse_req_t req, fuse_ino_t number, size_t size, off_t offset, struct fuse_file_info *info) {
    (void)number, (void)info;
    char *buffer = malloc(size);
    size_t used = 0;
    for (size_t at = offset ? (size_t)offset : 2; at < num_files; at++) {
        if (!files[at]->name)
            continue;
        struct fuse_entry_param entry = entry_of(&files[at]->attr);
        size_t needed = fuse_add_direntry_plus(req, buffer + used, size - used, files[at]->name, &entry, (off_t)at + 1);
        if (needed > size - used)
            break;
        used += needed;
    }
    fuse_reply_buf(req, buffer, used);
    free(buffer);
}

static void on_init(void *userdata, struct fuse_conn_info *connection) {
    (void)userdata;
    connection->want &= ~(unsigned)(FUSE_CAP_READDIRPLUS_AUTO | FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE);
}

static const struct fuse_lowlevel_ops operations = {
    .init = on_init,
    .lookup = on_lookup,
    .getattr = on_getattr,
    .setattr = on_setattr,
    .create = on_create,
    .unlink = on_unlink,
    .open = on_open,
    .read = on_read,
    .write = on_write,
    .readdirplus = on_readdirplus,
};

int main(int argc, char **argv) {
    struct fuse_args arguments = FUSE_ARGS_INIT(argc, argv);
    struct fuse_cmdline_opts options;
    if (fuse_parse_cmdline(&arguments, &options) || !options.mountpoint) {
        fprintf(stderr, "usage: minimal_fuse DIR\n");
        return 2;
    }
    root.st_ino = FUSE_ROOT_ID;
    root.st_mode = S_IFDIR | 0755;
    root.st_nlink = 2;
    root.st_uid = getuid();
    struct fuse_session *session = fuse_session_new(&arguments, &operations, sizeof operations, NULL);
    if (!session || fuse_set_signal_handlers(session) || fuse_session_mount(session, options.mountpoint))
        return 1;
    int result = fuse_session_loop(session);
    fuse_session_unmount(session);
    fuse_session_destroy(session);
    return result != 0;
}

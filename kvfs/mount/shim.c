/* The layer between libfuse and the mount's handlers. It adds operations that pyfuse3 lacks, and makes all operations
 * cheaper.
 *
 * pyfuse3 makes the session, mounts it, waits for it under trio and receives from it. But it has no handlers for
 * copy_file_range (by which `cp` becomes a fork), flock and interrupts. It needs a coroutine for every answer, and a
 * pass through trio's epoll for every request. It refills its own table of operations at each init, so patching the
 * table does not help. Instead this object is loaded with RTLD_GLOBAL before pyfuse3, and exports functions that the
 * dynamic linker finds before libfuse's:
 *
 *   fuse_session_new           installs our operations instead of pyfuse3's
 *   fuse_session_process_buf   also answers further requests that arrive within a moment, before it returns
 *   fuse_session_receive_buf   never blocks: a request may vanish between epoll and read if its process is killed
 *
 * Each operation calls one Python function. The function packs the answer into `kvfs_out` in the kernel's format
 * (linux/fuse.h, see wire.py), and returns its length, or -errno, or a value of the `enum` in shim.h. All code here
 * runs in the thread of pyfuse3's loop, with the GIL held unless a comment says otherwise.
 */

#define Py_LIMITED_API 0x03020000 /* the value that cffi uses, so that one build serves every Python */
#include <Python.h>

#include "shim.h"

#include "kept_names.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define UNLOCKED_BYTES 32768 /* shorter answers are sent with the GIL held: its release may cost 0.1 ms */

/* Functions of libfuse. This object is not linked with libfuse: pyfuse3 may use the distribution's library, or a
 * library of another name in its wheel, and a process must not load libfuse twice. */
#define LIBFUSE(function)                                                                                              \
    function(lowlevel_notify_inval_inode) function(reply_buf) function(reply_err) function(reply_none)                 \
        function(req_ctx) function(req_interrupt_func) function(session_exited) function(session_fd)                   \
            function(session_new) function(session_process_buf) function(session_receive_buf)
#define DECLARED(name) __typeof__(fuse_##name) *name;
static struct {
    LIBFUSE(DECLARED)
} libfuse;

/* Time for which the loop answers requests before other tasks of the daemon run. */
static const long budget_ns = 400 * 1000;

/* How long the loop polls for the next request. A client on the same CPU runs as soon as we yield, and is back in
 * 10 us; a client on another CPU is woken up in 20 to 50 us. If we slept, we would have to be woken up too, and trio's
 * loop takes 100 us. So with a client on another CPU, polling more than doubles the rate. While the model computes, the
 * time is 0, because the model needs the CPU. */
long kvfs_linger_ns = 60 * 1000;

/* Python looks whether the model computes (pace.py) only when it is called. So C leaves some of the requests that it
 * could answer to Python, and all of them while the model computes. */
static const int most_without_python = 15;

_Alignas(8) char kvfs_out[OUT_BYTES];
const void *kvfs_data;
size_t kvfs_data_bytes;

/* The attributes of the root. The kernel may not keep them (grants.py), and asks for them with every path. `dummy`, which
 * the kernel ignores, is 0 once they may have changed. */
static struct fuse_attr_out kept_root;

static struct fuse_session *captured_session;
static void (*pyfuse3_init)(void *userdata, struct fuse_conn_info *connection);
static int must_return; /* trio has a task to run for the mount */

/* Answers */

/* Send an answer, during its callback or later. When Python calls this, cffi releases the GIL first. */
void kvfs_answer(fuse_req_t req, int status) {
    if (status >= 0)
        libfuse.reply_buf(req, kvfs_out, (size_t)status);
    else if (status == ANSWER_DATA)
        libfuse.reply_buf(req, kvfs_data, kvfs_data_bytes);
    else
        libfuse.reply_err(req, -status);
}

static void answer(fuse_req_t req, int status) {
    if (status == ANSWER_LATER) {
        must_return = 1;
    } else if (status == ANSWER_DATA && kvfs_data_bytes >= UNLOCKED_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        kvfs_answer(req, status);
        Py_END_ALLOW_THREADS
    } else {
        kvfs_answer(req, status);
    }
}

static void on_interrupt(fuse_req_t req, void *unused) {
    (void)unused;
    must_return = 1;
    kvfs_interrupted(req);
}

/* Have `kvfs_interrupted` called when the process that waits for the answer gets a signal, or at once if the process
 * has already got a signal. */
void kvfs_watch(fuse_req_t req) { libfuse.req_interrupt_func(req, on_interrupt, NULL); }

/* The uid of the process that makes the request. */
uint32_t kvfs_uid(fuse_req_t req) { return libfuse.req_ctx(req)->uid; }

/* Have the kernel ask again for the attributes of an inode, and drop its kept answers. Return 0, or -ENOENT if the kernel
 * does not know the inode. */
int kvfs_withdraw(uint64_t inode) {
    if (inode == FUSE_ROOT_ID)
        kept_root.dummy = 0;
    kvfs_drop_name(inode);
    return captured_session ? libfuse.lowlevel_notify_inval_inode(captured_session, inode, -1, 0) : -ENODEV;
}

/* Operations */

static int may_answer_without_python(void) {
    static int num_answered;
    if (!kvfs_linger_ns || num_answered == most_without_python)
        return num_answered = 0;
    return ++num_answered;
}

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name) {
    const struct fuse_entry_out *kept = may_answer_without_python() ? kvfs_kept_name(parent, name) : NULL;
    if (kept) {
        libfuse.reply_buf(req, (const char *)kept, sizeof *kept);
        return;
    }
    const int status = kvfs_lookup(req, parent, name);
    if (status == sizeof *kept)
        kvfs_keep_name(parent, name, strlen(name), (const struct fuse_entry_out *)kvfs_out);
    answer(req, status);
}

static void forget(fuse_ino_t inode, uint64_t num_lookups) {
    kvfs_drop_name(inode);
    kvfs_forget(inode, num_lookups);
}

static void on_forget(fuse_req_t req, fuse_ino_t inode, uint64_t num_lookups) {
    forget(inode, num_lookups);
    libfuse.reply_none(req);
}

static void on_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets) {
    for (size_t i = 0; i < count; i++)
        forget(forgets[i].ino, forgets[i].nlookup);
    libfuse.reply_none(req);
}

static void on_getattr(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    if (inode == FUSE_ROOT_ID && kept_root.dummy && may_answer_without_python()) {
        libfuse.reply_buf(req, (const char *)&kept_root, sizeof kept_root);
        return;
    }
    const int status = kvfs_getattr(req, inode, file != NULL);
    if (inode == FUSE_ROOT_ID && status == sizeof kept_root)
        memcpy(&kept_root, kvfs_out, sizeof kept_root);
    answer(req, status);
}

static void on_setattr(fuse_req_t req, fuse_ino_t inode, struct stat *attr, int fields, struct fuse_file_info *file) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const struct timespec *atime = fields & FUSE_SET_ATTR_ATIME_NOW ? &now : &attr->st_atim;
    const struct timespec *mtime = fields & FUSE_SET_ATTR_MTIME_NOW ? &now : &attr->st_mtim;
    answer(req,
           kvfs_setattr(req, inode, fields, file != NULL, file ? file->fh : 0, attr->st_mode, attr->st_uid,
                        attr->st_gid, attr->st_size, atime->tv_sec, atime->tv_nsec, mtime->tv_sec, mtime->tv_nsec));
}

static void on_readlink(fuse_req_t req, fuse_ino_t inode) { answer(req, kvfs_readlink(req, inode)); }

static void on_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t device) {
    const struct fuse_ctx *caller = libfuse.req_ctx(req);
    answer(req, kvfs_mknod(req, parent, name, mode, (uint32_t)device, caller->uid, caller->gid));
}

static void on_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode) {
    on_mknod(req, parent, name, S_IFDIR | (mode & 07777), 0);
}

static void on_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name) {
    const struct fuse_ctx *caller = libfuse.req_ctx(req);
    answer(req, kvfs_symlink(req, target, parent, name, caller->uid, caller->gid));
}

static void on_link(fuse_req_t req, fuse_ino_t inode, fuse_ino_t parent, const char *name) {
    answer(req, kvfs_link(req, inode, parent, name, libfuse.req_ctx(req)->uid));
}

static void on_unlink(fuse_req_t req, fuse_ino_t parent, const char *name) {
    answer(req, kvfs_unlink(req, parent, name));
}

static void on_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name) {
    answer(req, kvfs_rmdir(req, parent, name));
}

static void on_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name,
                      unsigned flags) {
    answer(req, kvfs_rename(req, parent, name, new_parent, new_name, flags));
}

static void on_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *file) {
    const struct fuse_ctx *caller = libfuse.req_ctx(req);
    answer(req, kvfs_create(req, parent, name, mode, file->flags, caller->uid, caller->gid, caller->pid));
}

static void on_open(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    const struct fuse_ctx *caller = libfuse.req_ctx(req);
    answer(req, kvfs_open(req, inode, file->flags, caller->uid, caller->pid));
}

static void on_read(fuse_req_t req, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file) {
    (void)inode;
    answer(req, kvfs_read(req, file->fh, offset, size));
}

static void on_write(fuse_req_t req, fuse_ino_t inode, const char *bytes, size_t size, off_t offset,
                     struct fuse_file_info *file) {
    (void)inode;
    answer(req, kvfs_write(req, file->fh, offset, bytes, size));
}

static void on_flush(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    (void)inode;
    answer(req, kvfs_flush(req, file->fh, libfuse.req_ctx(req)->pid));
}

static void on_fsync(fuse_req_t req, fuse_ino_t inode, int datasync, struct fuse_file_info *file) {
    (void)inode, (void)datasync;
    answer(req, kvfs_fsync(req, file->fh));
}

static void on_release(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    (void)inode;
    answer(req, kvfs_release(req, file->fh));
}

static void on_flock(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file, int operation) {
    (void)inode;
    answer(req, kvfs_flock(req, file->fh, operation));
}

static void on_copy_file_range(fuse_req_t req, fuse_ino_t source_inode, off_t source_offset,
                               struct fuse_file_info *source, fuse_ino_t target_inode, off_t target_offset,
                               struct fuse_file_info *target, size_t size, int flags) {
    (void)source_inode, (void)target_inode;
    int status =
        flags ? -EINVAL : kvfs_copy_file_range(req, source->fh, source_offset, target->fh, target_offset, size);
    answer(req, status);
}

static void on_fallocate(fuse_req_t req, fuse_ino_t inode, int mode, off_t offset, off_t size,
                         struct fuse_file_info *file) {
    (void)inode;
    answer(req, kvfs_fallocate(req, file->fh, mode, offset, size));
}

static void on_opendir(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *listing) {
    (void)listing;
    answer(req, kvfs_opendir(req, inode));
}

static void on_readdirplus(fuse_req_t req, fuse_ino_t inode, size_t size, off_t offset,
                           struct fuse_file_info *listing) {
    const int status = kvfs_readdir(req, listing->fh, offset, size);
    if (status == ANSWER_DATA)
        kvfs_keep_listing(inode, kvfs_data, kvfs_data_bytes);
    answer(req, status);
}

static void on_releasedir(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *listing) {
    (void)inode;
    answer(req, kvfs_releasedir(req, listing->fh));
}

static void on_fsyncdir(fuse_req_t req, fuse_ino_t inode, int datasync, struct fuse_file_info *listing) {
    (void)inode, (void)datasync;
    answer(req, kvfs_fsyncdir(req, listing->fh));
}

static void on_statfs(fuse_req_t req, fuse_ino_t inode) { answer(req, kvfs_statfs(req, inode)); }

/* No file here has ACLs, labels or capabilities. The kernel asks for capabilities before each write, and `ls -l` for
 * labels until the answer is EOPNOTSUPP. */
static void on_getxattr(fuse_req_t req, fuse_ino_t inode, const char *name, size_t size) {
    if (strncmp(name, "user.", 5) != 0)
        libfuse.reply_err(req, EOPNOTSUPP);
    else
        answer(req, kvfs_getxattr(req, inode, name, size));
}

static void on_listxattr(fuse_req_t req, fuse_ino_t inode, size_t size) {
    answer(req, kvfs_listxattr(req, inode, size));
}

static void on_setxattr(fuse_req_t req, fuse_ino_t inode, const char *name, const char *value, size_t size, int flags) {
    answer(req, kvfs_setxattr(req, inode, name, value, size, flags, libfuse.req_ctx(req)->uid));
}

static void on_removexattr(fuse_req_t req, fuse_ino_t inode, const char *name) {
    answer(req, kvfs_removexattr(req, inode, name, libfuse.req_ctx(req)->uid));
}

/* Answer ENOTTY: no file here is a terminal. The call is frequent, because isatty(3) is an ioctl, and so each open() in
 * Python makes one. */
static void on_ioctl(fuse_req_t req, fuse_ino_t inode, unsigned int command, void *argument,
                     struct fuse_file_info *file, unsigned flags, const void *input, size_t input_bytes,
                     size_t output_bytes) {
    (void)inode, (void)command, (void)argument, (void)file, (void)flags, (void)input, (void)input_bytes;
    (void)output_bytes;
    libfuse.reply_err(req, ENOTTY);
}

static void on_init(void *userdata, struct fuse_conn_info *connection) {
    pyfuse3_init(userdata, connection);
    /* Dropping setuid bits at a write needs the writer's credentials, which FUSE does not pass on. So the kernel has to
     * drop the bits: it asks for the change with a plain chmod. */
    connection->want &= ~(unsigned)FUSE_CAP_HANDLE_KILLPRIV;
    /* With this feature, the kernel answers an asynchronous direct write before the write ends, and drops the cached
     * pages of the range at the answer. A buffered read could then cache old pages, which would stay. So io_submit(2)
     * has to wait for the write. */
    connection->want &= ~(unsigned)FUSE_CAP_ASYNC_DIO;
    /* A read straight into our buffer is cheaper than a read through a pipe. */
    connection->want &= ~(unsigned)FUSE_CAP_SPLICE_READ;
    int descriptor = libfuse.session_fd(captured_session);
    fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
}

/* Operations of the mount. libfuse answers all other operations with ENOSYS, and the kernel works without them. */
static const struct fuse_lowlevel_ops our_operations = {
    .init = on_init,
    .lookup = on_lookup,
    .forget = on_forget,
    .forget_multi = on_forget_multi,
    .getattr = on_getattr,
    .setattr = on_setattr,
    .readlink = on_readlink,
    .mknod = on_mknod,
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
    .flush = on_flush,
    .fsync = on_fsync,
    .release = on_release,
    .flock = on_flock,
    .copy_file_range = on_copy_file_range,
    .fallocate = on_fallocate,
    .opendir = on_opendir,
    .readdirplus = on_readdirplus,
    .releasedir = on_releasedir,
    .fsyncdir = on_fsyncdir,
    .statfs = on_statfs,
    .getxattr = on_getxattr,
    .listxattr = on_listxattr,
    .setxattr = on_setxattr,
    .removexattr = on_removexattr,
    .ioctl = on_ioctl,
};

/* Interposed functions */

__attribute__((visibility("default"))) struct fuse_session *fuse_session_new(struct fuse_args *arguments,
                                                                             const struct fuse_lowlevel_ops *operations,
                                                                             size_t operations_bytes, void *userdata) {
    (void)operations_bytes;
    pyfuse3_init = operations->init;
    captured_session = libfuse.session_new(arguments, &our_operations, sizeof our_operations, userdata);
    return captured_session;
}

__attribute__((visibility("default"))) int fuse_session_receive_buf(struct fuse_session *session,
                                                                    struct fuse_buf *buf) {
    int result = libfuse.session_receive_buf(session, buf);
    return result == -EAGAIN ? -EINTR : result; /* pyfuse3 then waits again */
}

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

/* Receive the next request, if it comes within kvfs_linger_ns. */
static int receive_soon(struct fuse_session *session, struct fuse_buf *buf) {
    struct pollfd waiting = {.fd = libfuse.session_fd(session), .events = POLLIN};
    const long end_ns = now_ns() + kvfs_linger_ns;
    int found, result = 0;
    Py_BEGIN_ALLOW_THREADS
    while (!(found = poll(&waiting, 1, 0)) && now_ns() < end_ns)
        sched_yield();
    if (found == 1)
        result = libfuse.session_receive_buf(session, buf);
    Py_END_ALLOW_THREADS
    return result;
}

__attribute__((visibility("default"))) void fuse_session_process_buf(struct fuse_session *session,
                                                                     const struct fuse_buf *received) {
    struct fuse_buf *buf = (struct fuse_buf *)received; /* pyfuse3 owns the buffer, but needs it no more */
    const long end_ns = now_ns() + budget_ns;
    must_return = 0;
    do
        libfuse.session_process_buf(session, buf);
    while (!must_return && now_ns() < end_ns && !libfuse.session_exited(session) && receive_soon(session, buf) > 0);
}

/* Take libfuse's functions from the library that pyfuse3's module is linked with. Return an error, or NULL. */
const char *kvfs_find_libfuse(const char *pyfuse3) {
    void *module = dlopen(pyfuse3, RTLD_LAZY | RTLD_NOLOAD);
    if (!module)
        return dlerror();
#define FOUND(name)                                                                                                    \
    if (!(libfuse.name = (__typeof__(fuse_##name) *)dlsym(module, "fuse_" #name)))                                     \
        return "libfuse3 has no fuse_" #name;
    LIBFUSE(FOUND)
    return NULL;
}

int kvfs_session_captured(void) { return captured_session != NULL; }

void kvfs_forget_session(void) {
    captured_session = NULL;
    kept_root.dummy = 0;
    kvfs_drop_names();
}

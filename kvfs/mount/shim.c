/* Between libfuse and the mount's handlers: what pyfuse3 leaves out, and the way that costs least.
 *
 * pyfuse3 makes the session, mounts it, waits for it under trio and receives from it; but it has no handler for
 * copy_file_range (by which `cp` becomes a fork), for flock and interrupts, it can't answer without a coroutine, and it
 * goes through trio's epoll for every request. Its own table of operations is refilled on every init, so patching that
 * is no use. Instead this object, loaded RTLD_GLOBAL before pyfuse3, exports functions that the dynamic linker finds
 * before libfuse's:
 *
 *   fuse_session_new           puts our operations in place of pyfuse3's
 *   fuse_session_process_buf   goes on with the requests that are there, or come within a moment, before it returns
 *   fuse_session_receive_buf   never blocks: a request may be gone between epoll and read, when its process is killed
 *
 * Each operation calls one Python function, which packs the answer as the kernel wants it (linux/fuse.h, see wire.py)
 * into `kvfs_out`, and returns its length; or -errno; or a value of `enum`, below. Everything here runs in the
 * thread that runs pyfuse3's loop, with the GIL held unless it says otherwise.
 */

#define Py_LIMITED_API 0x03020000 /* as in what cffi makes: one build for every Python */
#include <Python.h>

#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define UNLOCKED_BYTES 32768 /* shorter answers are sent with the GIL held: giving it away may cost 0.1 ms */

/* Functions of libfuse. This object is not linked with it: libfuse is the distribution's, or in pyfuse3's wheel under a
 * name of its own, and there must not be two. */
#define LIBFUSE(function)                                                                                              \
    function(reply_buf) function(reply_err) function(reply_none) function(req_ctx) function(req_interrupt_func)        \
        function(session_exited) function(session_fd) function(session_new) function(session_process_buf)              \
            function(session_receive_buf)
#define DECLARED(name) __typeof__(fuse_##name) *name;
static struct {
    LIBFUSE(DECLARED)
} libfuse;

/* How long requests are answered without a look at the rest of the daemon. */
static const long budget_ns = 400 * 1000;

/* How long we look for the next one. A client on the same CPU runs as soon as we yield, and is back in 10 us; one on
 * another CPU is woken up in 20 to 50. Asleep we would have to be woken up as well, and trio's loop takes 100: beside a
 * client on another CPU looking gives more than twice the rate. 0 while the model computes: the CPU is for it. */
long kvfs_linger_ns = 60 * 1000;

char kvfs_out[OUT_BYTES];
const void *kvfs_data;
size_t kvfs_data_bytes;

static struct fuse_session *captured_session;
static void (*pyfuse3_init)(void *userdata, struct fuse_conn_info *connection);
static int must_return; /* trio has something to do for the mount */

/* Answers */

/* For requests that were answered later; cffi gives the GIL away before it calls. */
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

/* Let Python know when whoever waits for the answer is interrupted; at once, if that has happened. */
void kvfs_watch(fuse_req_t req) { libfuse.req_interrupt_func(req, on_interrupt, NULL); }

/* Who makes the request. */
uint32_t kvfs_uid(fuse_req_t req) { return libfuse.req_ctx(req)->uid; }

/* Operations */

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name) {
    answer(req, kvfs_lookup(req, parent, name));
}

static void on_forget(fuse_req_t req, fuse_ino_t inode, uint64_t num_lookups) {
    kvfs_forget(inode, num_lookups);
    libfuse.reply_none(req);
}

static void on_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets) {
    for (size_t i = 0; i < count; i++)
        kvfs_forget(forgets[i].ino, forgets[i].nlookup);
    libfuse.reply_none(req);
}

static void on_getattr(fuse_req_t req, fuse_ino_t inode, struct fuse_file_info *file) {
    answer(req, kvfs_getattr(req, inode, file != NULL));
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
    (void)inode;
    answer(req, kvfs_readdir(req, listing->fh, offset, size));
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

static void on_getxattr(fuse_req_t req, fuse_ino_t inode, const char *name, size_t size) {
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

/* No file here has controls. Asked often: isatty(3), and with it every open() of Python, is an ioctl. */
static void on_ioctl(fuse_req_t req, fuse_ino_t inode, unsigned int command, void *argument,
                     struct fuse_file_info *file, unsigned flags, const void *input, size_t input_bytes,
                     size_t output_bytes) {
    (void)inode, (void)command, (void)argument, (void)file, (void)flags, (void)input, (void)input_bytes;
    (void)output_bytes;
    libfuse.reply_err(req, ENOTTY);
}

static void on_init(void *userdata, struct fuse_conn_info *connection) {
    pyfuse3_init(userdata, connection);
    /* Dropping setuid bits on write needs the writer's credentials, which are not passed on: left to the kernel, which
     * then asks for it with a plain chmod. */
    connection->want &= ~(unsigned)FUSE_CAP_HANDLE_KILLPRIV;
    /* An asynchronous direct write is answered before it ends, and the kernel drops cached pages of its range when it
     * answers: pages that a buffered read brings in between would stay as they were. So io_submit(2) waits. */
    connection->want &= ~(unsigned)FUSE_CAP_ASYNC_DIO;
    /* A read straight into our buffer is cheaper than one through a pipe. */
    connection->want &= ~(unsigned)FUSE_CAP_SPLICE_READ;
    int descriptor = libfuse.session_fd(captured_session);
    fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
}

/* What is not here libfuse answers with ENOSYS, and the kernel does it itself or without. */
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

/* Interposed */

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
    return result == -EAGAIN ? -EINTR : result; /* pyfuse3 waits again */
}

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

/* The next request, if it comes soon. */
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
    struct fuse_buf *buf = (struct fuse_buf *)received; /* pyfuse3's, and not needed by it any more */
    const long end_ns = now_ns() + budget_ns;
    must_return = 0;
    do
        libfuse.session_process_buf(session, buf);
    while (!must_return && now_ns() < end_ns && !libfuse.session_exited(session) && receive_soon(session, buf) > 0);
}

/* Take libfuse from what pyfuse3's module was linked with. The first function that is missing, or NULL. */
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

void kvfs_forget_session(void) { captured_session = NULL; }

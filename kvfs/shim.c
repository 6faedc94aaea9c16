/* What pyfuse3 leaves out of libfuse's operations, filled in behind its back.
 *
 * pyfuse3 has no handler for copy_file_range, and that is the call by which `cp` can become a fork. Its own table of
 * operations is refilled on every init, so patching that is no use. Instead this object, loaded RTLD_GLOBAL before
 * pyfuse3, exports a `fuse_session_new` that the dynamic linker finds before libfuse's: it completes the table and
 * calls the real one.
 *
 * Everything here runs in the thread that runs pyfuse3's loop, with the GIL held.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_NEXT */
#endif
#define FUSE_USE_VERSION 35
#include <fuse_lowlevel.h>

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static void kvfs_copy_file_range(fuse_req_t req, uint64_t source, int64_t source_offset, uint64_t target,
                                 int64_t target_offset, uint64_t size);

static struct fuse_session *captured_session;
static void (*pyfuse3_init)(void *userdata, struct fuse_conn_info *connection);

static void on_copy_file_range(fuse_req_t req, fuse_ino_t source_inode, off_t source_offset,
                               struct fuse_file_info *source, fuse_ino_t target_inode, off_t target_offset,
                               struct fuse_file_info *target, size_t size, int flags)
{
    (void)source_inode, (void)target_inode;
    if (flags)
        fuse_reply_err(req, EINVAL);
    else
        kvfs_copy_file_range(req, source->fh, source_offset, target->fh, target_offset, size);
}

/* No file here has controls. Asked often: isatty(3), and with it every open() of Python, is an ioctl. */
static void on_ioctl(fuse_req_t req, fuse_ino_t inode, unsigned int command, void *argument,
                     struct fuse_file_info *file, unsigned flags, const void *input, size_t input_bytes,
                     size_t output_bytes)
{
    (void)inode, (void)command, (void)argument, (void)file, (void)flags, (void)input, (void)input_bytes;
    (void)output_bytes;
    fuse_reply_err(req, ENOTTY);
}

static void on_init(void *userdata, struct fuse_conn_info *connection)
{
    pyfuse3_init(userdata, connection);
    /* Dropping setuid bits on write needs the writer's credentials, which pyfuse3 does not pass on: left to the kernel,
     * which then asks for it with a plain chmod. */
    connection->want &= ~(unsigned)FUSE_CAP_HANDLE_KILLPRIV;
}

__attribute__((visibility("default"))) struct fuse_session *fuse_session_new(struct fuse_args *arguments,
                                                                             const struct fuse_lowlevel_ops *operations,
                                                                             size_t operations_bytes, void *userdata)
{
    struct fuse_session *(*real)(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t, void *);
    struct fuse_lowlevel_ops completed;

    /* The next one in the search order is libfuse's: this object is linked with it. */
    real = (__typeof__(real))dlsym(RTLD_NEXT, "fuse_session_new");
    if (!real) {
        fprintf(stderr, "kvfs: libfuse3 has no fuse_session_new: %s\n", dlerror());
        return NULL;
    }
    memset(&completed, 0, sizeof completed);
    memcpy(&completed, operations, operations_bytes < sizeof completed ? operations_bytes : sizeof completed);
    pyfuse3_init = completed.init;
    completed.init = on_init;
    completed.copy_file_range = on_copy_file_range;
    completed.ioctl = on_ioctl;
    captured_session = real(arguments, &completed, sizeof completed, userdata);
    return captured_session;
}

static int kvfs_session_captured(void)
{
    return captured_session != NULL;
}

static void kvfs_forget_session(void)
{
    captured_session = NULL;
}

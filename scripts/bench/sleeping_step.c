/* A step that sleeps, whatever it holds: see sleeping_daemon.py, which compiles it. */
#include "steps.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define TOKEN 97 /* the likeliest after everything: 'a' to the tiny model */

int64_t step_ns, vocab_size;

/* The rows are written within the time of the step. */
int sleeping_step(sym_decoder *decoder, const sym_batch *batch) {
    struct timespec until;
    int error;
    (void)decoder;
    clock_gettime(CLOCK_MONOTONIC, &until);
    const int64_t until_ns = until.tv_nsec + step_ns;
    until.tv_sec += until_ns / 1000000000;
    until.tv_nsec = until_ns % 1000000000;
    for (int32_t i = 0; i < batch->num_wanted; i++) {
        memset(batch->out[i], 0, (size_t)vocab_size * sizeof(float));
        batch->out[i][TOKEN] = 1;
    }
    prctl(PR_SET_TIMERSLACK, 1); /* else the kernel may add 50 us */
    do
        error = clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    while (error == EINTR);
    return error;
}

/* A step that only sleeps, however many calls are in it. sleeping_daemon.py compiles this file. */
#include "steps.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define TOKEN 97 /* the most likely token after any text: 'a' in the tiny model */

int64_t step_ns, vocab_size;

/* Write the rows, and sleep until the step has taken `step_ns` in all. */
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
    prctl(PR_SET_TIMERSLACK, 1); /* otherwise the kernel may sleep 50 us longer */
    do
        error = clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    while (error == EINTR);
    return error;
}

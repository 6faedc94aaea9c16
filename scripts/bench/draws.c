/* Draws of many rows, one after the other and by the threads of a decoder: see draws.py, which compiles it. */
#include "steps.h"

#include <stddef.h>
#include <time.h>

struct draws {
    const sym_hot_functions *hot;
    sym_sampler *const *samplers;
    const float *const *rows;
    int64_t *tokens;
    uint64_t index;
};

static void draw_one(void *context, int32_t i) {
    const struct draws *draws = context;
    draws->tokens[i] = draws->hot->draw(draws->samplers[i], draws->rows[i], NULL, draws->index);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Nanoseconds that `count` draws take after a step and a rest of so long; without `parallel` by this thread alone. */
int64_t time_draws(struct draws *draws, int32_t count, sym_parallel_function *parallel, sym_step_function *step,
                   sym_decoder *decoder, const sym_batch *batch, int64_t rest_ns) {
    if (step(decoder, batch) != 0)
        return -1;
    if (rest_ns > 0)
        nanosleep(&(struct timespec){.tv_nsec = rest_ns}, NULL);
    const int64_t began = now_ns();
    if (parallel != NULL)
        parallel(decoder, draw_one, draws, count);
    for (int32_t i = 0; parallel == NULL && i < count; i++)
        draw_one(draws, i);
    return now_ns() - began;
}

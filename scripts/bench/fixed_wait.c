/* Decisions of streams.c, or in their place a fixed wait: a benchmark's. */
#define sym_streams_wait_until wait_until_due
#include "streams.c"
#undef sym_streams_wait_until

/* How long a step waits for calls, unless so many are ready; negative: as streams.c says. */
struct fixed_wait {
    int64_t wait_ns, num_calls;
};
__attribute__((visibility("default"))) const volatile struct fixed_wait *fixed_wait;

int64_t sym_streams_wait_until(sym_streams *streams, const sym_ready *ready, const sym_wait *wait,
                               const sym_limits *limits, const sym_cost *cost, const sym_work *latest,
                               int32_t num_calls, const sym_share *shares, int64_t now_ns) {
    if (fixed_wait->wait_ns < 0)
        return wait_until_due(streams, ready, wait, limits, cost, latest, num_calls, shares, now_ns);
    return ready->num_calls >= fixed_wait->num_calls ? now_ns : ready->began_ns + fixed_wait->wait_ns;
}

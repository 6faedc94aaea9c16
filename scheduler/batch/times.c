/* The clock, and counts of durations of steps and calls. The difference of two readings of these counts gives the
 * quantiles of the durations between the readings. */
#include "loop_state.h"

#include <time.h>

#define FIRST_OCTAVE 16 /* the first bound is 2^16 ns */
#define ROOT_OF_TWO 362 /* the square root of 2, times 256 */

int64_t sym_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

int64_t sym_time_bound_ns(int32_t index) {
    const int octave = FIRST_OCTAVE + index / 2;
    return index % 2 == 0 ? (int64_t)1 << octave : (int64_t)ROOT_OF_TWO << (octave - 8);
}

void sym_count_time(sym_times *times, int64_t ns) {
    int index = 0;
    if (ns > sym_time_bound_ns(0)) {
        const int octave = 63 - __builtin_clzll((unsigned long long)(ns - 1));
        index = 2 * (octave - FIRST_OCTAVE) + 1;
        index += ns > sym_time_bound_ns(index);
        index = index < SYM_NUM_TIMES ? index : SYM_NUM_TIMES - 1;
    }
    times->num[index]++;
    times->sum_ns += ns > 0 ? ns : 0;
}

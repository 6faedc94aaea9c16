/* How long steps and calls took, counted so that quantiles can be told of any stretch of time: of two readings the difference. */
#include "loop_state.h"

#define FIRST_OCTAVE 16 /* 2^16 ns */
#define ROOT_OF_TWO 362 /* times 256 */

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

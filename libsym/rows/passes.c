/* Chooses the instruction set of the passes, and keeps the scratch memory of each thread. */
#include "passes.h"

#include "rows.h"
#include "simd/machine.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

int32_t pack_order[256][8] __attribute__((aligned(32)));
const struct passes *passes = &passes_plain;

/* Chooses the instruction set of the passes: vectors of 512 or 256 bits, or 0 for plain code. The constructor below and
 * tests call this function. -ENOTSUP: the processor lacks the instructions, and the choice is unchanged. */
int sym_rows_use(int vector_bits) {
    if (vector_bits == 0)
        passes = &passes_plain;
#ifdef __x86_64__
    else if (vector_bits == 256 && machine_has(AVX2))
        passes = &passes_avx2;
    else if (vector_bits == 512 && machine_has(AVX512))
        passes = &passes_avx512;
#endif
    else
        return -ENOTSUP;
    return 0;
}

__attribute__((constructor)) static void choose_passes(void) {
    for (int byte = 0; byte < 256; byte++) {
        int count = 0;
        for (int bit = 0; bit < 8; bit++)
            if (byte >> bit & 1)
                pack_order[byte][count++] = bit;
    }
    if (sym_rows_use(512) != 0)
        sym_rows_use(256);
}

/* ---- the scratch memory of a thread ---- */

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

static void *take(char **from, size_t bytes) {
    void *result = *from;
    *from += (bytes + 63) / 64 * 64;
    return result;
}

struct scratch *scratch_for(int64_t n) {
    pthread_once(&scratch_once, make_scratch_key);
    struct scratch *scratch = pthread_getspecific(scratch_key);
    if (scratch != NULL && scratch->room >= n)
        return scratch;
    free(scratch);
    const size_t room =
        ((size_t)n + BLOCK) / BLOCK * BLOCK + LANES; /* whole blocks, and a whole vector beyond any entry */
    char *at = aligned_alloc(64, (sizeof *scratch + 63) / 64 * 64 + room * 64);
    pthread_setspecific(scratch_key, at);
    if (at == NULL)
        return NULL;
    scratch = take(&at, sizeof *scratch);
    scratch->room = n;
    scratch->row = take(&at, room * sizeof(float));
    scratch->groups = take(&at, room * sizeof(float));
    scratch->masses = take(&at, room / BLOCK * sizeof(double));
    for (int i = 0; i < 2; i++) {
        sym_list *list = i == 0 ? &scratch->list : &scratch->other;
        list->values = take(&at, room * sizeof(float));
        list->weights = take(&at, room * sizeof(float));
        list->indices = take(&at, room * sizeof(int32_t));
    }
    scratch->keys = take(&at, 2 * room * sizeof(uint64_t));
    return scratch;
}

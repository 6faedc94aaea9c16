/* BLAKE2b-256 of eight pages together. Each lane of AVX-512 hashes one page. This method is four times as fast as
 * hashing one page after the other.
 *
 * The digests are those of RFC 7693 and of hashlib.blake2b(page, digest_size=32). Pages have to be multiples of 128
 * bytes, the block of BLAKE2b. On processors without AVX-512 the caller uses hashlib: with fewer registers this code
 * would be no faster.
 */

#include "digest.h"

#include <string.h>

enum { LANES = 8, BLOCK_BYTES = 128, DIGEST_BYTES = 32 };

typedef uint64_t lanes __attribute__((vector_size(64)));

static const uint64_t initial[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t order[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

#define ROTATE(x, n) ((x) >> (n) | (x) << (64 - (n)))
#define MIX(a, b, c, d, x, y)                                                                                          \
    a += b + (x), d = ROTATE(d ^ a, 32), c += d, b = ROTATE(b ^ c, 24);                                                \
    a += b + (y), d = ROTATE(d ^ a, 16), c += d, b = ROTATE(b ^ c, 63);

/* Exchange halves of 1, 2 and 4 lanes, so that rows of words become lanes of pages. */
#define SWAP(a, b, low, high)                                                                                          \
    do {                                                                                                               \
        lanes first = __builtin_shuffle(a, b, (lanes)low), second = __builtin_shuffle(a, b, (lanes)high);              \
        a = first, b = second;                                                                                         \
    } while (0)

static inline __attribute__((always_inline, target("avx512f"))) void transpose(lanes row[8]) {
    for (int i = 0; i < 8; i += 2)
        SWAP(row[i], row[i + 1], ((lanes){0, 8, 2, 10, 4, 12, 6, 14}), ((lanes){1, 9, 3, 11, 5, 13, 7, 15}));
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; j++)
            SWAP(row[j], row[j + 2], ((lanes){0, 1, 8, 9, 4, 5, 12, 13}), ((lanes){2, 3, 10, 11, 6, 7, 14, 15}));
    for (int j = 0; j < 4; j++)
        SWAP(row[j], row[j + 4], ((lanes){0, 1, 2, 3, 8, 9, 10, 11}), ((lanes){4, 5, 6, 7, 12, 13, 14, 15}));
}

int digest_is_fast(void) { return __builtin_cpu_supports("avx512f") != 0; }

__attribute__((target("avx512f"))) void digest_pages(const uint8_t *const pages[], uint64_t page_bytes, uint8_t *out) {
    lanes state[8];
    for (int i = 0; i < 8; i++)
        state[i] = (lanes){0} + initial[i];
    state[0] ^= (lanes){0} + (0x01010000 ^ DIGEST_BYTES);
    for (uint64_t at = 0; at < page_bytes; at += BLOCK_BYTES) {
        lanes m[16], v[16];
        for (int half = 0; half < 2; half++) {
            for (int lane = 0; lane < LANES; lane++)
                memcpy(&m[8 * half + lane], pages[lane] + at + 64 * half, 64);
            transpose(m + 8 * half);
        }
        for (int i = 0; i < 8; i++) {
            v[i] = state[i];
            v[i + 8] = (lanes){0} + initial[i];
        }
        v[12] ^= (lanes){0} + (at + BLOCK_BYTES);
        if (at + BLOCK_BYTES == page_bytes)
            v[14] = ~v[14];
#pragma GCC unroll 12
        for (int round = 0; round < 12; round++) {
            const uint8_t *s = order[round];
            MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]])
            MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]])
            MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]])
            MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]])
            MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]])
            MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]])
            MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]])
            MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]])
        }
        for (int i = 0; i < 8; i++)
            state[i] ^= v[i] ^ v[i + 8];
    }
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < DIGEST_BYTES / 8; i++) {
            uint64_t word = state[i][lane];
            memcpy(out + lane * DIGEST_BYTES + 8 * i, &word, 8);
        }
}

/* Upper limits of this machine: bytes a second that threads can read, and operations a second of each instruction
 * for products of matrices. A multiplication and an addition are two operations.
 *
 * Each instruction runs in 24 independent chains, because 12 chains would measure the instruction's latency on some
 * processors. The loops are unrolled, so chains stay in registers. An empty asm statement hides the values of chains
 * from the compiler, which would otherwise merge equal chains. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <immintrin.h>
#include <stdint.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- operations ---- */

#define CHAINS(target_, name, type, count, zero, step, keep)                                                           \
    __attribute__((target(target_))) static void name(long rounds) {                                                   \
        type a[count], x = zero, y = zero;                                                                             \
        _Pragma("GCC unroll 32") for (int i = 0; i < count; i++) a[i] = zero;                                          \
        _Pragma("GCC unroll 32") for (int i = 0; i < count; i++) __asm__ volatile("" : keep(a[i]));                    \
        for (long r = 0; r < rounds; r++) {                                                                            \
            __asm__ volatile("" : keep(x), keep(y));                                                                   \
            _Pragma("GCC unroll 32") for (int i = 0; i < count; i++) a[i] = step;                                      \
        }                                                                                                              \
        _Pragma("GCC unroll 32") for (int i = 0; i < count; i++) __asm__ volatile("" : keep(a[i]));                    \
    }

/* AVX2 has 16 registers, which are enough for 12 chains, two operands and a temporary value. */
CHAINS("avx2,fma", fma_avx2, __m256, 12, _mm256_setzero_ps(), _mm256_fmadd_ps(x, y, a[i]), "+x")
CHAINS("avx2", maddubs_avx2, __m256i, 12, _mm256_setzero_si256(),
       _mm256_add_epi16(_mm256_maddubs_epi16(_mm256_xor_si256(x, a[i]), y), a[i]), "+x")
CHAINS("avx512f", fma_avx512, __m512, 24, _mm512_setzero_ps(), _mm512_fmadd_ps(x, y, a[i]), "+v")
CHAINS("avx512f,avx512bw,avx512vnni", vpdpbusd, __m512i, 24, _mm512_setzero_si512(), _mm512_dpbusd_epi32(a[i], x, y),
       "+v")
CHAINS("avx512f,avx512bw,avx512bf16", vdpbf16ps, __m512, 24, _mm512_setzero_ps(),
       _mm512_dpbf16_ps(a[i], (__m512bh)x, (__m512bh)y), "+v")

/* The configuration is static because gcc 12 drops stores to a configuration on the stack. */
static struct {
    uint8_t palette, start, pad[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tiles = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

#define TILES(target_, name, instruction)                                                                              \
    __attribute__((target(target_))) static void name(long rounds) {                                                   \
        _tile_loadconfig(&tiles);                                                                                      \
        _tile_zero(0);                                                                                                 \
        _tile_zero(1);                                                                                                 \
        _tile_zero(2);                                                                                                 \
        _tile_zero(3);                                                                                                 \
        _tile_zero(4);                                                                                                 \
        _tile_zero(5);                                                                                                 \
        _tile_zero(6);                                                                                                 \
        _tile_zero(7);                                                                                                 \
        for (long r = 0; r < rounds; r++) {                                                                            \
            instruction(0, 4, 6);                                                                                      \
            instruction(1, 4, 7);                                                                                      \
            instruction(2, 5, 6);                                                                                      \
            instruction(3, 5, 7);                                                                                      \
        }                                                                                                              \
        _tile_release();                                                                                               \
    }

TILES("amx-tile,amx-bf16", tdpbf16ps, _tile_dpbf16ps)
TILES("amx-tile,amx-int8", tdpbssd, _tile_dpbssd)

enum feature { AVX2, AVX512, VNNI, BF16, AMX_BF16, AMX_INT8 };

static int amx(int bit) {
    unsigned a = 7, b, c = 0, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    /* ARCH_REQ_XCOMP_PERM: a process must ask the kernel for permission to use tiles. */
    return (d >> 24 & 1) && (d >> bit & 1) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

static int has(enum feature feature) {
    __builtin_cpu_init();
    switch (feature) {
    case AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    case VNNI:
        return has(AVX512) && __builtin_cpu_supports("avx512vnni");
    case BF16:
        return has(AVX512) && __builtin_cpu_supports("avx512bf16");
    case AMX_BF16:
        return amx(22);
    case AMX_INT8:
        return amx(25);
    }
    return 0;
}

static const struct kind {
    const char *name;
    enum feature needs;
    void (*run)(long rounds);
    double ops; /* operations of a round */
} kinds[] = {
    {"fma avx2", AVX2, fma_avx2, 12 * 8 * 2},
    {"fma avx512", AVX512, fma_avx512, 24 * 16 * 2},
    {"bf16 vdpbf16ps", BF16, vdpbf16ps, 24 * 32 * 2},
    {"bf16 amx", AMX_BF16, tdpbf16ps, 4 * 16 * 16 * 32 * 2},
    {"int8 vpmaddubsw", AVX2, maddubs_avx2, 12 * 32 * 2},
    {"int8 vpdpbusd", VNNI, vpdpbusd, 24 * 64 * 2},
    {"int8 amx", AMX_INT8, tdpbssd, 4 * 16 * 16 * 64 * 2},
};

/* ---- reading ---- */

__attribute__((target("avx512f"))) static uint64_t read_avx512(const char *p, size_t bytes) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 256) {
        a = _mm512_or_si512(a, _mm512_load_si512(p + i));
        b = _mm512_or_si512(b, _mm512_load_si512(p + i + 64));
        c = _mm512_or_si512(c, _mm512_load_si512(p + i + 128));
        d = _mm512_or_si512(d, _mm512_load_si512(p + i + 192));
    }
    return (uint64_t)_mm512_reduce_or_epi64(_mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d)));
}

static uint64_t read_plain(const char *p, size_t bytes) {
    __m128i a = _mm_setzero_si128(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 64) {
        a = _mm_or_si128(a, _mm_load_si128((const void *)(p + i)));
        b = _mm_or_si128(b, _mm_load_si128((const void *)(p + i + 16)));
        c = _mm_or_si128(c, _mm_load_si128((const void *)(p + i + 32)));
        d = _mm_or_si128(d, _mm_load_si128((const void *)(p + i + 48)));
    }
    a = _mm_or_si128(_mm_or_si128(a, b), _mm_or_si128(c, d));
    return (uint64_t)_mm_cvtsi128_si64(a);
}

/* ---- functions that threads of limits.py call ---- */

static volatile uint64_t sink;

int limit_kinds(void) { return sizeof kinds / sizeof *kinds; }
const char *limit_name(int kind) { return kinds[kind].name; }
/* Return the operations of a round, or 0 if the processor lacks the instruction. */
double limit_ops(int kind) { return has(kinds[kind].needs) ? kinds[kind].ops : 0; }
void limit_run(int kind, long rounds) { kinds[kind].run(rounds); }
void limit_read(const char *p, size_t bytes) { sink = has(AVX512) ? read_avx512(p, bytes) : read_plain(p, bytes); }

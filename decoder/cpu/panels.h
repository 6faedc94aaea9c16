/* Conversions of 16-bit numbers, and the layout of a panel of packed weights. */

#ifndef SYMPHONY_PANELS_H
#define SYMPHONY_PANELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "work.h"

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Round to the nearest bfloat16, ties to even. A NaN stays a NaN. */
static inline uint16_t to_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float of_bfloat16(uint16_t x) { return float_of((uint32_t)x << 16); }

/* Round to the nearest float16, ties to even. A number that is too large becomes infinite. */
static inline uint16_t to_float16(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest >= 0x47800000)
        return (uint16_t)(sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (rest < 0x38800000) /* a denormal: adding 0.5 rounds it, and shifts it into the low bits */
        return (uint16_t)(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - 0x38000000) >> 13);
}

static inline float of_float16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest >= 0x7c00)
        return float_of(sign | 0x7f800000 | rest << 13);
    float value = float_of((rest << 13) + 0x38000000);
    if (rest < 0x400)
        value = float_of((rest << 13) + 0x38800000) - float_of(0x38800000);
    return float_of(sign | bits_of(value));
}

static inline int has_codes(int format) { return format == SYM_CODES || format == SYM_ROTATED8; }

/* Levels of codes: of IQ4_NL and IQ4_XS, and of MXFP4, whose numbers are halves of these. */
static const int8_t code_levels[3][16] = {
    {0},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

/* Inputs of a step of numbers or of rotated codes. */
static inline long inputs_per_step(int format) { return format == SYM_FLOAT32 ? 1 : format == SYM_BFLOAT16 ? 2 : 4; }

#define GROUPS_OF_BLOCK(m) (SYM_BLOCK / (m)->group)
#define BLOCKS_OF_SUPER (SYM_SUPER / SYM_BLOCK)
/* Bytes of one group's scales for a panel. Its mins have as many. */
static inline long scale_bytes(const sym_matrix *m) { return m->has_supers ? PANEL : PANEL * 2; }
/* Bytes of scales and mins in front of a block's codes. */
static inline long block_head(const sym_matrix *m) {
    return GROUPS_OF_BLOCK(m) * scale_bytes(m) * (m->has_mins ? 2 : 1);
}
static inline long codes_block_bytes(const sym_matrix *m) { return block_head(m) + (long)m->bits * STEP; }
/* Bytes of the supers in front of eight blocks. */
static inline long super_head(const sym_matrix *m) { return !m->has_supers ? 0 : m->has_mins ? PANEL * 4 : PANEL * 2; }
/* Offset of block i, behind its supers. Where supers begin, they lie just before it. */
static inline long codes_block_at(const sym_matrix *m, long i) {
    return i * codes_block_bytes(m) + (i / BLOCKS_OF_SUPER + 1) * super_head(m);
}
static inline long panel_bytes(const sym_matrix *m) {
    if (m->format != SYM_CODES)
        return m->k / inputs_per_step(m->format) * STEP + (m->format == SYM_ROTATED8 ? PANEL * 8 : 0);
    const long blocks = m->k / SYM_BLOCK, supers = (blocks + BLOCKS_OF_SUPER - 1) / BLOCKS_OF_SUPER;
    return blocks * codes_block_bytes(m) + supers * super_head(m);
}

#endif

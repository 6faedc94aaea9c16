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

static inline long inputs_per_step(int format) {
    return format == SYM_FLOAT32 ? 1 : format == SYM_BFLOAT16 ? 2 : format == SYM_CODES4 ? 8 : 4;
}
static inline int has_groups(int format) { return format == SYM_CODES8 || format == SYM_CODES4; }
static inline int has_codes(int format) { return has_groups(format) || format == SYM_ROTATED8; }

/* Bytes of scales and mins in front of a group's codes. */
static inline long group_head(const sym_matrix *m) { return m->has_mins ? 2 * PANEL * 2 : PANEL * 2; }
static inline long group_bytes(const sym_matrix *m) {
    return group_head(m) + SYM_GROUP / inputs_per_step(m->format) * STEP;
}
static inline long panel_bytes(const sym_matrix *m) {
    if (has_groups(m->format))
        return m->k / SYM_GROUP * group_bytes(m);
    return m->k / inputs_per_step(m->format) * STEP + (m->format == SYM_ROTATED8 ? PANEL * 8 : 0);
}

#endif

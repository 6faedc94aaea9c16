/* Packing of matrices into their layout in memory (see step.h), and reading of single rows as embeddings. */

#include "panels.h"

int64_t sym_packed_bytes(const sym_matrix *m) { return (m->n + PANEL - 1) / PANEL * panel_bytes(m); }

/* Return the address of one feature's bytes in the step of numbers or rotated codes that contains input i. */
static char *feature_at(const sym_matrix *m, int64_t strip, int64_t lane, int64_t i) {
    return m->data + strip / 2 * panel_bytes(m) + (strip % 2 * 16 + lane) * 4 + i / inputs_per_step(m->format) * STEP;
}

/* A feature's place in one block of codes. */
struct place {
    char *block; /* the scales; the codes follow them */
    int64_t feature;
};

static struct place place_of(const sym_matrix *m, int64_t strip, int64_t lane, int64_t block) {
    return (struct place){m->data + strip / 2 * panel_bytes(m) + codes_block_at(m, block), strip % 2 * 16 + lane};
}

/* Return the index of a group's scale in a block, or of its min. */
static int64_t scale_index(const sym_matrix *m, const struct place *p, int64_t group, int min) {
    return (group + min * GROUPS_OF_BLOCK(m)) * PANEL + p->feature;
}
static uint16_t *half_at(const sym_matrix *m, const struct place *p, int64_t group, int min) {
    return (uint16_t *)p->block + scale_index(m, p, group, min);
}
static int8_t *factor_at(const sym_matrix *m, const struct place *p, int64_t group, int min) {
    return (int8_t *)p->block + scale_index(m, p, group, min);
}
/* The supers lie before the first of eight blocks. */
static uint16_t *super_at(const sym_matrix *m, const struct place *p, int min) {
    return (uint16_t *)(p->block - super_head(m)) + min * PANEL + p->feature;
}

static uint32_t *word_at(const sym_matrix *m, const struct place *p, int64_t step) {
    return (uint32_t *)(p->block + block_head(m) + step * STEP) + p->feature;
}

/* Write the codes of one block. */
static void put_codes(const sym_matrix *m, const struct place *p, const uint8_t *codes) {
    const int high_bits = m->bits - 4;
    uint32_t four, high[2] = {0, 0};
    for (int i = 0; i < SYM_BLOCK / 4; i++) {
        memcpy(&four, codes + 4 * i, 4);
        if (m->bits == 8) {
            *word_at(m, p, i) = four;
            continue;
        }
        const uint32_t low = four & 0x0f0f0f0fu;
        if (i % 2)
            *word_at(m, p, i / 2) |= low << 4;
        else
            *word_at(m, p, i / 2) = low;
        high[i * high_bits / 8] |= (four >> 4 & 0x03030303u) << i * high_bits % 8;
    }
    for (int i = 0; m->bits < 8 && i < high_bits; i++)
        *word_at(m, p, 4 + i) = high[i];
}

/* Read the codes of one block. */
static void get_codes(const sym_matrix *m, const struct place *p, uint8_t *codes) {
    const int high_bits = m->bits - 4;
    for (int i = 0; i < SYM_BLOCK / 4; i++) {
        uint32_t four;
        if (m->bits == 8) {
            four = *word_at(m, p, i);
        } else {
            four = *word_at(m, p, i / 2) >> i % 2 * 4 & 0x0f0f0f0fu;
            if (high_bits) {
                const uint32_t high = *word_at(m, p, 4 + i * high_bits / 8) >> i * high_bits % 8;
                four |= (high & (high_bits == 1 ? 0x01010101u : 0x03030303u)) << 4;
            }
        }
        memcpy(codes + 4 * i, &four, 4);
    }
}

/* Pack one row with 8-bit codes around zero. The largest magnitude of a block becomes 127 times the scale. */
static void pack_symmetric(const sym_matrix *m, const float *w, int64_t k, int64_t strip, int64_t lane) {
    for (int64_t first = 0; first < k; first += SYM_BLOCK) {
        int64_t end = first + SYM_BLOCK < k ? first + SYM_BLOCK : k;
        float largest = 0;
        for (int64_t i = first; i < end; i++)
            largest = fmaxf(largest, fabsf(w[i]));
        const struct place p = place_of(m, strip, lane, first / SYM_BLOCK);
        uint16_t scale = to_float16(largest / 127 / CODE_UNIT);
        float step = of_float16(scale) * CODE_UNIT, inverse = step > 0 ? 1 / step : 0;
        *half_at(m, &p, 0, 0) = scale;
        if (m->has_mins)
            *half_at(m, &p, 0, 1) = to_float16(-128 * of_float16(scale));
        uint8_t codes[SYM_BLOCK];
        for (int64_t i = first; i < first + SYM_BLOCK; i++) {
            float code = i < end ? nearbyintf(w[i] * inverse) : 0;
            codes[i - first] = (uint8_t)(128 + (int)fmaxf(-127, fminf(127, code)));
        }
        put_codes(m, &p, codes);
    }
}

#define LANES 8 /* sums of a group have as many parts, so that the compiler may use vectors */

static float total(const float *lanes) {
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

static float level(float w, float min, float inverse) {
    const float place = (w - min) * inverse + 0.5f, least = place > 0 ? place : 0;
    return (float)(int)(least < 15 ? least : 15);
}

/* Round a group to 16 levels from `low` to `high`, and find the scale and the min with which these codes fit best (least
 * squares). Return the sum of the squared errors. */
static float fit_levels(const float *w, float low, float high, float *scale, float *min) {
    const float inverse = high > low ? 15 / (high - low) : 0;
    float code[SYM_BLOCK], codes[LANES] = {0}, squares[LANES] = {0}, products[LANES] = {0}, sums[LANES] = {0};
    for (int i = 0; i < SYM_BLOCK; i += LANES)
        for (int j = 0; j < LANES; j++) {
            code[i + j] = level(w[i + j], low, inverse);
            codes[j] += code[i + j];
            squares[j] += code[i + j] * code[i + j];
            products[j] += code[i + j] * w[i + j];
            sums[j] += w[i + j];
        }
    const float spread = SYM_BLOCK * total(squares) - total(codes) * total(codes);
    *scale = spread > 0 ? (SYM_BLOCK * total(products) - total(codes) * total(sums)) / spread : 0;
    *min = (total(sums) - *scale * total(codes)) / SYM_BLOCK;
    float errors[LANES] = {0};
    for (int i = 0; i < SYM_BLOCK; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const float difference = *scale * code[i + j] + *min - w[i + j];
            errors[j] += difference * difference;
        }
    return total(errors);
}

/* Pack one row in 4-bit codes with mins. The outermost weights of a group may be cut off a little, if the others then
 * lie closer to their levels. */
static void pack_levels(const sym_matrix *m, const float *w, int64_t k, int64_t strip, int64_t lane) {
    for (int64_t first = 0; first < k; first += SYM_BLOCK) {
        float group[SYM_BLOCK], low = w[first], high = w[first], scale = 0, min = 0, least = INFINITY;
        for (int64_t i = 0; i < SYM_BLOCK; i++) { /* the last weight fills up a short group */
            group[i] = w[first + i < k ? first + i : k - 1];
            low = fminf(low, group[i]);
            high = fmaxf(high, group[i]);
        }
        for (int cut = 0; cut < 8; cut++) {
            const float off = (high - low) * (float)cut / 64;
            float one_scale, one_min;
            const float error = fit_levels(group, low + off, high - off, &one_scale, &one_min);
            if (error < least) {
                least = error;
                scale = one_scale;
                min = one_min;
            }
        }
        const struct place p = place_of(m, strip, lane, first / SYM_BLOCK);
        *half_at(m, &p, 0, 0) = to_float16(scale / CODE_UNIT);
        *half_at(m, &p, 0, 1) = to_float16(min / CODE_UNIT);
        scale = of_float16(*half_at(m, &p, 0, 0)) * CODE_UNIT;
        min = of_float16(*half_at(m, &p, 0, 1)) * CODE_UNIT;
        uint8_t codes[SYM_BLOCK];
        for (int i = 0; i < SYM_BLOCK; i++)
            codes[i] = (uint8_t)level(group[i], min, scale > 0 ? 1 / scale : 0);
        put_codes(m, &p, codes);
    }
}

static int64_t power_of_two_in(int64_t k) { return k & -k; }

/* Replace x by R x. */
static void rotate_inputs(const sym_matrix *m, float *x, int64_t k) {
    int64_t power = power_of_two_in(k), odd = k / power;
    float column[SYM_MAX_MIX], norm = 1 / sqrtf((float)power);
    for (int64_t half = 1; half < power; half *= 2)
        for (int64_t i = 0; i < k; i += 2 * half)
            for (int64_t j = i; j < i + half; j++) {
                float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    for (int64_t i = 0; i < k; i++)
        x[i] *= norm;
    for (int64_t j = 0; m->mix && j < power; j++) {
        for (int64_t o = 0; o < odd; o++)
            column[o] = x[o * power + j];
        for (int64_t o = 0; o < odd; o++) {
            float sum = 0;
            for (int64_t i = 0; i < odd; i++)
                sum += m->mix[o * odd + i] * column[i];
            x[o * power + j] = sum;
        }
    }
}

static char *rotated_scale_at(const sym_matrix *m, int64_t strip, int64_t lane) {
    return feature_at(m, strip, lane, m->k);
}

static void pack_rotated(const sym_matrix *m, const float *w, int64_t k, int64_t strip, int64_t lane) {
    float rotated[SYM_MAX_INPUTS], low = 0, high = 0; /* the loader checks k */
    memcpy(rotated, w, (size_t)k * sizeof *w);
    rotate_inputs(m, rotated, k);
    for (int64_t i = 0; i < k; i++) {
        low = fminf(low, rotated[i]);
        high = fmaxf(high, rotated[i]);
    }
    float scale = (high - low) / 255, inverse = scale > 0 ? 1 / scale : 0;
    int32_t zero = (int32_t)nearbyintf(-low * inverse);
    memcpy(rotated_scale_at(m, strip, lane), &scale, sizeof scale);
    memcpy(rotated_scale_at(m, strip, lane) + PANEL * 4, &zero, sizeof zero);
    for (int64_t i = 0; i < m->k; i++) {
        float code = (float)zero + (i < k ? nearbyintf(rotated[i] * inverse) : 0);
        ((uint8_t *)feature_at(m, strip, lane, i))[i % 4] = (uint8_t)fmaxf(0, fminf(255, code));
    }
}

void sym_pack(const sym_matrix *m, const float *w, int64_t n, int64_t k, int64_t first, int64_t every) {
    for (int64_t i = 0; i < n; i++) {
        const float *row = w + i * k;
        int64_t strip = first + i / 16 * every, lane = i % 16;
        if (has_codes(m->format)) {
            if (m->format == SYM_ROTATED8)
                pack_rotated(m, row, k, strip, lane);
            else if (m->bits == 8)
                pack_symmetric(m, row, k, strip, lane);
            else
                pack_levels(m, row, k, strip, lane);
            continue;
        }
        char *to = feature_at(m, strip, lane, 0);
        if (m->format == SYM_FLOAT32)
            for (int64_t j = 0; j < k; j++)
                memcpy(to + j * STEP, row + j, sizeof *row);
        else
            for (int64_t j = 0; j < k; j += 2) {
                uint16_t two[2] = {to_bfloat16(row[j]), j + 1 < k ? to_bfloat16(row[j + 1]) : 0};
                memcpy(to + j / 2 * STEP, two, sizeof two);
            }
    }
}

void sym_pack_codes(const sym_matrix *m, const sym_codes *c, int64_t n, int64_t k, int64_t first, int64_t every) {
    const int64_t blocks = k / SYM_BLOCK, per_block = GROUPS_OF_BLOCK(m), supers = k / SYM_SUPER;
    for (int64_t i = 0; i < n; i++)
        for (int64_t b = 0; b < blocks; b++) {
            const struct place p = place_of(m, first + i / 16 * every, i % 16, b);
            const int64_t super = i * supers + b / BLOCKS_OF_SUPER;
            for (int min = 0; min <= m->has_mins; min++) {
                const float *halves = min ? c->mins : c->scales;
                const int8_t *factors = min ? c->min_codes : c->scale_codes;
                if (m->has_supers && b % BLOCKS_OF_SUPER == 0)
                    *super_at(m, &p, min) = to_float16(halves[super] / CODE_UNIT);
                for (int64_t g = 0; g < per_block; g++) {
                    const int64_t group = (i * blocks + b) * per_block + g;
                    if (m->has_supers)
                        *factor_at(m, &p, g, min) = factors[group];
                    else
                        *half_at(m, &p, g, min) = to_float16(halves[group] / CODE_UNIT);
                }
            }
            put_codes(m, &p, c->codes + i * k + b * SYM_BLOCK);
        }
}

float sym_pack_q4_0(const sym_matrix *m, const uint8_t *blocks, int64_t n, int64_t k, int64_t first, int64_t every) {
    const int64_t groups = k / SYM_BLOCK, size = codes_block_bytes(m);
    const uint32_t low = 0x0f0f0f0f, high = 0xf0f0f0f0;
    uint16_t largest = 0; /* as bits: infinity and NaN are larger than all numbers */
    for (int64_t i = 0; i < n; i++) {
        const struct place p = place_of(m, first + i / 16 * every, i % 16, 0);
        char *codes = (char *)word_at(m, &p, 0), *scales = (char *)half_at(m, &p, 0, 0);
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *block = blocks + (i * groups + g) * 18;
            uint16_t scale;
            uint32_t bytes[4], *steps = (uint32_t *)(codes + g * size);
            memcpy(&scale, block, sizeof scale);
            memcpy(bytes, block + sizeof scale, sizeof bytes);
            largest = largest > (scale & 0x7fff) ? largest : scale & 0x7fff;
            *(uint16_t *)(scales + g * size) = to_float16(of_float16(scale) / CODE_UNIT);
            steps[0 * STEP / 4] = (bytes[0] & low) | (bytes[1] & low) << 4;
            steps[1 * STEP / 4] = (bytes[2] & low) | (bytes[3] & low) << 4;
            steps[2 * STEP / 4] = (bytes[0] >> 4 & low) | (bytes[1] & high);
            steps[3 * STEP / 4] = (bytes[2] >> 4 & low) | (bytes[3] & high);
        }
    }
    return of_float16(largest);
}

/* Return a scale of codes, or a min, in units of CODE_UNIT. */
static float scale_of(const sym_matrix *m, const struct place *p, int64_t block, int64_t group, int min) {
    if (!m->has_supers)
        return of_float16(*half_at(m, p, group, min));
    const struct place first = {p->block - block % BLOCKS_OF_SUPER * codes_block_bytes(m), p->feature};
    return of_float16(*super_at(m, &first, min)) * (float)*factor_at(m, p, group, min);
}

static void unpack_codes(const sym_matrix *m, int64_t strip, int64_t lane, int64_t k, float *out) {
    uint8_t codes[SYM_BLOCK];
    const int zero = m->has_mins ? 0 : 1 << (m->bits - 1);
    for (int64_t first = 0; first < k; first += SYM_BLOCK) {
        const struct place p = place_of(m, strip, lane, first / SYM_BLOCK);
        get_codes(m, &p, codes);
        for (int64_t i = first; i < k && i < first + SYM_BLOCK; i++) {
            const int64_t group = (i - first) / m->group;
            const int code = m->levels ? code_levels[m->levels][codes[i - first]] : codes[i - first] - zero;
            const float value = scale_of(m, &p, first / SYM_BLOCK, group, 0) * (float)code;
            const float min = m->has_mins ? scale_of(m, &p, first / SYM_BLOCK, group, 1) : 0;
            out[i] = (m->has_mins ? value + min : value) * CODE_UNIT;
        }
    }
}

void sym_unpack_row(const sym_matrix *m, int64_t row, int64_t k, float *out) {
    int64_t strip = row / 16, lane = row % 16;
    if (m->format == SYM_ROTATED8) {
        float scale;
        int32_t zero;
        memcpy(&scale, rotated_scale_at(m, strip, lane), sizeof scale);
        memcpy(&zero, rotated_scale_at(m, strip, lane) + PANEL * 4, sizeof zero);
        for (int64_t i = 0; i < k; i++)
            out[i] = (float)(((const uint8_t *)feature_at(m, strip, lane, i))[i % 4] - zero) * scale;
        rotate_inputs(m, out, k);
        return;
    }
    if (!has_codes(m->format)) {
        const char *from = feature_at(m, strip, lane, 0);
        for (int64_t i = 0; i < k; i++) {
            uint16_t narrow;
            if (m->format == SYM_FLOAT32) {
                memcpy(out + i, from + i * STEP, sizeof *out);
            } else {
                memcpy(&narrow, from + i / 2 * STEP + i % 2 * 2, sizeof narrow);
                out[i] = of_bfloat16(narrow);
            }
        }
        return;
    }
    unpack_codes(m, strip, lane, k, out);
}

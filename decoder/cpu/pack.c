/* Packing of matrices into their layout in memory (see step.h), and reading of single rows as embeddings. */

#include "panels.h"

int64_t sym_packed_bytes(const sym_matrix *m) { return (m->n + PANEL - 1) / PANEL * panel_bytes(m); }

/* Return the address of the four bytes of one feature that contain input i. */
static char *feature_at(const sym_matrix *m, int64_t strip, int64_t lane, int64_t i) {
    char *panel = m->data + strip / 2 * panel_bytes(m) + (strip % 2 * 16 + lane) * 4;
    long per_step = inputs_per_step(m->format);
    if (!has_groups(m->format))
        return panel + i / per_step * STEP;
    return panel + i / SYM_GROUP * group_bytes(m) + group_head(m) + i % SYM_GROUP / per_step * STEP;
}

static uint16_t *scale_at(const sym_matrix *m, int64_t strip, int64_t lane, int64_t group) {
    return (uint16_t *)(m->data + strip / 2 * panel_bytes(m) + group * group_bytes(m)) + strip % 2 * 16 + lane;
}

/* Write the codes of one group. A step of a panel has four bytes for each feature: the codes of four inputs, or of eight
 * inputs with 4 bits. */
static void put_codes(const sym_matrix *m, int64_t strip, int64_t lane, int64_t group, const uint8_t *codes) {
    char *to = feature_at(m, strip, lane, group * SYM_GROUP);
    if (m->format == SYM_CODES8) {
        for (int step = 0; step < SYM_GROUP / 4; step++)
            memcpy(to + step * STEP, codes + 4 * step, 4);
        return;
    }
    for (int step = 0; step < SYM_GROUP / 8; step++) {
        uint32_t low, high;
        memcpy(&low, codes + 8 * step, 4);
        memcpy(&high, codes + 8 * step + 4, 4);
        low |= high << 4;
        memcpy(to + step * STEP, &low, 4);
    }
}

/* Pack one row with codes around zero. The largest magnitude of a group becomes 127 times the scale. */
static void pack_symmetric(const sym_matrix *m, const float *w, int64_t k, int64_t strip, int64_t lane) {
    for (int64_t first = 0; first < k; first += SYM_GROUP) {
        int64_t end = first + SYM_GROUP < k ? first + SYM_GROUP : k;
        float largest = 0;
        for (int64_t i = first; i < end; i++)
            largest = fmaxf(largest, fabsf(w[i]));
        uint16_t scale = to_float16(largest / 127 / CODE_UNIT);
        float step = of_float16(scale) * CODE_UNIT, inverse = step > 0 ? 1 / step : 0;
        uint16_t *head = scale_at(m, strip, lane, first / SYM_GROUP);
        head[0] = scale;
        if (m->has_mins)
            head[PANEL] = to_float16(-128 * of_float16(scale));
        uint8_t codes[SYM_GROUP];
        for (int64_t i = first; i < first + SYM_GROUP; i++) {
            float code = i < end ? nearbyintf(w[i] * inverse) : 0;
            codes[i - first] = (uint8_t)(128 + (int)fmaxf(-127, fminf(127, code)));
        }
        put_codes(m, strip, lane, first / SYM_GROUP, codes);
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
    float code[SYM_GROUP], codes[LANES] = {0}, squares[LANES] = {0}, products[LANES] = {0}, sums[LANES] = {0};
    for (int i = 0; i < SYM_GROUP; i += LANES)
        for (int j = 0; j < LANES; j++) {
            code[i + j] = level(w[i + j], low, inverse);
            codes[j] += code[i + j];
            squares[j] += code[i + j] * code[i + j];
            products[j] += code[i + j] * w[i + j];
            sums[j] += w[i + j];
        }
    const float spread = SYM_GROUP * total(squares) - total(codes) * total(codes);
    *scale = spread > 0 ? (SYM_GROUP * total(products) - total(codes) * total(sums)) / spread : 0;
    *min = (total(sums) - *scale * total(codes)) / SYM_GROUP;
    float errors[LANES] = {0};
    for (int i = 0; i < SYM_GROUP; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const float difference = *scale * code[i + j] + *min - w[i + j];
            errors[j] += difference * difference;
        }
    return total(errors);
}

/* Pack one row in 4-bit codes with mins. The outermost weights of a group may be cut off a little, if the others then
 * lie closer to their levels. */
static void pack_levels(const sym_matrix *m, const float *w, int64_t k, int64_t strip, int64_t lane) {
    for (int64_t first = 0; first < k; first += SYM_GROUP) {
        float group[SYM_GROUP], low = w[first], high = w[first], scale = 0, min = 0, least = INFINITY;
        for (int64_t i = 0; i < SYM_GROUP; i++) { /* the last weight fills up a short group */
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
        uint16_t *head = scale_at(m, strip, lane, first / SYM_GROUP);
        head[0] = to_float16(scale / CODE_UNIT);
        head[PANEL] = to_float16(min / CODE_UNIT);
        scale = of_float16(head[0]) * CODE_UNIT;
        min = of_float16(head[PANEL]) * CODE_UNIT;
        uint8_t codes[SYM_GROUP];
        for (int i = 0; i < SYM_GROUP; i++)
            codes[i] = (uint8_t)level(group[i], min, scale > 0 ? 1 / scale : 0);
        put_codes(m, strip, lane, first / SYM_GROUP, codes);
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
            if (m->format == SYM_CODES4)
                pack_levels(m, row, k, strip, lane);
            else if (has_groups(m->format))
                pack_symmetric(m, row, k, strip, lane);
            else
                pack_rotated(m, row, k, strip, lane);
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

void sym_pack_codes(const sym_matrix *m, const uint8_t *codes, const float *scales, const float *mins, int64_t n,
                    int64_t k, int64_t first, int64_t every) {
    int64_t groups = k / SYM_GROUP;
    for (int64_t i = 0; i < n; i++) {
        int64_t strip = first + i / 16 * every, lane = i % 16;
        for (int64_t g = 0; g < groups; g++) {
            uint16_t *head = scale_at(m, strip, lane, g);
            head[0] = to_float16(scales[i * groups + g] / CODE_UNIT);
            if (mins)
                head[PANEL] = to_float16(mins[i * groups + g] / CODE_UNIT);
            put_codes(m, strip, lane, g, codes + i * k + g * SYM_GROUP);
        }
    }
}

float sym_pack_q4_0(const sym_matrix *m, const uint8_t *blocks, int64_t n, int64_t k, int64_t first, int64_t every) {
    int64_t groups = k / SYM_GROUP, size = group_bytes(m);
    uint32_t low = 0x0f0f0f0f, high = 0xf0f0f0f0;
    uint16_t largest = 0; /* as bits: infinity and NaN are larger than all numbers */
    for (int64_t i = 0; i < n; i++) {
        int64_t strip = first + i / 16 * every, lane = i % 16;
        char *codes = feature_at(m, strip, lane, 0), *scales = (char *)scale_at(m, strip, lane, 0);
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
    for (int64_t i = 0; i < k; i++) {
        uint16_t *head = scale_at(m, strip, lane, i / SYM_GROUP);
        uint8_t byte = ((const uint8_t *)feature_at(m, strip, lane, i))[i % 4];
        int code = m->format == SYM_CODES8 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
        int zero = m->has_mins ? 0 : m->format == SYM_CODES8 ? 128 : 8;
        float value = of_float16(head[0]) * (float)(code - zero);
        out[i] = (m->has_mins ? value + of_float16(head[PANEL]) : value) * CODE_UNIT;
    }
}

/* Everything that rows are asked for, and stop texts, under sanitizers: rows that end where their memory ends, with every
 * set of instructions that this machine has, in several threads. Each gives the same bits as the one for any processor. */
#include "rows.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#ifdef SHORT_RUN
enum { NUM_DRAWS = 10, NUM_SHAPED = 6 };
#else
enum { NUM_DRAWS = 40, NUM_SHAPED = 30 };
#endif
enum { NUM_THREADS = 3, MOST_NAMED = 3, NUM_REDUCED = 3 };

/* What one row gave; compared as bytes. */
struct found {
    int64_t argmax, drawn[NUM_DRAWS], shaped[3][NUM_SHAPED];
    double logsumexp, entropy;
    struct sym_reduced head;
    struct sym_scored top[8];
    float named[MOST_NAMED], softmax;
    char reduced[NUM_REDUCED][sizeof(struct sym_reduced) + 8 * sizeof(struct sym_scored) + sizeof(float[MOST_NAMED])];
};

/* Draws of a sampler with all that struct sym_sampling_more has; its block ends where its memory ends. */
static void draw_shaped(const float *row, int64_t n, uint32_t mirostat, int64_t *drawn) {
    const struct sym_sampling settings = {
        .temperature = 1.1,
        .top_p = 0.99,
        .top_k = mirostat == 2 ? 60 : 0,
        .repetition_penalty = 1.2f,
        .presence_penalty = 0.3f,
        .num_before = 3,
        .flags = SYM_SAMPLING_MORE,
    };
    const struct sym_sampling_more more = {
        .typical_p = mirostat == 1 ? 1.0 : 0.9,
        .dry_multiplier = 0.8,
        .dry_base = 1.75,
        .mirostat_tau = 3.0,
        .mirostat_eta = 0.2,
        .mirostat = mirostat,
        .penalty_window = 7,
        .dry_window = mirostat == 0 ? 20 : 0,
        .dry_allowed_length = mirostat,
        .breaker_bytes = 2,
    };
    const int32_t before[3] = {0, (int32_t)(n - 1), 0};
    const size_t bytes = sizeof settings + sizeof more + 2 + sizeof before, mask_bytes = ((size_t)n + 31) / 32 * 4;
    char *block = malloc(bytes), *breakers = calloc(1, mask_bytes);
    CHECK(block != NULL && breakers != NULL);
    memcpy(block, &settings, sizeof settings);
    memcpy(block + sizeof settings, &more, sizeof more);
    memcpy(block + sizeof settings + sizeof more, "b", 2);
    memcpy(block + sizeof settings + sizeof more + 2, before, sizeof before);
    breakers[0] = 4;
    CHECK(sym_sampler_new(block, bytes - 1, (uint32_t)n, breakers) == NULL);
    sym_sampler *sampler = sym_sampler_new(block, bytes, (uint32_t)n, breakers);
    CHECK(sampler != NULL);
    free(block);
    free(breakers);
    for (int i = 0; i < NUM_SHAPED; i++) {
        drawn[i] = sym_sampler_draw(sampler, row, NULL, (uint64_t)i);
        CHECK(drawn[i] >= 0 && drawn[i] < n && drawn[i] == sym_sampler_draw(sampler, row, NULL, (uint64_t)i));
        CHECK(sym_sampler_note(sampler, (int32_t)drawn[i]) == 0);
    }
    for (int i = 0; i < 600; i++) /* tokens take more room */
        CHECK(sym_sampler_note(sampler, (int32_t)(i % (n < 9 ? n : 9))) == 0);
    CHECK(sym_sampler_draw(sampler, row, NULL, NUM_SHAPED) >= 0);
    sym_sampler_free(sampler);
}

static struct found look_at_row(int64_t n, unsigned seed) {
    struct found found;
    memset(&found, 0, sizeof found);
    float *row = malloc((size_t)n * sizeof *row), *out = malloc((size_t)n * sizeof *out);
    const size_t mask_bytes = ((size_t)n + 31) / 32 * 4;
    unsigned char *allowed = malloc(mask_bytes);
    CHECK(row != NULL && out != NULL && allowed != NULL);
    memset(allowed, 0xa5, mask_bytes);
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        row[i] = (float)(seed >> 16) / 4096.0f * (seed & 64 ? 1.0f : 0.1f); /* some are equal */
    }
    const int32_t named[MOST_NAMED] = {0, (int32_t)(n / 2), (int32_t)(n - 1)};
    const uint32_t top_k = n < 8 ? (uint32_t)n : 8;
    found.argmax = sym_row_argmax(row, n, allowed);
    CHECK(sym_row_logsumexp(row, n, NULL, &found.logsumexp) == 0);
    CHECK(sym_row_entropy(row, n, allowed, &found.entropy) == 0);
    CHECK(sym_row_softmax(row, n, NULL, out) == 0);
    found.softmax = out[n - 1];
    CHECK(sym_row_reduce(row, n, top_k, named, MOST_NAMED, &found.head, found.top, found.named) == 0);
    int32_t *indices = malloc((size_t)n * sizeof *indices);
    double *logprobs = malloc((size_t)n * sizeof *logprobs);
    CHECK(sym_row_topk(row, n, NULL, n, indices, logprobs) == 0 && indices[0] == found.top[0].token);

    const struct sym_sampling settings = {.temperature = 0.7, .top_p = 0.95, .repetition_penalty = 1.2f, .num_bias = 1};
    const struct sym_bias bias = {.token = 0, .bias = -1.0f};
    char block[sizeof settings + sizeof bias];
    memcpy(block, &settings, sizeof settings);
    memcpy(block + sizeof settings, &bias, sizeof bias);
    sym_sampler *sampler = sym_sampler_new(block, sizeof block, (uint32_t)n, NULL);
    CHECK(sampler != NULL);
    for (int i = 0; i < NUM_DRAWS; i++) {
        const int64_t top = i % 4 == 0 ? 0 : i;
        found.drawn[i] = i % 2 ? sym_sampler_draw(sampler, row, i % 8 == 1 ? allowed : NULL, (uint64_t)i)
                               : sym_row_sample(row, n, i % 3 ? NULL : allowed, 0.9, top, i % 5 ? 1.0 : 0.8,
                                                i % 7 ? 0.0 : 0.05, sym_uniform((uint64_t)i));
        CHECK(found.drawn[i] >= 0 && found.drawn[i] < n);
        CHECK(sym_sampler_note(sampler, (int32_t)found.drawn[i]) == 0);
    }
    CHECK(sym_sampler_note(sampler, (int32_t)n) < 0);
    for (uint32_t mirostat = 0; mirostat <= 2; mirostat++)
        draw_shaped(row, n, mirostat, found.shaped[mirostat]);
    sym_reducer *reducer = sym_reducer_new((uint32_t)n, top_k, named, MOST_NAMED, sampler);
    CHECK(reducer != NULL && sym_reducer_bytes(reducer) <= (int64_t)sizeof found.reduced[0]);
    char *answer = malloc((size_t)sym_reducer_bytes(reducer)); /* ends where the answer ends */
    CHECK(answer != NULL);
    for (int i = 0; i < NUM_REDUCED; i++) {
        CHECK(sym_reducer_reduce(reducer, row, (uint64_t)i, answer) == 0);
        memcpy(found.reduced[i], answer, (size_t)sym_reducer_bytes(reducer));
    }
    row[n / 2] = NAN;
    CHECK(sym_row_argmax(row, n, NULL) < 0);
    CHECK(sym_reducer_reduce(reducer, row, 0, answer) < 0);
    free(answer);
    sym_reducer_free(reducer);
    sym_sampler_free(sampler);
    free(row);
    free(out);
    free(allowed);
    free(indices);
    free(logprobs);
    return found;
}

/* Stop texts over tokens whose bytes end where their memory ends; the table is everybody's. */
static const uint64_t token_begins[] = {0, 1, 3, 3, 6};
static sym_token_texts token_texts = {.begins = token_begins, .num_tokens = 4}; /* a, ab, nothing, bab */

static void watch_for_texts(void) {
    static const char texts[] = "ababcaabbabb"; /* ababc, aab, babb: the first never comes */
    static const uint32_t lengths[] = {5, 3, 4};
    static const int32_t tokens[] = {1, 1, 2, 3, 1, 3, 0, 1};
    char *own = malloc(sizeof texts - 1);
    CHECK(own != NULL);
    memcpy(own, texts, sizeof texts - 1);
    sym_stops *stops = sym_stops_new(&token_texts, own, lengths, 3), *none = sym_stops_new(&token_texts, NULL, NULL, 0);
    free(own);
    CHECK(stops != NULL && none != NULL);
    CHECK(sym_stops_add(stops, 4) < -1 && sym_stops_add(stops, -1) < -1);
    for (int i = 0; i < 8; i++) {
        CHECK(sym_stops_add(stops, tokens[i]) == (i < 3 ? -1 : 2)); /* abab-bab: babb is complete */
        CHECK(sym_stops_add(none, tokens[i]) == -1);
    }
    CHECK(sym_stops_found(stops) == 2);
    sym_stops_free(stops);
    sym_stops_free(none);
    char *bits = calloc(1, 4);
    CHECK(bits != NULL && sym_tokens_with(&token_texts, "ba", 2, bits) == 1 && bits[0] == 1 << 3); /* not a|ab|bab */
    CHECK(sym_tokens_with(&token_texts, "a", 1, bits) == 3 && bits[0] == 0xb);
    free(bits);
}

static const int64_t sizes[] = {1, 15, 17, 511, 513, 1000, 20001};
enum { NUM_SIZES = sizeof sizes / sizeof *sizes };
static struct found expected[NUM_SIZES];

static void *look_at_rows(void *unused) {
    watch_for_texts();
    for (int i = 0; i < NUM_SIZES; i++) {
        const struct found found = look_at_row(sizes[i], (unsigned)i);
        CHECK(memcmp(&found, &expected[i], sizeof found) == 0);
    }
    return unused;
}

int main(void) {
    char *bytes = malloc(6);
    CHECK(bytes != NULL);
    memcpy(bytes, "aabbab", 6);
    token_texts.bytes = bytes;
    CHECK(sym_rows_use(0) == 0);
    for (int i = 0; i < NUM_SIZES; i++)
        expected[i] = look_at_row(sizes[i], (unsigned)i);
    for (int bits = 0; bits <= 512; bits += 256) {
        if (sym_rows_use(bits) != 0)
            continue;
        pthread_t threads[NUM_THREADS];
        for (int i = 0; i < NUM_THREADS; i++)
            pthread_create(&threads[i], NULL, look_at_rows, NULL);
        for (int i = 0; i < NUM_THREADS; i++)
            pthread_join(threads[i], NULL);
    }
    free(bytes);
    return 0;
}

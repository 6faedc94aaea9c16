/* The sampler, for programs and for the daemon: draws a token from a row of logits.
 *
 * A draw has these steps, in this order. Logit bias is added. Penalties and DRY are applied, see history.c. The
 * repetition penalty divides a positive logit of tokens before and generated, and multiplies a negative one. Frequency
 * and presence penalties are subtracted from logits of generated tokens. Tokens that are not allowed get -inf. The
 * logits are divided by the temperature (0: the argmax). top_k keeps the k likeliest. typical_p keeps the fewest tokens
 * that have this fraction of the remaining mass, beginning with those whose surprise (-log p) is nearest to the
 * entropy. top_p keeps the fewest likeliest tokens that have this fraction of the remaining mass. min_p keeps tokens
 * with at least this fraction of the likeliest token's probability. mirostat keeps tokens within its limit. Then a
 * random number u in [0, 1) chooses a token. The token at which the running sum of the kept probabilities exceeds u is
 * drawn. With top_k, typical_p, top_p or mirostat 1, the sum begins with the likeliest token, else with the lowest id.
 */
#include "rows_state.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- limits and the draw ----------------------------------------------------------------------------- */

/* splitmix64: each random number adds STRIDE to the generator's state, and mixes the new state. */
#define STRIDE 0x9e3779b97f4a7c15u

static uint64_t mixed(uint64_t state) {
    uint64_t z = state + STRIDE;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* The state of a seed's stream before the draw with the serial number `draw`. The seed is mixed first. Otherwise the
 * streams of seeds that differ by STRIDE would be one stream, shifted by a draw. */
uint64_t sym_stream(uint64_t seed, uint64_t draw) { return mixed(seed) + draw * STRIDE; }

/* The random number in [0, 1) of a state. */
double sym_uniform(uint64_t stream) { return (double)(mixed(stream) >> 11) * 0x1p-53; }

struct limits {
    float inverse_temperature; /* INFINITY: the argmax */
    float floor;               /* 0: off */
    double top_p, typical_p;   /* 1: off */
    int64_t top_k;             /* 0: off */
};

/* Mirostat keeps the surprise of drawn tokens near `tau` bits: each draw moves the limit `mu` by `eta` times the error.
 * A repeated draw, with the same index, has the same limit. */
struct mirostat {
    uint32_t version; /* 0: off */
    double tau, eta;
    double mu, next_mu; /* limits for the `index`-th draw, and for the next draw */
    uint64_t index;
};

static struct limits limits_of(double temperature, int64_t top_k, double top_p, double min_p) {
    return (struct limits){
        .inverse_temperature = temperature <= 0.0         ? INFINITY
                               : 1.0 / temperature < 1e30 ? (float)(1.0 / temperature)
                                                          : 1e30f,
        .floor = (float)min_p,
        .top_p = top_p,
        .typical_p = 1.0,
        .top_k = top_k,
    };
}

/* Draws without ranking, in the order of the indices. `*mass` gets the mass of the tokens that may be drawn. */
static int64_t draw_unranked(struct scratch *scratch, const float *row, int64_t n, float max,
                             const struct limits *limits, double u, double *mass) {
    double *masses = scratch->masses;
    *mass = passes->mass(row, n, max, limits->inverse_temperature, limits->floor, masses);
    double left = u * *mass;
    int64_t block = 0;
    int inside = 0;
    for (int64_t i = 0; i * BLOCK < n && !inside; i++) {
        if (masses[i] == 0.0)
            continue;
        block = i * BLOCK;
        inside = left < masses[i];
        left -= inside ? 0.0 : masses[i];
    }
    if (!inside)
        left = INFINITY; /* u is nearly 1, and the sums were rounded down: take the last possible token */
    const int64_t count = n - block < BLOCK ? n - block : BLOCK;
    float *weights = scratch->list.weights;
    passes->weigh(row + block, count, max, limits->inverse_temperature, weights);
    int64_t token = 0;
    for (int64_t i = 0; i < count && left >= 0.0; i++) {
        if (weights[i] == 0.0f || weights[i] < limits->floor)
            continue;
        token = block + i;
        left -= weights[i];
    }
    return token;
}

/* If the groups' maxima alone weigh more than this, the row is so flat that a nucleus has thousands of entries. For
 * such a row all weights are computed once and kept. For other rows the weights are summed first, and computed again
 * for the collected entries. */
#define FLAT 64.0

/* Without top_k: puts the entries that may be kept into the scratch's list, with weights. Returns the row's mass. */
static double weigh_candidates(struct scratch *scratch, const float *row, int64_t n, float max,
                               const struct limits *limits) {
    const float inverse_temperature = limits->inverse_temperature;
    sym_list groups = rank_groups(scratch, n), *list = &scratch->list;
    const double grouped = passes->weigh(groups.values, groups.count, max, inverse_temperature, groups.weights);
    double total = 0.0;
    float least = -INFINITY;
    if (grouped < FLAT || limits->floor > 0.0f) {
        total = passes->mass(row, n, max, inverse_temperature, 0.0f, NULL);
        const double target = limits->top_p * total;
        if (grouped > target * 1.00001) /* a margin larger than the rounding of sums */
            least = rank_mark(&groups, grouped, target * 1.00001, 0, list, scratch->keys).value;
        /* Entries below `lowest` are below the floor, with a margin larger than the rounding of exponentials. */
        const float lowest = max + (logf(limits->floor) - 0.01f) / inverse_temperature - fabsf(max) * 1e-5f;
        least = lowest > least ? lowest : least; /* both limits cut the low end, so the higher one applies */
    }
    list->count = passes->collect(row, n, least, list->values, list->indices);
    list->sorted = 0;
    const double weighed = passes->weigh(list->values, list->count, max, inverse_temperature, list->weights);
    return total > 0.0 ? total : weighed;
}

/* Computes the weights of the scratch's list, relative to its largest logit `max`. Returns their sum. */
static double weigh_list(struct scratch *scratch, float max, const struct limits *limits) {
    const sym_list *list = &scratch->list;
    return passes->weigh(list->values, list->count, max, limits->inverse_temperature, list->weights);
}

static double list_mass(const sym_list *list) {
    double mass, nothing;
    passes->split(list->values, list->weights, list->count, -INFINITY, -INFINITY, &mass, &nothing);
    return mass;
}

/* Replaces a list's values by the negated distance of the scaled logit from the mean, so that the nearest entry ranks
 * best. Entries without weight are dropped: their surprise is infinite. */
static void rank_by_distance(sym_list *list, float max, float inverse_temperature, double mean) {
    list->count = passes->keep_best(list, rank_everything, FLT_MIN);
    for (int64_t i = 0; i < list->count; i++)
        list->values[i] = (float)-fabs((double)((list->values[i] - max) * inverse_temperature) - mean);
}

/* Without top_k: puts the entries that may be typical into the scratch's list, in the order of indices, with weights.
 * Returns the row's mass, and sets `*mean` to the mean scaled logit. If the groups' maxima within some distance of the
 * mean have the wanted mass, the whole row's entries within that distance have it, too. */
static double weigh_typical(struct scratch *scratch, const float *row, int64_t n, float max,
                            const struct limits *limits, double *mean) {
    const float inverse_temperature = limits->inverse_temperature;
    sym_list groups = rank_groups(scratch, n), *list = &scratch->list;
    double total, least = -INFINITY;
    passes->moments(row, n, max, inverse_temperature, &total, mean);
    *mean /= total;
    const double grouped = passes->weigh(groups.values, groups.count, max, inverse_temperature, groups.weights);
    const double target = limits->typical_p * total * 1.00001; /* a margin larger than the rounding of sums */
    if (grouped > target) {
        rank_by_distance(&groups, max, inverse_temperature, *mean);
        const double distance = -rank_mark(&groups, grouped, target, 0, list, scratch->keys).value;
        least = max + (*mean - distance - 0.01) / inverse_temperature - fabs(max) * 1e-5;
    }
    list->count = passes->collect(row, n, (float)least, list->values, list->indices);
    list->sorted = 0;
    weigh_list(scratch, max, limits);
    return total;
}

/* Keeps the typical entries of the scratch's list, which is in the order of indices. Sets `*max` to the largest logit
 * of the kept entries, computes their weights anew, and returns the mass. A token's surprise minus the entropy equals
 * the mean scaled logit minus the token's scaled logit. */
static double keep_typical(struct scratch *scratch, const float *row, float *max, const struct limits *limits,
                           double mass, double mean) {
    sym_list *list = &scratch->list;
    rank_by_distance(list, *max, limits->inverse_temperature, mean);
    const sym_mark last = rank_mark(list, mass, limits->typical_p * mass, 0, &scratch->other, scratch->keys);
    list->count = passes->keep_best(list, last, FLT_MIN);
    *max = -INFINITY;
    for (int64_t i = 0; i < list->count; i++) {
        list->values[i] = row[list->indices[i]];
        *max = list->values[i] > *max ? list->values[i] : *max;
    }
    return weigh_list(scratch, *max, limits);
}

enum { ZIPF_TOKENS = 100 }; /* number of likeliest tokens from which the exponent is estimated */

/* Mirostat 1: the number of likeliest tokens to keep for a surprise of `mu`. The formula assumes that the probabilities
 * of the n tokens fall as rank^-s, with s estimated from the likeliest tokens. */
static double count_of_surprise(struct scratch *scratch, int64_t n, double mu) {
    float weights[ZIPF_TOKENS];
    const int64_t count = rank_weights(scratch, ZIPF_TOKENS, weights);
    double products = 0.0, squares = 0.0;
    for (int64_t i = 0; i + 1 < count; i++) {
        const double step = log((double)(i + 2) / (double)(i + 1));
        products += step * log((double)weights[i] / (double)weights[i + 1]);
        squares += step * step;
    }
    if (count < 2)
        return 1.0;
    const double s = products / squares, beyond = s - 1.0;
    const double factor =
        fabs(beyond) > 1e-9 ? beyond / (1.0 - pow((double)n, -beyond)) : 1.0 / log((double)n); /* the limit for s = 1 */
    return pow(factor * exp2(mu), 1.0 / s);
}

/* The least weight of a token whose surprise is within the limit of mirostat 2, at most the weight of the likeliest
 * token. `mass` is the sum of all weights. */
static float lightest_within(const struct mirostat *mirostat, double mass) {
    return fminf((float)(exp2(-mirostat->mu) * mass), 1.0f);
}

/* Cuts the scratch's list: version 1 by the number of tokens, version 2 by their surprise. Keeps the likeliest
 * token. */
static void limit_surprise(struct scratch *scratch, int64_t n, const struct mirostat *mirostat) {
    const sym_list *list = &scratch->list;
    if (mirostat->version == 2) {
        rank_keep(scratch, rank_everything, lightest_within(mirostat, list_mass(list)));
        return;
    }
    const double count = count_of_surprise(scratch, n, mirostat->mu);
    if (!(count >= (double)list->count)) /* also true for NaN */
        rank_keep(scratch, rank_place(scratch, count > 1.0 ? (int64_t)count : 1), 0.0f);
}

/* Computes the limit of the next draw, after a token with this logit was drawn from tokens of this mass. */
static void note_surprise(struct mirostat *mirostat, float logit, float max, const struct limits *limits, double mass) {
    float weights[LANES];
    passes->weigh(&logit, 1, max, limits->inverse_temperature, weights);
    mirostat->next_mu = mirostat->mu - mirostat->eta * (log2(mass / (double)weights[0]) - mirostat->tau);
}

static int64_t draw_ranked(struct scratch *scratch, const float *row, int64_t n, float max, const struct limits *limits,
                           struct mirostat *mirostat, double u) {
    sym_list *list = &scratch->list;
    const int is_typical = limits->typical_p < 1.0;
    double total, mean;
    if (limits->top_k <= 0 || limits->top_k >= n) {
        total = is_typical ? weigh_typical(scratch, row, n, max, limits, &mean)
                           : weigh_candidates(scratch, row, n, max, limits);
    } else if (is_typical) {
        rank_best_in_order(scratch, row, n, limits->top_k);
        weigh_list(scratch, max, limits);
        passes->moments(list->values, list->count, max, limits->inverse_temperature, &total, &mean);
        mean /= total;
    } else {
        rank_best(scratch, row, n, limits->top_k);
        total = weigh_list(scratch, max, limits);
    }
    if (is_typical)
        total = keep_typical(scratch, row, &max, limits, total, mean);
    sym_mark last = rank_everything;
    if (limits->top_p < 1.0)
        last = rank_mark(list, total, limits->top_p * total, 0, &scratch->other, scratch->keys);
    rank_keep(scratch, last, limits->floor > 0.0f ? limits->floor : FLT_MIN); /* drops entries without weight */
    if (mirostat->version != 0)
        limit_surprise(scratch, n, mirostat);
    const double mass = list_mass(list);
    const sym_mark drawn = rank_mark(list, mass, u * mass, 1, &scratch->other, scratch->keys);
    if (mirostat->version != 0)
        note_surprise(mirostat, drawn.value, max, limits, mass);
    return drawn.index;
}

/* Draws a token. -EDOM: the row has NaN or +inf; -ERANGE: all logits are -inf; -ENOMEM. */
static int64_t draw(const float *row, int64_t n, const struct limits *limits, struct mirostat *mirostat, double u) {
    if (limits->inverse_temperature == INFINITY || limits->top_k == 1)
        return sym_row_argmax(row, n, NULL);
    struct scratch *scratch = scratch_for(n);
    if (scratch == NULL)
        return -ENOMEM;
    float max;
    const int rc = row_look(&row, n, NULL, scratch->groups, &max);
    if (rc != 0)
        return rc;
    const int is_whole = (limits->top_k <= 0 || limits->top_k >= n) && limits->top_p >= 1.0 && limits->typical_p >= 1.0;
    if (is_whole && mirostat->version != 1) {
        struct limits floored = *limits;
        double mass;
        if (mirostat->version == 2) {
            mass = passes->mass(row, n, max, limits->inverse_temperature, limits->floor, NULL);
            floored.floor = fmaxf(limits->floor, lightest_within(mirostat, mass));
        }
        const int64_t token = draw_unranked(scratch, row, n, max, &floored, u, &mass);
        if (mirostat->version == 2)
            note_surprise(mirostat, row[token], max, limits, mass);
        return token;
    }
    return draw_ranked(scratch, row, n, max, limits, mirostat, u);
}

/* Draws a token with the random number u in [0, 1). top_k 0, top_p 1, min_p 0: off. */
int64_t sym_row_sample(const float *row, int64_t n, const void *allowed, double temperature, int64_t top_k,
                       double top_p, double min_p, double u) {
    const struct limits limits = limits_of(temperature, top_k, top_p, min_p);
    const int rc = row_only_allowed(&row, n, allowed);
    struct mirostat none = {.version = 0};
    return rc != 0 ? rc : draw(row, n, &limits, &none, u);
}

/* ---- a sampler: settings, and the state between draws ---------------------------------------------- */

struct sym_sampler {
    struct limits limits;
    struct mirostat mirostat;
    struct history history;
    uint64_t stream, stride; /* random state before the first draw, and its change from draw to draw */
    int64_t vocab_size;
    uint32_t num_bias;
    struct sym_bias *bias;
    char *allowed; /* bitmask; NULL: all tokens */
};

void sym_sampler_free(sym_sampler *sampler) {
    if (sampler == NULL)
        return;
    free(sampler->bias);
    free(sampler->allowed);
    history_free(&sampler->history);
    free(sampler);
}

#define MOST_MIROSTAT 1e6 /* bound of tau and eta, so that the limit stays finite */

/* Whether all settings are in range. */
static int is_valid(const struct sym_sampling *settings, const struct sym_sampling_more *more) {
    return settings->temperature >= 0.0 && settings->top_p >= 0.0 && settings->top_p <= 1.0 && settings->min_p >= 0.0 &&
           settings->min_p <= 1.0 && settings->repetition_penalty >= 0.0f && settings->repetition_penalty < INFINITY &&
           isfinite(settings->presence_penalty) && isfinite(settings->frequency_penalty) &&
           settings->flags <= (SYM_SAMPLING_ALLOWED | SYM_SAMPLING_STREAM | SYM_SAMPLING_MORE) &&
           more->typical_p >= 0.0 && more->typical_p <= 1.0 && more->dry_multiplier >= 0.0 &&
           more->dry_multiplier < INFINITY && more->dry_base >= 0.0 && more->dry_base < INFINITY &&
           more->mirostat <= 2 && more->mirostat_tau >= 0.0 && more->mirostat_tau <= MOST_MIROSTAT &&
           more->mirostat_eta >= 0.0 && more->mirostat_eta <= MOST_MIROSTAT && more->reserved == 0;
}

/* Reads the settings at the beginning of a block. Returns the length of the settings and of all parts that follow them;
 * -EINVAL: the block is shorter. */
static int64_t read_settings(const char *block, uint64_t bytes, uint32_t vocab_size, struct sym_sampling *settings,
                             struct sym_sampling_more *more) {
    uint64_t all = sizeof *settings;
    *more = (struct sym_sampling_more){0};
    if (bytes < all)
        return -EINVAL;
    memcpy(settings, block, sizeof *settings);
    if (settings->flags & SYM_SAMPLING_MORE) {
        if (bytes < all + sizeof *more)
            return -EINVAL;
        memcpy(more, block + all, sizeof *more);
        all += sizeof *more + more->breaker_bytes;
    }
    const uint64_t words = settings->flags & SYM_SAMPLING_ALLOWED ? ((uint64_t)vocab_size + 31) / 32 : 0;
    /* No sum here exceeds 2^38. */
    all += settings->num_bias * (uint64_t)sizeof(struct sym_bias) +
           ((uint64_t)settings->num_before + settings->num_generated + words) * 4;
    return all <= bytes ? (int64_t)all : -EINVAL;
}

/* The length of the sampling block at the beginning of `bytes` bytes; -EINVAL: the block is incomplete. */
int64_t sym_sampling_bytes(const char *block, uint64_t bytes, uint32_t vocab_size) {
    struct sym_sampling settings;
    struct sym_sampling_more more;
    return read_settings(block, bytes, vocab_size, &settings, &more);
}

/* Copies a bitmask over the vocabulary. NULL: no memory. */
static char *copy_of_mask(const char *mask, int64_t vocab_size) {
    const size_t bytes = ((size_t)vocab_size + 31) / 32 * 4;
    char *copy = malloc(bytes);
    return copy == NULL ? NULL : memcpy(copy, mask, bytes);
}

/* Copies the parts that follow the settings. Returns 0, EINVAL or ENOMEM. */
static int read_tables(sym_sampler *sampler, const struct sym_sampling *settings, const char *at) {
    const size_t bias_bytes = settings->num_bias * sizeof(struct sym_bias);
    sampler->num_bias = settings->num_bias;
    sampler->bias = malloc(bias_bytes + 1);
    if (sampler->bias == NULL)
        return ENOMEM;
    memcpy(sampler->bias, at, bias_bytes);
    for (uint32_t i = 0; i < sampler->num_bias; i++) {
        const struct sym_bias *each = &sampler->bias[i];
        if (each->token < 0 || each->token >= sampler->vocab_size || !(each->bias < INFINITY))
            return EINVAL;
    }
    at += bias_bytes;
    for (uint64_t i = 0; i < (uint64_t)settings->num_before + settings->num_generated; i++, at += 4) {
        int32_t token;
        memcpy(&token, at, sizeof token);
        if (token < 0 || token >= sampler->vocab_size)
            return EINVAL;
        if (history_add(&sampler->history, token, i >= settings->num_before) != 0)
            return ENOMEM;
    }
    if (settings->flags & SYM_SAMPLING_ALLOWED) {
        sampler->allowed = copy_of_mask(at, sampler->vocab_size);
        if (sampler->allowed == NULL)
            return ENOMEM;
    }
    return 0;
}

/* Makes a sampler from a sampling block, which is not trusted and may have any alignment. `breakers` has a bit for each
 * breaker token, or is NULL. Returns NULL on failure, with errno EINVAL (wrong length, a setting out of range or NaN)
 * or ENOMEM. */
sym_sampler *sym_sampler_new(const char *block, uint64_t bytes, uint32_t vocab_size, const void *breakers) {
    struct sym_sampling settings;
    struct sym_sampling_more more;
    if (vocab_size == 0 || vocab_size > INT32_MAX ||
        read_settings(block, bytes, vocab_size, &settings, &more) != (int64_t)bytes || !is_valid(&settings, &more)) {
        errno = EINVAL;
        return NULL;
    }
    sym_sampler *sampler = calloc(1, sizeof *sampler);
    if (sampler == NULL)
        return NULL;
    /* For the next settings 0 also means off, so that a block of zeros is a greedy sampler. */
    const double top_p = settings.top_p > 0.0 ? settings.top_p : 1.0;
    sampler->limits = limits_of(settings.temperature, settings.top_k, top_p, settings.min_p);
    sampler->limits.typical_p = more.typical_p > 0.0 ? more.typical_p : 1.0;
    sampler->mirostat = (struct mirostat){
        .version = more.mirostat,
        .tau = more.mirostat_tau,
        .eta = more.mirostat_eta,
        .mu = 2.0 * more.mirostat_tau,
        .next_mu = 2.0 * more.mirostat_tau,
    };
    sampler->history = (struct history){
        .repetition = settings.repetition_penalty > 0.0f ? settings.repetition_penalty : 1.0f,
        .presence = settings.presence_penalty,
        .frequency = settings.frequency_penalty,
        .window = more.penalty_window,
        .dry_multiplier = more.dry_multiplier,
        .dry_base = more.dry_base,
        .dry_window = more.dry_window,
        .dry_allowed_length = more.dry_allowed_length,
    };
    sampler->stream = settings.stream;
    sampler->stride = settings.flags & SYM_SAMPLING_STREAM ? STRIDE : 1;
    sampler->vocab_size = vocab_size;
    const size_t more_bytes = settings.flags & SYM_SAMPLING_MORE ? sizeof more + more.breaker_bytes : 0;
    int rc = read_tables(sampler, &settings, block + sizeof settings + more_bytes);
    if (rc == 0 && breakers != NULL) {
        sampler->history.breakers = copy_of_mask(breakers, vocab_size);
        rc = sampler->history.breakers == NULL ? ENOMEM : 0;
    }
    if (rc != 0) {
        sym_sampler_free(sampler);
        errno = rc;
        return NULL;
    }
    return sampler;
}

/* Counts a token as generated. -EINVAL: the token is not in the vocabulary; -ENOMEM. */
int sym_sampler_note(sym_sampler *sampler, int32_t token) {
    if (token < 0 || token >= sampler->vocab_size)
        return -EINVAL;
    return history_add(&sampler->history, token, 1);
}

/* Makes the `index`-th draw, counted from 0, without noting the token. Draws are made in order; only the last draw may
 * be repeated. `allowed` (or NULL) applies in addition to the block's own bitmask. -EDOM: NaN or +inf, in the row or
 * after a penalty; -ERANGE: no token is possible; -ENOMEM. */
int64_t sym_sampler_draw(sym_sampler *sampler, const float *row, const void *allowed, uint64_t index) {
    const int64_t n = sampler->vocab_size;
    if (sampler->num_bias > 0 || history_is_due(&sampler->history) || sampler->allowed != NULL || allowed != NULL) {
        struct scratch *scratch = scratch_for(n);
        if (scratch == NULL)
            return -ENOMEM;
        /* The pass that copies the row also applies the mask. Penalties leave -inf as it is. */
        const int rc = passes->mask(row, n, sampler->allowed, allowed, scratch->row);
        if (rc != 0)
            return rc;
        for (uint32_t i = 0; i < sampler->num_bias; i++)
            scratch->row[sampler->bias[i].token] += sampler->bias[i].bias;
        history_adjust(&sampler->history, scratch->row, n, scratch);
        row = scratch->row;
    }
    struct mirostat *mirostat = &sampler->mirostat;
    if (index != mirostat->index)
        mirostat->mu = mirostat->next_mu;
    mirostat->index = index;
    const double u = sym_uniform(sampler->stream + index * sampler->stride);
    return draw(row, n, &sampler->limits, mirostat, u);
}

/* The one sampler, of programs and of the daemon: how a token is drawn from a row of logits.
 *
 * In this order: logit bias is added; penalties (repetition: of tokens before and generated, a positive logit is divided
 * by it and a negative one multiplied; frequency and presence: subtracted, of tokens generated); what is not
 * allowed becomes -inf. Then the logits are divided by the temperature (0: the argmax); top_k keeps the k likeliest;
 * top_p the fewest likeliest that hold this part of what is left; min_p those at least this part as likely as
 * the likeliest. Then a number u of [0, 1) chooses: with top_k or top_p it runs through what is kept likeliest first,
 * else in the order of tokens.
 */
#include "rows_state.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- limits and the draw ----------------------------------------------------------------------------- */

/* splitmix64: a generator's state goes on by STRIDE, and each number is its state, mixed. */
#define STRIDE 0x9e3779b97f4a7c15u

static uint64_t mixed(uint64_t state) {
    uint64_t z = state + STRIDE;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Where a seed's stream of numbers stands before the draw of this number. A seed is mixed first: the streams of
 * neighbouring seeds would else be one stream, shifted by a draw. */
uint64_t sym_stream(uint64_t seed, uint64_t draw) { return mixed(seed) + draw * STRIDE; }

/* The number in [0, 1) that comes next where a stream stands. */
double sym_uniform(uint64_t stream) { return (double)(mixed(stream) >> 11) * 0x1p-53; }

struct limits {
    float inverse_temperature; /* INFINITY: the argmax */
    float floor;               /* 0: off */
    double top_p;              /* 1: off */
    int64_t top_k;             /* 0: off */
};

static struct limits limits_of(double temperature, int64_t top_k, double top_p, double min_p) {
    return (struct limits){
        .inverse_temperature = temperature <= 0.0         ? INFINITY
                               : 1.0 / temperature < 1e30 ? (float)(1.0 / temperature)
                                                          : 1e30f,
        .floor = (float)min_p,
        .top_p = top_p,
        .top_k = top_k,
    };
}

/* Nothing to rank: the draw runs through the row in the order of its indices. */
static int64_t draw_unranked(struct scratch *scratch, const float *row, int64_t n, float max,
                             const struct limits *limits, double u) {
    double *masses = scratch->masses;
    double left = u * passes->mass(row, n, max, limits->inverse_temperature, limits->floor, masses);
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
        left = INFINITY; /* u is all but 1, and the sums were rounded down: the last possible token */
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

/* Where the groups' largest alone hold more than this, the row is so flat that a nucleus has thousands of entries: then
 * their weights are computed once and kept, rather than first summed and then computed for those collected. */
#define FLAT 64.0

/* Weighs what may be kept of a row without top_k, as the scratch's list; gives the row's mass. */
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
        if (grouped > target * 1.00001) /* by more than sums may be rounded */
            least = rank_mark(&groups, grouped, target * 1.00001, 0, list, scratch->keys).value;
        /* What is certainly below the floor, by more than an exponential is rounded. */
        const float lowest = max + (logf(limits->floor) - 0.01f) / inverse_temperature - fabsf(max) * 1e-5f;
        least = lowest > least ? lowest : least; /* both cut the end of one order, whichever comes first */
    }
    list->count = passes->collect(row, n, least, list->values, list->indices);
    list->sorted = 0;
    const double weighed = passes->weigh(list->values, list->count, max, inverse_temperature, list->weights);
    return total > 0.0 ? total : weighed;
}

static int64_t draw_ranked(struct scratch *scratch, const float *row, int64_t n, float max, const struct limits *limits,
                           double u) {
    sym_list *list = &scratch->list;
    double total;
    if (limits->top_k > 0 && limits->top_k < n) {
        rank_best(scratch, row, n, limits->top_k);
        total = passes->weigh(list->values, list->count, max, limits->inverse_temperature, list->weights);
    } else {
        total = weigh_candidates(scratch, row, n, max, limits);
    }
    sym_mark last = rank_everything;
    if (limits->top_p < 1.0)
        last = rank_mark(list, total, limits->top_p * total, 0, &scratch->other, scratch->keys);
    rank_keep(scratch, last, limits->floor > 0.0f ? limits->floor : FLT_MIN); /* what weighs nothing is never drawn */
    double mass, nothing;
    passes->split(list->values, list->weights, list->count, -INFINITY, -INFINITY, &mass, &nothing);
    return rank_mark(list, mass, u * mass, 1, &scratch->other, scratch->keys).index;
}

/* -EDOM: NaN or +inf; -ERANGE: all are -inf; -ENOMEM. */
static int64_t draw(const float *row, int64_t n, const struct limits *limits, double u) {
    if (limits->inverse_temperature == INFINITY || limits->top_k == 1)
        return sym_row_argmax(row, n, NULL);
    struct scratch *scratch = scratch_for(n);
    if (scratch == NULL)
        return -ENOMEM;
    float max;
    const int rc = row_look(&row, n, NULL, scratch->groups, &max);
    if (rc != 0)
        return rc;
    if ((limits->top_k <= 0 || limits->top_k >= n) && limits->top_p >= 1.0)
        return draw_unranked(scratch, row, n, max, limits, u);
    return draw_ranked(scratch, row, n, max, limits, u);
}

/* A token drawn with the uniform number u of [0, 1). top_k 0, top_p 1, min_p 0: off. */
int64_t sym_row_sample(const float *row, int64_t n, const void *allowed, double temperature, int64_t top_k,
                       double top_p, double min_p, double u) {
    const struct limits limits = limits_of(temperature, top_k, top_p, min_p);
    const int rc = row_only_allowed(&row, n, allowed);
    return rc != 0 ? rc : draw(row, n, &limits, u);
}

/* ---- a sampler: settings, and the tokens that were seen ----------------------------------------------- */

struct counted { /* a token of the history; only these are touched by penalties */
    int32_t token;
    uint32_t num_generated;
};

struct sym_sampler {
    struct limits limits;
    float repetition, presence, frequency;
    uint64_t stream, stride; /* what the first draw takes its number from, and how far the next one is */
    int64_t vocab_size;
    uint32_t num_bias;
    struct sym_bias *bias;
    char *allowed; /* NULL: all */
    struct counted *counted;
    uint32_t num_counted, room_counted;
    uint32_t *places; /* hashed by token: 1 + where in `counted`; 0: nothing */
    uint32_t num_places; /* a power of two, more than twice num_counted */
};

/* Where the token is in `places`, or would be. */
static uint32_t place_of(const sym_sampler *sampler, int32_t token) {
    uint32_t at = (uint32_t)token * 0x9e3779b1u & (sampler->num_places - 1);
    while (sampler->places[at] != 0 && sampler->counted[sampler->places[at] - 1].token != token)
        at = (at + 1) & (sampler->num_places - 1);
    return at;
}

/* Doubles the room for tokens. 0 or -ENOMEM, and then nothing is lost. */
static int grow(sym_sampler *sampler) {
    const uint32_t room = sampler->room_counted == 0 ? 64 : 2 * sampler->room_counted;
    struct counted *counted = realloc(sampler->counted, room * sizeof *counted);
    if (counted == NULL)
        return -ENOMEM;
    sampler->counted = counted;
    uint32_t *places = calloc(4 * (size_t)room, sizeof *places);
    if (places == NULL)
        return -ENOMEM;
    free(sampler->places);
    sampler->places = places;
    sampler->num_places = 4 * room;
    sampler->room_counted = room;
    for (uint32_t i = 0; i < sampler->num_counted; i++)
        places[place_of(sampler, counted[i].token)] = i + 1;
    return 0;
}

static int count_token(sym_sampler *sampler, int32_t token, uint32_t num_generated) {
    if (sampler->num_counted == sampler->room_counted && grow(sampler) != 0)
        return -ENOMEM;
    const uint32_t at = place_of(sampler, token);
    if (sampler->places[at] == 0) {
        sampler->counted[sampler->num_counted] = (struct counted){token, 0};
        sampler->places[at] = ++sampler->num_counted;
    }
    sampler->counted[sampler->places[at] - 1].num_generated += num_generated;
    return 0;
}

static int has_penalties(const sym_sampler *sampler) {
    return sampler->repetition != 1.0f || sampler->presence != 0.0f || sampler->frequency != 0.0f;
}

void sym_sampler_free(sym_sampler *sampler) {
    if (sampler == NULL)
        return;
    free(sampler->bias);
    free(sampler->allowed);
    free(sampler->counted);
    free(sampler->places);
    free(sampler);
}

/* Whether all settings are in range. */
static int is_valid(const struct sym_sampling *settings) {
    return settings->temperature >= 0.0 && settings->top_p >= 0.0 && settings->top_p <= 1.0 && settings->min_p >= 0.0 &&
           settings->min_p <= 1.0 && settings->repetition_penalty >= 0.0f && settings->repetition_penalty < INFINITY &&
           isfinite(settings->presence_penalty) && isfinite(settings->frequency_penalty) &&
           settings->flags <= (SYM_SAMPLING_ALLOWED | SYM_SAMPLING_STREAM);
}

/* How long the block at the start of `bytes` bytes is with all that follows it; -EINVAL: it does not end there. */
int64_t sym_sampling_bytes(const char *block, uint64_t bytes, uint32_t vocab_size) {
    struct sym_sampling settings;
    if (bytes < sizeof settings)
        return -EINVAL;
    memcpy(&settings, block, sizeof settings);
    const uint64_t words = settings.flags & SYM_SAMPLING_ALLOWED ? ((uint64_t)vocab_size + 31) / 32 : 0;
    /* No sum here exceeds 2^38. */
    const uint64_t all = sizeof settings + settings.num_bias * (uint64_t)sizeof(struct sym_bias) +
                         ((uint64_t)settings.num_before + settings.num_generated + words) * 4;
    return all <= bytes ? (int64_t)all : -EINVAL;
}

/* Takes over what follows the settings. 0, EINVAL or ENOMEM. */
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
        if (has_penalties(sampler) && count_token(sampler, token, i >= settings->num_before) != 0)
            return ENOMEM;
    }
    if (settings->flags & SYM_SAMPLING_ALLOWED) {
        const size_t allowed_bytes = ((size_t)sampler->vocab_size + 31) / 32 * 4;
        sampler->allowed = malloc(allowed_bytes);
        if (sampler->allowed == NULL)
            return ENOMEM;
        memcpy(sampler->allowed, at, allowed_bytes);
    }
    return 0;
}

/* From a struct sym_sampling with all that follows it, which may come from anybody and lie at any address. NULL, and errno:
 * EINVAL (cut short, too long, out of range, NaN) or ENOMEM. */
sym_sampler *sym_sampler_new(const char *block, uint64_t bytes, uint32_t vocab_size) {
    struct sym_sampling settings;
    if (vocab_size == 0 || vocab_size > INT32_MAX || sym_sampling_bytes(block, bytes, vocab_size) != (int64_t)bytes) {
        errno = EINVAL;
        return NULL;
    }
    memcpy(&settings, block, sizeof settings);
    if (!is_valid(&settings)) {
        errno = EINVAL;
        return NULL;
    }
    sym_sampler *sampler = calloc(1, sizeof *sampler);
    if (sampler == NULL)
        return NULL;
    /* 0 is off for these two as well, so that a block of zeros is a greedy sampler. */
    const double top_p = settings.top_p > 0.0 ? settings.top_p : 1.0;
    sampler->repetition = settings.repetition_penalty > 0.0f ? settings.repetition_penalty : 1.0f;
    sampler->limits = limits_of(settings.temperature, settings.top_k, top_p, settings.min_p);
    sampler->presence = settings.presence_penalty;
    sampler->frequency = settings.frequency_penalty;
    sampler->stream = settings.stream;
    sampler->stride = settings.flags & SYM_SAMPLING_STREAM ? STRIDE : 1;
    sampler->vocab_size = vocab_size;
    const int rc = read_tables(sampler, &settings, block + sizeof settings);
    if (rc != 0) {
        sym_sampler_free(sampler);
        errno = rc;
        return NULL;
    }
    return sampler;
}

/* Counts as generated from now on. -EINVAL: no such token; -ENOMEM. */
int sym_sampler_note(sym_sampler *sampler, int32_t token) {
    if (token < 0 || token >= sampler->vocab_size)
        return -EINVAL;
    return has_penalties(sampler) ? count_token(sampler, token, 1) : 0;
}

static void adjust(const sym_sampler *sampler, float *row) {
    for (uint32_t i = 0; i < sampler->num_bias; i++)
        row[sampler->bias[i].token] += sampler->bias[i].bias;
    for (uint32_t i = 0; i < sampler->num_counted; i++) {
        const struct counted each = sampler->counted[i];
        float logit = row[each.token];
        logit = logit < 0.0f ? logit * sampler->repetition : logit / sampler->repetition;
        if (each.num_generated > 0)
            logit = logit - sampler->frequency * (float)each.num_generated - sampler->presence;
        row[each.token] = logit;
    }
}

/* The draw `index` of this sampler, from 0 on; does not note it. `allowed`: beside the block's own, or NULL.
 * -EDOM: NaN or +inf, in the row or by a penalty; -ERANGE: nothing is possible; -ENOMEM. */
int64_t sym_sampler_draw(sym_sampler *sampler, const float *row, const void *allowed, uint64_t index) {
    if (sampler->num_bias > 0 || sampler->num_counted > 0 || sampler->allowed != NULL || allowed != NULL) {
        struct scratch *scratch = scratch_for(sampler->vocab_size);
        if (scratch == NULL)
            return -ENOMEM;
        /* The mask goes first, for it costs a pass that the copy makes anyway: -inf stays -inf. */
        const int rc = passes->mask(row, sampler->vocab_size, sampler->allowed, allowed, scratch->row);
        if (rc != 0)
            return rc;
        adjust(sampler, scratch->row);
        row = scratch->row;
    }
    return draw(row, sampler->vocab_size, &sampler->limits, sym_uniform(sampler->stream + index * sampler->stride));
}

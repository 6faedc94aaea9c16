/* One forward pass of a Llama-family model over a batch of chunks. Every thread walks the same list of phases. In each
 * phase, a thread takes units until none is left, and then waits for the other threads.
 *
 * The rows of all chunks, one for each token, are consecutive. A phase works on rows, not on chunks, except for the two
 * phases that touch pages. Once the last layer has stored K and V, the phases compute only rows whose logits are
 * wanted. */

#include <errno.h>
#include <time.h>

#include "arrays.h"
#include "isa.h"
#include "mass.h"
#include "plan.h"
#include "pool.h"

#define QUERIES 48   /* most query vectors of one unit of attention */
#define ROW_BLOCK 96 /* rows of a product's unit: their activations and a panel fit a core's L2 together */
#define UNIT_WORK (1 << 17) /* least multiply-adds that are worth the cost of taking a unit */
#define FEW_ROWS 4   /* rows that every thread normalises for itself, which is cheaper than a barrier */
#define AMX_ROWS 32  /* rows of padding at the end of buffers: products on tiles read 32 rows at a time */

enum phase { EMBED, QKV, STORE, ATTEND, MASS, OUT, NORM, GATE_UP, DOWN, HEAD, NUM_PHASES };
static const char *const phase_names[] = {"embed", "qkv",  "store",   "attend", "mass",
                                          "o",     "norm", "gate+up", "down",   "head"};

/* Rows of activations, `stride` bytes apart. */
struct rows {
    char *data;
    long stride;
};

struct sym_decoder {
    struct pool pool;
    sym_model model;
    const struct kernels *kernels;
    const sym_batch *batch;
    int64_t solo_work, work_per_row;
    int64_t phase_ns[NUM_PHASES];

    /* The arrays below are regrown for a batch that is larger than all earlier batches. */
    long room_rows, room_wanted, room_partials;
    struct rows x, qkv, attended, ff, added; /* floats; attended and ff are bfloat16 if the weights are */
    struct rows operand;                     /* rows in the form that prepare() makes */
    float *rotations[2]; /* [rows][2][head_dim / 2] cosines, sines; for full and for sliding layers */
    float **all_rows, **wanted_rows; /* into x */
    struct plan plans[2][2]; /* attention of [all, wanted in the last layer][full, sliding] */
    struct planner planner;
    struct mass_plan mass; /* for chunks that ask for mass */
    float *partials; /* [partials][kv_heads] softmaxes of one row over one split */
    char *private; /* [threads] see private_layout */
};

/* Return the stride of a row: whole cache lines, and one more. Widths are often powers of two. With the extra line, the
 * rows are in different sets of the cache. */
static long row_bytes(long bytes) { return (bytes + 63) / 64 * 64 + 64; }

static long heads_per_kv(const sym_shape *s) { return s->heads / s->kv_heads; }
static long attended_width(const sym_shape *s) { return (long)s->heads * s->head_dim; }
static long qkv_width(const sym_shape *s) { return (s->heads + 2L * s->kv_heads) * s->head_dim; }
static long rows_per_unit(const sym_shape *s) { return QUERIES > heads_per_kv(s) ? QUERIES / heads_per_kv(s) : 1; }
static long max_vectors(const sym_shape *s) { return rows_per_unit(s) * heads_per_kv(s); }
static long number_bytes(int format) { return format == SYM_FLOAT32 ? 4 : 2; }
static long block_bytes(const sym_shape *s) {
    return (long)SYM_PAGE_ENTRIES * s->head_dim * number_bytes(s->kv_format);
}
static long page_bytes(const sym_shape *s) { return 2L * s->layers * s->kv_heads * block_bytes(s); }
static long partial_floats(const sym_shape *s) { return heads_per_kv(s) * (s->head_dim + 2L); }
static long level_floats(const sym_shape *s) { return 2L * s->heads; }
static int weight_format(const sym_model *m) { return m->layers[0].o.format; }
static int narrow(const struct sym_decoder *d) { return weight_format(&d->model) == SYM_BFLOAT16; }

/* Return the bytes of the widest row that a product reads, in the form that prepare() makes. */
static long operand_bytes(const sym_model *m) {
    const sym_layer *l = &m->layers[0];
    long k = at_least(at_least(l->qkv[0].k, l->o.k), at_least(l->down.k, m->head.k)),
         codes = has_codes(weight_format(m));
    return row_bytes(codes ? k + k / SYM_BLOCK * (long)sizeof(struct block_info) : 4 * k);
}

static struct softmax softmax_at(float *memory, long vectors) {
    return (struct softmax){memory, memory + vectors, memory + 2 * vectors};
}

/* Layout of a thread's private memory: the offset of each part, and the size of all parts. */
struct private_layout {
    long operand, floats, q, whole, part, room, bytes;
};

static struct private_layout private_layout(const sym_model *m) {
    const sym_shape *s = &m->shape;
    long vectors = max_vectors(s), softmax = row_bytes(vectors * (s->head_dim + 2L) * 4);
    struct private_layout l;
    l.operand = 0;
    l.floats = l.operand + operand_bytes(m) * AMX_ROWS;
    l.q = l.floats + row_bytes(4L * at_least(at_least(s->hidden, s->ffn), attended_width(s)));
    l.whole = l.q + row_bytes(vectors * s->head_dim * 4);
    l.part = l.whole + softmax;
    l.room = l.part + softmax;
    l.bytes = l.room + row_bytes(ROOM(vectors) * 4);
    return l;
}

static char *private_of(struct sym_decoder *d, int thread) {
    return d->private + thread * private_layout(&d->model).bytes;
}

/* ---- phases: each function computes one unit ---- */

static void embed_rows(struct sym_decoder *d, long first, long last) {
    const sym_shape *s = &d->model.shape;
    const sym_batch *b = d->batch;
    long half = s->head_dim / 2;
    for (long r = first; r < last; r++) {
        float *x = d->all_rows[r];
        sym_unpack_row(&d->model.embed, b->tokens[r], s->hidden, x);
        for (long i = 0; s->embed_scale != 1 && i < s->hidden; i++)
            x[i] *= s->embed_scale;
        for (int kind = 0; kind < (s->window ? 2 : 1); kind++) {
            float *cosines = d->rotations[kind] + r * 2 * half;
            for (long i = 0; i < half; i++) {
                double angle = b->positions[r] * d->model.frequencies[kind][i], sine, cosine;
                sincos(angle, &sine, &cosine);
                double factor = d->model.rotation_factors[kind];
                cosines[i] = (float)(cosine * factor);
                cosines[half + i] = (float)(sine * factor);
            }
        }
    }
}

static const float *rotation(const struct sym_decoder *d, const sym_layer *layer, long row) {
    return d->rotations[layer->sliding] + row * d->model.shape.head_dim;
}

static char *kv_block(const struct sym_decoder *d, long page, long layer, long part, long kv_head) {
    const sym_shape *s = &d->model.shape;
    return d->model.arena + page * page_bytes(s) + ((layer * 2 + part) * s->kv_heads + kv_head) * block_bytes(s);
}

/* Rotate the K of one row and head, and store K and V at the row's place in its page. */
static void store_entry(struct sym_decoder *d, long layer_index, long chunk, long row, long kv_head, float *scratch) {
    const sym_shape *s = &d->model.shape;
    const sym_layer *layer = &d->model.layers[layer_index];
    const sym_batch *b = d->batch;
    long hd = s->head_dim, entry = b->start[chunk] + row - b->first_row[chunk], slot = entry % SYM_PAGE_ENTRIES;
    long page = b->pages[b->first_page[chunk] + entry / SYM_PAGE_ENTRIES];
    const float *qkv = (const float *)(d->qkv.data + row * d->qkv.stride), *k = qkv + (s->heads + kv_head) * hd;
    const float *v = k + s->kv_heads * hd;
    char *k_block = kv_block(d, page, layer_index, 0, kv_head), *v_block = kv_block(d, page, layer_index, 1, kv_head);

    if (layer->k_norm)
        d->kernels->rms_norm(k, layer->k_norm, s->rms_eps, hd, scratch), k = scratch;
    d->kernels->rotate(k, rotation(d, layer, row), hd / 2, scratch);
    if (s->kv_format == SYM_FLOAT32) {
        for (long i = 0; i < hd; i++)
            memcpy(k_block + i * STEP + slot * 4, scratch + i, 4);
        memcpy(v_block + slot * hd * 4, v, (size_t)hd * 4);
        return;
    }
    uint16_t *k_pairs = (uint16_t *)k_block + slot * 2, *v_pairs = (uint16_t *)v_block + slot / 2 * hd * 2 + slot % 2;
    uint16_t numbers[256 + 16];
    d->kernels->to_bfloat16(scratch, hd, numbers);
    for (long i = 0; i < hd; i += 2)
        memcpy(k_pairs + i / 2 * (STEP / 2), numbers + i, 4);
    d->kernels->to_bfloat16(v, hd, numbers);
    for (long i = 0; i < hd; i++)
        v_pairs[2 * i] = numbers[i];
}

/* ---- attention ---- */

/* Copy the query heads of a row, normalised and rotated, in the pages' format. */
static void gather_query(struct sym_decoder *d, const sym_layer *layer, long row, long kv_head, char *to,
                         float *scratch) {
    const sym_shape *s = &d->model.shape;
    long hd = s->head_dim, heads = heads_per_kv(s);
    const float *q = (const float *)(d->qkv.data + row * d->qkv.stride) + kv_head * heads * hd;
    for (long h = 0; h < heads; h++, q += hd, to += hd * number_bytes(s->kv_format)) {
        const float *x = q;
        if (layer->q_norm)
            d->kernels->rms_norm(q, layer->q_norm, s->rms_eps, hd, scratch), x = scratch;
        float *rotated = s->kv_format == SYM_FLOAT32 ? (float *)to : scratch;
        d->kernels->rotate(x, rotation(d, layer, row), hd / 2, rotated);
        if (s->kv_format != SYM_FLOAT32)
            d->kernels->to_bfloat16(scratch, hd, (uint16_t *)to);
    }
}

static void finish_row(struct sym_decoder *d, const struct softmax *from, long first, const struct seat *seat,
                       long kv_head) {
    const sym_shape *s = &d->model.shape;
    long heads = heads_per_kv(s), bytes = narrow(d) ? 2 : 4;
    char *out = d->attended.data + seat->out_row * d->attended.stride + kv_head * heads * s->head_dim * bytes;
    d->kernels->finish(from, first, heads, s->head_dim, out, narrow(d));
}

static struct softmax partial_of(struct sym_decoder *d, const struct seat *seat, long split, long kv_head) {
    const sym_shape *s = &d->model.shape;
    long index = (seat->partial + softmax_of(seat, split)) * s->kv_heads + kv_head;
    return softmax_at(d->partials + index * partial_floats(s), heads_per_kv(s));
}

/* Store a row's softmax of one split. The thread that stores the last softmax of a row merges all of them, in order. */
static void keep_partial(struct sym_decoder *d, struct plan *plan, long seat_index, const struct softmax *from,
                         long first, long split, long kv_head) {
    const sym_shape *s = &d->model.shape;
    const struct seat *seat = &plan->seats[seat_index];
    long heads = heads_per_kv(s), hd = s->head_dim;
    struct softmax mine = partial_of(d, seat, split, kv_head);
    memcpy(mine.max, from->max + first, (size_t)heads * sizeof(float));
    memcpy(mine.sum, from->sum + first, (size_t)heads * sizeof(float));
    memcpy(mine.value, from->value + first * hd, (size_t)(heads * hd) * sizeof(float));
    atomic_int *unfinished = &plan->unfinished[seat_index * s->kv_heads + kv_head];
    if (atomic_fetch_sub(unfinished, 1) > 1)
        return;
    atomic_store(unfinished, (int)num_softmaxes(seat)); /* for the next layer */
    struct softmax total = partial_of(d, seat, seat->first_split, kv_head);
    for (long next = seat->first_split + seat->folded; next < seat->end_split; next++) {
        struct softmax part = partial_of(d, seat, next, kv_head);
        d->kernels->merge(&total, &part, heads, hd);
    }
    finish_row(d, &total, 0, seat, kv_head);
}

/* Prefetch the queries and the first pages of a unit into the cache, while the thread works on another unit. */
static void fetch_unit(const struct sym_decoder *d, const struct plan *plan, long layer, const struct unit *unit,
                       long kv_head) {
    const sym_shape *s = &d->model.shape;
    const sym_batch *b = d->batch;
    const struct seat *seat = &plan->seats[plan->members[unit->first_member]];
    for (long i = 0; i < unit->rows; i++) {
        long row = plan->seats[plan->members[unit->first_member + i]].row, bytes = 4 * heads_per_kv(s) * s->head_dim;
        for (long at = 0; at < bytes; at += 64)
            __builtin_prefetch(d->qkv.data + row * d->qkv.stride + kv_head * bytes + at, 0, 2);
    }
    long first = unit->first_split * SPLIT_PAGES,
         past = divide_up(row_limit(b, seat->chunk, seat->row), SYM_PAGE_ENTRIES);
    for (long page = first; page < at_most(first + BLOCK_PAGES, past); page++)
        for (int part = 0; part < 2; part++) {
            const char *block = kv_block(d, b->pages[b->first_page[seat->chunk] + page], layer, part, kv_head);
            for (long i = 0; i < block_bytes(&d->model.shape); i += 64)
                __builtin_prefetch(block + i, 0, 2);
        }
}

/* Limits and masks of the rows of one unit. */
struct query_rows {
    long limits[QUERIES];
    const uint32_t *masks[QUERIES];
};

static void add_query(struct sym_decoder *d, long layer_index, long chunk, long row, long kv_head,
                      struct query_rows *rows, long index, char *private) {
    const sym_shape *s = &d->model.shape;
    const sym_batch *b = d->batch;
    const struct private_layout l = private_layout(&d->model);
    long within = row - b->first_row[chunk];
    rows->limits[index] = row_limit(b, chunk, row);
    rows->masks[index] =
        b->masks[chunk] ? b->masks[chunk] + within * (b->first_page[chunk + 1] - b->first_page[chunk]) : NULL;
    gather_query(d, &d->model.layers[layer_index], row, kv_head,
                 private + l.q + index * heads_per_kv(s) * s->head_dim * number_bytes(s->kv_format),
                 (float *)(private + l.floats));
}

static struct attention attention_of(const struct sym_decoder *d, long layer_index, long chunk, long kv_head,
                                     const struct query_rows *rows, long count, const char *private) {
    const sym_shape *s = &d->model.shape;
    const sym_batch *b = d->batch;
    return (struct attention){
        .format = s->kv_format,
        .rows = count,
        .heads = heads_per_kv(s),
        .head_dim = s->head_dim,
        .q = private + private_layout(&d->model).q,
        .limits = rows->limits,
        .window = d->model.layers[layer_index].sliding ? s->window : 0,
        .masks = rows->masks,
        .scale = s->attn_scale,
        .softcap = s->attn_softcap,
        .pages = b->pages + b->first_page[chunk],
        .k = kv_block(d, 0, layer_index, 0, kv_head),
        .v = kv_block(d, 0, layer_index, 1, kv_head),
        .page_bytes = page_bytes(s),
        .block_bytes = block_bytes(s),
    };
}

/* Compute one unit of attention. `fused`: the unit also stores the new entries of its chunk that lie within the unit's
 * splits. No other unit reads these entries. */
static void attend_unit(struct sym_decoder *d, struct plan *plan, long layer_index, const struct unit *unit,
                        long kv_head, int fused, char *private) {
    const sym_shape *s = &d->model.shape;
    const sym_batch *b = d->batch;
    const struct private_layout l = private_layout(&d->model);
    const int32_t *members = plan->members + unit->first_member;
    long heads = heads_per_kv(s), hd = s->head_dim, chunk = plan->seats[members[0]].chunk;
    struct query_rows queries;
    float *scratch = (float *)(private + l.floats), *room = (float *)(private + l.room);

    for (long i = 0; i < unit->rows; i++) {
        const struct seat *seat = &plan->seats[members[i]];
        add_query(d, layer_index, seat->chunk, seat->row, kv_head, &queries, i, private);
    }
    for (long row = b->first_row[chunk]; fused && row < b->first_row[chunk + 1]; row++) {
        long split = (row_limit(b, chunk, row) - 1) / SPLIT;
        if (unit->first_split <= split && split < unit->end_split)
            store_entry(d, layer_index, chunk, row, kv_head, scratch);
    }
    struct attention a = attention_of(d, layer_index, chunk, kv_head, &queries, unit->rows, private);
    struct softmax whole = softmax_at((float *)(private + l.whole), unit->rows * heads);
    struct softmax part = softmax_at((float *)(private + l.part), unit->rows * heads);
    d->kernels->attend(&a, unit->first_split, &whole, room);
    for (long split = unit->first_split + 1; split < unit->end_split; split++) {
        d->kernels->attend(&a, split, &part, room);
        d->kernels->merge(&whole, &part, unit->rows * heads, hd);
    }
    for (long i = 0; i < unit->rows; i++) {
        const struct seat *seat = &plan->seats[members[i]];
        if (seat->partial < 0)
            finish_row(d, &whole, i * heads, seat, kv_head);
        else
            keep_partial(d, plan, members[i], &whole, i * heads, unit->first_split, kv_head);
    }
}

/* ---- mass, for chunks that ask for it ---- */

/* Return the queries of a group for one KV head. Set `max` to the group's maxima; the group's shares follow them in
 * memory. */
static struct attention group_queries(struct sym_decoder *d, long layer_index, const struct mass_group *group,
                                      long kv_head, struct query_rows *queries, char *private, float **max) {
    const sym_shape *s = &d->model.shape;
    for (long i = 0; i < group->rows; i++)
        add_query(d, layer_index, group->chunk, group->first_row + i, kv_head, queries, i, private);
    *max = d->mass.levels + group->level * level_floats(s) + kv_head * 2 * group->rows * heads_per_kv(s);
    return attention_of(d, layer_index, group->chunk, kv_head, queries, group->rows, private);
}

static void measure_group(struct sym_decoder *d, long layer_index, const struct mass_group *group, long kv_head,
                          char *private) {
    struct query_rows queries;
    float *max, *room = (float *)(private + private_layout(&d->model).room);
    struct attention a = group_queries(d, layer_index, group, kv_head, &queries, private, &max);
    d->kernels->measure(&a, max, max + a.rows * a.heads, room);
}

static void spread_block(struct sym_decoder *d, long layer_index, const struct mass_block *block, long kv_head,
                         char *private) {
    const sym_mass *mass = &d->batch->masses[block->chunk];
    float *sums = mass->sums + (layer_index * d->model.shape.kv_heads + kv_head) * mass->columns + block->first_entry;
    float *max, *room = (float *)(private + private_layout(&d->model).room);
    long window = d->model.layers[layer_index].sliding ? d->model.shape.window : 0;
    struct query_rows queries;
    for (long g = block->first_group; g < block->end_group; g++) {
        const struct mass_group *group = &d->mass.groups[g];
        long first_limit = row_limit(d->batch, group->chunk, group->first_row);
        if (first_limit + group->rows - 1 <= block->first_entry)
            continue; /* no row of the group sees the block */
        if (window && first_limit - window >= block->first_entry + block->entries)
            continue;
        struct attention a = group_queries(d, layer_index, group, kv_head, &queries, private, &max);
        d->kernels->spread(&a, block->first_entry, block->entries, max, max + a.rows * a.heads, sums, room);
    }
}

/* ---- the walk ---- */

struct walker {
    struct sym_decoder *d;
    char *private;
    int thread, active;
    int64_t since_ns;
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void end_phase(struct walker *w, enum phase phase) {
    pool_meet(&w->d->pool, w->active);
    if (w->thread)
        return;
    int64_t now = now_ns();
    w->d->phase_ns[phase] += now - w->since_ns;
    w->since_ns = now;
}

/* Take rows in units: single rows if there are at most 64, else sixteen rows (whole cache lines of a K block). */
#define FOR_ROW_UNITS(d, count, first, last)                                                                           \
    for (long step_ = (count) > 64 ? 16 : 1, first, last;                                                              \
         (first = pool_take(&(d)->pool) * step_) < (count) && (last = at_most(first + step_, (count)), 1);)

/* Source of a product's rows: floats, which are normalised first if `norm` is not null. */
struct source {
    float *const *pointers; /* a pointer to each row; null: the rows are in `rows` */
    struct rows rows;
    const float *norm;
    long width;
};

static void make_operand(struct walker *w, const struct source *from, const sym_matrix *m, long first, long last,
                         struct rows to) {
    struct sym_decoder *d = w->d;
    float *scratch = (float *)(w->private + private_layout(&d->model).floats);
    for (long r = first; r < last; r++) {
        const float *x = from->pointers ? from->pointers[r] : (const float *)(from->rows.data + r * from->rows.stride);
        void *out = to.data + r * to.stride;
        if (from->norm && m->format == SYM_FLOAT32) {
            d->kernels->rms_norm(x, from->norm, d->model.shape.rms_eps, from->width, out);
            continue;
        }
        if (from->norm)
            d->kernels->rms_norm(x, from->norm, d->model.shape.rms_eps, from->width, scratch), x = scratch;
        d->kernels->prepare(m, x, from->width, out, scratch);
    }
}

/* Return the rows in the form that a product with m reads. If there are at most FEW_ROWS rows, each thread converts all
 * of them for itself. Otherwise, the threads divide the rows. */
static struct rows operand_rows(struct walker *w, const struct source *from, const sym_matrix *m, long count) {
    struct sym_decoder *d = w->d;
    if (!from->norm && !has_codes(m->format))
        return from->rows; /* the rows already have this form */
    if (count <= FEW_ROWS) {
        struct rows own = {w->private, d->operand.stride};
        make_operand(w, from, m, 0, count, own);
        return own;
    }
    FOR_ROW_UNITS (d, count, first, last)
        make_operand(w, from, m, first, last, d->operand);
    end_phase(w, NORM);
    return d->operand;
}

/* Set the product to one of a row of matrices, whose outputs lie side by side: the one that has this panel. Return the
 * panel's number in that matrix. */
static long locate(struct product *p, const sym_matrix *matrices, long panel) {
    for (p->w = matrices; panel >= divide_up(p->w->n, PANEL); p->w++) {
        panel -= divide_up(p->w->n, PANEL);
        p->out = p->out ? (float *)p->out + p->w->n : NULL;
        p->bias = p->bias ? p->bias + p->w->n : NULL;
    }
    return panel;
}

static const char *panel_data(const sym_matrix *matrices, long panel) {
    struct product p = {.bias = NULL};
    panel = locate(&p, matrices, panel);
    return p.w->data + panel * panel_bytes(p.w);
}

/* Multiply rows by `count` matrices. */
static void phase_products(struct walker *w, const struct product *product, const sym_matrix *matrices, int count,
                           const struct source *from, long rows, enum phase phase) {
    struct pool *pool = &w->d->pool;
    struct rows operand = operand_rows(w, from, matrices, rows);
    long panels = 0;
    for (int i = 0; i < count; i++)
        panels += divide_up(matrices[i].n, PANEL);
    long group = UNIT_WORK / (matrices->k * PANEL * at_most(rows, ROW_BLOCK));
    group = at_most(group, panels / (8 * pool->active));
    if (group < 1)
        group = 1;
    long groups = divide_up(panels, group), blocks = divide_up(rows, ROW_BLOCK), units = groups * blocks;
    for (long unit = pool_take(pool), next; unit < units; unit = pool_take_after(pool, units, next)) {
        long first = unit / groups * ROW_BLOCK, panel = unit % groups * group;
        long last = at_most(first + ROW_BLOCK, rows), end = at_most(panel + group, panels);
        next = rows > 1 ? pool_take_ahead(pool, units) : units; /* one row prefetches its own panels */
        for (; panel < end; panel++) {
            long ahead = panel + 1 < end ? panel + 1 : next < units ? next % groups * group : panel;
            struct product p = *product;
            p.a = operand.data;
            p.a_stride = operand.stride;
            p.ahead = panel_data(matrices, ahead);
            long within = locate(&p, matrices, panel);
            w->d->kernels->product(&p, within, first, last);
        }
    }
    end_phase(w, phase);
}

static void phase_product(struct walker *w, struct product p, const struct source *from, long rows, enum phase phase) {
    phase_products(w, &p, p.w, 1, from, rows, phase);
}

/* Copy the first entries of a page, and perhaps more. In K, two cache lines hold all entries of one dimension (float32)
 * or two dimensions (bfloat16). In V, entries are consecutive, one by one or in pairs. */
static void copy_entries(struct sym_decoder *d, const int32_t *copy) {
    const sym_shape *s = &d->model.shape;
    const long page = page_bytes(s), block = block_bytes(s), part = s->kv_heads * block, line = 64;
    const char *source = d->model.arena + copy[0] * page;
    char *target = d->model.arena + copy[1] * page;
    const long entries = copy[2] + copy[2] % 2, size = block / SYM_PAGE_ENTRIES * entries;
    for (long k = 0; k < page; k += 2 * part) {
        if (entries > SYM_PAGE_ENTRIES / 2)
            memcpy(target + k, source + k, (size_t)part);
        for (long at = k; entries <= SYM_PAGE_ENTRIES / 2 && at < k + part; at += 2 * line)
            memcpy(target + at, source + at, line);
        for (long at = k + part; at < k + 2 * part; at += block)
            memcpy(target + at, source + at, (size_t)size);
    }
}

static void phase_copy_and_embed(struct walker *w) {
    struct sym_decoder *d = w->d;
    const sym_batch *b = d->batch;
    for (long unit; b->num_copies && (unit = pool_take(&d->pool)) < b->num_copies;)
        copy_entries(d, b->copies + 3 * unit);
    if (b->num_copies)
        end_phase(w, EMBED);
    FOR_ROW_UNITS (d, b->num_rows, first, last)
        embed_rows(d, first, last);
    end_phase(w, EMBED);
}

static void phase_store(struct walker *w, long layer) {
    struct sym_decoder *d = w->d;
    const sym_shape *s = &d->model.shape;
    const sym_batch *b = d->batch;
    float *scratch = (float *)(w->private + private_layout(&d->model).floats);
    FOR_ROW_UNITS (d, b->num_rows, first, last) {
        long chunk = 0, past = b->num_chunks; /* the last chunk that begins at or before `first` */
        while (past - chunk > 1) {
            long middle = (chunk + past) / 2;
            if (b->first_row[middle] <= first)
                chunk = middle;
            else
                past = middle;
        }
        for (long r = first; r < last; r++) {
            while (b->first_row[chunk + 1] <= r)
                chunk++;
            const char *later = d->qkv.data + (r + 2) * d->qkv.stride; /* the buffer ends with rows of padding */
            for (long at = 4 * attended_width(s); at < 4 * qkv_width(s); at += 64)
                __builtin_prefetch(later + at);
            for (long h = 0; h < s->kv_heads; h++)
                store_entry(d, layer, chunk, r, h, scratch);
        }
    }
    end_phase(w, STORE);
}

static void phase_attend(struct walker *w, struct plan *plan, long layer, int fused) {
    struct sym_decoder *d = w->d;
    struct pool *pool = &d->pool;
    long kv_heads = d->model.shape.kv_heads;
    long attending = plan->num_units * kv_heads, units = attending + d->mass.num_groups * kv_heads;
    for (long unit = pool_take(pool), next; unit < units; unit = pool_take_after(pool, units, next)) {
        next = pool_take_ahead(pool, units);
        if (next < attending)
            fetch_unit(d, plan, layer, &plan->units[next / kv_heads], next % kv_heads);
        if (unit < attending)
            attend_unit(d, plan, layer, &plan->units[unit / kv_heads], unit % kv_heads, fused, w->private);
        else
            measure_group(d, layer, &d->mass.groups[(unit - attending) / kv_heads], unit % kv_heads, w->private);
    }
    end_phase(w, ATTEND);
}

static void phase_mass(struct walker *w, long layer) {
    struct sym_decoder *d = w->d;
    long kv_heads = d->model.shape.kv_heads, units = d->mass.num_blocks * kv_heads;
    for (long unit; (unit = pool_take(&d->pool)) < units;)
        spread_block(d, layer, &d->mass.blocks[unit / kv_heads], unit % kv_heads, w->private);
    end_phase(w, MASS);
}

/* Add the product to `live`. If `norm` is not null, the product is normalised first. */
static void phase_add(struct walker *w, const sym_matrix *m, const struct source *from, const float *norm, float **live,
                      long rows, enum phase phase) {
    struct sym_decoder *d = w->d;
    const sym_shape *s = &d->model.shape;
    struct product p = {.w = m, .out_rows = live, .epilogue = ADD};
    if (norm)
        p = (struct product){.w = m, .out = d->added.data, .out_stride = d->added.stride, .epilogue = PUT};
    phase_product(w, p, from, rows, phase);
    if (!norm)
        return;
    FOR_ROW_UNITS (d, rows, first, last)
        for (long r = first; r < last; r++) {
            float *added = (float *)(d->added.data + r * d->added.stride);
            d->kernels->rms_norm(added, norm, s->rms_eps, s->hidden, added);
            for (long i = 0; i < s->hidden; i++)
                live[r][i] += added[i];
        }
    end_phase(w, NORM);
}

static void walk(void *context, int thread) {
    struct sym_decoder *d = context;
    struct walker walker = {d, private_of(d, thread), thread, d->pool.active, thread ? 0 : now_ns()}, *w = &walker;
    const sym_shape *s = &d->model.shape;
    const long all = d->batch->num_rows,
               wanted = d->batch->num_wanted; /* local: after the last pool_meet, shared data may not be read */
    const int has_mass = d->mass.num_groups > 0;
    /* If each chunk is one row, the unit that attends can store the row's entry: no other unit reads it meanwhile. */
    const int decodes = all == d->batch->num_chunks && !has_mass;
    phase_copy_and_embed(w);
    if (!all)
        return; /* the batch has only copies */
    for (long i = 0; i < s->layers; i++) {
        const sym_layer *layer = &d->model.layers[i];
        int last = i + 1 == s->layers;
        long rows = all;
        float **live = d->all_rows;

        struct source x = {.pointers = live, .norm = layer->attn_norm, .width = s->hidden};
        struct product qkv = {.out = d->qkv.data, .out_stride = d->qkv.stride, .bias = layer->qkv_bias};
        phase_products(w, &qkv, layer->qkv, 3, &x, rows, QKV);
        if (last || !decodes)
            phase_store(w, i);
        if (last && !wanted && !has_mass)
            return; /* after the last pool_meet, shared data may not be read */
        if (last) {
            rows = wanted;
            x.pointers = live = d->wanted_rows;
        }
        phase_attend(w, &d->plans[last][layer->sliding], i, !last && decodes);
        if (has_mass)
            phase_mass(w, i);
        if (last && !wanted)
            return;
        struct source attended = {.rows = d->attended, .width = attended_width(s)};
        phase_add(w, &layer->o, &attended, layer->post_attn_norm, live, rows, OUT);
        x.norm = layer->ffn_norm;
        struct product gate_up = {.w = &layer->gate_up,
                                  .out = d->ff.data,
                                  .out_stride = d->ff.stride,
                                  .epilogue = GATED,
                                  .activation = s->activation,
                                  .narrow_out = narrow(d)};
        phase_product(w, gate_up, &x, rows, GATE_UP);
        struct source ff = {.rows = d->ff, .width = s->ffn};
        phase_add(w, &layer->down, &ff, layer->post_ffn_norm, live, rows, DOWN);
    }
    struct source x = {.pointers = d->wanted_rows, .norm = d->model.final_norm, .width = s->hidden};
    struct product head = {.w = &d->model.head, .out_rows = d->batch->out, .softcap = s->final_softcap};
    phase_product(w, head, &x, wanted, HEAD);
}

/* ---- memory, before the walk ---- */

static int regrow_rows(struct rows *rows, long count, long bytes) {
    rows->stride = row_bytes(bytes);
    return regrow(&rows->data, (size_t)(rows->stride * (count + AMX_ROWS)));
}

static int reserve_rows(struct sym_decoder *d, long rows, long wanted) {
    const sym_shape *s = &d->model.shape;
    int error = 0;
    if (wanted > d->room_wanted) {
        wanted = at_least(wanted, d->room_wanted + d->room_wanted / 2);
        d->room_wanted = 0;
        error = regrow(&d->wanted_rows, (size_t)wanted * sizeof *d->wanted_rows);
        if (error)
            return error;
        d->room_wanted = wanted;
    }
    if (rows <= d->room_rows)
        return 0;
    rows = at_least(rows, d->room_rows + d->room_rows / 2);
    d->room_rows = 0;
    long rotations = rows * s->head_dim * (long)sizeof(float), post_norms = d->model.layers[0].post_attn_norm != NULL;
    if ((error = regrow_rows(&d->x, rows, 4L * s->hidden)) || (error = regrow_rows(&d->qkv, rows, 4 * qkv_width(s))) ||
        (error = regrow_rows(&d->attended, rows, 4 * attended_width(s))) ||
        (error = regrow_rows(&d->ff, rows, 4L * s->ffn)) ||
        (error = regrow_rows(&d->added, rows, post_norms ? 4L * s->hidden : 0)) ||
        (error = regrow_rows(&d->operand, rows, operand_bytes(&d->model) - 64)) ||
        (error = regrow(&d->rotations[0], (size_t)rotations)) ||
        (error = regrow(&d->rotations[1], s->window ? (size_t)rotations : 0)) ||
        (error = regrow(&d->all_rows, (size_t)rows * sizeof *d->all_rows)))
        return error;
    d->room_rows = rows;
    for (long r = 0; r < rows; r++)
        d->all_rows[r] = (float *)(d->x.data + r * d->x.stride);
    return 0;
}

static int make_plans(struct sym_decoder *d) {
    const sym_shape *s = &d->model.shape;
    const sym_batch *b = d->batch;
    int error = 0;
    long partials = 0;
    for (int wanted_only = 0; wanted_only < 2; wanted_only++)
        for (int sliding = 0; sliding < (s->window ? 2 : 1) && !error; sliding++) {
            struct plan *plan = &d->plans[wanted_only][sliding];
            plan->window = sliding ? s->window : 0;
            error = make_plan(&d->planner, plan, b, wanted_only, rows_per_unit(s), s->kv_heads, d->pool.threads);
            partials = at_least(partials, plan->num_partials);
        }
    long out_row = 0;
    for (long c = 0; c < b->num_chunks; c++)
        for (long r = b->first_row[c + 1] - b->wanted[c]; r < b->first_row[c + 1]; r++)
            d->wanted_rows[out_row++] = d->all_rows[r];
    if (error || partials <= d->room_partials)
        return error;
    partials = at_least(partials, d->room_partials + d->room_partials / 2);
    d->room_partials = 0;
    error = regrow(&d->partials, (size_t)(partials * s->kv_heads * partial_floats(s)) * sizeof(float));
    if (!error)
        d->room_partials = partials;
    return error;
}

int sym_step(struct sym_decoder *d, const sym_batch *batch) {
    d->batch = batch;
    int error = reserve_rows(d, batch->num_rows, batch->num_wanted);
    if (!error)
        error = make_plans(d);
    if (!error)
        error = make_mass_plan(&d->mass, batch, rows_per_unit(&d->model.shape), level_floats(&d->model.shape));
    if (error)
        return error;
    int solo = batch->num_rows * d->work_per_row < d->solo_work;
    pool_run(&d->pool, solo ? 1 : d->pool.threads, walk, d);
    return 0;
}

void sym_parallel(struct sym_decoder *d, void (*work)(void *, int32_t), void *context, int32_t count) {
    pool_each(&d->pool, work, context, count);
}

int64_t sym_shared_rows(const struct sym_decoder *d) { return d->plans[0][0].shared_rows; }

/* ---- making and freeing decoders ---- */

void sym_decoder_free(struct sym_decoder *d) {
    pool_stop(&d->pool, d->pool.threads - 1);
    for (int i = 0; i < 4; i++)
        free_plan(&d->plans[i / 2][i % 2]);
    free_mass_plan(&d->mass);
    void *owned[] = {d->x.data,       d->qkv.data,     d->attended.data, d->ff.data,  d->added.data,
                     d->operand.data, d->rotations[0], d->rotations[1],  d->all_rows, d->wanted_rows,
                     d->planner.few,  d->planner.keys, d->partials,      d->private,  d};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        free(owned[i]);
}

struct sym_decoder *sym_decoder_new(const sym_model *model, int threads, const char *isa, int64_t solo_work) {
    const sym_shape *s = &model->shape;
    struct sym_decoder *d = NULL;
    int error = regrow(&d, sizeof *d);
    if (error) {
        errno = error;
        return NULL;
    }
    d->model = *model;
    d->kernels = isa_choose(isa);
    d->solo_work = solo_work;
    d->work_per_row = (int64_t)s->layers * s->hidden * (qkv_width(s) + attended_width(s) + 3L * s->ffn);
    error = d->kernels ? regrow(&d->private, (size_t)(threads * private_layout(model).bytes)) : EINVAL;
    if (!error)
        error = pool_start(&d->pool, threads);
    if (!error)
        return d;
    free(d->private);
    free(d);
    errno = error;
    return NULL;
}

struct sym_decoder *sym_crew_new(int threads) {
    struct sym_decoder *d = NULL;
    int error = regrow(&d, sizeof *d);
    if (!error)
        error = pool_start(&d->pool, threads);
    if (!error)
        return d;
    free(d);
    errno = error;
    return NULL;
}

const char *sym_isa(const char *wanted) {
    const struct kernels *kernels = isa_choose(wanted);
    return kernels ? kernels->name : NULL;
}

int sym_num_phases(void) { return NUM_PHASES; }
const char *sym_phase_name(int phase) { return phase_names[phase]; }
int64_t sym_phase_ns(const struct sym_decoder *d, int phase) { return d->phase_ns[phase]; }

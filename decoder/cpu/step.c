/* One forward pass of a Llama-family model over a batch of chunks: every thread walks the same list of phases,
 * takes units of the current one until none is left, and meets the others before the next.
 *
 * Rows (one a token) of all chunks lie one after the other; a phase knows rows, not chunks, except for the two
 * that touch pages. In the last layer only the rows whose logits are wanted go past the K and V stores. */

#include <errno.h>
#include <time.h>

#include "isa.h"
#include "pool.h"
#include "step.h"

#define QUERIES 48   /* query vectors that one unit of attention takes through a page: 12 KiB of 64 floats */
#define ROW_BLOCK 96 /* rows of a product's unit: activations that stay in a core's L2 beside a panel */
#define UNIT_WORK (1 << 17) /* multiply-adds that make taking a unit worth it */

enum phase { EMBED, QKV, STORE, ATTEND, OUT, NORM, GATE_UP, DOWN, HEAD, NUM_PHASES };
static const char *const phase_names[] = {"embed", "qkv", "rope+store", "attend", "o", "norm", "gate+up", "down", "head"};

/* Query rows of one chunk that are attended together, over splits [first_split, end_split). */
struct block {
    int32_t chunk, row, rows, out_row, first_split, end_split;
    int32_t group; /* blocks that share a group are splits of the same rows; -1: the block has them all */
    int32_t partial;
};

struct plan {
    struct block *blocks;
    long num_blocks, room_blocks;
};

struct sym_decoder {
    struct pool pool;
    sym_model model;
    const struct kernels *kernels;
    const sym_batch *batch;
    int64_t solo_work, work_per_row;
    int64_t phase_ns[NUM_PHASES];

    /* Regrown when a batch is larger than all before. */
    long room_rows, room_wanted, room_groups, room_partials;
    long num_groups, num_partials;      /* of both plans together */
    float *x, *h, *qkv, *attended, *ff; /* [rows][stride of its width] */
    float **all_rows, **wanted_rows;    /* into x */
    struct plan plan, last_plan;        /* attention of all rows, and of the wanted ones in the last layer */
    atomic_int *unfinished;             /* [groups][kv_heads] splits to come */
    float *partials;                    /* [partials][kv_heads][a softmax] */
    float *private;                     /* [threads] room for attend and two softmaxes */
};

/* A row's stride: whole cache lines, and never a power of two, so that a tile's rows fall into different sets. */
static long stride(long width) { return (width + 15) / 16 * 16 + 16; }
static long at_most(long a, long b) { return a < b ? a : b; }
static long divide_up(long a, long b) { return (a + b - 1) / b; }

static long heads_per_kv(const sym_shape *s) { return s->heads / s->kv_heads; }
static long qkv_width(const sym_shape *s) { return (s->heads + 2L * s->kv_heads) * s->head_dim; }
static long rows_per_block(const sym_shape *s) { return QUERIES > heads_per_kv(s) ? QUERIES / heads_per_kv(s) : 1; }
static long max_vectors(const sym_shape *s) { return rows_per_block(s) * heads_per_kv(s); }
static long softmax_floats(const sym_shape *s) { return max_vectors(s) * (s->head_dim + 2L); }
static long private_floats(const sym_shape *s)
{
    return stride(2 * softmax_floats(s) + ROOM(max_vectors(s), s->head_dim));
}
static long page_floats(const sym_shape *s) { return 2L * s->layers * s->kv_heads * PAGE * s->head_dim; }

static struct softmax softmax_at(float *memory, const sym_shape *s)
{
    long vectors = max_vectors(s);
    return (struct softmax){memory, memory + vectors, memory + 2 * vectors};
}

/* ---- phases: each a function of one unit ---- */

static void embed_rows(struct sym_decoder *d, long first, long last)
{
    const sym_shape *s = &d->model.shape;
    for (long r = first; r < last; r++)
        memcpy(d->all_rows[r], d->model.embed + (long)d->batch->tokens[r] * s->hidden, (size_t)s->hidden * sizeof(float));
}

static void norm_rows(struct sym_decoder *d, float *const *rows, const float *weight, long first, long last)
{
    const sym_shape *s = &d->model.shape;
    for (long r = first; r < last; r++)
        d->kernels->rms_norm(rows[r], weight, s->rms_eps, s->hidden, d->h + r * stride(s->hidden));
}

/* Pairs (i, i + half) turn by the position's angle: the rotate-half convention. */
static void rotate(float *x, const float *cos, const float *sin, long half)
{
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Rotates a row's Q and K, and stores its K and V into their slot. */
static void store_row(struct sym_decoder *d, long layer, long chunk, long row)
{
    const sym_shape *s = &d->model.shape;
    const sym_batch *b = d->batch;
    long hd = s->head_dim, half = hd / 2, block = PAGE * hd;
    const float *cos = d->model.cos + b->positions[row] * half, *sin = d->model.sin + b->positions[row] * half;
    float *q = d->qkv + row * stride(qkv_width(s)), *k = q + s->heads * hd, *v = k + s->kv_heads * hd;
    long entry = b->start[chunk] + row - b->first_row[chunk], slot = entry % PAGE;
    float *page = d->model.arena + b->pages[b->first_page[chunk] + entry / PAGE] * page_floats(s);
    float *k_block = page + layer * 2 * s->kv_heads * block, *v_block = k_block + s->kv_heads * block;

    for (long h = 0; h < s->heads; h++) rotate(q + h * hd, cos, sin, half);
    for (long h = 0; h < s->kv_heads; h++) {
        rotate(k + h * hd, cos, sin, half);
        for (long i = 0; i < hd; i++) k_block[h * block + i * PAGE + slot] = k[h * hd + i];
        memcpy(v_block + h * block + slot * hd, v + h * hd, (size_t)hd * sizeof(float));
    }
}

static void store_rows(struct sym_decoder *d, long layer, long first, long last)
{
    const sym_batch *b = d->batch;
    long chunk = 0, past = b->num_chunks; /* the last chunk that begins at or before `first` */
    while (past - chunk > 1) {
        long middle = (chunk + past) / 2;
        if (b->first_row[middle] <= first) chunk = middle;
        else past = middle;
    }
    for (long r = first; r < last; r++) {
        while (b->first_row[chunk + 1] <= r) chunk++;
        store_row(d, layer, chunk, r);
    }
}

/* Adds the splits of `from` that a block's rows see: a later split is seen by its last rows alone. */
static void merge_split(struct sym_decoder *d, const struct attention *a, long split, struct softmax *into,
                        const struct softmax *from)
{
    long blind = split * SPLIT - a->limit + 1; /* rows whose limit is at or before the split's first entry */
    if (blind < 0) blind = 0;
    d->kernels->merge(into, from, blind * a->heads, a->rows * a->heads, a->head_dim);
}

static void attend_block(struct sym_decoder *d, long layer, const struct block *block, long kv_head, int thread)
{
    const sym_shape *s = &d->model.shape;
    const sym_batch *b = d->batch;
    long hd = s->head_dim, heads = heads_per_kv(s), kv_block = PAGE * hd;
    float *k = d->model.arena + (layer * 2 * s->kv_heads + kv_head) * kv_block;
    struct attention a = {
        .q = d->qkv + block->row * stride(qkv_width(s)) + kv_head * heads * hd,
        .q_stride = stride(qkv_width(s)),
        .rows = block->rows,
        .heads = heads,
        .head_dim = hd,
        .scale = 1.0f / sqrtf((float)hd),
        .limit = b->start[block->chunk] + block->row - b->first_row[block->chunk] + 1,
        .pages = b->pages + b->first_page[block->chunk],
        .k = k,
        .v = k + s->kv_heads * kv_block,
        .page_floats = page_floats(s),
    };
    float *out = d->attended + block->out_row * stride(s->heads * hd) + kv_head * heads * hd;
    float *memory = d->private + thread * private_floats(s), *room = memory + 2 * softmax_floats(s);
    struct softmax whole = softmax_at(memory, s), part = softmax_at(memory + softmax_floats(s), s);

    if (block->group < 0) {
        d->kernels->attend(&a, block->first_split, &whole, room);
        for (long split = block->first_split + 1; split < block->end_split; split++) {
            d->kernels->attend(&a, split, &part, room);
            merge_split(d, &a, split, &whole, &part);
        }
        d->kernels->finish(&whole, &a, out, stride(s->heads * hd));
        return;
    }
    /* One of several blocks for these rows: whoever finishes last merges them all, in order. */
    long first = block->partial;
#define PARTIAL(i) softmax_at(d->partials + ((i) * s->kv_heads + kv_head) * softmax_floats(s), s)
    struct softmax mine = PARTIAL(first + block->first_split);
    d->kernels->attend(&a, block->first_split, &mine, room);
    atomic_int *unfinished = &d->unfinished[block->group * s->kv_heads + kv_head];
    if (atomic_fetch_sub(unfinished, 1) > 1) return;
    long count = divide_up(a.limit + a.rows - 1, SPLIT);
    atomic_store(unfinished, (int)count); /* for the next layer */
    struct softmax total = PARTIAL(first);
    for (long split = 1; split < count; split++) {
        struct softmax next = PARTIAL(first + split);
        merge_split(d, &a, split, &total, &next);
    }
    d->kernels->finish(&total, &a, out, stride(s->heads * hd));
#undef PARTIAL
}

/* ---- the walk ---- */

struct walker {
    struct sym_decoder *d;
    int thread, active;
    int64_t since_ns;
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void end_phase(struct walker *w, enum phase phase)
{
    pool_meet(&w->d->pool, w->active);
    if (w->thread) return;
    int64_t now = now_ns();
    w->d->phase_ns[phase] += now - w->since_ns;
    w->since_ns = now;
}

/* Rows in units: one by one when they are few, else sixteen (whole cache lines of a K block). */
#define FOR_ROW_UNITS(d, count, first, last) \
    for (long step_ = (count) > 64 ? 16 : 1, first, last; \
         (first = pool_take(&(d)->pool) * step_) < (count) && (last = at_most(first + step_, (count)), 1);)

static void phase_product(struct walker *w, const struct product *p, long rows, enum phase phase)
{
    struct pool *pool = &w->d->pool;
    long panels = divide_up(p->epilogue == SWIGLU ? 2 * p->n : p->n, PANEL);
    long group = UNIT_WORK / (p->k * PANEL * at_most(rows, ROW_BLOCK));
    group = at_most(group, panels / (8 * pool->active));
    if (group < 1) group = 1;
    long groups = divide_up(panels, group), blocks = divide_up(rows, ROW_BLOCK);
    for (long unit; (unit = pool_take(pool)) < groups * blocks;) {
        long first = unit / groups * ROW_BLOCK, panel = unit % groups * group;
        long last = at_most(first + ROW_BLOCK, rows), end = at_most(panel + group, panels);
        for (; panel < end; panel++) w->d->kernels->product(p, panel, first, last);
    }
    end_phase(w, phase);
}

static void phase_copy_and_embed(struct walker *w)
{
    struct sym_decoder *d = w->d;
    const sym_batch *b = d->batch;
    long page = page_floats(&d->model.shape);
    for (long unit; b->num_copies && (unit = pool_take(&d->pool)) < b->num_copies;)
        memcpy(d->model.arena + b->copies[2 * unit + 1] * page, d->model.arena + b->copies[2 * unit] * page,
               (size_t)page * sizeof(float));
    if (b->num_copies) end_phase(w, EMBED);
    FOR_ROW_UNITS(d, b->num_rows, first, last) {
        embed_rows(d, first, last);
        norm_rows(d, d->all_rows, d->model.layers[0].attn_norm, first, last);
    }
    end_phase(w, EMBED);
}

static void phase_norm(struct walker *w, float *const *rows, long count, const float *weight)
{
    FOR_ROW_UNITS(w->d, count, first, last) norm_rows(w->d, rows, weight, first, last);
    end_phase(w, NORM);
}

static void phase_attend(struct walker *w, const struct plan *plan, long layer)
{
    struct sym_decoder *d = w->d;
    long kv_heads = d->model.shape.kv_heads;
    for (long unit; (unit = pool_take(&d->pool)) < plan->num_blocks * kv_heads;)
        attend_block(d, layer, &plan->blocks[unit / kv_heads], unit % kv_heads, w->thread);
    end_phase(w, ATTEND);
}

static void walk(void *context, int thread)
{
    struct sym_decoder *d = context;
    struct walker walker = {d, thread, d->pool.active, thread ? 0 : now_ns()}, *w = &walker;
    const sym_shape *s = &d->model.shape;
    const long all = d->batch->num_rows, wanted = d->batch->num_wanted; /* read before the last meeting, see pool_meet */
    long hidden = stride(s->hidden), width = (long)s->heads * s->head_dim;
    phase_copy_and_embed(w);
    if (!all) return; /* copies alone */
    for (long i = 0; i < s->layers; i++) {
        const sym_layer *layer = &d->model.layers[i];
        int last = i + 1 == s->layers;
        long rows = all;
        float **live = d->all_rows;

        struct product qkv = {.a = d->h, .a_stride = hidden, .packed = layer->qkv, .k = s->hidden, .n = qkv_width(s),
                              .out = d->qkv, .out_stride = stride(qkv_width(s)), .epilogue = PUT};
        phase_product(w, &qkv, rows, QKV);
        FOR_ROW_UNITS(d, rows, first, past) store_rows(d, i, first, past);
        end_phase(w, STORE);
        if (last) {
            rows = wanted;
            live = d->wanted_rows;
            if (!rows) return;
        }
        phase_attend(w, last ? &d->last_plan : &d->plan, i);
        struct product o = {.a = d->attended, .a_stride = stride(width), .packed = layer->o, .k = width,
                            .n = s->hidden, .out_rows = live, .epilogue = ADD};
        phase_product(w, &o, rows, OUT);
        phase_norm(w, live, rows, layer->ffn_norm);
        struct product gate_up = {.a = d->h, .a_stride = hidden, .packed = layer->gate_up, .k = s->hidden,
                                  .n = s->ffn, .out = d->ff, .out_stride = stride(s->ffn), .epilogue = SWIGLU};
        phase_product(w, &gate_up, rows, GATE_UP);
        struct product down = {.a = d->ff, .a_stride = stride(s->ffn), .packed = layer->down, .k = s->ffn,
                               .n = s->hidden, .out_rows = live, .epilogue = ADD};
        phase_product(w, &down, rows, DOWN);
        phase_norm(w, live, rows, last ? d->model.final_norm : layer[1].attn_norm);
    }
    struct product head = {.a = d->h, .a_stride = hidden, .packed = d->model.head, .k = s->hidden, .n = s->vocab,
                           .out_rows = d->batch->out, .epilogue = PUT};
    phase_product(w, &head, wanted, HEAD);
}

/* ---- before the walk: memory, and who attends what ---- */

/* Exchanges *memory for at least `bytes` bytes on a cache line's boundary; its contents are lost. */
static int regrow(void *memory, size_t bytes)
{
    void *old, *new = NULL;
    memcpy(&old, memory, sizeof old);
    free(old);
    int error = posix_memalign(&new, 64, bytes ? bytes : 64);
    if (error) new = NULL;
    memcpy(memory, &new, sizeof new);
    return error;
}

static int reserve_rows(struct sym_decoder *d, long rows, long wanted)
{
    const sym_shape *s = &d->model.shape;
    int error = 0;
    if (wanted > d->room_wanted) {
        d->room_wanted = 0;
        error = regrow(&d->wanted_rows, (size_t)wanted * sizeof *d->wanted_rows);
        if (error) return error;
        d->room_wanted = wanted;
    }
    if (rows <= d->room_rows) return 0;
    d->room_rows = 0;
    size_t row = (size_t)rows * sizeof(float);
    if ((error = regrow(&d->x, row * stride(s->hidden))) || (error = regrow(&d->h, row * stride(s->hidden))) ||
        (error = regrow(&d->qkv, row * stride(qkv_width(s)))) ||
        (error = regrow(&d->attended, row * stride((long)s->heads * s->head_dim))) ||
        (error = regrow(&d->ff, row * stride(s->ffn))) || (error = regrow(&d->all_rows, rows * sizeof *d->all_rows)))
        return error;
    d->room_rows = rows;
    for (long r = 0; r < rows; r++) d->all_rows[r] = d->x + r * stride(s->hidden);
    return 0;
}

static int add_block(struct plan *plan, struct block block)
{
    if (plan->num_blocks == plan->room_blocks) {
        long room = plan->room_blocks ? 2 * plan->room_blocks : 64;
        struct block *blocks = realloc(plan->blocks, (size_t)room * sizeof *blocks);
        if (!blocks) return ENOMEM;
        plan->blocks = blocks;
        plan->room_blocks = room;
    }
    plan->blocks[plan->num_blocks++] = block;
    return 0;
}

/* A chunk of one block's rows is spread over its splits (decode over a long file); a longer one has enough blocks. */
static int plan_chunk(struct sym_decoder *d, struct plan *plan, long chunk, long row, long out_row)
{
    const sym_batch *b = d->batch;
    long end = b->first_row[chunk + 1], height = rows_per_block(&d->model.shape);
    int spread = end - row <= height, error = 0;
    for (; row < end && !error; row += height, out_row += height) {
        long rows = at_most(height, end - row);
        long splits = divide_up(b->start[chunk] + row + rows - b->first_row[chunk], SPLIT);
        struct block block = {.chunk = (int32_t)chunk, .row = (int32_t)row, .rows = (int32_t)rows,
                              .out_row = (int32_t)out_row, .end_split = (int32_t)splits, .group = -1};
        if (!spread || splits == 1) {
            error = add_block(plan, block);
            continue;
        }
        block.group = (int32_t)d->num_groups++;
        block.partial = (int32_t)d->num_partials;
        d->num_partials += splits;
        for (long split = 0; split < splits && !error; split++) {
            block.first_split = (int32_t)split;
            block.end_split = (int32_t)split + 1;
            error = add_block(plan, block);
        }
    }
    return error;
}

static int reserve_splits(struct sym_decoder *d)
{
    const sym_shape *s = &d->model.shape;
    int error = 0;
    if (d->num_groups > d->room_groups) {
        d->room_groups = 0;
        error = regrow(&d->unfinished, (size_t)(d->num_groups * s->kv_heads) * sizeof *d->unfinished);
        if (error) return error;
        d->room_groups = d->num_groups;
    }
    if (d->num_partials > d->room_partials) {
        d->room_partials = 0;
        error = regrow(&d->partials, (size_t)(d->num_partials * s->kv_heads * softmax_floats(s)) * sizeof(float));
        if (error) return error;
        d->room_partials = d->num_partials;
    }
    return 0;
}

static void rewind_groups(struct sym_decoder *d, const struct plan *plan)
{
    long kv_heads = d->model.shape.kv_heads;
    for (const struct block *b = plan->blocks; b < plan->blocks + plan->num_blocks; b++)
        for (long h = 0; b->group >= 0 && h < kv_heads; h++)
            atomic_store(&d->unfinished[b->group * kv_heads + h], b->end_split); /* the group's last block wins */
}

static int make_plans(struct sym_decoder *d)
{
    const sym_batch *b = d->batch;
    int error = 0;
    d->plan.num_blocks = d->last_plan.num_blocks = d->num_groups = d->num_partials = 0;
    long out_row = 0;
    for (long c = 0; c < b->num_chunks && !error; c++) {
        long first_wanted = b->first_row[c + 1] - b->wanted[c];
        error = plan_chunk(d, &d->plan, c, b->first_row[c], b->first_row[c]);
        if (!error) error = plan_chunk(d, &d->last_plan, c, first_wanted, out_row);
        for (long r = first_wanted; r < b->first_row[c + 1]; r++) d->wanted_rows[out_row++] = d->all_rows[r];
    }
    if (!error) error = reserve_splits(d);
    if (error) return error;
    rewind_groups(d, &d->plan);
    rewind_groups(d, &d->last_plan);
    return 0;
}

int sym_step(struct sym_decoder *d, const sym_batch *batch)
{
    d->batch = batch;
    int error = reserve_rows(d, batch->num_rows, batch->num_wanted);
    if (!error) error = make_plans(d);
    if (error) return error;
    int solo = batch->num_rows * d->work_per_row < d->solo_work;
    pool_run(&d->pool, solo ? 1 : d->pool.threads, walk, d);
    return 0;
}

/* ---- a decoder's life ---- */

void sym_decoder_free(struct sym_decoder *d)
{
    pool_stop(&d->pool, d->pool.threads - 1);
    void *owned[] = {d->x, d->h, d->qkv, d->attended, d->ff, d->all_rows, d->wanted_rows, d->plan.blocks,
                     d->last_plan.blocks, d->unfinished, d->partials, d->private, d};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
}

struct sym_decoder *sym_decoder_new(const sym_model *model, int threads, const char *isa, int64_t solo_work)
{
    const sym_shape *s = &model->shape;
    struct sym_decoder *d = NULL;
    int error = regrow(&d, sizeof *d);
    if (error) {
        errno = error;
        return NULL;
    }
    memset(d, 0, sizeof *d);
    d->model = *model;
    d->kernels = isa_choose(isa);
    d->solo_work = solo_work;
    d->work_per_row = (int64_t)s->layers * s->hidden * (qkv_width(s) + (int64_t)s->heads * s->head_dim + 3L * s->ffn);
    error = d->kernels ? regrow(&d->private, (size_t)(threads * private_floats(s)) * sizeof(float)) : EINVAL;
    if (!error) error = pool_start(&d->pool, threads);
    if (!error) return d;
    free(d->private);
    free(d);
    errno = error;
    return NULL;
}

const char *sym_isa(const char *wanted)
{
    const struct kernels *kernels = isa_choose(wanted);
    return kernels ? kernels->name : NULL;
}

int sym_num_phases(void) { return NUM_PHASES; }
const char *sym_phase_name(int phase) { return phase_names[phase]; }
int64_t sym_phase_ns(const struct sym_decoder *d, int phase) { return d->phase_ns[phase]; }

/* ---- packing ---- */

int64_t sym_packed_size(int64_t n, int64_t k) { return divide_up(n, PANEL) * PANEL * k; }

void sym_pack(const float *w, int64_t n, int64_t k, float *packed, int64_t first, int64_t every)
{
    for (int64_t i = 0; i < n; i += 16) {
        int64_t strip = first + i / 16 * every, rows = at_most(16, n - i);
        float *to = packed + strip / 2 * PANEL * k + strip % 2 * 16;
        for (int64_t j = 0; j < k; j += 16) /* 16 x 16 at a time: both sides stay in L1 */
            for (int64_t r = 0; r < rows; r++)
                for (int64_t l = j; l < at_most(j + 16, k); l++) to[l * PANEL + r] = w[(i + r) * k + l];
    }
}

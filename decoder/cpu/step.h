/* What Python sees of the CPU step. cffi reads this file too: declarations only, no directives but constants. */

typedef struct {
    int32_t vocab, hidden, layers, heads, kv_heads, head_dim, ffn;
    float rms_eps;
} sym_shape;

/* Matrices are packed by sym_pack. */
typedef struct {
    const float *attn_norm, *qkv, *o, *ffn_norm, *gate_up, *down;
} sym_layer;

typedef struct {
    sym_shape shape;
    const sym_layer *layers;
    const float *embed;      /* [vocab][hidden], as it came */
    const float *final_norm;
    const float *head;       /* packed */
    const float *cos, *sin;  /* [positions][head_dim / 2] */
    float *arena;            /* [pages][layers][2][kv_heads][32 * head_dim] */
} sym_model;

/* One step. Chunk c's rows are first_row[c] .. first_row[c + 1] - 1, its pages begin at pages[first_page[c]]. */
typedef struct {
    int32_t num_rows, num_chunks, num_wanted, num_copies;
    const int32_t *tokens, *positions; /* [rows] */
    const int32_t *first_row;          /* [chunks + 1] */
    const int32_t *start;              /* [chunks] entry index of the first row */
    const int32_t *first_page;         /* [chunks] */
    const int32_t *pages;
    const int32_t *wanted;             /* [chunks] how many of its last rows give logits */
    float *const *out;                 /* [num_wanted] -> [vocab] */
    const int32_t *copies;             /* [copies][2] source, target */
} sym_batch;

typedef struct sym_decoder sym_decoder;

/* The name of the instruction set that a name, or null for the best one here, selects; null if it cannot run. */
const char *sym_isa(const char *wanted);

/* What is not in the model by value must outlive the decoder. Steps of fewer than solo_work multiply-adds run on
 * the caller's thread alone: waking others takes longer. Null and errno on failure. */
sym_decoder *sym_decoder_new(const sym_model *model, int threads, const char *isa, int64_t solo_work);
void sym_decoder_free(sym_decoder *decoder);

/* 0, or an errno. The batch was checked by the caller: every index is in range. */
int sym_step(sym_decoder *decoder, const sym_batch *batch);

/* Nanoseconds that thread 0 spent in each phase since the decoder was made, barriers included. */
int sym_num_phases(void);
const char *sym_phase_name(int phase);
int64_t sym_phase_ns(const sym_decoder *decoder, int phase);

/* Floats that n packed output features of k inputs take. */
int64_t sym_packed_size(int64_t n, int64_t k);
/* Packs w [n][k] into strips of 16 features: its i-th strip becomes the (first + i * every)-th of `packed`. */
void sym_pack(const float *w, int64_t n, int64_t k, float *packed, int64_t first, int64_t every);

/* What crosses between the daemon's three extension modules while steps follow each other without the interpreter:
 * `libsym._channel` has the calls and the samplers, `decoder.cpu._step` the step, `scheduler._loop` calls both. They are
 * loaded by Python, not linked, so functions cross as pointers; the compiler checks their types where each module fills
 * in its part, and where the loop calls it. cffi reads this file: declarations only. */
#ifndef SYM_STEPS_H
#define SYM_STEPS_H

#include <stdint.h>

/* Entries in a page. One number for every tier, file and kernel: changing it changes the image format. */
#define SYM_PAGE_ENTRIES 32

typedef struct sym_server sym_server;
typedef struct sym_sampler sym_sampler;
typedef struct sym_decoder sym_decoder;
typedef struct sym_reducer sym_reducer;
typedef struct sym_stops sym_stops;

/* A pred() of one token and its last row, as a decode loop makes it. */
typedef struct sym_hot_call {
    uint64_t id;
    int64_t slot;
    float *row; /* of the slot */
    int32_t token;
    uint32_t stream; /* whose call it is */
} sym_hot_call;

/* A request that was looked at: its frame is well-formed, what it asks for is not yet judged. */
typedef struct sym_taken {
    uint64_t id, handle;
    int64_t args[4];
    uint32_t flags, op, stream;
    uint32_t payload_at, payload_bytes; /* in the inbox */
} sym_taken;

enum sym_served {
    SYM_COLD = 0,   /* it is for the interpreter */
    SYM_SERVED = 1, /* here is its answer */
    SYM_LATER = 2,  /* somebody answers it */
};

/* Carries out a request at once, without the interpreter: a `sym_served`. `answer`: zeros before. */
typedef int sym_serve_function(void *connection, const sym_taken *request, const char *payload, int64_t answer[4]);

enum sym_hot_outcome {
    SYM_HOT_OTHER = -2, /* what comes next is a call of another file */
    SYM_HOT_COLD = -1,  /* what comes next on this connection is something else */
    SYM_HOT_NONE = 0,   /* nothing has come */
    SYM_HOT_TAKEN = 1,
};

/* What libsym does for the loop: libsym/channel/hot.c and server.c, libsym/rows/sampler.c say what each means. */
typedef struct sym_hot_functions {
    int (*take)(sym_server *server, uint64_t handle, int32_t position, const int *stop, sym_hot_call *call);
    int (*answer)(sym_server *server, uint64_t id, int64_t slot, int64_t num_entries);
    int (*push)(sym_server *server, uint64_t id, uint32_t flags, int64_t a0, int64_t a1, int64_t a2,
                const char *payload, uint32_t payload_bytes, const char *more, uint32_t more_bytes);
    int (*watch)(sym_server *server);
    int (*unwatch)(sym_server *server, int slept);
    int (*drain)(sym_server *server, int doorbell_fd);
    void *(*served_by)(sym_server *server);
    int64_t (*take_rows)(sym_server *server, uint32_t num_rows);
    void (*free_rows)(sym_server *server, uint32_t first, uint32_t num_rows);
    float *(*row)(sym_server *server, int64_t slot);
    int64_t (*draw)(sym_sampler *sampler, const float *row, const void *allowed, uint64_t index);
    int (*note)(sym_sampler *sampler, int32_t token);
    int (*reduce)(sym_reducer *reducer, const float *row, uint64_t index, char *answer);
    int (*stops_add)(sym_stops *stops, int32_t token);
} sym_hot_functions;

/* What the rows of a chunk attend to: `sums` gets, for each layer and KV head, the weights that they give each entry, those
 * of the query heads of one KV head added up. */
typedef struct sym_mass {
    float *sums; /* [layers][kv_heads][columns]; null: nobody asks */
    int32_t layers, kv_heads; /* the model's */
    int32_t columns;          /* at least as many as there are entries with the chunk */
} sym_mass;

/* One step. Chunk c's rows are first_row[c] .. first_row[c + 1] - 1, its pages begin at pages[first_page[c]]. */
typedef struct sym_batch {
    int32_t num_rows, num_chunks, num_wanted, num_copies;
    const int32_t *tokens, *positions; /* [rows] */
    const int32_t *first_row;          /* [chunks + 1] */
    const int32_t *start;              /* [chunks] entry index of the first row */
    const int32_t *first_page;         /* [chunks + 1] */
    const int32_t *pages;
    const int32_t *wanted;        /* [chunks] how many of its last rows give logits */
    const uint32_t *const *masks; /* [chunks] null, or [rows of the chunk][its pages]: a bit for each entry */
    float *const *out;            /* [num_wanted] -> [vocab] */
    const int32_t *copies;        /* [copies][3] source, target, entries: the first so many at least */
    const sym_mass *masses;       /* [chunks], or null: no chunk asks */
} sym_batch;

/* What the decoder does for the loop: 0, or an errno. */
typedef int sym_step_function(sym_decoder *decoder, const sym_batch *batch);

/* Has work(context, 0 .. count - 1) done by a decoder's threads, between two steps. */
typedef void sym_parallel_function(sym_decoder *decoder, void (*work)(void *context, int32_t index), void *context,
                                   int32_t count);

#endif

/* Interface between the daemon's three extension modules while the run computes steps without the interpreter.
 * `libsym._channel` has the calls and the samplers, `decoder.cpu._step` has the step, and `scheduler._loop` calls both.
 * Python loads the modules; the linker does not join them. So functions cross as pointers. The compiler checks their
 * types where a module fills in its part and where the loop calls it. cffi reads this file: declarations only. */
#ifndef SYM_STEPS_H
#define SYM_STEPS_H

#include <stdint.h>

/* Entries in a page, the same in every tier, file and kernel. A change of this number changes the image format. */
#define SYM_PAGE_ENTRIES 32

typedef struct sym_server sym_server;
typedef struct sym_sampler sym_sampler;
typedef struct sym_decoder sym_decoder;
typedef struct sym_reducer sym_reducer;
typedef struct sym_stops sym_stops;

/* A pred() of one token that asks for its last row, as a decode loop makes it. */
typedef struct sym_hot_call {
    uint64_t id;
    int64_t slot;
    float *row; /* memory of the slot */
    int32_t token;
    uint32_t stream; /* the stream that made the call */
} sym_hot_call;

/* A request with a well-formed frame. Its contents are not checked yet. */
typedef struct sym_taken {
    uint64_t id, handle;
    int64_t args[4];
    uint32_t flags, op, stream;
    uint32_t payload_at, payload_bytes; /* place in the inbox */
} sym_taken;

enum sym_served {
    SYM_COLD = 0,   /* the request needs the interpreter */
    SYM_SERVED = 1, /* the answer is complete */
    SYM_LATER = 2,  /* the answer comes later */
};

/* Carries out a request immediately, without the interpreter. Returns a `sym_served`. The caller zeroes `answer`
 * first. */
typedef int sym_serve_function(void *connection, const sym_taken *request, const char *payload, int64_t answer[4]);

enum sym_hot_outcome {
    SYM_HOT_OTHER = -2, /* the next request is a hot call on another file */
    SYM_HOT_COLD = -1,  /* the next request on this connection is not a hot call */
    SYM_HOT_NONE = 0,   /* no request has come */
    SYM_HOT_TAKEN = 1,
};

/* Functions that libsym gives the loop. libsym/channel/hot.c and server.c, and libsym/rows/sampler.c describe them. */
typedef struct sym_hot_functions {
    int (*take)(sym_server *server, uint64_t handle, int32_t position, const int *stop, sym_hot_call *call);
    int (*answer)(sym_server *server, uint64_t id, int64_t slot, int64_t num_entries);
    int (*answer_all)(sym_server *server, uint64_t id, int64_t num, const char *payload, uint32_t payload_bytes,
                      uint32_t num_rows);
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
    sym_reducer *(*read_reducer)(const char *block, uint32_t bytes, uint32_t vocab_size);
    void (*free_reducer)(sym_reducer *reducer);
    int64_t (*reduced_bytes)(const sym_reducer *reducer);
    int (*reduce)(sym_reducer *reducer, const float *row, uint64_t index, char *answer);
    int (*stops_add)(sym_stops *stops, int32_t token);
} sym_hot_functions;

/* Attention of the rows of a chunk. For each layer, KV head and entry, `sums` receives the weights that the rows give
 * the entry, summed over the query heads of that KV head. */
typedef struct sym_mass {
    float *sums; /* [layers][kv_heads][columns]; null: no call asks for the attention of this chunk */
    int32_t layers, kv_heads; /* of the model */
    int32_t columns;          /* at least as many as the file's entries, the chunk included */
} sym_mass;

/* One step. Chunk c has the rows first_row[c] .. first_row[c + 1] - 1. The chunk's pages begin at
 * pages[first_page[c]]. */
typedef struct sym_batch {
    int32_t num_rows, num_chunks, num_wanted, num_copies;
    const int32_t *tokens, *positions; /* [rows] */
    const int32_t *first_row;          /* [chunks + 1] */
    const int32_t *start;              /* [chunks] index in the file of the first row's entry */
    const int32_t *first_page;         /* [chunks + 1] */
    const int32_t *pages;
    const int32_t *wanted;        /* [chunks] number of the chunk's last rows that give logits */
    const uint32_t *const *masks; /* [chunks] null, or [rows of the chunk][its pages]: a bit for each entry */
    float *const *out;            /* [num_wanted] -> [vocab] */
    const int32_t *copies;        /* [copies][3] source, target, number of entries to copy at least */
    const sym_mass *masses;       /* [chunks]; null: no call asks for attention */
} sym_batch;

/* Computes one step. Returns 0 or an errno. */
typedef int sym_step_function(sym_decoder *decoder, const sym_batch *batch);

/* Calls work(context, i) for i = 0 .. count - 1 on a decoder's threads, between two steps. */
typedef void sym_parallel_function(sym_decoder *decoder, void (*work)(void *context, int32_t index), void *context,
                                   int32_t count);

#endif

/* gpu_host.h: the host side of a gpu backend: what its files share.
 *
 *   backend_gpu.c       the table: open, close, memory
 *   gpu_device.c        failures, the device of the calling thread, streams
 *   gpu_pool.c          pools
 *   gpu_job.c           one batch as launches; gpu_launch.c makes them
 *   gpu_choose.c        what is kept for items that choose blocks, and their choice
 *   heads/gpu_heads.c   projections of items that carry heads, and their weights
 *   gpu_queue.c         submit, poll, block transfers
 *   gpu_moves.c         blocks that move beside batches
 *   gpu_peers.c         other devices
 *   bench/gpu_bench.c   measurement
 *
 * Thread     the engine thread, but for the host memory slots.
 * Allocation device and page-locked memory is taken in open and pool_open, in the measurement
 *            slots, which give it back, and by a thread that moves blocks as it begins; a batch
 *            takes none. What the driver takes for the graph of a direct kernel, once a kernel and
 *            stream, it may refuse: then there is no graph.
 * Order      every slot has a stream of its own. A batch whose table rows the one in front does not
 *            name runs beside it: its thread blocks take over processors as blocks of that one
 *            leave. Any other follows that one's stream, all but its way in: upload, q, k and v go
 *            to its own staging before.
 */
#ifndef ATTND_GPU_HOST_H
#define ATTND_GPU_HOST_H

#include "kernels/backend.h"
#include "kernels/choice.h"
#include "kernels/gpu/params.h"
#include "kernels/gpu/sm90/decode.h"
#include "kernels/gpu/sm90/prefill.h"
#include "kernels/gpu/vendor/runtime.h"
#include "kernels/kv_layout.h"
#include "kernels/kv_range.h"
#include "kernels/moves.h"
#include "kernels/prefix.h"

#ifndef GPU_BACKEND_NAME
#define GPU_BACKEND_NAME "cuda"
#endif

#define GPU_MAX_PATCHES 65536 /* of one upload; more go in further launches */
#define GPU_PART_SLOTS 65536 /* partial results of splits held at once */
#define GPU_SHARED_SLOTS 32768 /* behind those: room for what items have in common */
#define GPU_MAX_JOINED 65536 /* thread blocks of a launch that join their splits */
#define GPU_MOVE_THREADS 2 /* for each direction: the copies of one follow the other's */
#ifndef GPU_SUM_KIB
#define GPU_SUM_KIB 16384 /* of blocks whose checksums are made together */
#endif

/* A batch that follows the one in front has its q, k and v brought before if they are at least so
 * many bytes (fewer come with prep: another launch takes longer) of at most so many tokens (more
 * are computed for so long that it makes no difference). */
#ifndef GPU_BRING_BYTES
#define GPU_BRING_BYTES 65536
#endif
#define GPU_BRING_TOKENS 2048

enum gpu_kernel {
    GPU_TUNED, /* decode.h */
    GPU_MATRIX_16, /* up to 16 query rows a kv head */
    GPU_MATRIX_64, /* from 17 on */
    GPU_MATRIX_128, /* from 65 on, where there is a kernel (attend_rows.cuh) */
    GPU_PREFILL, /* prefill.h */
    GPU_DILATED, /* the same, of dilated layers */
    GPU_VECTOR,
    GPU_TREE, /* the same, of items that are trees */
    GPU_TREE_PREFILL, /* of them those that prefill.h's kernels take */
    GPU_LISTED, /* the same, of items that have lists */
    GPU_LISTED_16, /* of them those that GPU_MATRIX_16's kernel for f16 and bf16 takes */
    GPU_LISTED_LATENT, /* of them those that prefill.h's kernels take */
    GPU_CHOSEN, /* the same, of items that choose */
    GPU_CHOSEN_16, /* of them those that GPU_MATRIX_16's kernel takes */
    GPU_NAIVE, /* the ladder's steps; never chosen by submit */
    GPU_ONLINE,
    GPU_SHARED,
    GPU_NONE, /* append only */
    GPU_N_KERNELS,
};

/* Which kernels a batch's attention may use. */
struct gpu_choice {
    bool is_forced; /* `forced` for every item, else by geometry */
    bool is_split;
    enum gpu_kernel forced;
    uint32_t n_shards; /* splits of every item, 0: as many as fill the processors */
};

/* A launch of one kernel over a range of the items. */
struct gpu_range {
    enum gpu_kernel kernel;
    struct gpu_attend attend; /* kernels other than those of decode.h and prefill.h */
    /* of items that choose */
    uint32_t *chosen; /* device: attend.chosen, to be written */
    uint32_t *places; /* as the job's */
    uint32_t n_tokens, n_longest; /* of all items together; blocks that a query sees at most */
};

/* The memory a batch is staged in. host and device have the same layout. */
struct gpu_staging {
    char *host, *device;
    uint64_t bytes;
    char *q; /* device: [max_batch_tokens][num_q_heads][dk] of the widest pool */
    uint64_t q_bytes;
    char *kv; /* device: k and v of up to GPU_BRING_TOKENS tokens of the widest pool */
    uint64_t kv_bytes;
    char *heads; /* device: [max_batch_tokens] rows of gpu_heads_row_bytes of the widest pool */
    uint64_t heads_bytes;
    void *scratch; /* device: PREFILL_SCRATCH_BYTES, then that of the decode kernels */
    uint64_t scratch_bytes;
};

struct gpu_prefill {
    struct prefill_call call;
    const void *upload; /* device */
};

/* One batch, ready to be launched. */
struct gpu_job {
    struct backend_pool *pool;
    struct gpu_staging staging;
    uint64_t upload_from, upload_bytes; /* of staging, to bring to the device first */
    struct gpu_prep prep;
    bool has_tuned;
    struct decode_call tuned;
    const void *tuned_upload; /* device */
    /* of layers that are not dilated, of quantised pools as many as their decoded keys need; of
     * those that are; and of groups of items */
    struct gpu_prefill *prefills;
    uint32_t n_prefills, prefills_capacity;
    double prefill_flop; /* as if causal, without windows */
    struct gpu_range *ranges;
    uint32_t n_ranges, ranges_capacity;
    struct decode_item *tuned_items; /* [max_batch_items] */
    const struct tree_node *nodes; /* device: of all trees */
    const uint32_t *list_starts, *list_tokens; /* device: of all lists */
    uint32_t *chosen; /* device: of all choices */
    uint32_t *places; /* host: of all choices, behind the attention; NULL: nobody asks */
    struct backend_block_layer *missing; /* [n_missing] whose extremes the batch makes */
    uint32_t n_missing, missing_capacity;
    const struct backend_extremes *extremes; /* the batch's */
    struct gpu_join join; /* n_items 0: nothing was found in common */
    struct gpu_heads heads; /* n_tiles 0: none are projected */
    struct gpu_head_row *head_rows; /* host: as heads.rows */
    struct gpu_head_tile *head_tiles;
    uint32_t n_head_rows;
    uint64_t kv_bytes, kv_shared_bytes;
    uint32_t n_splits;
    bool has_append;
    bool is_direct; /* attention is all that is launched; gpu_submit settles it */
    uint32_t *order; /* [max_batch_items] the batch's items sorted by kernel */
};

/* What items of the batch that is being made begin with in common; memory that is used again. */
struct gpu_shared {
    struct prefixes prefixes; /* n_groups 0: nothing that pays */
    struct prefix_item *begins; /* [n_items] */
    /* [n_items] the batch's, without what their groups have; which of the batch's each is */
    struct backend_item *items;
    uint32_t *from;
    uint32_t *place; /* [n_items] where the job has each of items */
    uint32_t *query_of; /* [n_items] the first query of each, of all that are in groups */
    uint32_t n_queries, n_pieces; /* that are in groups; items that groups become */
    uint64_t bytes; /* of K and V that are not read again */
    uint32_t begins_capacity, items_capacity, from_capacity, place_capacity, query_of_capacity;
    bool is_off; /* while each item is measured for itself */
};

/* Written by the device, read by the host. */
struct gpu_signal {
    uint64_t start_ns;
    uint64_t done; /* as gpu_finish.out_done */
    uint64_t attended; /* nobody reads it */
};

struct gpu_slot {
    struct backend_batch *batch;
    struct gpu_job job;
    struct gpu_signal *signal;
    runtime_stream *stream;
    uint32_t value; /* signal->done's when the batch is done */
    bool is_alone; /* nothing may run beside it */
};

/* A thread that moves blocks. */
struct gpu_mover {
    runtime_stream *copies, *sums;
    runtime_event *came; /* what is to be summed up */
    uint64_t *deltas; /* device: [GPU_SUM_KIB][8] */
    uint64_t *lanes; /* host: [MOVES_TOGETHER][8] */
};

/* Of a row of the block table in a layer: the blocks of entries 1 to n - 1 have extremes, if the
 * turn is still the pool's. */
struct gpu_known {
    uint32_t n, turn;
};

struct backend_pool {
    struct backend *b;
    struct backend_pool *next;
    struct kv_range range;
    struct backend_pool_config config; /* layers points to specs */
    struct attn_layer_spec *specs; /* sink_logits and alibi_slopes are set to NULL: see kv.layers */
    struct kv_layout layout;
    struct gpu_kv kv;
    bool has_alibi; /* a layer has slopes */
    void *layers_memory, *table_memory; /* device */
    struct decode_pool *tuned; /* NULL: this geometry has no tuned kernel */
    struct prefill_pool *prefill; /* the same for prompts */
    uint32_t *touched; /* [n_table_rows] value of the last slot whose batch names the row */
    uint8_t *has_extremes; /* [num_layers][backend_n_names]; NULL: no step has chosen yet */
    struct gpu_known *known; /* [n_table_rows][num_layers], with has_extremes */
    uint32_t known_turn;
    struct kv_range extremes_range; /* as gpu_extremes has them */
    uint64_t *weights_have; /* [num_layers] bytes (weights.h); NULL: no projections */
};

/* What the latest batch was; layers of a model's step follow each other. */
struct gpu_course {
    const struct backend_pool *pool;
    uint32_t n_items; /* 0: no small direct batch */
    uint32_t row, layer; /* of the first item */
    bool is_next_due; /* the next layer's launch may be made ready */
};

struct backend {
    struct backend_config config;
    struct runtime_device device;
    runtime_stream *stream; /* of the first slot, and of all that is no batch */
    runtime_stream *prompts; /* their part of a batch that is computed side by side */
    runtime_stream *rows; /* of rows_copy; NULL: none were copied */
    runtime_event *met; /* where one stream follows another */
    struct moves *moves; /* NULL: nothing was moved yet */
    struct gpu_mover movers[2 * GPU_MOVE_THREADS];
    struct runtime_range kv;
    struct kv_range *kv_ranges; /* of pools */
    uint64_t kv_written; /* bytes from the start that pools had */
    struct backend_pool *pools;
    struct gpu_slot slots[BACKEND_MAX_IN_FLIGHT];
    struct gpu_signal *signals;
    uint32_t oldest, n_in_flight, last_value;
    uint64_t last_end_ns; /* of the batches polled so far */
    struct decode_planner planner;
    struct gpu_shared shared;
    float *part_o, *part_ml; /* device: GPU_PART_SLOTS, and GPU_SHARED_SLOTS of part_o */
    uint32_t *arrivals; /* device: [GPU_MAX_JOINED], 0 */
    char *decoded; /* device: PREFILL_DECODED_BYTES; NULL: no pool has needed it */
    uint32_t part_dv;
    uint64_t part_slots; /* GPU_PART_SLOTS but while shards are measured */
    uint32_t n_looks;
    struct gpu_course course;
    struct backend *next_opened; /* of the process (gpu_peers.c) */
    uint64_t reached; /* devices, by number */
    bool is_lost; /* the device gave an error that does not go away */
    char error[512];
};

/* ---- gpu_device.c */

/* Writes b->error, gives st back. */
__attribute__((format(printf, 3, 4))) attn_status gpu_fail(struct backend *b, attn_status st,
                                                           const char *format, ...);
/* info.features */
uint32_t gpu_features(const struct backend *b);
/* Every slot of the engine thread begins with this: the thread works with the backend's device from
 * now on. ATTN_EDEVICE: it is lost; last_error says why. */
attn_status gpu_enter(struct backend *b);
/* The device is lost: runtime_last_error says why. Gives ATTN_EDEVICE. */
attn_status gpu_lost(struct backend *b);
/* What is enqueued on s from now on runs after what other has so far. The runtime's code. */
int gpu_stream_follow(struct backend *b, runtime_stream *s, runtime_stream *other);
/* What is enqueued on b->stream from now on runs after all batches in flight. The runtime's
 * code. */
int gpu_follow_all(struct backend *b);

/* ---- gpu_pool.c: slots of the table */

attn_status gpu_pool_check(struct backend *b, const struct backend_pool_config *c);
uint64_t gpu_pool_bytes(const struct backend *b, const struct backend_pool_config *c);
attn_status gpu_pool_open(struct backend *b, const struct backend_pool_config *c,
                          struct backend_pool **out_pool);
uint64_t gpu_pool_place(const struct backend_pool *p);
uint32_t gpu_pool_room(const struct backend_pool *p);
attn_status gpu_pool_resize(struct backend_pool *p, uint32_t n_blocks, uint32_t max_row_blocks);
void gpu_pool_close(struct backend_pool *p);
/* What a pool has beside its part of the KV memory. It may be half-built. */
void gpu_pool_free(struct backend_pool *p);

/* ---- gpu_job.c */

/* Bytes of staging.host and .device for a batch at the limits. */
uint64_t gpu_staging_bytes(const struct backend *b, const struct backend_pool *p);
uint64_t gpu_q_bytes(const struct backend *b, const struct backend_pool *p);
/* Of K and V of a token as a client sends it. */
uint64_t gpu_kv_row_bytes(const struct backend_pool *p);
uint64_t gpu_brought_bytes(const struct backend *b, const struct backend_pool *p);
/* ATTN_ENOMEM */
attn_status gpu_job_init(struct backend *b, struct gpu_job *j);
void gpu_job_fini(struct gpu_job *j);
/* Checks a batch and turns it into launches. Items' results go to out_device (laid out as q, by
 * token) and lse_device if given, else to the items' own pointers.
 * Errors: ATTN_EINVAL an index out of range; ATTN_ENOTSUP; ATTN_ENOMEM */
attn_status gpu_job_make(struct backend *b, struct gpu_job *j, const struct backend_batch *batch,
                         const struct gpu_choice *choice, char *out_device, float *lse_device);

/* Processors that prompts take beside decodes. They compute and decodes read, so each has what the
 * other leaves, for as long as both last. 0: one is short, and they follow each other. */
uint32_t gpu_job_beside(const struct gpu_job *j);

/* ---- gpu_select.c */

/* Which kernel computes the item. */
enum gpu_kernel gpu_kernel_of(const struct backend_pool *p, const struct gpu_choice *choice,
                              const struct backend_item *it);
bool gpu_is_matrix(enum gpu_kernel kernel); /* of gpu_attend_matrix_launch, but for choices */
bool gpu_is_choosing(enum gpu_kernel kernel);
bool gpu_is_sparse(enum gpu_kernel kernel); /* each query visits keys of its own */
/* Thread blocks of so many rows that a processor has at once; 0: attend_rows.cuh has none. */
uint32_t gpu_rows_blocks(const struct backend_pool *p, uint32_t rows);
/* A slot of the table. */
void gpu_pool_kernels(const struct backend_pool *p, char *out, size_t bytes);

/* ---- gpu_choose.c */

/* Do the item's queries choose, or do they see no more blocks than they may visit? */
bool gpu_item_chooses(const struct backend_pool *p, const struct backend_item *it);
/* Of an item that does: keys that a query of its visits at most; bytes of K and V that are read. */
uint32_t gpu_chosen_most(const struct backend_pool *p, const struct backend_item *it);
uint64_t gpu_chosen_bytes(const struct backend_pool *p, const struct backend_item *it);
/* A block is written, and no batch does it. */
void gpu_extremes_forget(struct backend_pool *p, uint32_t block);
void gpu_extremes_free(struct backend_pool *p);
attn_status gpu_summaries_open(struct backend_pool *p);
/* Those of all pools leave their room. false: there were none. */
bool gpu_extremes_make_way(struct backend *b);
/* Forgets what the batch writes to, and lists what its choices lack, as made. The last thing before
 * a batch begins. Errors: ATTN_ENOMEM, ATTN_EINVAL a block's are nowhere; then nothing is as made,
 * and summaries that the batch copies to are of nothing. */
attn_status gpu_choice_note(struct gpu_job *j, const struct backend_batch *batch);
/* The batch is done: its items say what they chose. */
void gpu_choices_tell(const struct gpu_job *j, const struct backend_batch *batch);
/* Launches, which return the runtime's code: the batch's summaries, in front of its copies; what
 * its choices lack, behind its appends; the choices of a range, in front of its attention. Bounds
 * lie where partial results will. */
int gpu_summaries_make(const struct backend_batch *batch, runtime_stream *s);
int gpu_extremes_make(const struct gpu_job *j, runtime_stream *s);
int gpu_choice_launch(const struct backend_pool *p, const struct gpu_range *r, runtime_stream *s,
                      bool is_chained);

/* ---- heads/gpu_heads.c: two slots of the table; what is there as the pool is opened. */

attn_status gpu_weights_write(struct backend_pool *p, uint32_t layer, uint64_t offset,
                              const void *bytes, uint64_t n);
uint64_t gpu_weights_have(const struct backend_pool *p, uint32_t layer);
attn_status gpu_weights_read(struct backend_pool *p, uint32_t layer, uint64_t offset, uint64_t n,
                             void *out_bytes);
attn_status gpu_weights_open(struct backend_pool *p); /* errors: ATTN_ENOMEM, ATTN_EDEVICE */
/* Of a token of the widest of what lies in staging.heads; 0: the pool has no projections. */
uint64_t gpu_heads_row_bytes(const struct backend_pool *p);
/* Makes j->heads for j->n_head_rows tokens, without any, its lists at host_at of the staging: a row
 * and a tile for each. Then add: one of the job's items, as written; outs go to out, as the batch's
 * item has them. */
void gpu_heads_begin(struct gpu_job *j, uint64_t host_at);
void gpu_heads_add(struct gpu_job *j, const struct gpu_item *it, char *out);

/* ---- gpu_shared.c */

/* Finds what the batch's items begin with in common, if it pays. b->shared.prefixes.n_groups > 0:
 * the job is made of b->shared.items and of n_pieces more. Errors: ATTN_ENOMEM */
attn_status gpu_shared_find(struct backend *b, const struct gpu_choice *choice,
                            const struct backend_batch *batch);
/* What computes groups, the smallest of which has so many queries, and none more than n_keys. */
enum gpu_kernel gpu_groups_kernel(const struct backend_pool *p, uint32_t layer, uint32_t n_tokens,
                                  uint32_t n_keys);
/* items: of the job, as written from b->shared.items, [n_items], behind which n_pieces are written;
 * joined [n_items]. Fills j->join but for the address of joined. */
void gpu_shared_write(struct backend *b, struct gpu_job *j, struct gpu_item *items,
                      uint32_t n_items, struct gpu_joined *joined);
void gpu_shared_fini(struct gpu_shared *s);

/* ---- gpu_launch.c */

/* Is it worth it to bring q, k and v before prep, behind a batch in flight? */
bool gpu_job_is_brought(const struct gpu_job *j);
/* Does attention use part_o and part_ml, or decoded, of which there is one? */
bool gpu_job_has_parts(const struct gpu_job *j);
/* Can attention do without what is launched before it? */
bool gpu_job_can_be_direct(const struct gpu_job *j);
/* The launches of a job, in this order; bring may be left out, all but attend if it is direct. They
 * return the runtime's code. upload: of staging to the device; bring: q, k and v; prep: surplus
 * patches and prep. */
int gpu_job_upload(const struct gpu_job *j, runtime_stream *s);
int gpu_job_bring(struct gpu_job *j, runtime_stream *s);
int gpu_job_prep(const struct gpu_job *j, const struct backend_batch *batch, runtime_stream *s);
/* attend: is_chained: it follows prep. finish: what the device tells the host after it; NULL:
 * nothing. */
int gpu_job_attend(const struct gpu_job *j, const struct gpu_finish *finish, runtime_stream *s,
                   bool is_chained);

/* attend of a direct job, as far as it can be done before its batch is there. */
void gpu_job_attend_early(const struct gpu_job *j, const struct gpu_finish *finish,
                          runtime_stream *s);

/* ---- gpu_queue.c: slots of the table */

attn_status gpu_submit(struct backend *b, struct backend_batch *batch);
struct backend_batch *gpu_poll(struct backend *b, uint64_t wait_ns);
attn_status gpu_block_read(struct backend_pool *p, uint32_t block, void *out_bytes);
attn_status gpu_block_write(struct backend_pool *p, uint32_t block, const void *bytes);
attn_status gpu_tokens_copy(struct backend_pool *p, const struct backend_token_copy *list,
                            uint32_t n);

/* ---- gpu_peers.c */

/* The backend has its KV memory; it is about to give it back. */
void gpu_peers_join(struct backend *b);
void gpu_peers_leave(struct backend *b);
/* Its device works with that device's memory over a link, or it is its own. Any thread. */
bool gpu_reaches(const struct backend *b, int device);
uint64_t gpu_reached(const struct backend *b); /* others, as info has them */

/* ---- gpu_moves.c: a slot of the table; its end, before pools and device are closed */

attn_status gpu_moves_submit(struct backend *b, struct backend_moves *m);
void gpu_moves_end(struct backend *b);

#endif

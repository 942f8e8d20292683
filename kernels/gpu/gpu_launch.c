/* gpu_launch.c: the launches of a job that gpu_job.c made, in a stream, and what they depend on. */
#include "kernels/gpu/gpu_host.h"

#include <string.h>

int gpu_job_upload(const struct gpu_job *j, runtime_stream *s)
{
    if (j->upload_bytes == 0)
        return 0;
    return runtime_copy(j->staging.device + j->upload_from, j->staging.host + j->upload_from,
                        j->upload_bytes, s);
}

bool gpu_job_can_be_direct(const struct gpu_job *j)
{
    return j->has_tuned && j->tuned.n_items == j->prep.n_items && j->join.n_items == 0 &&
           j->heads.n_tiles == 0 && decode_can_be_direct(&j->tuned);
}

bool gpu_job_has_parts(const struct gpu_job *j)
{
    bool has = j->n_ranges > 0 || j->join.n_items > 0;
    for (uint32_t i = 0; i < j->n_prefills; i++)
        has |= j->prefills[i].call.is_cut || j->prefills[i].call.head_blocks > 0;
    return has;
}

bool gpu_job_is_brought(const struct gpu_job *j)
{
    const struct backend_pool_config *c = &j->pool->config;
    uint64_t q = (uint64_t)c->num_q_heads * backend_q_dim(c) * attn_dtype_bytes(c->q_dtype);
    uint64_t bytes = j->prep.n_tokens * (q + gpu_kv_row_bytes(j->pool));
    return j->prep.n_tokens > 0 && j->prep.n_tokens <= GPU_BRING_TOKENS && bytes >= GPU_BRING_BYTES;
}

int gpu_job_bring(struct gpu_job *j, runtime_stream *s)
{
    j->prep.brought = j->staging.kv;
    return runtime_check("bring kernel", gpu_bring_launch(&j->prep, s));
}

int gpu_job_prep(const struct gpu_job *j, const struct backend_batch *batch, runtime_stream *s)
{
    int code = 0;
    for (uint32_t i = GPU_MAX_PATCHES; i < batch->n_patches && !code; i += GPU_INLINE_PATCHES) {
        struct gpu_prep more = {.kv = j->pool->kv};
        uint32_t n = batch->n_patches - i;
        more.n_patches = n < GPU_INLINE_PATCHES ? n : GPU_INLINE_PATCHES;
        memcpy(more.inline_patches, batch->patches + i, more.n_patches * sizeof *batch->patches);
        code = runtime_check("patch kernel", gpu_prep_launch(&more, s));
    }
    return code ? code : runtime_check("prep kernel", gpu_prep_launch(&j->prep, s));
}

static int launch_range(const struct gpu_range *r, runtime_stream *s, bool is_chained)
{
    const struct gpu_attend *a = &r->attend;
    switch (r->kernel) {
    case GPU_MATRIX_16:
    case GPU_MATRIX_64:
    case GPU_MATRIX_128:
    case GPU_CHOSEN_16:
    case GPU_LISTED_16:
        return runtime_check("matrix attention kernel", gpu_attend_matrix_launch(a, s, is_chained));
    case GPU_VECTOR:
    case GPU_TREE:
    case GPU_LISTED:
    case GPU_CHOSEN:
        return runtime_check("vector attention kernel", gpu_attend_vector_launch(a, s, is_chained));
    default:
        return runtime_check("ladder kernel",
                             gpu_ladder_launch(a, (int)(r->kernel - GPU_NAIVE), s));
    }
}

static int launch_decodes(const struct gpu_job *j, const struct gpu_finish *finish,
                          runtime_stream *s, bool is_chained)
{
    void *scratch = (char *)j->staging.scratch + PREFILL_SCRATCH_BYTES;
    const enum decode_way way = j->is_direct ? DECODE_BY_ITSELF : DECODE_BEHIND_PREP;
    return runtime_check("decode kernel", decode_launch(&j->tuned, j->tuned_upload, scratch, finish,
                                                        s, is_chained, way));
}

/* n_processors: that they take, at most; 0: all. */
static int launch_prefills(const struct gpu_job *j, uint32_t n_processors, runtime_stream *s,
                           bool is_chained)
{
    const struct backend *b = j->pool->b;
    int code = 0;
    for (uint32_t i = 0; i < j->n_prefills && !code; i++)
        code = runtime_check("prefill kernel",
                             prefill_launch(&j->prefills[i].call, j->prefills[i].upload,
                                            j->staging.scratch, b->part_o, b->part_ml, n_processors,
                                            s, is_chained || i > 0));
    return code;
}

/* Prompts first, so that their blocks have their processors before those of decodes take all. */
static int launch_beside(const struct gpu_job *j, uint32_t n_processors, runtime_stream *s)
{
    struct backend *b = j->pool->b;
    int code = gpu_stream_follow(b, b->prompts, s);
    if (!code)
        code = launch_prefills(j, n_processors, b->prompts, false);
    if (!code)
        code = launch_decodes(j, NULL, s, false);
    return code ? code : gpu_stream_follow(b, s, b->prompts);
}

void gpu_job_attend_early(const struct gpu_job *j, const struct gpu_finish *finish,
                          runtime_stream *s)
{
    void *scratch = (char *)j->staging.scratch + PREFILL_SCRATCH_BYTES;
    if (decode_can_finish(&j->tuned)) /* what fails here fails again in the launch, and is said */
        (void)decode_launch(&j->tuned, NULL, scratch, finish, s, false, DECODE_EARLY);
}

int gpu_job_attend(const struct gpu_job *j, const struct gpu_finish *finish, runtime_stream *s,
                   bool is_chained)
{
    const uint32_t n_beside = gpu_job_beside(j);
    const bool has_heads = j->heads.n_tiles > 0;
    int code =
        has_heads ? runtime_check("absorb kernel", gpu_absorb_launch(&j->heads, s, is_chained)) : 0;
    bool is_signalled = false;
    if (!code)
        code = gpu_extremes_make(j, s);
    is_chained &= j->n_missing == 0 && j->extremes == NULL;
    if (code)
        return code;
    if (n_beside > 0) {
        code = launch_beside(j, n_beside, s);
        is_chained = false;
    } else {
        if (j->has_tuned) {
            is_signalled = finish && j->n_ranges == 0 && j->n_prefills == 0 && !has_heads &&
                           decode_can_finish(&j->tuned);
            code = launch_decodes(j, is_signalled ? finish : NULL, s, is_chained && !j->is_direct);
            is_chained = true;
        }
        if (!code)
            code = launch_prefills(j, 0, s, is_chained);
        is_chained |= j->n_prefills > 0;
    }
    for (uint32_t i = 0; i < j->n_ranges && !code; i++) {
        if (j->ranges[i].chosen != NULL) {
            code = gpu_choice_launch(j->pool, &j->ranges[i], s, is_chained);
            is_chained = true;
        }
        if (!code)
            code = launch_range(&j->ranges[i], s, is_chained);
        is_chained = true;
        if (!code && j->ranges[i].attend.any_split && !j->ranges[i].attend.is_joined)
            code = runtime_check("merge kernel", gpu_merge_launch(&j->ranges[i].attend, s));
    }
    if (!code && j->join.n_items > 0)
        code = runtime_check("join kernel", gpu_join_launch(&j->join, s, is_chained));
    if (!code && has_heads)
        code = runtime_check("expand kernel", gpu_expand_launch(&j->heads, s, n_beside == 0));
    if (!code && finish && !is_signalled)
        code = runtime_check("finish kernel", gpu_finish_launch(finish, s, n_beside == 0));
    return code;
}

/* cuda_simt.cpp: the runtime's functions of cuda/cuda.h for decode_launch.cu and prefill_launch.cu.
 * It counts launches by kernel; with ATTND_SIMT_WANT=NAME[,NAME] (cluster, warp, list, short, wide;
 * of wide rows32, of short direct, of direct early; prefill, dilated, codes, latent; of prefill
 * few; of prefill, codes and latent cut) the process ends with code 3 if one of them was never
 * launched, so that a test cannot pass by the generic kernels.
 */
#include "kernels/gpu/sm90/decode_kernels.h"
#include "kernels/gpu/sm90/prefill_kernels.h"
#include "kernels/gpu/vendor/launch_cuda.h"
#include "tests/kernels/simt/gpu_simt.h"
#include "tests/kernels/simt/sm90.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <unistd.h>

#undef gridDim /* are fields here */
#undef blockDim
#include "kernels/gpu/vendor/runtime_kept.h"

static struct counts {
    unsigned n[14];

    ~counts()
    {
        static const char *const names[14] = {"cluster", "warp",   "list",    "short",   "wide",
                                              "direct",  "rows32", "prefill", "dilated", "codes",
                                              "cut",     "early",  "latent",  "few"};
        const char *want = getenv("ATTND_SIMT_WANT");
        if (want == nullptr)
            return;
        bool is_missing = false;
        fprintf(stderr, "simt: launches:");
        for (int i = 0; i < 14; i++) {
            fprintf(stderr, " %s %u", names[i], n[i]);
            is_missing |= n[i] == 0 && strstr(want, names[i]) != nullptr;
        }
        fprintf(stderr, is_missing ? ", but wanted: %s\n" : "\n", want);
        if (is_missing)
            _exit(3);
    }
} launches;

static CUresult encode(CUtensorMap *out, CUtensorMapDataType, cuuint32_t rank, void *base,
                       const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                       const cuuint32_t *steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
{
    tensor_map m = {};
    bool is_good = (rank == 4 || rank == 5) && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
                   (uintptr_t)base % 16 == 0;
    is_good &= box[0] == 64; /* 128 bytes of 16-bit elements */
    m.box[4] = 1;
    m.dims[4] = 1;
    for (cuuint32_t i = 0; i < rank; i++) {
        is_good &= steps[i] == 1 && box[i] > 0 && box[i] <= 256 && dims[i] > 0 &&
                   dims[i] <= (uint64_t)1 << 32;
        is_good &= i == rank - 1 || (strides[i] % 16 == 0 && strides[i] < (uint64_t)1 << 40);
        m.box[i] = box[i];
        m.dims[i] = dims[i];
        if (i < rank - 1)
            m.strides[i] = strides[i];
    }
    if (!is_good)
        return CUDA_ERROR_INVALID_VALUE;
    m.magic = tensor_map_magic;
    m.base = (const char *)base;
    memset(out, 0, sizeof *out);
    memcpy(out->opaque, &m, sizeof m);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out_function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult *)
{
    if (strcmp(name, "cuTensorMapEncodeTiled") != 0)
        return cudaErrorNotSupported;
    *out_function = (void *)encode;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind)
{
    memcpy(dst, src, bytes);
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *out_device)
{
    *out_device = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out_value, cudaDeviceAttr, int)
{
    *out_value = (int)simt::shared_limit;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int value)
{
    return value > (int)simt::shared_limit ? cudaErrorInvalidValue : cudaSuccess;
}

/* The rows of a unit of the kernel if it is of this kind, else 0. */
static uint32_t rows_of(const void *kernel, int kind, decode::decode_start start)
{
    for (uint32_t dim = 64; dim <= 256; dim *= 2)
        for (uint32_t rows = 8; rows <= 64; rows *= 2)
            for (int has_extras = 0; has_extras < 2; has_extras++)
                for (auto find : {decode::kernel_bf16, decode::kernel_f16})
                    if (find((decode_kernel)kind, dim, rows, has_extras, start) == kernel)
                        return rows;
    return 0;
}

/* Rows of a unit of a kernel of prompts or of trees; 0: it is none. */
static uint32_t prefill_rows_of(const void *kernel)
{
    for (bool has_extras : {false, true})
        for (auto find : {prefill::kernel_bf16, prefill::kernel_f16, prefill::trees_kernel_bf16,
                          prefill::trees_kernel_f16}) {
            for (uint32_t dim = 64; dim <= 256; dim += 64)
                if (find(dim, prefill_rows(dim, false), has_extras) == kernel)
                    return prefill_rows(dim, false);
            if (find(64, PREFILL_FEW_ROWS, has_extras) == kernel)
                return PREFILL_FEW_ROWS;
        }
    return 0;
}

/* 8: of dilated layers, 9: of quantised pools; 0: neither. */
static int narrow_kind(const void *kernel)
{
    for (uint32_t dim = 64; dim <= 128; dim += 64)
        for (bool has_extras : {false, true}) {
            for (auto find : {prefill::dilated_kernel_bf16, prefill::dilated_kernel_f16})
                if (find(dim, has_extras) == kernel)
                    return 8;
            for (auto find : {prefill::codes_kernel_bf16, prefill::codes_kernel_f16})
                if (find(dim, has_extras) == kernel)
                    return 9;
        }
    return 0;
}

/* 1: of pools whose V is in K, 2: what joins their parts; 0: neither. */
static int latent_kind(const void *kernel)
{
    for (auto find : {prefill::latent_kernel_bf16, prefill::latent_kernel_f16})
        if (find(false, false) == kernel || find(true, false) == kernel ||
            find(false, true) == kernel || find(true, true) == kernel)
            return 1;
    for (const bool is_listed : {false, true})
        if (kernel == prefill::latent_join_bf16(is_listed) ||
            kernel == prefill::latent_join_f16(is_listed))
            return 2;
    return 0;
}

/* A kernel's three parameters. */
template <class params, class words, class maps>
static int enqueue(runtime_stream *s, const simt::launch &how, const void *kernel, void **args)
{
    struct copy {
        params p;
        words w;
        maps map;
    };
    /* on the heap, where a sanitizer sees its end; the stream may run it later */
    std::shared_ptr<copy> c = std::make_shared<copy>();
    memcpy(&c->p, args[0], sizeof c->p);
    memcpy(&c->w, args[1], sizeof c->w);
    memcpy(&c->map, args[2], sizeof c->map);
    auto fn = (void (*)(const params &, const words &, const maps &))kernel;
    return simt::enqueue(s, [=] {
        auto before = simt::deliver;
        simt::width = gpu::warp_width;
        simt::deliver = simt::deliver_copy;
        simt::run(how, [&] { fn(c->p, c->w, c->map); });
        simt::deliver = before;
    });
}

/* What is cut travels in the words, the longest unit first. */
static void count_cut(void **args)
{
    const prefill_entry &first = ((const prefill_words *)args[1])->list.entries[0];
    launches.n[10] += !((const prefill_params *)args[0])->entries && first.last_part > 0;
}

int runtime_launch(runtime_stream *s, const void *kernel, cudaLaunchConfig_t *l, void **args)
{
    simt::launch how = {l->gridDim, l->blockDim, l->dynamicSmemBytes};
    how.has_async = true;
    for (unsigned i = 0; i < l->numAttrs; i++)
        if (l->attrs[i].id == cudaLaunchAttributeClusterDimension)
            how.cluster = l->attrs[i].val.clusterDim.x;
        else
            how.is_chained = true;
    const uint32_t rows = prefill_rows_of(kernel);
    if (rows && l->dynamicSmemBytes <= simt::shared_limit) {
        launches.n[7]++;
        launches.n[13] += rows == PREFILL_FEW_ROWS;
        count_cut(args);
        return enqueue<prefill_params, prefill_words, prefill::prefill_maps>(s, how, kernel, args);
    }
    const int narrow = narrow_kind(kernel);
    if (narrow && l->dynamicSmemBytes <= simt::shared_limit) {
        launches.n[narrow]++;
        if (narrow == 9)
            count_cut(args);
        return enqueue<prefill_params, prefill_words, prefill::prefill_maps>(s, how, kernel, args);
    }
    const int latent = latent_kind(kernel);
    if (latent && l->dynamicSmemBytes <= simt::shared_limit) {
        launches.n[12] += latent == 1;
        if (latent == 1)
            count_cut(args);
        return enqueue<prefill_params, prefill_words, prefill::prefill_maps>(s, how, kernel, args);
    }
    int kind = DECODE_CLUSTER;
    while (kind <= DECODE_WIDE && !rows_of(kernel, kind, decode::DECODE_AFTER_PREP) &&
           !rows_of(kernel, kind, decode::DECODE_DIRECT) &&
           !rows_of(kernel, kind, decode::DECODE_DIRECT_FEW))
        kind++;
    if (kind > DECODE_WIDE || l->dynamicSmemBytes > simt::shared_limit)
        return (int)cudaErrorInvalidValue;
    launches.n[kind]++;
    launches.n[5] += ((const decode_params *)args[0])->sources_at != 0;
    launches.n[6] += kind == DECODE_WIDE && rows_of(kernel, kind, decode::DECODE_AFTER_PREP) == 32;
    if (kind == DECODE_SHORT && rows_of(kernel, kind, decode::DECODE_DIRECT_FEW))
        return enqueue<decode_params, decode_few_words, CUtensorMap>(s, how, kernel, args);
    bool is_short = kind == DECODE_CLUSTER || kind == DECODE_SHORT || kind == DECODE_WIDE;
    return is_short ? enqueue<decode_params, decode_short_words, CUtensorMap>(s, how, kernel, args)
                    : enqueue<decode_params, decode_words, CUtensorMap>(s, how, kernel, args);
}

/* The node of a kept graph: what its kernel runs with. */
struct node {
    struct kept_params given;
    decode_params p;
    decode_few_words w;
    CUtensorMap map;
    bool is_early;
};

int runtime_launch_kept(runtime_stream *s, const void *kernel, cudaLaunchConfig_t *l,
                        struct runtime_args *args, int is_early)
{
    static std::map<std::pair<runtime_stream *, const void *>, node> nodes;
    node &n = nodes[{s, kernel}];
    const bool is_new = kept_note(&n.given, l, args);
    if (is_new) {
        memcpy(&n.p, args->p[0], sizeof n.p);
        memcpy(&n.w, args->p[1], args->bytes[1]);
        memcpy(&n.map, args->p[2], sizeof n.map);
    }
    launches.n[11] += !is_early && !is_new && n.is_early;
    n.is_early = is_early;
    void *given[] = {&n.p, &n.w, &n.map};
    return is_early ? 0 : runtime_launch(s, kernel, l, given);
}

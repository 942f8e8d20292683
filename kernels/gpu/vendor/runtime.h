/* runtime.h: the calls of a vendor's runtime that the backend makes, in plain C; runtime_cuda.c
 * spells them for CUDA.
 *
 * Every function returns 0 or an error code and leaves "CALL: the runtime's words" in
 * runtime_last_error(), which is the calling thread's own. Nothing here allocates behind the
 * caller's back, and every allocation has a free.
 */
#ifndef ATTND_GPU_RUNTIME_H
#define ATTND_GPU_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct runtime_stream runtime_stream;
typedef struct runtime_event runtime_event;
typedef struct runtime_graph runtime_graph;

struct runtime_device {
    char name[96];
    char driver[128]; /* versions of driver and runtime */
    uint32_t n_processors;
    uint32_t capability; /* 10 * major + minor */
    bool has_words; /* runtime_stream_wait_word and _write_word */
    uint8_t uuid[16];
    uint32_t driver_version;
    bool is_shared; /* by processes that run side by side (MPS) */
    bool has_matrix_units; /* 16-bit products with 32-bit sums, as attend_matrix.cuh wants them */
    uint32_t shared_bytes; /* that a thread block may have */
    uint64_t l2_bytes;
    uint64_t total_bytes, free_bytes;
    uint64_t memory_bytes_per_s; /* by the memory's clock and width; 0: the driver does not say */
};

const char *runtime_last_error(void); /* never NULL */
/* Records what a kernel launch returned; gives the code back. */
int runtime_check(const char *call, int code);
/* Is the device usable at all? 0, or the driver's words in runtime_last_error. */
int runtime_device_open(int index, struct runtime_device *out);
uint32_t runtime_n_devices(void); /* 0: or no driver */
/* The calling thread works with device index from now on. */
int runtime_device_use(int index);

int runtime_alloc(void **out_p, size_t bytes); /* device memory */
void runtime_free(void *p);
int runtime_host_alloc(void **out_p, size_t bytes); /* page-locked, same address on the device */
void runtime_host_free(void *p);
int runtime_host_register(void *p, size_t bytes);
int runtime_host_unregister(void *p);

int runtime_stream_open(runtime_stream **out_s);
/* Blocks of its kernels come before those of other streams, where both could run. */
int runtime_stream_open_first(runtime_stream **out_s);
void runtime_stream_close(runtime_stream *s);
void *runtime_stream_native(runtime_stream *s); /* as the vendor's libraries name it */
int runtime_stream_wait(runtime_stream *s);
/* 0: nothing is wrong (done or not), else the error that stopped it. */
int runtime_stream_check(runtime_stream *s);
/* Any direction; page-locked host memory must stay as it is until the copy is done. */
int runtime_copy(void *dst, const void *src, size_t bytes, runtime_stream *s);
/* n rows of so many bytes, a step behind one another on either side. */
int runtime_copy_rows(void *dst, size_t dst_step, const void *src, size_t src_step,
                      size_t row_bytes, size_t n, runtime_stream *s);
/* The same n times, in one call where the runtime has one. They may be done in any order. */
int runtime_copies(void *const *dst, const void *const *src, const size_t *bytes, uint32_t n,
                   runtime_stream *s);
/* Between the memory of two devices, by their numbers, of which neither reaches the other's:
 * through the host's. What is reached is copied as any memory. */
int runtime_copy_peer(void *dst, int dst_device, const void *src, int src_device, size_t bytes,
                      runtime_stream *s);
int runtime_fill(void *dst, int byte, size_t bytes, runtime_stream *s);

int runtime_event_open(runtime_event **out_e);
void runtime_event_close(runtime_event *e);
int runtime_event_record(runtime_event *e, runtime_stream *s);
/* What is enqueued on s from now on runs after what e was recorded behind. */
int runtime_stream_follow(runtime_stream *s, runtime_event *e);
/* What is enqueued on s from now on runs after (int32_t)(*word - value) >= 0. The device reads
 * the word where it is, in page-locked host memory or its own. */
int runtime_stream_wait_word(runtime_stream *s, const uint32_t *word, uint32_t value);
/* *word becomes value after all that is enqueued on s; who sees it sees what was written before. */
int runtime_stream_write_word(runtime_stream *s, uint32_t *word, uint32_t value);
int runtime_event_ns(runtime_event *from, runtime_event *to, uint64_t *out_ns);

/* What is launched on s between begin and end becomes a graph instead. */
int runtime_graph_begin(runtime_stream *s);
int runtime_graph_end(runtime_stream *s, runtime_graph **out_g);
int runtime_graph_launch(runtime_graph *g, runtime_stream *s);
void runtime_graph_close(runtime_graph *g);

/* A range of device memory with a descriptor that outlives the process. */
struct runtime_range {
    void *p;
    uint64_t bytes; /* as taken: rounded up */
    uint64_t handle;
    bool is_mapped, is_reserved, has_handle;
};

/* import_fd -1: new memory. out is valid for runtime_range_close also after a failure. */
int runtime_range_open(int index, uint64_t bytes, int import_fd, struct runtime_range *out);
int runtime_range_export(const struct runtime_range *r, int *out_fd);
/* Lets another device read and write the range where it lies, at the same addresses. Not 0: there
 * is no link between them, or it has no address. */
int runtime_range_reach(const struct runtime_range *r, int owner, int device);
void runtime_range_close(struct runtime_range *r);

#ifdef __cplusplus
}
#endif
#endif

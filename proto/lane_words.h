/* lane_words.h: the memory that a worker and the daemon share for a lane: the two packets that open
 * it, the page of control words, and where tensors begin in a region. The protocol is in
 * docs/protocol/lanes.md.
 *
 * A lane has a page of host memory and two regions, which both sides map: the daemon's, where the
 * worker puts q, k and v, and the worker's, where the daemon puts out. Either each region is memory
 * of its side's GPU (one GPU, or two that reach each other), or both are memfds. Either side can
 * write to all of it at any time.
 */
#ifndef ATTND_PROTO_LANE_WORDS_H
#define ATTND_PROTO_LANE_WORDS_H

#include <stdatomic.h>
#include <stdint.h>

#define LANE_MAGIC 0x454e4c41u /* "ALNE" as bytes */
#define LANE_VERSION 1u
#define LANE_ALIGN 64u /* alignment of tensors in a region */
#define LANE_REGION_ALIGN (2u << 20) /* a region's size is a multiple of it */
#define LANE_OUT_OFFSET 128u /* in the worker's region; the word `done` lies before it */

/* The GPU that a side is on. All zeros: the regions are memfds. */
struct lane_device {
    uint8_t uuid[16];
    uint32_t driver_version; /* as the CUDA driver numbers versions: 13000 is 13.0 */
    uint32_t is_shared; /* 1: this process is an MPS client of that GPU */
};

/* worker -> daemon, the first packet; it carries the descriptor of the worker's region */
struct lane_hello {
    uint32_t magic, version;
    struct lane_device device;
    uint64_t in_bytes; /* the most that is wanted of the daemon's region; 0: as much as it gives */
    uint64_t out_bytes; /* of the worker's region */
};

/* daemon -> worker, the answer; with status 0 it carries two descriptors: the page's memfd and the
 * daemon's region */
struct lane_welcome {
    uint32_t magic, version;
    int32_t status; /* attn_status */
    uint32_t reserved; /* 0 */
    uint64_t lane; /* names the lane in plans */
    uint64_t in_bytes; /* of the daemon's region */
    struct lane_device device; /* the daemon's, whatever the status */
    char message[200]; /* why the status is not 0; ends with a 0 */
};

/* The page of control words. */
struct lane_page {
    _Alignas(64) _Atomic uint32_t bell; /* layers that the worker has rung for, modulo 2^32 */
    /* Written by the daemon: in the lower half the latest bell that its host answered, in the upper
     * half the status. A bell that the device answered is only in `done`. */
    _Alignas(64) _Atomic uint64_t verdict;
    /* For the worker's own use: stop 1 releases what waits; fault is the status of the first layer
     * that failed. */
    _Alignas(64) _Atomic uint32_t stop;
    _Atomic int32_t fault;
    _Alignas(64) char why[192]; /* written by the daemon before a verdict that is not 0; ends with a
                                   0 */
};

#define LANE_PAGE_BYTES 4096u

static inline uint64_t lane_verdict(uint32_t bell, int32_t status)
{
    return (uint64_t)(uint32_t)status << 32 | bell;
}

_Static_assert(sizeof(struct lane_device) == 24, "as documented");
_Static_assert(sizeof(struct lane_hello) == 48, "as documented");
_Static_assert(sizeof(struct lane_welcome) == 256, "as documented");
_Static_assert(sizeof(struct lane_page) <= LANE_PAGE_BYTES, "as documented");

#endif

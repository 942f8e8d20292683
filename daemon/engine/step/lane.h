/* lane.h: a worker's way to the engine without messages: plans, and bells that start the planned
 * layers one by one (proto/lane_words.h; docs/protocol/lanes.md).
 *
 * A plan comes as a request and names the steps of the coming layers. A bell turns one of them into
 * an ordinary request whose tensors are in the lane's regions; its answer is a word. The page is
 * shared with the worker, so it is read once per look and not trusted: a bell that is not the next
 * one, or that is in no plan, is refused and ends all plans.
 *
 * Created and freed on the loop's thread (transport/gpu.c). In between only the primary uses it,
 * whichever cards compute its bells.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_LANE_H
#define ATTND_DAEMON_ENGINE_STEP_LANE_H

#include <sys/queue.h>

#include "daemon/request/request.h"
#include "kernels/backend.h"
#include "proto/lane_words.h"

enum {
    LANE_MAX_PLANS = 4, /* unfinished plans of a lane */
    /* in the engine at once; the device may answer one before its poll returns it */
    LANE_BELLS = 4,
};

/* The most that a plan takes (the struct, then its items and layers), and a bell's request. */
enum {
    LANE_ITEM_BYTES = sizeof(uint64_t) + 3 * sizeof(uint32_t),
    LANE_MAX_PLAN_BYTES =
        512 + WIRE_MAX_STEP_ITEMS * LANE_ITEM_BYTES + WIRE_MAX_LAYERS * sizeof(uint32_t),
    LANE_MAX_BELL_BYTES = 4096 + WIRE_MAX_STEP_ITEMS * 64, /* its request's task and items */
};

struct lane_plan {
    uint32_t n_refs; /* one of the lane, one of each bell */
    uint32_t first_bell, n_layers;
    const uint32_t *layers; /* [n_layers] */
    uint64_t session, timeout_us;
    uint64_t in_offset, out_offset;
    uint64_t in_bytes; /* q, k and v of a layer */
    Attnd__Step step; /* its arrays follow the struct */
};

/* A bell's request. */
struct lane_bell {
    struct request req; /* first */
    struct lane *lane;
    struct lane_plan *plan; /* NULL: free */
    uint32_t value;
    struct request_bell io;
    struct iobuf msg, room; /* msg is empty; room: for a refusal */
    Attnd__Request header;
    Attnd__Step step;
    uint8_t room_bytes[REQUEST_MIN_MSG_BYTES];
};

struct lane {
    LIST_ENTRY(lane) entry; /* in the engine's list */
    uint64_t id;
    struct engine *engine; /* of the card that opened the regions */
    const struct backend_ops *ops; /* that card's backend */
    struct backend *backend;
    const struct transport_ops *transport;
    _Atomic bool *out_news; /* set when a closed lane's last bell came back */
    struct principal principal;
    struct lane_page *page;
    struct backend_region in, out;

    uint32_t taken; /* the latest bell taken */
    uint64_t taken_ns; /* when it, or a plan, came */
    struct lane_plan *plans[LANE_MAX_PLANS]; /* in the order of their bells, without gaps */
    uint32_t n_plans, n_busy;
    uint64_t plan_session, plan_request; /* of the latest plan; older ones are late */
    /* asking other cards about a plan (it counts as busy); later plans are in `waiting` */
    bool is_asking;
    STAILQ_HEAD(, request) waiting;
    bool is_closed; /* takes no more bells */
    bool is_stuck; /* a lost card may still use its regions: they stay until the process ends */
    attn_status status; /* why bells are refused; ATTN_OK: no failure since the latest plan */
    struct lane_bell bells[LANE_BELLS];
};

/* Whether a device can have lanes. */
static inline bool lane_is_possible(const struct backend_info *info)
{
    const uint32_t all = BACKEND_HAS_WORDS | BACKEND_HAS_DEVICE_ADDRESSES | BACKEND_HAS_REGIONS;
    return (info->features & all) == all;
}

/* Names the memory: "GPU 0123..", "host memory". */
enum { LANE_DEVICE_TEXT_BYTES = 40 };
const char *lane_device_format(const struct lane_device *d, char out[LANE_DEVICE_TEXT_BYTES]);

/* Checks that a worker on that device and the daemon can share memory and run kernels at the same
 * time. On two GPUs, mapping the regions will show. ATTN_ENOTSUP: why names the obstacle. */
attn_status lane_device_check(const struct lane_device *theirs, const struct lane_device *ours,
                              char *why, size_t why_bytes);

/* id, engine, transport, out_news, principal, page and regions must be set. */
void lane_init(struct lane *l);
/* No bell may be in the engine. */
void lane_fini(struct lane *l);

/* The engine's thread from here on. */

/* Takes the bell that was rung. true: there was one. */
bool lane_poll(struct lane *l);
/* Takes no more bells; n_busy counts what is still in the engine. */
void lane_close(struct lane *l);

/* Accepts the plan of req, whose steps have been checked, and abandons older plans from its first
 * bell on. A repeat changes nothing; a plan without layers only abandons. On an error nothing
 * changes.
 * Errors   ATTN_EINVAL wrong first_bell, or a late copy; ATTN_EOVERLOAD too many plans;
 *          ATTN_ENOMEM */
attn_status lane_plan(struct lane *l, const struct request *req, uint64_t in_bytes, char *why,
                      size_t why_bytes);

/* Call when a bell or plan of the lane has left the engine: reports a closed lane's last. */
void lane_release(struct lane *l);
/* transport_ops.reply of bells. */
void lane_reply(struct request *req);

/* Starts serving a lane's plans and bells, until it is removed. The engine's thread. */
void engine_lane_add(struct engine *e, struct lane *l);
void engine_lane_remove(struct lane *l);

#endif

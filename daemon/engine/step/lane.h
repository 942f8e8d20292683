/* lane.h: a worker's way to the engine without messages: plans, and bells that say which of the
 * planned layers is next (proto/lane_words.h; docs/protocol.md, "Lanes").
 *
 * A plan comes as a request and names the steps of the layers to come. A bell makes of one of them
 * a request like any other, whose tensors lie in the lane's regions; its answer is a word. The page
 * is read once per look, nothing in it is believed: a bell that is not the next one, or that no
 * plan has, is refused and ends what is planned.
 *
 * Made and freed on the loop's thread (transport/gpu.c); in between the primary's alone, whichever
 * cards compute its bells.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_LANE_H
#define ATTND_DAEMON_ENGINE_STEP_LANE_H

#include <sys/queue.h>

#include "daemon/request/request.h"
#include "kernels/backend.h"
#include "proto/lane_words.h"

enum {
    LANE_MAX_PLANS = 4, /* not finished, of a lane */
    LANE_BELLS = 4, /* in the engine at once: answered by the device, not yet by its poll */
};

struct lane_plan {
    uint32_t n_refs; /* the lane's, and a bell's each */
    uint32_t first_bell, n_layers;
    const uint32_t *layers; /* [n_layers] */
    uint64_t session, timeout_us;
    uint64_t in_offset, out_offset;
    uint64_t in_bytes; /* of a layer's q, k and v */
    Attnd__Step step; /* arrays behind the struct */
};

/* A bell's request. */
struct lane_bell {
    struct request req; /* first */
    struct lane *lane;
    struct lane_plan *plan; /* NULL: free */
    uint32_t value;
    struct request_bell io;
    struct iobuf msg, room; /* of no message; of a refusal's sentence */
    Attnd__Request header;
    Attnd__Step step;
    uint8_t room_bytes[REQUEST_MIN_MSG_BYTES];
};

struct lane {
    LIST_ENTRY(lane) entry; /* of the engine's */
    uint64_t id;
    struct engine *engine; /* of the card that regions were opened on */
    const struct backend_ops *ops; /* its backend */
    struct backend *backend;
    const struct transport_ops *transport;
    _Atomic bool *out_news; /* set when the last bell of a closed lane came back */
    struct principal principal;
    struct lane_page *page;
    struct backend_region in, out;

    uint32_t taken; /* the latest bell */
    uint64_t taken_ns; /* when that, or a plan, came */
    struct lane_plan *plans[LANE_MAX_PLANS]; /* in the order of their bells, without gaps */
    uint32_t n_plans, n_busy;
    uint64_t plan_session, plan_request; /* that made the latest plan: older ones are late */
    bool is_asking; /* other cards, about a plan: it counts as busy; those behind it: */
    STAILQ_HEAD(, request) waiting;
    bool is_closed; /* nothing is taken any more */
    bool is_stuck; /* a lost card may have its regions: they stay until the process ends */
    attn_status status; /* why bells are refused; ATTN_OK: there is no plan */
    struct lane_bell bells[LANE_BELLS];
};

/* Can a device have lanes? */
static inline bool lane_is_possible(const struct backend_info *info)
{
    const uint32_t all = BACKEND_HAS_WORDS | BACKEND_HAS_DEVICE_ADDRESSES | BACKEND_HAS_REGIONS;
    return (info->features & all) == all;
}

/* Which memory this is, in words: "GPU 0123..", "host memory". */
enum { LANE_DEVICE_TEXT_BYTES = 40 };
const char *lane_device_format(const struct lane_device *d, char out[LANE_DEVICE_TEXT_BYTES]);

/* Can a worker there and the daemon share memory, and run kernels at once? On two GPUs mapping the
 * regions decides. ATTN_ENOTSUP: why names what is in the way. */
attn_status lane_device_check(const struct lane_device *theirs, const struct lane_device *ours,
                              char *why, size_t why_bytes);

/* id, engine, transport, out_news, principal, page and regions are set. */
void lane_init(struct lane *l);
/* No bell is in the engine. */
void lane_fini(struct lane *l);

/* The engine's thread from here on. */

/* Takes the bell that was rung, if there is one. true: there was. */
bool lane_poll(struct lane *l);
/* Nothing is taken any more; n_busy says what is still in the engine. */
void lane_close(struct lane *l);

/* Accepts the plan h, whose steps have been checked, and abandons older plans from its first bell
 * on. A repeat changes nothing; a plan without layers only abandons.
 * Errors   ATTN_EINVAL first_bell, or a late copy; ATTN_EOVERLOAD as many plans as there may be;
 *          ATTN_ENOMEM. Nothing has changed then */
attn_status lane_plan(struct lane *l, const struct request *req, uint64_t in_bytes, char *why,
                      size_t why_bytes);

/* Something of the lane has left the engine; of a closed one maybe the last. */
void lane_release(struct lane *l);
/* transport_ops.reply of bells. */
void lane_reply(struct request *req);

/* Starts serving a lane's plans and bells, until it is removed. The engine's thread. */
void engine_lane_add(struct engine *e, struct lane *l);
void engine_lane_remove(struct lane *l);

#endif

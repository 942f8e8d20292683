/* lane_steps.c: builds plan requests, fills a layer's tensors in the lane's regions, rings, and
 * compares what comes out with the model.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/transport/lane_steps.h"

uint64_t lane_send_plan(struct e2e_client *c, const struct lane_link *l, uint32_t first_bell,
                        const uint32_t *layers, uint32_t n_layers, const struct e2e_step *s,
                        struct lane_places at)
{
    Attnd__Plan b = ATTND__PLAN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.lane = l->welcome.lane;
    b.first_bell = first_bell;
    b.n_layers = n_layers;
    b.layers = (uint32_t *)(uintptr_t)layers;
    b.step = (Attnd__Step *)(uintptr_t)&s->wire;
    b.in_offset = at.in;
    b.out_offset = at.out;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_PLAN;
    h.plan = &b;
    return e2e_send(c, &h, NULL, 0);
}

const Attnd__Reply *lane_plan(struct e2e_client *c, const struct lane_link *l,
                              const uint32_t *layers, uint32_t n_layers, const struct e2e_step *s,
                              struct lane_places at)
{
    uint64_t id = lane_send_plan(c, l, l->count + 1, layers, n_layers, s, at);
    return e2e_await(c, id)->header;
}

void lane_plan_well(struct e2e_client *c, const struct lane_link *l, const uint32_t *layers,
                    uint32_t n_layers, const struct e2e_step *s, struct lane_places at)
{
    const Attnd__Reply *r = lane_plan(c, l, layers, n_layers, s, at);
    if (r->status != ATTN_OK)
        fail_msg("no plan: %s", r->message);
}

int lane_try(struct lane_link *l, const struct e2e_step *s, const struct e2e_item *items,
             uint32_t layer, struct lane_places at)
{
    memset(l->in + at.in, 0xff, s->layout.request_bytes);
    memset(l->out + at.out, 0xff, s->layout.reply_bytes);
    e2e_fill_step(s, layer, items, l->in + at.in);
    return lane_link_ring(l, LANE_LONG_MS);
}

void lane_layer(struct lane_link *l, const struct e2e_step *s, const struct e2e_item *items,
                uint32_t layer, struct lane_places at)
{
    static const Attnd__Reply ok = ATTND__REPLY__INIT;
    int status = lane_try(l, s, items, layer, at);
    if (status != 0)
        fail_msg("bell %u: %d: %s", l->count, status, l->page->why);
    const struct wire_reply r = {
        .header = &ok, .payload = l->out + at.out, .payload_bytes = s->layout.reply_bytes};
    e2e_check_step(&r, layer, s->wire.flags, items, (uint32_t)s->wire.n_seq);
}

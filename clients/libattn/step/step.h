/* step.h: what lanes ask about steps: whether an item of a layer may be cut. The rest of step.c is
 * public, in attn.h. */
#ifndef ATTN_STEP_H
#define ATTN_STEP_H

#include "clients/libattn/attn.h"

/* True for a layer without causal order (is_full): a query sees its whole item, so an item cannot
 * be cut. */
bool step_sees_all(const struct attn_pool_spec *spec, uint32_t layer);

#endif

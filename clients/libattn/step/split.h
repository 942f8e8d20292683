/* split.h: a step too large for one message, started as several. step.c builds and reads messages;
 * it hands such a step to split.c, with the function that starts one piece.
 */
#ifndef ATTN_SPLIT_H
#define ATTN_SPLIT_H

#include "clients/libattn/core/in_flight.h"

/* Starts a piece of the parent's step, with the parent's deadline. cb runs as that of a step. */
typedef attn_status step_start_piece_fn(struct attn_pool *p, const struct attn_step *s,
                                        const struct client_request *parent, attn_step_cb cb,
                                        void *user);

/* Starts the parent's step as pieces of at most max_tokens; is_whole: items must not be cut. Each
 * piece goes out through start_piece when the one before it is done. The parent is in no list;
 * once this has returned ATTN_OK, the last piece completes it with client_request_finish. */
attn_status split_start(struct client_request *parent, uint32_t max_tokens, bool is_whole,
                        step_start_piece_fn *start_piece);

#endif

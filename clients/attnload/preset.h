/* preset.h: attention geometries of published models (heads, head size, layers, windows), as the
 * models' configurations give them. */
#ifndef ATTNLOAD_PRESET_H
#define ATTNLOAD_PRESET_H

#include "clients/libattn/attn.h"

#define PRESET_MAX_LAYERS 128

struct preset {
    const char *name;
    uint32_t num_layers, num_q_heads, num_kv_heads, head_dim;
    float scale; /* 0: 1 / sqrt(head_dim) */
    float soft_cap; /* 0: none */
    uint32_t window_tokens; /* of the layers that slide, 0: none does */
    uint32_t full_every; /* with a window: every n-th layer sees all */
    /* 0: V is head_dim, too. Else latent attention: K is a latent of so many elements with the part
     * that has positions behind it, V the latent in it */
    uint32_t kv_lora_rank;
    uint32_t qk_nope_head_dim,
        v_head_dim; /* then: of the model's heads, without their rotated part */
};

extern const struct preset presets[];
extern const uint32_t n_presets;

/* NULL: no such preset. */
const struct preset *preset_find(const char *name);
/* Elements of a head of v, and of what attention gives. */
uint32_t preset_dim_v(const struct preset *p);
/* Elements of a head of q and of out in steps; has_heads: the model's, which attnd projects. */
uint32_t preset_dim_q(const struct preset *p, bool has_heads);
uint32_t preset_dim_out(const struct preset *p, bool has_heads);
/* How layer `index` of the model attends. */
struct attn_layer preset_layer(const struct preset *p, uint32_t index);
/* Cached tokens that a query at position pos reads there. */
uint32_t preset_visible(const struct preset *p, uint32_t layer, uint32_t pos);

#endif

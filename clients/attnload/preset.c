/* preset.c: the table. Gemma 3 slides in five of six layers, scales by 1 / sqrt(5376 / 32), caps no
 * logits of attention (its predecessor did). DeepSeek-V3 and Kimi K2 are in absorbed form: K of a
 * token is its latent (512) and its rotated part (64), for all query heads; the scale is that of
 * their expanded heads of 192 elements, DeepSeek's with YaRN's factor (0.1 ln 40 + 1)^2, Kimi K2's
 * with (0.1 ln 32 + 1)^2. */
#include "clients/attnload/preset.h"

#include <string.h>

const struct preset presets[] = {
    {"llama3-8b", 32, 32, 8, 128, 0, 0, 0, 0, 0, 0, 0},
    {"llama3-70b", 80, 64, 8, 128, 0, 0, 0, 0, 0, 0, 0},
    {"qwen3-32b", 64, 64, 8, 128, 0, 0, 0, 0, 0, 0, 0},
    {"gemma3-27b", 62, 32, 16, 128, 0.077151675f, 0, 1024, 6, 0, 0, 0},
    {"deepseek-v3", 61, 128, 1, 576, 0.13523376f, 0, 0, 0, 512, 128, 128},
    {"kimi-k2", 61, 64, 1, 576, 0.13086973f, 0, 0, 0, 512, 128, 128},
    {"bytelm", 4, 8, 2, 64, 0, 0, 0, 0, 0, 0, 0},
};
const uint32_t n_presets = sizeof presets / sizeof presets[0];

const struct preset *preset_find(const char *name)
{
    for (uint32_t i = 0; i < n_presets; i++) {
        if (strcmp(presets[i].name, name) == 0)
            return &presets[i];
    }
    return NULL;
}

uint32_t preset_dim_v(const struct preset *p)
{
    return p->kv_lora_rank > 0 ? p->kv_lora_rank : p->head_dim;
}

uint32_t preset_dim_q(const struct preset *p, bool has_heads)
{
    return has_heads ? p->qk_nope_head_dim + p->head_dim - p->kv_lora_rank : p->head_dim;
}

uint32_t preset_dim_out(const struct preset *p, bool has_heads)
{
    return has_heads ? p->v_head_dim : preset_dim_v(p);
}

static bool slides(const struct preset *p, uint32_t index)
{
    return p->window_tokens > 0 && (index + 1) % p->full_every != 0;
}

struct attn_layer preset_layer(const struct preset *p, uint32_t index)
{
    return (struct attn_layer){.scale = p->scale,
                               .soft_cap = p->soft_cap,
                               .window_tokens = slides(p, index) ? p->window_tokens : 0};
}

uint32_t preset_visible(const struct preset *p, uint32_t layer, uint32_t pos)
{
    return slides(p, layer) && pos + 1 > p->window_tokens ? p->window_tokens : pos + 1;
}

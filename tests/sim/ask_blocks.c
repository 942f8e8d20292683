/* ask_blocks.c: whole blocks out of sequences and into them, and what operators do to others:
 * requests, and what their answers must be. */
#include <string.h>

#include "daemon/request/session.h"
#include "kernels/kv_layout.h"
#include "model.h"
#include "proto/seq_file.h"

uint64_t attention_digest;

enum { MOST_BLOCKS = 3 };

static struct kv_layout layout(void)
{
    const struct backend_pool_config c = {.num_layers = N_LAYERS,
                                          .num_q_heads = Q_HEADS,
                                          .num_kv_heads = KV_HEADS,
                                          .head_dim_k = HEAD_DIM,
                                          .head_dim_v = HEAD_DIM,
                                          .block_tokens = BLOCK_TOKENS,
                                          .q_dtype = ATTN_F32,
                                          .kv_dtype = ATTN_F32};
    return kv_layout_of(&c);
}

/* Where the number of a token is in a block's bytes (device.c). */
static size_t number_at(uint32_t layer, uint32_t slot, uint32_t head)
{
    struct kv_layout l = layout();
    return layer * l.layer_bytes + head * l.k_head_bytes + slot * HEAD_DIM * sizeof(float);
}

/* --- out -------------------------------------------------------------------------------------- */

struct ask *ask_export(struct peer *p, struct seq *s)
{
    Attnd__Export b = ATTND__EXPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint32_t most = 0;
    if (s->control != NULL || s->is_unsure)
        return NULL;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        most = s->len[l] > most ? s->len[l] : most;
    uint32_t n_blocks = (most + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    struct ask *a = ask_new(p, ASK_EXPORT);
    if (a == NULL)
        return NULL;
    a->first_block = n_blocks == 0 ? 0 : sim_below(n_blocks);
    a->n_blocks = n_blocks - a->first_block;
    a->n_blocks = a->n_blocks < MOST_BLOCKS ? a->n_blocks : MOST_BLOCKS;
    memcpy(a->len_before, s->len, sizeof a->len_before);
    b.seq = s->name;
    b.epoch = sim_chance(500) ? s->epoch : 0;
    b.first_block = a->first_block;
    b.n_blocks = a->n_blocks;
    b.watch = sim_chance(700);
    a->seq = s;
    s->control = a; /* it is not truncated meanwhile */
    h.body_case = ATTND__REQUEST__BODY_EXPORT;
    h.export = &b;
    return ask_send(a, &h, NULL, 0);
}

static void check_block(const struct ask *a, const Attnd__ExportReply *r, uint32_t i,
                        const uint8_t *bytes)
{
    struct checksum sum = checksum_of(bytes, layout().block_bytes);
    if (sum.low != r->sums[2 * i] || sum.high != r->sums[2 * i + 1])
        sim_fail("peer %u, export %llu: block %u is not what its checksum says", a->peer->number,
                 (unsigned long long)a->id, i);
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t s = 0; s < BLOCK_TOKENS; s++)
            for (uint32_t h = 0; h < KV_HEADS; h++) {
                uint32_t pos = (a->first_block + i) * BLOCK_TOKENS + s;
                uint64_t number;
                memcpy(&number, bytes + number_at(l, s, h), sizeof number);
                bool is_there = pos < r->layer_len[l], is_known = pos < a->len_before[l];
                if (is_known && number != a->seq->token[l][pos].of_head[h])
                    sim_fail("peer %u, export %llu: token %u of layer %u is wrong", a->peer->number,
                             (unsigned long long)a->id, pos, l);
                if (!is_there && number != 0)
                    sim_fail("peer %u, export %llu: token %u of layer %u is nobody's, and is told",
                             a->peer->number, (unsigned long long)a->id, pos, l);
            }
}

/* It is not said to have kept what a truncation has taken since. */
static void check_kept(const struct ask *a, const Attnd__ExportReply *r)
{
    const struct seq *s = a->seq;
    for (uint32_t i = 0; r->kept_epoch != 0 && i < MAX_CUTS && i < s->n_cuts; i++)
        if (s->cuts[i].epoch > r->kept_epoch && s->cuts[i].len < r->n_kept)
            sim_fail("peer %u, export %llu: %u tokens have been kept since epoch %u, but %u were "
                     "left at epoch %u",
                     a->peer->number, (unsigned long long)a->id, r->n_kept, r->kept_epoch,
                     s->cuts[i].len, s->cuts[i].epoch);
    sim_counts.exports_kept += r->kept_epoch != 0 && r->kept_epoch < r->epoch && r->n_kept > 0;
}

void check_export(const struct ask *a, const Attnd__ExportReply *r, const uint8_t *payload,
                  size_t payload_bytes)
{
    size_t block_bytes = layout().block_bytes;
    if (r->n_layer_len != N_LAYERS || r->block_bytes != block_bytes ||
        r->n_sums != 2 * (size_t)a->n_blocks || payload_bytes != a->n_blocks * block_bytes)
        sim_fail("peer %u, export %llu: the answer has another size", a->peer->number,
                 (unsigned long long)a->id);
    for (uint32_t l = 0; l < N_LAYERS; l++)
        if (r->layer_len[l] < a->len_before[l])
            sim_fail("peer %u, export %llu: layer %u has lost tokens", a->peer->number,
                     (unsigned long long)a->id, l);
    for (uint32_t i = 0; i < a->n_blocks; i++)
        check_block(a, r, i, payload + i * block_bytes);
    check_kept(a, r);
    attention_digest = r->content->attention;
    sim_counts.exports++;
}

/* --- in --------------------------------------------------------------------------------------- */

static uint64_t *number_in(uint8_t *blocks, uint32_t pos, uint32_t layer, uint32_t head)
{
    uint8_t *block = blocks + pos / BLOCK_TOKENS * layout().block_bytes;
    return (uint64_t *)(void *)(block + number_at(layer, pos % BLOCK_TOKENS, head));
}

/* As many tokens for each layer as a's len_after says, none of which anybody has had before. */
static uint8_t *make_blocks(struct ask *a, uint64_t *sums)
{
    size_t block_bytes = layout().block_bytes;
    uint8_t *blocks = sim_alloc(a->n_blocks * block_bytes);
    uint32_t first = a->first_block * BLOCK_TOKENS, n = 0;
    a->tokens = sim_alloc(N_LAYERS * a->n_blocks * BLOCK_TOKENS * sizeof *a->tokens);
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t pos = first; pos < a->len_after[l]; pos++, n++)
            for (uint32_t h = 0; h < KV_HEADS; h++)
                *number_in(blocks, pos - first, l, h) = a->tokens[n].of_head[h] = sim_random();
    for (uint32_t i = 0; i < a->n_blocks; i++) {
        struct checksum sum = checksum_of(blocks + i * block_bytes, block_bytes);
        sums[2 * i] = sum.low;
        sums[2 * i + 1] = sum.high;
    }
    return blocks;
}

/* Behind full blocks that all layers have. */
struct ask *ask_import(struct seq *s)
{
    Attnd__Content content = ATTND__CONTENT__INIT;
    Attnd__Import b = ATTND__IMPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint64_t sums[2 * MOST_BLOCKS];
    uint32_t have = s->len[0];
    bool is_even = have % BLOCK_TOKENS == 0 && have + MOST_BLOCKS * BLOCK_TOKENS <= MAX_LEN;
    for (uint32_t l = 1; l < N_LAYERS; l++)
        is_even &= s->len[l] == have;
    if (!is_even || s->is_unsure || s->prompt != 0 || !seq_is_quiet(s) || attention_digest == 0)
        return NULL;
    struct ask *a = ask_new(s->owner, ASK_IMPORT);
    if (a == NULL)
        return NULL;
    a->first_block = have / BLOCK_TOKENS;
    a->n_blocks = 1 + sim_below(MOST_BLOCKS);
    uint32_t end = have + a->n_blocks * BLOCK_TOKENS;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        a->len_after[l] = have + sim_below(end - have + 1);
    a->len_after[sim_below(N_LAYERS)] = end - sim_below(BLOCK_TOKENS);
    uint8_t *blocks = make_blocks(a, sums);
    content.num_kv_heads = KV_HEADS;
    content.head_dim_k = content.head_dim_v = HEAD_DIM;
    content.block_tokens = BLOCK_TOKENS;
    content.kv_dtype = ATTND__DTYPE__F32;
    content.attention = attention_digest;
    b.seq = s->name;
    b.epoch = s->epoch;
    b.first_block = a->first_block;
    b.layout = KV_LAYOUT_VERSION;
    b.n_layer_len = N_LAYERS;
    b.layer_len = a->len_after;
    b.n_sums = 2 * (size_t)a->n_blocks;
    b.sums = sums;
    b.content = &content;
    a->seq = s;
    s->control = a;
    h.body_case = ATTND__REQUEST__BODY_IMPORT;
    h.import = &b;
    return ask_send(a, &h, blocks, a->n_blocks * layout().block_bytes);
}

void take_import(struct ask *a)
{
    struct seq *s = a->seq;
    uint32_t first = a->first_block * BLOCK_TOKENS, n = 0;
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        for (uint32_t pos = first; pos < a->len_after[l]; pos++)
            s->token[l][pos] = a->tokens[n++];
        s->len[l] = a->len_after[l];
    }
    sim_counts.imports++;
}

/* What its sequences can then have, whatever others do. One at a time: nobody would know which came
 * last. */
struct ask *ask_reserve(struct peer *p, uint32_t n_blocks)
{
    Attnd__PoolReserve b = ATTND__POOL_RESERVE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    for (uint64_t i = 0; i < p->n_asks; i++)
        if (p->asks[i]->kind == ASK_RESERVE && !p->asks[i]->is_answered)
            return NULL;
    struct ask *a = ask_new(p, ASK_RESERVE);
    if (a == NULL)
        return NULL;
    b.pool = p->pool;
    b.n_blocks = a->n_blocks = n_blocks;
    h.body_case = ATTND__REQUEST__BODY_POOL_RESERVE;
    h.pool_reserve = &b;
    return ask_send(a, &h, NULL, 0);
}

/* --- operators -------------------------------------------------------------------------------- */

struct ask *ask_kill(struct peer *p, struct seq *s)
{
    Attnd__Kill b = ATTND__KILL__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct ask *a = seq_is_quiet(s) ? ask_new(p, ASK_KILL) : NULL;
    if (a == NULL)
        return NULL;
    b.seq = s->name;
    a->seq = s;
    s->control = a;
    s->is_doomed = true;
    h.body_case = ATTND__REQUEST__BODY_KILL;
    h.kill = &b;
    return ask_send(a, &h, NULL, 0);
}

struct ask *ask_kill_session(struct peer *p, struct peer *victim)
{
    char label[16];
    Attnd__Kill b = ATTND__KILL__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        const struct seq *s = victim->seqs[i];
        bool is_mixed = s != NULL && s->control != NULL &&
                        (s->control->peer != victim || s->control->kind == ASK_ADOPT);
        if (is_mixed)
            return NULL; /* nobody would know what came first */
    }
    struct ask *a = victim->session != 0 ? ask_new(p, ASK_KILL_SESSION) : NULL;
    if (a == NULL)
        return NULL;
    snprintf(label, sizeof label, "%08x", session_label(victim->session));
    b.session = label;
    a->victim = victim;
    victim->is_killed = true;
    h.body_case = ATTND__REQUEST__BODY_KILL;
    h.kill = &b;
    return ask_send(a, &h, NULL, 0);
}

/* Often to what it was made with: others want its blocks. */
struct ask *ask_resize(struct peer *p)
{
    Attnd__PoolResize b = ATTND__POOL_RESIZE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct ask *a = ask_new(p, ASK_RESIZE);
    if (a == NULL)
        return NULL;
    b.name = "pool";
    b.n_blocks = sim_plan.n_blocks - (sim_chance(500) ? 0 : sim_below(sim_plan.n_blocks));
    h.body_case = ATTND__REQUEST__BODY_POOL_RESIZE;
    h.pool_resize = &b;
    return ask_send(a, &h, NULL, 0);
}

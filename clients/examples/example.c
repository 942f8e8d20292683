/* example.c: a worker: one sequence, one layer, ten tokens. */
#include <attn.h>
#include <stdio.h>

int main(void)
{
    float q[8 * 64] = {1}, k[2 * 64] = {1}, v[2 * 64] = {3}, out[8 * 64] = {0}; /* a model's */
    struct attn_item item = {.n_tokens = 1};
    struct attn_step step = {sizeof step, .n_items = 1, .items = &item, .q = q,
                             .k = k,      .v = v,       .out = out};
    attn_client *c = NULL;
    attn_pool *p = NULL;
    bool ok = !attn_client_open(NULL, NULL, 0, &c) && !attn_pool_describe(c, "demo", 0, &p) &&
              !attn_seq_open(p, 42, 0, &item.seq);
    for (; ok && item.pos < 10; item.pos++)
        ok = !attn_step(p, &step, NULL);
    ok = ok && !attn_seq_close(p, &item.seq, 0);
    printf("%s; %u tokens, out[0] = %g\n", ok ? "ok" : attn_last_error()->message, item.pos, *out);
    attn_pool_close(p);
    attn_client_close(c);
    return ok ? 0 : 1;
}

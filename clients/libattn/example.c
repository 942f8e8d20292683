/* example.c: a worker in twenty lines: one sequence, one layer, a token a step. */
#include <attn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    attn_client *client = NULL;
    attn_pool *pool = NULL;
    struct attn_seq seq;
    float q[8 * 64] = {1}, k[2 * 64] = {1}, v[2 * 64] = {3}, out[8 * 64];
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof(struct attn_layer),
                                  .name = "example",
                                  .num_layers = 1,
                                  .num_q_heads = 8,
                                  .num_kv_heads = 2,
                                  .head_dim_k = 64,
                                  .n_blocks = 16,
                                  .q_dtype = ATTN_F32};
    const char *url = argc > 1 ? argv[1] : "ipc:///tmp/attnd.sock";
    attn_status st = attn_client_open(url, NULL, 2000000, &client);
    if (st == ATTN_OK)
        st = attn_pool_create(client, &spec, 0, &pool);
    if (st == ATTN_OK)
        st = attn_seq_open(pool, 42, 0, &seq);
    for (uint32_t pos = 0; st == ATTN_OK && pos < 10; pos++) { /* q, k, v would come from a model */
        struct attn_item item = {.seq = seq.id, .epoch = seq.epoch, .pos = pos, .n_tokens = 1};
        struct attn_step step = {.struct_size = sizeof step, .layer = 0, .n_items = 1};
        step.items = &item;
        step.q = q, step.k = k, step.v = v, step.out = out;
        st = attn_step(pool, &step, NULL);
    }
    if (st == ATTN_OK)
        st = attn_seq_close(pool, &seq, 0);
    if (st == ATTN_OK)
        printf("ten tokens, out[0] = %g\n", out[0]);
    else
        fprintf(stderr, "%s: %s\n", attn_status_name(st), attn_last_error()->message);
    attn_pool_close(pool);
    attn_client_close(client);
    return st == ATTN_OK ? 0 : 1;
}

/* example.c: a worker: one sequence, one layer, ten tokens. */
#include <attn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    attn_client *client = NULL;
    attn_pool *pool = NULL;
    struct attn_seq seq;
    float q[8 * 64] = {1}, k[2 * 64] = {1}, v[2 * 64] = {3}, out[8 * 64];
    struct attn_pool_spec spec = {.struct_size = sizeof spec, .name = "example", .num_layers = 1};
    spec.layer_struct_size = sizeof(struct attn_layer), spec.q_dtype = ATTN_F32;
    spec.num_q_heads = 8, spec.num_kv_heads = 2, spec.head_dim_k = 64, spec.n_blocks = 16;
    const char *url = argc > 1 ? argv[1] : "ipc:///tmp/attnd.sock";
    attn_status st = attn_client_open(url, NULL, 0, &client);
    if (st == ATTN_OK && (st = attn_pool_create(client, &spec, 0, &pool)) == ATTN_OK)
        st = attn_seq_open(pool, 42, 0, &seq);
    for (uint32_t pos = 0; st == ATTN_OK && pos < 10; pos++) { /* q, k, v would come from a model */
        struct attn_item item = {seq.id, seq.epoch, pos, 1, 0};
        struct attn_step step = {.struct_size = sizeof step, .n_items = 1, .items = &item};
        step.q = q, step.k = k, step.v = v, step.out = out;
        st = attn_step(pool, &step, NULL);
    }
    if (st == ATTN_OK && (st = attn_seq_close(pool, &seq, 0)) == ATTN_OK)
        printf("ten tokens, out[0] = %g\n", out[0]);
    else
        fprintf(stderr, "%s: %s\n", attn_status_name(st), attn_last_error()->message);
    attn_pool_close(pool);
    attn_client_close(client);
    return st == ATTN_OK ? 0 : 1;
}

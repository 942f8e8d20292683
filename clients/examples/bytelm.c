/* bytelm.c: a language model in C whose attention and KV cache are attnd's: the pattern for an
 * engine of your own.
 *
 *     bytelm clients/python/examples/bytelm/model.safetensors 64 'def read(' 'class Client:'
 *
 * The model is a Llama with tied embeddings that writes Python byte by byte. It continues all
 * prompts at once, greedily, each by 64 tokens; $ATTND_ENDPOINT names the daemon. What an engine
 * does with attnd is in attach(), attend() and generate(); the rest is the model.
 */
#include <attn.h>
#include <err.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define HEAD_DIM 64 /* these three are config.json's; all other sizes are the tensors' */
#define ROPE_THETA 10000.0
#define NORM_EPS 1e-6f
#define MAX_LAYERS 16
#define MAX_PROMPTS 64

static void check(attn_status st, const char *what)
{
    if (st != ATTN_OK)
        errx(1, "%s: %s (%s)", what, attn_last_error()->message, attn_status_name(st));
}

static void *allocate(size_t n, size_t bytes)
{
    void *p = calloc(n, bytes);
    return p != NULL ? p : (errx(1, "no memory"), NULL);
}

/* ---- the model ---- */

/* y = w x, w [rows, columns] */
struct matrix {
    float *w;
    size_t rows, columns;
};

struct layer {
    struct matrix attn_norm, q, k, v, o, mlp_norm, gate, up, down;
};

struct model {
    struct matrix embed, norm; /* embed [vocab, hidden] */
    struct layer layers[MAX_LAYERS];
    uint32_t n_layers, n_q_heads, n_kv_heads;
};

/* A safetensors file: 8 bytes with the length of a JSON header, the header, tensors. */
struct file {
    char *header; /* ends with a zero byte */
    const uint8_t *data;
    size_t data_bytes;
};

static struct file open_model(const char *path)
{
    FILE *in = fopen(path, "rb");
    long bytes = in != NULL && fseek(in, 0, SEEK_END) == 0 ? ftell(in) : -1;
    if (bytes < 8)
        errx(1, "cannot read %s", path);
    uint8_t *base = allocate((size_t)bytes, 1);
    uint64_t header_bytes;
    rewind(in);
    if (fread(base, 1, (size_t)bytes, in) != (size_t)bytes)
        errx(1, "cannot read %s", path);
    fclose(in);
    memcpy(&header_bytes, base, sizeof header_bytes);
    if (header_bytes > (uint64_t)bytes - 8)
        errx(1, "%s is not a safetensors file", path);
    char *header = strndup((char *)base + 8, header_bytes);
    return (struct file){header, base + 8 + header_bytes, (size_t)bytes - 8 - header_bytes};
}

/* A tensor of one or two dimensions, bf16 in the file, f32 in memory. w NULL: there is none. */
static struct matrix tensor(const struct file *f, const char *prefix, const char *name)
{
    char key[128];
    snprintf(key, sizeof key, "\"%s%s.weight\":", prefix, name);
    const char *entry = strstr(f->header, key);
    struct matrix m = {NULL, 1, 0};
    size_t begin = 0, end = 0;
    if (entry == NULL)
        return m;
    entry += strlen(key);
    if (sscanf(entry, "{\"dtype\":\"BF16\",\"shape\":[%zu,%zu],\"data_offsets\":[%zu,%zu]", &m.rows,
               &m.columns, &begin, &end) != 4) {
        m.rows = 1;
        if (sscanf(entry, "{\"dtype\":\"BF16\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]",
                   &m.columns, &begin, &end) != 3)
            errx(1, "tensor %s is not bf16 of one or two dimensions", key);
    }
    if (end > f->data_bytes || end - begin != 2 * m.rows * m.columns)
        errx(1, "tensor %s lies outside of the file", key);
    m.w = allocate(m.rows * m.columns, sizeof(float));
    for (size_t i = 0; i < m.rows * m.columns; i++) {
        uint16_t half;
        memcpy(&half, f->data + begin + 2 * i, sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&m.w[i], &bits, sizeof bits);
    }
    return m;
}

static struct model load(const char *path)
{
    struct file f = open_model(path);
    struct model m = {.embed = tensor(&f, "model.", "embed_tokens"),
                      .norm = tensor(&f, "model.", "norm")};
    for (; m.n_layers < MAX_LAYERS; m.n_layers++) {
        struct layer *l = &m.layers[m.n_layers];
        char at[40];
        snprintf(at, sizeof at, "model.layers.%u.", m.n_layers);
        *l = (struct layer){
            tensor(&f, at, "input_layernorm"),  tensor(&f, at, "self_attn.q_proj"),
            tensor(&f, at, "self_attn.k_proj"), tensor(&f, at, "self_attn.v_proj"),
            tensor(&f, at, "self_attn.o_proj"), tensor(&f, at, "post_attention_layernorm"),
            tensor(&f, at, "mlp.gate_proj"),    tensor(&f, at, "mlp.up_proj"),
            tensor(&f, at, "mlp.down_proj")};
        if (l->q.w == NULL)
            break;
    }
    if (m.embed.w == NULL || m.n_layers == 0)
        errx(1, "%s holds no Llama", path);
    m.n_q_heads = (uint32_t)(m.layers[0].q.rows / HEAD_DIM);
    m.n_kv_heads = (uint32_t)(m.layers[0].k.rows / HEAD_DIM);
    return m;
}

/* y [n, rows] (+)= x [n, columns] w^T */
static void multiply(struct matrix m, const float *x, size_t n, bool is_added, float *y)
{
    for (size_t t = 0; t < n; t++) {
        for (size_t r = 0; r < m.rows; r++) {
            float sum = is_added ? y[t * m.rows + r] : 0;
            for (size_t c = 0; c < m.columns; c++)
                sum += x[t * m.columns + c] * m.w[r * m.columns + c];
            y[t * m.rows + r] = sum;
        }
    }
}

static void normalize(struct matrix m, const float *x, size_t n, float *y)
{
    for (size_t t = 0; t < n; t++, x += m.columns, y += m.columns) {
        float sum = 0;
        for (size_t i = 0; i < m.columns; i++)
            sum += x[i] * x[i];
        float scale = 1 / sqrtf(sum / (float)m.columns + NORM_EPS);
        for (size_t i = 0; i < m.columns; i++)
            y[i] = x[i] * scale * m.w[i];
    }
}

/* Rotary positions, before attention: what is cached is rotated. x [n, n_heads, HEAD_DIM] */
static void rotate(float *x, const struct attn_item *items, uint32_t n_items, uint32_t n_heads)
{
    for (uint32_t i = 0; i < n_items; i++) {
        for (uint32_t row = 0; row < items[i].n_tokens * n_heads; row++, x += HEAD_DIM) {
            for (int d = 0; d < HEAD_DIM / 2; d++) {
                double angle =
                    (items[i].pos + row / n_heads) * pow(ROPE_THETA, -2.0 * d / HEAD_DIM);
                float c = (float)cos(angle), s = (float)sin(angle);
                float a = x[d], b = x[d + HEAD_DIM / 2];
                x[d] = a * c - b * s;
                x[d + HEAD_DIM / 2] = b * c + a * s;
            }
        }
    }
}

/* ---- attnd ---- */

/* The pool of this model; all engines that name it with the same spec share it. */
static attn_pool *attach(attn_client *c, const struct model *m)
{
    struct attn_pool_spec spec = {sizeof spec,
                                  sizeof(struct attn_layer),
                                  .name = "bytelm-c",
                                  .num_layers = m->n_layers,
                                  .num_q_heads = m->n_q_heads,
                                  .num_kv_heads = m->n_kv_heads,
                                  .head_dim_k = HEAD_DIM,
                                  .n_blocks = 512, /* of 16 tokens */
                                  .q_dtype = ATTN_F32,
                                  .model = "bytelm"};
    attn_pool *p = NULL;
    check(attn_pool_create(c, &spec, 0, &p), "pool");
    return p;
}

/* Attention of one layer: k and v are appended to the sequences of items, q attends over them. */
static void attend(attn_pool *p, uint32_t layer, const struct attn_item *items, uint32_t n_items,
                   const float *q, const float *k, const float *v, float *out)
{
    struct attn_step step = {sizeof step,    .layer = layer, .n_items = n_items,
                             .items = items, .q = q,         .k = k,
                             .v = v,         .out = out};
    check(attn_step(p, &step, NULL), "step");
}

/* One pass over n packed tokens, those of items one after another; the next token of each item. */
static void forward(const struct model *m, attn_pool *p, const struct attn_item *items,
                    uint32_t n_items, const uint8_t *tokens, uint8_t *out_next)
{
    size_t n = 0, hidden = m->embed.columns, inner = m->layers[0].gate.rows;
    size_t q_size = m->layers[0].q.rows, kv_size = m->layers[0].k.rows;
    for (uint32_t i = 0; i < n_items; i++)
        n += items[i].n_tokens;
    size_t n_floats = n * 2 * (hidden + q_size + kv_size + inner) + m->embed.rows;
    float *memory = allocate(n_floats, sizeof(float));
    float *x = memory, *h = x + n * hidden, *q = h + n * hidden, *out = q + n * q_size;
    float *k = out + n * q_size, *v = k + n * kv_size, *gate = v + n * kv_size;
    float *up = gate + n * inner, *logits = up + n * inner;
    for (size_t t = 0; t < n; t++)
        memcpy(x + t * hidden, m->embed.w + tokens[t] * hidden, hidden * sizeof *x);
    for (uint32_t layer = 0; layer < m->n_layers; layer++) {
        const struct layer *l = &m->layers[layer];
        normalize(l->attn_norm, x, n, h);
        multiply(l->q, h, n, false, q);
        multiply(l->k, h, n, false, k);
        multiply(l->v, h, n, false, v);
        rotate(q, items, n_items, m->n_q_heads);
        rotate(k, items, n_items, m->n_kv_heads);
        attend(p, layer, items, n_items, q, k, v, out);
        multiply(l->o, out, n, true, x);
        normalize(l->mlp_norm, x, n, h);
        multiply(l->gate, h, n, false, gate);
        multiply(l->up, h, n, false, up);
        for (size_t i = 0; i < n * inner; i++)
            up[i] *= gate[i] / (1 + expf(-gate[i]));
        multiply(l->down, up, n, true, x);
    }
    size_t end = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        end += items[i].n_tokens;
        normalize(m->norm, x + (end - 1) * hidden, 1, h);
        multiply(m->embed, h, 1, false, logits);
        size_t best = 0;
        for (size_t token = 1; token < m->embed.rows; token++)
            best = logits[token] > logits[best] ? token : best;
        out_next[i] = (uint8_t)best;
    }
    free(memory);
}

static void generate(const struct model *m, char **prompts, uint32_t n, uint32_t n_new)
{
    attn_client *c = NULL;
    struct attn_item items[MAX_PROMPTS] = {0};
    uint8_t next[MAX_PROMPTS], *texts = allocate(n, n_new + 1u);
    size_t n_tokens = 0;
    check(attn_client_open(NULL, NULL, 0, &c), "connect");
    attn_pool *p = attach(c, m);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t id; /* nobody else's: ids are shared by all clients */
        if (getrandom(&id, sizeof id, 0) != sizeof id)
            errx(1, "no random numbers");
        check(attn_seq_open(p, id, 0, &items[i].seq), "sequence");
        items[i].n_tokens = (uint32_t)strlen(prompts[i]);
        n_tokens += items[i].n_tokens;
    }
    uint8_t *tokens = allocate(n_tokens + 1, 1);
    for (uint32_t i = 0; i < n; i++)
        strcat((char *)tokens, prompts[i]);
    for (uint32_t step = 0; step < n_new; step++) { /* the prompts, then a token of each */
        forward(m, p, items, n, step == 0 ? tokens : next, next);
        for (uint32_t i = 0; i < n; i++) {
            texts[i * (n_new + 1u) + step] = next[i];
            items[i].pos += items[i].n_tokens;
            items[i].n_tokens = 1;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        check(attn_seq_close(p, &items[i].seq, 0), "close");
        printf("%s%s\n--\n", prompts[i], (char *)&texts[i * (n_new + 1u)]);
    }
    free(tokens);
    free(texts);
    attn_pool_close(p);
    attn_client_close(c);
}

int main(int argc, char **argv)
{
    int n = argc - 3, n_new = argc > 2 ? atoi(argv[2]) : 0;
    if (n < 1 || n > MAX_PROMPTS || n_new < 1 || n_new > 4096)
        errx(1, "expected MODEL.safetensors, 1 to 4096 tokens, and 1 to %d prompts", MAX_PROMPTS);
    struct model m = load(argv[1]);
    generate(&m, argv + 3, (uint32_t)n, (uint32_t)n_new);
    return 0;
}

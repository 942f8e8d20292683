/* samples.c: the list of samples. Their bodies are static: filling only points to them. */
#include "samples.h"

#include <stdlib.h>
#include <string.h>

#define SESSION 0x5e55104000000001u
#define SEQ_A 0xa000000000000001u
#define SEQ_B 0xb000000000000002u
#define N(a) (sizeof(a) / sizeof(a)[0])

static float sink_logits[] = {0.5f, -1.25f, 3.0f, 0.125f};
static float alibi_slopes[] = {0.5f, 0.25f, 0.125f, 0.0625f};
static char *hello_features[] = {"time_travel"};
static char *pool_features[] = {"alibi", "window"};

static Attnd__LayerSpec layer_plain = ATTND__LAYER_SPEC__INIT;
static Attnd__LayerSpec layer_full = ATTND__LAYER_SPEC__INIT;
static Attnd__LayerSpec *layers[] = {&layer_plain, &layer_full};
static Attnd__Identity identity = ATTND__IDENTITY__INIT;
static Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;

static Attnd__PoolSpec *spec_fill(void)
{
    layer_plain.scale = 0.125f;
    layer_full = (Attnd__LayerSpec){
        .base = layer_full.base,
        .scale = 0.25f,
        .window_tokens = 1024,
        .sink_tokens = 4,
        .soft_cap = 50.0f,
        .is_full = 1,
        .n_sink_logits = N(sink_logits),
        .sink_logits = sink_logits,
        .n_alibi_slopes = N(alibi_slopes),
        .alibi_slopes = alibi_slopes,
    };
    identity.model = "sha256:0011aabb";
    identity.rope = "theta=500000;scaling=\xce\xbb";
    spec.name = "llama";
    spec.num_layers = 2;
    spec.num_q_heads = 4;
    spec.num_kv_heads = 2;
    spec.head_dim_k = 64;
    spec.head_dim_v = 32;
    spec.block_tokens = 16;
    spec.n_blocks = 1000;
    spec.q_dtype = ATTND__DTYPE__BF16;
    spec.kv_dtype = ATTND__DTYPE__INT8;
    spec.is_batch_invariant = 1;
    spec.n_layers = N(layers);
    spec.layers = layers;
    spec.identity = &identity;
    spec.n_required_features = N(pool_features);
    spec.required_features = pool_features;
    return &spec;
}

/* Sets the body of a request or a reply: case, pointer, and values of the static message. */
#define BODY(side, SIDE, member, CASE, type, init, ...)                                            \
    static type body;                                                                              \
    init(&body);                                                                                   \
    body = (type){.base = body.base, __VA_ARGS__};                                                 \
    side->body_case = ATTND__##SIDE##__BODY_##CASE;                                                \
    side->member = &body

#define FILL(name) static void fill_##name(Attnd__Request *q, Attnd__Reply *r)
#define REQUEST(member, CASE, type, init, ...)                                                     \
    (void)r;                                                                                       \
    q->session = SESSION;                                                                          \
    q->timeout_us = 250000;                                                                        \
    BODY(q, REQUEST, member, CASE, type, init, __VA_ARGS__)
#define REPLY(member, CASE, type, init, ...)                                                       \
    (void)q;                                                                                       \
    r->queue_ns = 1500;                                                                            \
    BODY(r, REPLY, member, CASE, type, init, __VA_ARGS__)

FILL(hello)
{
    REQUEST(hello, HELLO, Attnd__Hello, attnd__hello__init, .protocol_version = 1,
            .client_name = "worker 7", .n_required_features = N(hello_features),
            .required_features = hello_features, .resume_session = SESSION);
    q->session = 0;
}
FILL(hello_with_token)
{
    REQUEST(hello, HELLO, Attnd__Hello, attnd__hello__init, .protocol_version = 1,
            .client_name = "worker 7", .token = "a3f1c2");
    q->session = 0;
}
FILL(pool_create)
{
    REQUEST(pool_create, POOL_CREATE, Attnd__PoolCreate, attnd__pool_create__init,
            .spec = spec_fill());
}
FILL(pool_create_dilated)
{
    static uint32_t segments[] = {2048, 4096, 8192}, rates[] = {1, 2, 4};
    static Attnd__LayerSpec layer = ATTND__LAYER_SPEC__INIT, *only[] = {&layer};
    static Attnd__PoolSpec dilated = ATTND__POOL_SPEC__INIT;
    layer.n_branch_segment_tokens = layer.n_branch_rates = N(rates);
    layer.branch_segment_tokens = segments;
    layer.branch_rates = rates;
    dilated.name = "longnet";
    dilated.num_layers = 12;
    dilated.num_q_heads = dilated.num_kv_heads = 12;
    dilated.head_dim_k = 64;
    dilated.q_dtype = ATTND__DTYPE__BF16;
    dilated.n_layers = 1;
    dilated.layers = only;
    REQUEST(pool_create, POOL_CREATE, Attnd__PoolCreate, attnd__pool_create__init,
            .spec = &dilated);
}
FILL(pool_create_split)
{
    static Attnd__PoolSpec split = ATTND__POOL_SPEC__INIT;
    split.name = "long";
    split.num_layers = 32;
    split.num_q_heads = 32;
    split.num_kv_heads = 8;
    split.head_dim_k = 128;
    split.q_dtype = ATTND__DTYPE__BF16;
    split.split = ATTND__SPLIT__SPLIT_HEADS;
    REQUEST(pool_create, POOL_CREATE, Attnd__PoolCreate, attnd__pool_create__init, .spec = &split);
}
FILL(goodbye)
{
    REQUEST(goodbye, GOODBYE, Attnd__Goodbye, attnd__goodbye__init);
}
FILL(pool_describe)
{
    REQUEST(pool_describe, POOL_DESCRIBE, Attnd__PoolDescribe, attnd__pool_describe__init,
            .name = "llama");
}
FILL(pool_release)
{
    REQUEST(pool_release, POOL_RELEASE, Attnd__PoolRelease, attnd__pool_release__init, .pool = 1,
            .request = 0x1122334455667700);
}
FILL(pool_reserve)
{
    REQUEST(pool_reserve, POOL_RESERVE, Attnd__PoolReserve, attnd__pool_reserve__init, .pool = 1,
            .n_blocks = 2048);
}
FILL(weights)
{
    REQUEST(weights, WEIGHTS, Attnd__Weights, attnd__weights__init, .pool = 1, .layer = 3,
            .offset = 1 << 20);
}
FILL(pool_resize)
{
    REQUEST(pool_resize, POOL_RESIZE, Attnd__PoolResize, attnd__pool_resize__init, .name = "llama",
            .n_blocks = 4096);
}
FILL(open)
{
    REQUEST(open, OPEN, Attnd__Open, attnd__open__init, .seq = SEQ_A, .pool = 1);
}
FILL(open_with_tokens)
{
    static uint32_t ids[] = {128000, 9906, 1917};
    REQUEST(open, OPEN, Attnd__Open, attnd__open__init, .seq = SEQ_A, .pool = 1, .n_tokens = N(ids),
            .tokens = ids, .adapter = 0x1122334455667788);
}
FILL(tokens)
{
    static uint32_t ids[] = {0, 300, 4294967295};
    REQUEST(tokens, TOKENS, Attnd__Tokens, attnd__tokens__init, .seq = SEQ_A, .epoch = 1, .pos = 3,
            .n_tokens = N(ids), .tokens = ids);
}
FILL(fork)
{
    REQUEST(fork, FORK, Attnd__Fork, attnd__fork__init, .seq = SEQ_A, .epoch = 1, .new_seq = SEQ_B,
            .len = 48, .has_len = 1);
}
FILL(truncate)
{
    REQUEST(truncate, TRUNCATE, Attnd__Truncate, attnd__truncate__init, .seq = SEQ_B, .epoch = 1,
            .len = 33);
}
static uint32_t commit_nodes[] = {0, 2, 3};
FILL(commit)
{
    REQUEST(commit, COMMIT, Attnd__Commit, attnd__commit__init, .seq = SEQ_B, .epoch = 1,
            .n_nodes = N(commit_nodes), .nodes = commit_nodes);
}
FILL(close)
{
    REQUEST(close, CLOSE, Attnd__Close, attnd__close__init, .seq = SEQ_B, .epoch = 1);
}
FILL(close_moved)
{
    static Attnd__Moved to;
    attnd__moved__init(&to);
    to =
        (Attnd__Moved){.base = to.base, .url = "tls+tcp://10.0.0.2:9470", .seq = SEQ_B, .epoch = 5};
    REQUEST(close, CLOSE, Attnd__Close, attnd__close__init, .seq = SEQ_B, .epoch = 7, .moved = &to);
}
static uint8_t note_bytes[] = {0x72, 0x65, 0x71, 0x2d, 0x37, 0x00, 0xff};
FILL(note)
{
    REQUEST(note, NOTE, Attnd__Note, attnd__note__init, .seq = SEQ_B, .epoch = 7, .has_note = true,
            .note = {sizeof note_bytes, note_bytes});
}
FILL(note_ask)
{
    REQUEST(note, NOTE, Attnd__Note, attnd__note__init, .seq = SEQ_B);
}
FILL(locate)
{
    REQUEST(locate, LOCATE, Attnd__Locate, attnd__locate__init, .seq = SEQ_B, .epoch = 7);
}
static uint32_t probe_ids[] = {128000, 9906, 1917};
FILL(probe)
{
    REQUEST(probe, PROBE, Attnd__Probe, attnd__probe__init, .pool = 1, .n_tokens = N(probe_ids),
            .tokens = probe_ids, .adapter = 0x1122334455667788);
}
FILL(calls)
{
    static Attnd__Open made;
    static Attnd__Close gone;
    static Attnd__Call call[2], *list[] = {&call[0], &call[1]};
    attnd__open__init(&made);
    attnd__close__init(&gone);
    attnd__call__init(&call[0]);
    attnd__call__init(&call[1]);
    made = (Attnd__Open){.base = made.base, .seq = SEQ_A, .pool = 1};
    gone = (Attnd__Close){.base = gone.base, .seq = SEQ_B, .epoch = 300};
    call[0].body_case = ATTND__CALL__BODY_OPEN;
    call[0].open = &made;
    call[1].body_case = ATTND__CALL__BODY_CLOSE;
    call[1].close = &gone;
    REQUEST(calls, CALLS, Attnd__Calls, attnd__calls__init, .n_calls = N(list), .calls = list);
}
FILL(adopt)
{
    REQUEST(adopt, ADOPT, Attnd__Adopt, attnd__adopt__init, .seq = SEQ_A);
}

static uint64_t step_seq[] = {SEQ_A, SEQ_B};
static uint32_t step_epoch[] = {1, 300};
static uint32_t step_pos[] = {0, 48};
static uint32_t step_n_tokens[] = {2, 1};
FILL(step)
{
    REQUEST(step, STEP, Attnd__Step, attnd__step__init, .pool = 1, .layer = 1,
            .flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND | WIRE_STEP_LSE,
            .dtype = ATTND__DTYPE__BF16, .n_seq = 2, .seq = step_seq, .n_epoch = 2,
            .epoch = step_epoch, .n_pos = 2, .pos = step_pos, .n_n_tokens = 2,
            .n_tokens = step_n_tokens);
}
static uint32_t tree_n_tokens[] = {3};
static int32_t tree_parents[] = {-1, 0, 0};
FILL(tree)
{
    REQUEST(step, STEP, Attnd__Step, attnd__step__init, .pool = 1, .layer = 1,
            .flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND | WIRE_STEP_TREE,
            .dtype = ATTND__DTYPE__BF16, .n_seq = 1, .seq = step_seq, .n_epoch = 1,
            .epoch = step_epoch, .n_pos = 1, .pos = step_pos, .n_n_tokens = 1,
            .n_tokens = tree_n_tokens, .n_parent = N(tree_parents), .parent = tree_parents);
}
FILL(sparse)
{
    REQUEST(step, STEP, Attnd__Step, attnd__step__init, .pool = 1, .layer = 1,
            .flags = WIRE_STEP_ATTEND | WIRE_STEP_SPARSE, .dtype = ATTND__DTYPE__BF16, .n_seq = 1,
            .seq = step_seq, .n_epoch = 1, .epoch = step_epoch, .n_pos = 1, .pos = step_pos,
            .n_n_tokens = 1, .n_tokens = tree_n_tokens, .n_indices = 5, .index_tokens = 16);
}
FILL(choose)
{
    REQUEST(step, STEP, Attnd__Step, attnd__step__init, .pool = 1, .layer = 1,
            .flags = WIRE_STEP_ATTEND | WIRE_STEP_CHOOSE, .dtype = ATTND__DTYPE__BF16, .n_seq = 1,
            .seq = step_seq, .n_epoch = 1, .epoch = step_epoch, .n_pos = 1, .pos = step_pos,
            .n_n_tokens = 1, .n_tokens = tree_n_tokens, .choose_blocks = 64);
}
static uint32_t part_pos[] = {5000}, part_key_base[] = {131072}, part_n_keys[] = {4096};
FILL(part)
{
    REQUEST(step, STEP, Attnd__Step, attnd__step__init, .pool = 1, .layer = 1,
            .flags = WIRE_STEP_ATTEND | WIRE_STEP_LSE | WIRE_STEP_FULL | WIRE_STEP_PART,
            .dtype = ATTND__DTYPE__BF16, .n_seq = 1, .seq = step_seq, .n_epoch = 1,
            .epoch = step_epoch, .n_pos = 1, .pos = part_pos, .n_n_tokens = 1,
            .n_tokens = tree_n_tokens, .n_key_base = 1, .key_base = part_key_base, .n_n_keys = 1,
            .n_keys = part_n_keys);
}
static uint32_t plan_layers[] = {0, 1};
FILL(plan)
{
    static Attnd__Step step;
    attnd__step__init(&step);
    step = (Attnd__Step){.base = step.base,
                         .pool = 1,
                         .flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND,
                         .dtype = ATTND__DTYPE__BF16,
                         .n_seq = 2,
                         .seq = step_seq,
                         .n_epoch = 2,
                         .epoch = step_epoch,
                         .n_pos = 2,
                         .pos = step_pos,
                         .n_n_tokens = 2,
                         .n_tokens = step_n_tokens};
    REQUEST(plan, PLAN, Attnd__Plan, attnd__plan__init, .lane = 0x1a4e000000000001u,
            .first_bell = 4294967295u, .n_layers = 2, .layers = plan_layers, .step = &step,
            .in_offset = 64, .out_offset = 128);
}
FILL(export)
{
    REQUEST(export, EXPORT, Attnd__Export, attnd__export__init, .seq = SEQ_A, .epoch = 1,
            .first_block = 2, .n_blocks = 1, .n_tokens = 16);
}
FILL(export_layers)
{
    REQUEST(export, EXPORT, Attnd__Export, attnd__export__init, .seq = SEQ_A, .epoch = 1,
            .first_block = 2, .n_blocks = 1, .first_layer = 1, .n_layers = 1, .watch = true);
}
static uint32_t import_lens[] = {40, 33};
static uint64_t import_sums[] = {0x1111111111111111u, 0x2222222222222222u};
static Attnd__Content *content_fill(void)
{
    static Attnd__Identity meaning;
    static Attnd__Content content;
    attnd__identity__init(&meaning);
    meaning.model = "sha256:0f1e";
    meaning.rope = "theta=10000";
    attnd__content__init(&content);
    content.num_kv_heads = 1;
    content.head_dim_k = content.head_dim_v = 8;
    content.block_tokens = 16;
    content.kv_dtype = ATTND__DTYPE__BF16;
    content.identity = &meaning;
    content.attention = 0x3333333333333333u;
    return &content;
}
FILL(import)
{
    REQUEST(import, IMPORT, Attnd__Import, attnd__import__init, .seq = SEQ_A, .epoch = 1,
            .first_block = 2, .layout = 1, .n_layer_len = 2, .layer_len = import_lens, .n_sums = 2,
            .sums = import_sums, .content = content_fill());
}
FILL(import_layers)
{
    REQUEST(import, IMPORT, Attnd__Import, attnd__import__init, .seq = SEQ_A, .epoch = 1,
            .first_block = 2, .layout = 1, .n_layer_len = 2, .layer_len = import_lens, .n_sums = 2,
            .sums = import_sums, .content = content_fill(), .first_layer = 1, .n_layers = 1);
}
FILL(stats)
{
    REQUEST(stats, STATS, Attnd__Stats, attnd__stats__init);
}
FILL(drain)
{
    REQUEST(drain, DRAIN, Attnd__Drain, attnd__drain__init, .hold_us = 60000000);
}
FILL(retire)
{
    REQUEST(retire, RETIRE, Attnd__Retire, attnd__retire__init, .seq = SEQ_A, .tenant = "team-a");
}
FILL(fence)
{
    REQUEST(fence, FENCE, Attnd__Fence, attnd__fence__init, .sent_ns = 123456789);
}
FILL(inspect)
{
    REQUEST(inspect, INSPECT, Attnd__Inspect, attnd__inspect__init, .topic = "sequences",
            .after = 500);
}
FILL(configure)
{
    REQUEST(configure, CONFIGURE, Attnd__Configure, attnd__configure__init, .name = "log.level",
            .value = "debug");
}
FILL(pool_drop)
{
    REQUEST(pool_drop, POOL_DROP, Attnd__PoolDrop, attnd__pool_drop__init, .name = "pool");
}
FILL(kill_session)
{
    REQUEST(kill, KILL, Attnd__Kill, attnd__kill__init, .session = "0badcafe");
}
FILL(kill_seq)
{
    REQUEST(kill, KILL, Attnd__Kill, attnd__kill__init, .seq = 0x1122334455667788,
            .tenant = "research");
}
FILL(move)
{
    REQUEST(move, MOVE, Attnd__Move, attnd__move__init, .seq = 0x1122334455667788,
            .tenant = "research", .card = 3);
}
FILL(watch)
{
    REQUEST(inspect, INSPECT, Attnd__Inspect, attnd__inspect__init, .topic = "events", .after = 7,
            .wait_us = 5000000);
}
FILL(reload)
{
    REQUEST(reload, RELOAD, Attnd__Reload, attnd__reload__init);
}

FILL(hello_reply)
{
    REPLY(hello, HELLO, Attnd__HelloReply, attnd__hello_reply__init, .protocol_version = 1,
          .session = SESSION, .server_version = "0.1.0", .backend = "cpu", .lease_us = 30000000,
          .max_message_bytes = 67108864, .max_step_items = 1024, .max_step_tokens = 8192,
          .max_seq_tokens = 131072, .max_sequences = 4096);
}
FILL(pool_reply)
{
    REPLY(pool, POOL, Attnd__PoolReply, attnd__pool_reply__init, .pool = 1, .spec = spec_fill(),
          .n_free_blocks = 997);
}
static uint32_t layer_len[] = {48, 0};
FILL(seq_reply)
{
    REPLY(seq, SEQ, Attnd__SeqReply, attnd__seq_reply__init, .epoch = 300, .pool = 1,
          .n_layer_len = 2, .layer_len = layer_len);
}
FILL(probe_reply)
{
    REPLY(probe, PROBE, Attnd__ProbeReply, attnd__probe_reply__init, .cached_tokens = 4096,
          .tier_tokens = 512, .n_blocks = 1000, .n_free_blocks = 300, .n_reserved_blocks = 200);
}
FILL(moved_reply)
{
    REPLY(moved, MOVED, Attnd__Moved, attnd__moved__init, .url = "tls+tcp://10.0.0.2:9470",
          .seq = SEQ_B, .epoch = 5);
}
FILL(note_reply)
{
    REPLY(note, NOTE, Attnd__Note, attnd__note__init, .seq = SEQ_B, .epoch = 7,
          .note = {sizeof note_bytes, note_bytes});
}
FILL(calls_reply)
{
    static Attnd__SeqReply made;
    static Attnd__CallReply call[2], *list[] = {&call[0], &call[1]};
    attnd__seq_reply__init(&made);
    attnd__call_reply__init(&call[0]);
    attnd__call_reply__init(&call[1]);
    made = (Attnd__SeqReply){.base = made.base, .epoch = 1, .pool = 1};
    call[0].body_case = ATTND__CALL_REPLY__BODY_SEQ;
    call[0].seq = &made;
    call[1].status = ATTN_ENOTFOUND;
    call[1].message = "sequence 12682136550675316738 is not open";
    REPLY(calls, CALLS, Attnd__CallsReply, attnd__calls_reply__init, .n_calls = N(list),
          .calls = list);
}
static uint32_t export_ids[] = {7, 70000};
static uint64_t export_sums[] = {0x1111111111111111u, 0x2222222222222222u};
FILL(export_reply)
{
    REPLY(export, EXPORT, Attnd__ExportReply, attnd__export_reply__init, .epoch = 300, .pool = 1,
          .layout = 1, .block_bytes = 128, .n_layer_len = 2, .layer_len = layer_len, .n_ids = 2,
          .adapter = 5, .n_tokens = 2, .tokens = export_ids, .n_sums = 2, .sums = export_sums,
          .content = content_fill(), .pool_name = "pool");
}
static int32_t item_status[] = {ATTN_OK, ATTN_ENOBLOCKS};
FILL(step_reply)
{
    REPLY(step, STEP, Attnd__StepReply, attnd__step_reply__init, .n_item_status = 2,
          .item_status = item_status);
    r->status = ATTN_ENOBLOCKS;
    r->message = "item 1: sequence 0xb000000000000002 needs 1 block, 0 are free";
    r->device_ns = 42000;
}
FILL(stats_reply)
{
    REPLY(stats, STATS, Attnd__StatsReply, attnd__stats_reply__init,
          .json = "{\n\t\"steps_received\": 3\n}\n");
}
FILL(error_reply)
{
    (void)q;
    r->status = ATTN_EOVERLOAD;
    r->message = "the queue holds 4096 requests, the most is 4096";
    r->retry_after_us = 2000;
}
FILL(ok_reply)
{
    (void)q;
    r->queue_ns = 1500;
}

const struct sample samples[] = {
    {"request_hello", "an old session is resumed, with a feature no daemon has", false, 0,
     fill_hello},
    {"request_hello_with_token", "a tenant's token says who it is", false, 0,
     fill_hello_with_token},
    {"request_goodbye", "a session is given up", false, 0, fill_goodbye},
    {"request_pool_create", "two layers, the second with every option", false, 0, fill_pool_create},
    {"request_pool_create_dilated", "every layer dilated, in three branches", false, 0,
     fill_pool_create_dilated},
    {"request_pool_create_split", "each card has some of the kv heads", false, 0,
     fill_pool_create_split},
    {"request_pool_describe", "a pool by name", false, 0, fill_pool_describe},
    {"request_pool_release", "the session lets go of a pool", false, 0, fill_pool_release},
    {"request_pool_reserve", "so many blocks of a pool are the session's", false, 0,
     fill_pool_reserve},
    {"request_weights", "a piece of a layer's weights", false, 64, fill_weights},
    {"request_pool_resize", "a pool has so many blocks", false, 0, fill_pool_resize},
    {"request_open", "a new sequence", false, 0, fill_open},
    {"request_open_with_tokens", "a new sequence of three tokens, with an adapter", false, 0,
     fill_open_with_tokens},
    {"request_tokens", "which tokens are at 3, 4 and 5", false, 0, fill_tokens},
    {"request_fork", "the first 48 tokens under a new name", false, 0, fill_fork},
    {"request_truncate", "back to 33 tokens", false, 0, fill_truncate},
    {"request_commit", "of a tree's nodes, 0, 2 and 3 stay", false, 0, fill_commit},
    {"request_close", "a sequence is given up", false, 0, fill_close},
    {"request_close_moved", "a sequence goes on at another daemon", false, 0, fill_close_moved},
    {"request_note", "what whoever adopts the sequence is to know", false, 0, fill_note},
    {"request_note_ask", "the note that a sequence has", false, 0, fill_note_ask},
    {"request_locate", "where it went", false, 0, fill_locate},
    {"request_adopt", "a sequence of another session is taken over", false, 0, fill_adopt},
    {"request_probe", "what is cached of three tokens", false, 0, fill_probe},
    {"request_calls", "a sequence is opened, another one closed", false, 0, fill_calls},
    /* 3 tokens, 4 q heads, 2 kv heads, head_dim 64 and 32, bf16: q 1536, k 768, v 384 */
    {"request_step", "two items, three tokens; q at 0, k at 1536, v at 2304 of the payload", false,
     2688, fill_step},
    {"request_step_tree", "the same tensors of one item, which is a tree", false, 2688, fill_tree},
    {"request_step_sparse", "three queries that visit 5 blocks of 16 tokens each, named at 1536",
     false, 1596, fill_sparse},
    {"request_step_choose", "three queries that visit 64 blocks each, which attnd chooses", false,
     1536, fill_choose},
    {"request_step_part",
     "three queries over the 4096 tokens of a part that begins at 131072, from 904 tokens behind "
     "it",
     false, 1536, fill_part},
    {"request_plan", "the same items in both layers, whose bells will be 4294967295 and 0", false,
     0, fill_plan},
    {"request_export", "one block, and 16 ids", false, 0, fill_export},
    {"request_export_layers", "what one block has of layer 1, and what has stayed", false, 0,
     fill_export_layers},
    {"request_import", "one block of 128 bytes", false, 128, fill_import},
    {"request_import_layers", "64 bytes that a block has of layer 1", false, 64,
     fill_import_layers},
    {"request_stats", "an empty body that is present", false, 0, fill_stats},
    {"request_drain", "sequences hold it up for a minute", false, 0, fill_drain},
    {"request_inspect", "a list for operators, from entry 500 on", false, 0, fill_inspect},
    {"request_watch", "events behind the seventh, when there are any", false, 0, fill_watch},
    {"request_configure", "a setting that changes at once", false, 0, fill_configure},
    {"request_pool_drop", "a pool by name", false, 0, fill_pool_drop},
    {"request_kill_session", "a session, by its label", false, 0, fill_kill_session},
    {"request_kill_sequence", "a tenant's sequence", false, 0, fill_kill_seq},
    {"request_move", "a tenant's sequence, to another card", false, 0, fill_move},
    {"request_retire", "a tenant's sequence gets its next epoch", false, 0, fill_retire},
    {"request_fence", "appends are served for a while", false, 0, fill_fence},
    {"request_reload", "an empty body that is present", false, 0, fill_reload},
    {"reply_hello", "the session and the limits", true, 0, fill_hello_reply},
    {"reply_pool", "to pool_create and pool_describe", true, 0, fill_pool_reply},
    {"reply_seq", "to adopt and fork: with the lengths", true, 0, fill_seq_reply},
    {"reply_probe", "4096 tokens at once, 512 more from a tier", true, 0, fill_probe_reply},
    {"reply_moved", "to locate: where the sequence went", true, 0, fill_moved_reply},
    {"reply_note", "to note: seven bytes", true, 0, fill_note_reply},
    {"reply_calls", "the first call made a sequence, the second found none", true, 0,
     fill_calls_reply},
    /* out [3][4][32] bf16 768, lse [3][4] f32 48 */
    {"reply_step", "the second item failed; out at 0, lse at 768 of the payload", true, 816,
     fill_step_reply},
    {"reply_export", "one block of 128 bytes", true, 128, fill_export_reply},
    {"reply_stats", "json", true, 0, fill_stats_reply},
    {"reply_error", "a status, a sentence and a hint; no body", true, 0, fill_error_reply},
    {"reply_ok", "to close, truncate, plan and drain: no body", true, 0, fill_ok_reply},
};
const size_t n_samples = N(samples);

static uint8_t *message_new(size_t bytes)
{
    return aligned_alloc(WIRE_ALIGN, (bytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN);
}

uint8_t *sample_build(const struct sample *s, size_t *out_bytes)
{
    Attnd__Request q = ATTND__REQUEST__INIT;
    Attnd__Reply r = ATTND__REPLY__INIT;
    s->fill(&q, &r);
    size_t head_bytes = s->is_reply ? wire_reply_head_bytes(&r) : wire_request_head_bytes(&q);
    uint8_t *msg = message_new(head_bytes + s->payload_bytes);
    if (msg == NULL)
        return NULL;
    memset(msg, 0xee, head_bytes);
    if (s->is_reply)
        wire_reply_head_encode(&r, SAMPLE_REQUEST_ID, s->payload_bytes, msg);
    else
        wire_request_head_encode(&q, SAMPLE_REQUEST_ID, s->payload_bytes, msg);
    for (size_t i = 0; i < s->payload_bytes; i++)
        msg[head_bytes + i] = (uint8_t)(7 * i + 1);
    *out_bytes = head_bytes + s->payload_bytes;
    return msg;
}

uint8_t *sample_recode(uint8_t *msg, size_t msg_bytes, bool is_reply, size_t *out_bytes, char *why,
                       size_t why_bytes)
{
    struct wire_arena a;
    struct wire_request q;
    struct wire_reply r;
    wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    attn_status st = is_reply ? wire_reply_decode(msg, msg_bytes, &a, &r, why, why_bytes)
                              : wire_request_decode(msg, msg_bytes, &a, &q, why, why_bytes);
    uint8_t *again = NULL;
    if (st == ATTN_OK) {
        size_t payload_bytes = is_reply ? r.payload_bytes : q.payload_bytes;
        const uint8_t *payload = is_reply ? r.payload : q.payload;
        size_t head_bytes =
            is_reply ? wire_reply_head_bytes(r.header) : wire_request_head_bytes(q.header);
        again = head_bytes ? message_new(head_bytes + payload_bytes) : NULL;
        if (again != NULL) {
            if (is_reply)
                wire_reply_head_encode(r.header, r.request_id, payload_bytes, again);
            else
                wire_request_head_encode(q.header, q.request_id, payload_bytes, again);
            memcpy(again + head_bytes, payload, payload_bytes);
            *out_bytes = head_bytes + payload_bytes;
        }
    }
    wire_arena_reset(&a);
    return again;
}

/* open.c: makes the arena or maps an existing one, recovers it, closes it, and answers for it as a
 * whole: its id, its clock, its statistics.
 *
 * The memfd is sealed against shrinking and growing, so that no other holder of the descriptor can
 * pull pages from under the mapping. The tables are sparse: a page that no sequence has used takes
 * no memory, and free records are reused last in, first out, which keeps the used pages few.
 */
#define _GNU_SOURCE /* memfd_create */
#include "cache/kv_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_ARENA_BYTES (UINT64_C(1) << 46)
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

static const struct {
    const char *name;
    size_t offset;
    uint32_t max;
} config_fields[] = {
    {"max_pools", offsetof(struct kv_config, max_pools), 4096},
    {"max_blocks", offsetof(struct kv_config, max_blocks), 1u << 31},
    {"max_sequences", offsetof(struct kv_config, max_sequences), 1u << 26},
    {"max_seq_blocks", offsetof(struct kv_config, max_seq_blocks), 1u << 26},
    {"max_layers", offsetof(struct kv_config, max_layers), 4096},
    {"max_seq_tokens", offsetof(struct kv_config, max_seq_tokens), UINT32_MAX},
    {"max_block_tokens", offsetof(struct kv_config, max_block_tokens), KV_MAX_BLOCK_TOKENS},
    {"max_owners", offsetof(struct kv_config, max_owners), 1u << 26},
    {"block_layout", offsetof(struct kv_config, block_layout), UINT32_MAX},
};
#define N_CONFIG_FIELDS (sizeof config_fields / sizeof config_fields[0])

static uint32_t config_get(const struct kv_config *c, size_t field)
{
    uint32_t v;
    memcpy(&v, (const char *)c + config_fields[field].offset, sizeof v);
    return v;
}

static uint64_t layout(const struct kv_config *c, uint64_t offset[KV_N_SECTIONS])
{
    uint64_t at = 0;
#define X(name, type, count)                                                                       \
    offset[KV_##name] = at;                                                                        \
    at += ((count) * sizeof(type) + KV_ARENA_PAGE_BYTES - 1) / KV_ARENA_PAGE_BYTES *               \
          KV_ARENA_PAGE_BYTES;
    KV_TRUTH_MAP(X)
    KV_DERIVED_MAP(X)
#undef X
    return at;
}

uint64_t kv_full_bytes(const struct kv_config *c)
{
    uint64_t offset[KV_N_SECTIONS];
    return layout(c, offset);
}

uint64_t kv_fixed_bytes(const struct kv_config *c)
{
    uint64_t offset[KV_N_SECTIONS + 1];
    uint64_t bytes = offset[KV_N_SECTIONS] = layout(c, offset);
    static const enum kv_section of_blocks[] = {KV_PUBLISHED, KV_RETAINED, KV_PUBLISHED_IDS,
                                                KV_BLOCKS};
    static const enum kv_section of_rows[] = {KV_GIVEN_IDS, KV_TABLES};
    for (size_t i = 0; i < sizeof of_blocks / sizeof of_blocks[0]; i++)
        bytes -= offset[of_blocks[i] + 1] - offset[of_blocks[i]];
    for (size_t i = 0; i < sizeof of_rows / sizeof of_rows[0]; i++) {
        uint64_t rows = offset[of_rows[i] + 1] - offset[of_rows[i]];
        uint64_t first_pages = (uint64_t)c->max_sequences * KV_ARENA_PAGE_BYTES;
        bytes -= rows > first_pages ? rows - first_pages : 0;
    }
    bytes -= offset[KV_NOTES + 1] - offset[KV_NOTES];
    return bytes;
}

static uint64_t header_seal(const struct kv_header *h)
{
    static const uint64_t no_key[2];
    return siphash(no_key, h, offsetof(struct kv_header, seal));
}

static void keys_take(struct kv *kv, const struct kv_header *h)
{
    memcpy(kv->key, h->key, sizeof kv->key);
    memcpy(kv->root_secret, h->root_secret, sizeof kv->root_secret);
    memcpy(kv->block_secret, h->block_secret, sizeof kv->block_secret);
}

static attn_status header_init(struct kv *kv, struct kv_header *h)
{
    uint64_t random[6];
    ssize_t n;
    do
        n = getrandom(random, sizeof random, 0);
    while (n < 0 && errno == EINTR);
    if (n != sizeof random)
        return kv_fail(kv, ATTN_EINTERNAL, "arena: getrandom: %s", strerror(errno));
    *h = (struct kv_header){
        .magic = KV_ARENA_MAGIC,
        .version = KV_ARENA_VERSION,
        .header_bytes = sizeof *h,
        .arena_bytes = kv->bytes,
        .config = kv->config,
        .key = {random[0], random[1]},
        .root_secret = {random[2], random[3]},
        .block_secret = {random[4], random[5]},
    };
    layout(&kv->config, h->offset);
    kv_publish64(&h->seal, header_seal(h));
    keys_take(kv, h);
    return ATTN_OK;
}

static attn_status header_check(struct kv *kv, const struct kv_header *h)
{
    if (h->magic != KV_ARENA_MAGIC)
        return kv_fail(kv, ATTN_EINVAL, "arena: magic is %llx, not an arena",
                       (unsigned long long)h->magic);
    if (h->version != KV_ARENA_VERSION || h->header_bytes != sizeof *h)
        return kv_fail(kv, ATTN_EINVAL, "arena: version %u, this program has version %u",
                       h->version, KV_ARENA_VERSION);
    if (h->seal != header_seal(h))
        return kv_fail(kv, ATTN_EINVAL, "arena: the header is damaged");
    for (size_t i = 0; i < N_CONFIG_FIELDS; i++)
        if (config_get(&h->config, i) != config_get(&kv->config, i))
            return kv_fail(kv, ATTN_EINVAL, "arena: made with %s %u, configured is %u",
                           config_fields[i].name, config_get(&h->config, i),
                           config_get(&kv->config, i));
    uint64_t offset[KV_N_SECTIONS];
    if (layout(&kv->config, offset) != h->arena_bytes ||
        memcmp(offset, h->offset, sizeof offset) != 0)
        return kv_fail(kv, ATTN_EINVAL, "arena: its tables lie elsewhere than this program's");
    return ATTN_OK;
}

static attn_status arena_make(struct kv *kv)
{
    kv->fd = memfd_create("attnd-cache", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (kv->fd < 0)
        return kv_fail(kv, ATTN_ENOMEM, "arena: memfd_create: %s", strerror(errno));
    if (ftruncate(kv->fd, (off_t)kv->bytes) != 0)
        return kv_fail(kv, ATTN_ENOMEM, "arena: ftruncate to %llu bytes: %s",
                       (unsigned long long)kv->bytes, strerror(errno));
    if (fcntl(kv->fd, F_ADD_SEALS, SEALS) != 0)
        return kv_fail(kv, ATTN_EINTERNAL, "arena: F_ADD_SEALS: %s", strerror(errno));
    return ATTN_OK;
}

static attn_status arena_take(struct kv *kv, int fd)
{
    kv->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (kv->fd < 0)
        return kv_fail(kv, errno == EBADF ? ATTN_EINVAL : ATTN_ENOMEM, "arena: fd %d: %s", fd,
                       strerror(errno));
    int seals = fcntl(kv->fd, F_GET_SEALS);
    if (seals < 0 || ((seals & SEALS) != SEALS && fcntl(kv->fd, F_ADD_SEALS, SEALS) != 0))
        return kv_fail(kv, ATTN_EINVAL, "arena: fd %d cannot be sealed: %s", fd, strerror(errno));
    struct stat sb;
    if (fstat(kv->fd, &sb) != 0)
        return kv_fail(kv, ATTN_EINVAL, "arena: fd %d: %s", fd, strerror(errno));
    /* The header is read first: it can tell why the size differs. */
    struct kv_header h;
    if (pread(kv->fd, &h, sizeof h, 0) != sizeof h)
        return kv_fail(kv, ATTN_EINVAL, "arena: fd %d has %lld bytes, too few for a header", fd,
                       (long long)sb.st_size);
    attn_status st = header_check(kv, &h);
    if (st == ATTN_OK && (uint64_t)sb.st_size != kv->bytes)
        st = kv_fail(kv, ATTN_EINVAL, "arena: has %lld bytes, needs %llu", (long long)sb.st_size,
                     (unsigned long long)kv->bytes);
    keys_take(kv, &h);
    return st;
}

static void bind_sections(struct kv *kv)
{
    uint64_t offset[KV_N_SECTIONS];
    layout(&kv->config, offset);
    kv->pools = (void *)(kv->base + offset[KV_POOLS]);
    kv->specs = kv->base + offset[KV_SPECS];
    kv->seqs = (void *)(kv->base + offset[KV_SEQS]);
    kv->lens = (void *)(kv->base + offset[KV_LENS]);
    kv->holes = (void *)(kv->base + offset[KV_HOLES]);
    kv->latest = (void *)(kv->base + offset[KV_LATEST]);
    kv->trees = (void *)(kv->base + offset[KV_TREES]);
    kv->given = (void *)(kv->base + offset[KV_GIVEN]);
    kv->given_ids = (void *)(kv->base + offset[KV_GIVEN_IDS]);
    kv->notes = (void *)(kv->base + offset[KV_NOTES]);
    kv->published = (void *)(kv->base + offset[KV_PUBLISHED]);
    kv->retained = (void *)(kv->base + offset[KV_RETAINED]);
    kv->published_ids = (void *)(kv->base + offset[KV_PUBLISHED_IDS]);
    kv->prefixes = (void *)(kv->base + offset[KV_PREFIXES]);
    kv->owners = (void *)(kv->base + offset[KV_OWNERS]);
    kv->seen = (void *)(kv->base + offset[KV_SEEN]);
    kv->epochs = (void *)(kv->base + offset[KV_EPOCHS]);
    kv->moved = (void *)(kv->base + offset[KV_MOVED]);
    kv->journal = (void *)(kv->base + offset[KV_JOURNAL]);
    kv->early_slots = (void *)(kv->base + offset[KV_EARLY_BATCHES]);
    kv->early = (void *)(kv->base + offset[KV_EARLY]);
    kv->early_words = (void *)(kv->base + offset[KV_EARLY_WORDS]);
    kv->tables = (void *)(kv->base + offset[KV_TABLES]);
    kv->blocks = (void *)(kv->base + offset[KV_BLOCKS]);
    kv->links = (void *)(kv->base + offset[KV_LINKS]);
    kv->slots = (void *)(kv->base + offset[KV_INDEX]);
    kv->owned = (void *)(kv->base + offset[KV_OWNED]);
    kv->reserved = (void *)(kv->base + offset[KV_RESERVED]);
    kv->last_set = (void *)(kv->base + offset[KV_LAST_SET]);
    kv->charged = (void *)(kv->base + offset[KV_CHARGED]);
    kv->heads = (void *)(kv->base + offset[KV_HEADS]);
}

/* Checks the configuration and takes the size of its arena. */
static attn_status config_check(struct kv *kv)
{
    for (size_t i = 0; i < N_CONFIG_FIELDS; i++) {
        uint32_t v = config_get(&kv->config, i);
        if (v < 1 || v > config_fields[i].max)
            return kv_fail(kv, ATTN_EINVAL, "%s is %u, not in 1..%u", config_fields[i].name, v,
                           config_fields[i].max);
    }
    if (kv->config.idle_pages >= KV_PLACE)
        return kv_fail(kv, ATTN_EINVAL, "idle_pages is %u, at most %u", kv->config.idle_pages,
                       KV_PLACE - 1);
    uint64_t offset[KV_N_SECTIONS];
    kv->bytes = layout(&kv->config, offset);
    if (kv->bytes > MAX_ARENA_BYTES)
        return kv_fail(kv, ATTN_EINVAL,
                       "max_sequences %u x (max_seq_blocks %u + max_seq_tokens %u): tables too "
                       "large",
                       kv->config.max_sequences, kv->config.max_seq_blocks,
                       kv->config.max_seq_tokens);
    return ATTN_OK;
}

attn_status kv_config_check(const struct kv_config *c, char *why, size_t why_bytes)
{
    struct kv kv = {.config = *c};
    attn_status st = config_check(&kv);
    if (st != ATTN_OK)
        snprintf(why, why_bytes, "%s", kv.error);
    return st;
}

attn_status kv_open(const struct kv_config *c, int fd, struct kv **out_kv, char *why,
                    size_t why_bytes)
{
    struct kv *kv = calloc(1, sizeof *kv);
    if (kv == NULL) {
        snprintf(why, why_bytes, "out of memory");
        return ATTN_ENOMEM;
    }
    kv->fd = -1;
    kv->config = *c;
    attn_status st = config_check(kv);
    if (st != ATTN_OK)
        goto fail;
    kv->journal_capacity = kv_journal_capacity(c);
    kv->index_mask = kv_index_capacity(c) - 1;
    kv->prefix_mask = kv_prefix_capacity(c) - 1;

    st = fd < 0 ? arena_make(kv) : arena_take(kv, fd);
    if (st != ATTN_OK)
        goto fail;
    void *base =
        mmap(NULL, kv->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, kv->fd, 0);
    if (base == MAP_FAILED) {
        st = kv_fail(kv, ATTN_ENOMEM, "arena: mmap of %llu bytes: %s",
                     (unsigned long long)kv->bytes, strerror(errno));
        goto fail;
    }
    kv->base = base;
    bind_sections(kv);
    kv->n_parted = calloc(c->max_pools, sizeof *kv->n_parted);
    if (kv->n_parted == NULL) {
        st = kv_fail(kv, ATTN_ENOMEM, "no memory for %u pools", c->max_pools);
        goto fail;
    }
    kv->events = c->events_kept == 0 ? NULL : calloc(c->events_kept, sizeof *kv->events);
    if (kv->events == NULL && c->events_kept > 0) {
        st = kv_fail(kv, ATTN_ENOMEM, "no memory for %llu events",
                     (unsigned long long)c->events_kept);
        goto fail;
    }
    if (!kv_pages_init(kv)) {
        st = kv_fail(kv, ATTN_ENOMEM, "no memory for the map of %u idle pages", c->idle_pages);
        goto fail;
    }
    if (fd < 0) {
        st = header_init(kv, base);
        if (st != ATTN_OK)
            goto fail;
    }
    uint32_t n_dropped; /* not needed: the stats count them, too */
    st = kv_recover(kv, &n_dropped);
    if (st != ATTN_OK)
        goto fail;
    kv->pages.are_new = false;
    *out_kv = kv;
    return ATTN_OK;
fail:
    snprintf(why, why_bytes, "%s", kv->error);
    kv_close(kv);
    return st;
}

void kv_close(struct kv *kv)
{
    if (kv == NULL)
        return;
    kv_promotions_forget(kv);
    kv_seq_imports_forget(kv);
    kv_idle_moves_forget(kv);
    free(kv->pages.map);
    free(kv->n_parted);
    free(kv->events);
    if (kv->base != NULL)
        munmap(kv->base, kv->bytes);
    if (kv->fd >= 0)
        close(kv->fd);
    free(kv);
}

int kv_fd(const struct kv *kv)
{
    return kv->fd;
}

uint64_t kv_arena_id(const struct kv *kv)
{
    static const uint64_t no_key[2];
    return siphash(no_key, kv->key, sizeof kv->key);
}

void kv_set_time(struct kv *kv, uint32_t now_s)
{
    kv->now_s = now_s;
}

void kv_set_tier_ops(struct kv *kv, const struct kv_tier_ops *x)
{
    kv->tier = *x;
}

void kv_stats_read(const struct kv *kv, struct kv_stats *out)
{
    const struct kv_stats *s = &kv->heads->stats;
#define X(field) out->field = __atomic_load_n(&s->field, __ATOMIC_RELAXED);
    KV_STATS_MAP(X)
#undef X
}

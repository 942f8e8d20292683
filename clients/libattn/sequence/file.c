/* file.c: sequences in files. A file appears as a whole or not at all: it is written under a
 * name beside its own, synced and renamed. It is read to its end before a daemon hears of it.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clients/libattn/sequence/blocks.h"
#include "clients/libattn/sequence/target.h"

enum {
    MAX_TRIES = 3, /* of a sequence that loses more than drafts */
    MAX_LOOKS = 100, /* of a try */
    MAX_OVERTAKEN = 100, /* tries whose blocks are freed before they are copied */
    FILE_OLD_BYTES = offsetof(struct attn_seq_file, freed_first),
};

/* Exactly n bytes, or an error: a file may end before, or lie on a disk that fails. */
static attn_status read_at(int fd, const char *path, uint8_t *dst, uint64_t n, uint64_t at)
{
    while (n > 0) {
        ssize_t done = pread(fd, dst, n, (off_t)at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return io_failed("read", path);
        if (done == 0)
            return error_set(ATTN_EPROTO, "%.180s ends at byte %" PRIu64, path, at);
        dst += done;
        n -= (uint64_t)done;
        at += (uint64_t)done;
    }
    return ATTN_OK;
}

/* ---- export ---- */

struct store {
    struct attn_client *client;
    const char *path;
    uint64_t timeout_us;
    struct seq_look look, now; /* what the file has, and the latest */
    uint32_t n_kept; /* tokens that have stayed since the first look */
    int n_looks, n_overtaken;
    struct seq_file file;
    struct seq_note note;
    uint64_t head_bytes;
    struct seq_piece piece;
    uint32_t *ids; /* [file.n_ids] */
    struct checksum *sums; /* [file.n_blocks] */
    uint8_t *head, *blocks; /* [piece.n_blocks] */
    char target[PATH_MAX], tmp[PATH_MAX];
    int fd;
};

static attn_status write_at(const struct store *s, const uint8_t *bytes, uint64_t n, uint64_t at)
{
    while (n > 0) {
        ssize_t done = pwrite(s->fd, bytes, n, (off_t)at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done == 0)
            errno = EIO;
        if (done <= 0)
            return io_failed("write", s->path);
        bytes += done;
        n -= (uint64_t)done;
        at += (uint64_t)done;
    }
    return ATTN_OK;
}

/* Looks at the sequence and takes memory for what its file will be. */
static attn_status store_begin(struct store *s, uint64_t id)
{
    uint32_t least, most;
    attn_status st = seq_look_at(s->client, id, s->timeout_us, &s->look);
    if (st == ATTN_OK)
        st = seq_piece_of(s->client, &s->look.geometry, &s->piece);
    if (st == ATTN_OK)
        st = seq_note_read(s->client, id, s->timeout_us, &s->note);
    if (st != ATTN_OK)
        return st;
    s->now = s->look;
    s->n_kept = UINT32_MAX;
    s->n_looks = 0;
    seq_look_lengths(&s->look, &least, &most);
    uint32_t bt = s->look.geometry.block_tokens;
    s->file = (struct seq_file){.geometry = s->look.geometry,
                                .name = id,
                                .pool = s->look.pool,
                                .adapter = s->look.adapter,
                                .n_blocks = most / bt + (most % bt != 0),
                                .n_ids = s->look.n_ids,
                                .freed_first = s->look.freed_first,
                                .freed_past = s->look.freed_past,
                                .layer_len = s->look.layer_len,
                                .note = s->note.bytes,
                                .note_bytes = s->note.n_bytes};
    s->head_bytes = seq_file_head_bytes(&s->file);
    s->ids = calloc((size_t)s->file.n_ids + 1, sizeof *s->ids);
    s->sums = calloc((size_t)s->file.n_blocks + 1, sizeof *s->sums);
    s->head = calloc(1, s->head_bytes);
    s->blocks = malloc(s->piece.n_blocks * s->look.geometry.block_bytes);
    if (s->ids == NULL || s->sums == NULL || s->head == NULL || s->blocks == NULL)
        return error_set(ATTN_ENOMEM, "no memory for an export");
    s->file.ids = s->ids;
    s->file.sums = (const uint8_t *)s->sums;
    return ATTN_OK;
}

static void store_end(struct store *s)
{
    free(s->ids);
    free(s->sums);
    free(s->head);
    free(s->blocks);
    s->ids = NULL;
    s->sums = NULL;
    s->head = s->blocks = NULL;
}

/* What has stayed, after something was copied, which came to st. */
static attn_status store_look(struct store *s, attn_status st)
{
    uint32_t n_kept;
    st = seq_look_after(s->client, st, s->timeout_us, &s->now, &n_kept);
    if (st != ATTN_OK)
        return st;
    s->n_kept = n_kept < s->n_kept ? n_kept : s->n_kept;
    if (++s->n_looks == MAX_LOOKS)
        return error_set(ATTN_ESTALE, "sequence %" PRIu64 " is truncated all the while",
                         s->look.id);
    return ATTN_OK;
}

/* Blocks of the tokens that have stayed. */
static uint32_t n_blocks_kept(const struct store *s)
{
    uint32_t bt = s->look.geometry.block_tokens, n = s->n_kept / bt + (s->n_kept % bt != 0);
    return n < s->file.n_blocks ? n : s->file.n_blocks;
}

static attn_status overtaken(struct store *s, uint32_t block)
{
    s->n_overtaken++;
    return error_set(ATTN_ESTALE, "sequence %" PRIu64 ": block %" PRIu32 " is freed meanwhile",
                     s->look.id, block);
}

static attn_status store_blocks(struct store *s)
{
    uint64_t block_bytes = s->look.geometry.block_bytes;
    for (uint32_t i = 0, n; i < n_blocks_kept(s); i += n) {
        n = seq_blocks_next(s->look.freed_first, s->look.freed_past, &i, n_blocks_kept(s),
                            s->piece.n_blocks);
        if (n == 0)
            break;
        uint32_t place = seq_file_place(&s->file, i);
        attn_status st = seq_blocks_get(s->client, &s->look, 0, s->piece, i, n, s->timeout_us,
                                        s->blocks, &s->sums[place]);
        if (st == ATTN_OK) {
            st = write_at(s, s->blocks, n * block_bytes, s->head_bytes + place * block_bytes);
        } else {
            st = store_look(s, st);
            n = 0; /* once more, as far as they have stayed */
            if (st == ATTN_OK && s->now.freed_first <= i && i < s->now.freed_past)
                return overtaken(s, i);
        }
        if (st != ATTN_OK)
            return st;
    }
    return store_look(s, ATTN_OK);
}

static attn_status store_ids(struct store *s)
{
    attn_status st, got;
    do {
        uint32_t n = s->file.n_ids < s->n_kept ? s->file.n_ids : s->n_kept;
        got = seq_ids_get(s->client, &s->look, 0, 0, n, s->timeout_us, s->ids);
        st = store_look(s, got);
    } while (st == ATTN_OK && got != ATTN_OK);
    return st;
}

/* The file has what has stayed, and a shorter head where that makes one. */
static attn_status store_shorten(struct store *s)
{
    uint64_t from = s->head_bytes, bytes = s->look.geometry.block_bytes;
    s->file.n_blocks = n_blocks_kept(s);
    if (s->file.n_blocks <= s->file.freed_first) /* no query there sees what is freed */
        s->file.freed_first = s->file.freed_past = 0;
    uint32_t n_stored = seq_file_n_stored(&s->file);
    s->file.n_ids = s->file.n_ids < s->n_kept ? s->file.n_ids : s->n_kept;
    for (uint32_t i = 0; i < s->look.geometry.num_layers; i++)
        if (s->look.layer_len[i] > s->n_kept)
            s->look.layer_len[i] = s->n_kept;
    s->head_bytes = seq_file_head_bytes(&s->file);
    attn_status st = ATTN_OK;
    for (uint32_t i = 0; s->head_bytes < from && st == ATTN_OK && i < n_stored; i++) {
        st = read_at(s->fd, s->path, s->blocks, bytes, from + i * bytes);
        if (st == ATTN_OK)
            st = write_at(s, s->blocks, bytes, s->head_bytes + i * bytes);
    }
    if (st == ATTN_OK && ftruncate(s->fd, (off_t)(s->head_bytes + n_stored * bytes)) != 0)
        st = io_failed("write", s->path);
    return st;
}

/* Drafts that were taken back meanwhile are left out; where more was, the last try does so, too. */
static attn_status store_run(struct store *s, uint64_t id, bool is_last)
{
    uint32_t least, most;
    attn_status st = store_begin(s, id);
    if (st == ATTN_OK)
        st = store_blocks(s);
    if (st == ATTN_OK)
        st = store_ids(s);
    if (st != ATTN_OK)
        return st;
    seq_look_lengths(&s->look, &least, &most);
    bool is_more = s->n_kept < most && most - s->n_kept >= s->look.geometry.block_tokens;
    if ((is_more && !is_last) || (s->n_kept == 0 && most > 0))
        return error_set(ATTN_ESTALE, "sequence %" PRIu64 " is truncated meanwhile", id);
    if (s->n_kept < most || s->n_kept < s->file.n_ids)
        st = store_shorten(s);
    if (st != ATTN_OK)
        return st;
    seq_file_encode(&s->file, s->head);
    return write_at(s, s->head, s->head_bytes, 0);
}

static attn_status store_to(struct store *s, uint64_t id)
{
    attn_status st = target_find(s->path, s->target);
    if (st != ATTN_OK)
        return st;
    int n = snprintf(s->tmp, sizeof s->tmp, "%s.XXXXXX", s->target);
    if (n < 0 || (size_t)n >= sizeof s->tmp)
        return error_set(ATTN_EINVAL, "path has %d bytes, at most %zu are allowed", n - 7,
                         sizeof s->tmp - 8);
    s->fd = mkostemp(s->tmp, O_CLOEXEC);
    if (s->fd < 0)
        return io_failed("make", s->path);
    st = store_run(s, id, false);
    for (int i = 1; st == ATTN_ESTALE && i < MAX_TRIES && s->n_overtaken < MAX_OVERTAKEN;) {
        int before = s->n_overtaken;
        store_end(s);
        st = ftruncate(s->fd, 0) == 0 ? store_run(s, id, i + 1 == MAX_TRIES)
                                      : io_failed("write", s->path);
        i += s->n_overtaken == before;
    }
    if (st == ATTN_OK && fsync(s->fd) != 0)
        st = io_failed("sync", s->path);
    if (close(s->fd) != 0 && st == ATTN_OK)
        st = io_failed("close", s->path);
    if (st == ATTN_OK)
        st = target_replace(s->tmp, s->target);
    if (st != ATTN_OK)
        unlink(s->tmp);
    return st;
}

static void tell(const struct seq_file *f, uint64_t bytes, struct attn_seq_file *out)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < f->geometry.num_layers; i++)
        most = f->layer_len[i] > most ? f->layer_len[i] : most;
    struct attn_seq_file all = {.struct_size = out->struct_size,
                                .num_layers = f->geometry.num_layers,
                                .id = f->name,
                                .adapter = f->adapter,
                                .bytes = bytes,
                                .n_tokens = most,
                                .n_ids = f->n_ids,
                                .n_blocks = f->n_blocks,
                                .kv_dtype = f->geometry.kv_dtype,
                                .freed_first = f->freed_first,
                                .freed_past = f->freed_past};
    snprintf(all.pool, sizeof all.pool, "%s", f->pool);
    memcpy(out, &all, out->struct_size);
}

static attn_status file_check(const void *path, const struct attn_seq_file *out)
{
    if (path == NULL)
        return error_set(ATTN_EINVAL, "path is NULL");
    if (out == NULL || out->struct_size == sizeof *out || out->struct_size == FILE_OLD_BYTES)
        return ATTN_OK;
    return error_set(ATTN_EINVAL, "attn_seq_file.struct_size %u: this library knows %zu",
                     out->struct_size, sizeof *out);
}

attn_status attn_seq_export(attn_client *c, uint64_t id, const char *path, uint64_t timeout_us,
                            struct attn_seq_file *out_file)
{
    attn_status st = client_check(c);
    if (st == ATTN_OK)
        st = file_check(path, out_file);
    if (st != ATTN_OK)
        return st;
    struct store *s = calloc(1, sizeof *s);
    if (s == NULL)
        return error_set(ATTN_ENOMEM, "no memory for an export");
    s->client = c;
    s->path = path;
    s->timeout_us = timeout_us;
    st = store_to(s, id);
    if (st == ATTN_OK && out_file != NULL)
        tell(&s->file, s->head_bytes + seq_file_n_stored(&s->file) * s->look.geometry.block_bytes,
             out_file);
    store_end(s);
    free(s);
    return st;
}

/* ---- import ---- */

struct stored {
    const char *path;
    int fd;
    uint64_t bytes, head_bytes;
    uint8_t *head;
    struct seq_file file; /* points into head */
};

static attn_status head_read(struct stored *s)
{
    uint8_t fixed[SEQ_FILE_FIXED_BYTES];
    char why[160];
    uint64_t n = s->bytes < sizeof fixed ? s->bytes : sizeof fixed;
    attn_status st = read_at(s->fd, s->path, fixed, n, 0);
    if (st != ATTN_OK)
        return st;
    st = seq_file_head_find(fixed, n, s->bytes, &s->head_bytes, why, sizeof why);
    if (st != ATTN_OK)
        return error_set(st, "%.80s: %s", s->path, why);
    s->head = malloc(s->head_bytes);
    if (s->head == NULL)
        return error_set(ATTN_ENOMEM, "no memory for the head of %.180s", s->path);
    st = read_at(s->fd, s->path, s->head, s->head_bytes, 0);
    if (st != ATTN_OK)
        return st;
    /* what was found above may be another now */
    st = memcmp(s->head, fixed, sizeof fixed) == 0 ? ATTN_OK : ATTN_EPROTO;
    if (st != ATTN_OK)
        return error_set(st, "%.180s changes while it is read", s->path);
    st = seq_file_decode(s->head, s->head_bytes, &s->file, why, sizeof why);
    return st == ATTN_OK ? st : error_set(st, "%.80s: %s", s->path, why);
}

static attn_status stored_open(struct stored *s, const char *path)
{
    struct stat info;
    *s = (struct stored){.path = path};
    s->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (s->fd < 0)
        return io_failed("open", path);
    if (fstat(s->fd, &info) != 0)
        return io_failed("stat", path);
    if (!S_ISREG(info.st_mode))
        return error_set(ATTN_EPROTO, "%.180s is no regular file", path);
    s->bytes = (uint64_t)info.st_size;
    return head_read(s);
}

static void stored_close(struct stored *s)
{
    if (s->fd >= 0)
        close(s->fd);
    free(s->head);
}

/* Blocks [first, first + n) of those that it has, which make their checksums. */
static attn_status blocks_read(const struct stored *s, uint32_t first, uint32_t n, uint8_t *dst)
{
    uint64_t bytes = s->file.geometry.block_bytes;
    uint64_t place = seq_file_place(&s->file, first);
    attn_status st = read_at(s->fd, s->path, dst, n * bytes, s->head_bytes + place * bytes);
    for (uint32_t i = 0; st == ATTN_OK && i < n; i++) {
        struct checksum want = seq_file_sum(&s->file, first + i);
        struct checksum sum = checksum_of(dst + i * bytes, bytes);
        if (!checksum_is_equal(sum, want))
            st = error_set(ATTN_EPROTO,
                           "%.100s: block %" PRIu32 ": checksum is %016" PRIx64 "%016" PRIx64
                           ", its bytes make %016" PRIx64 "%016" PRIx64,
                           s->path, first + i, want.high, want.low, sum.high, sum.low);
    }
    return st;
}

/* What the library knows of the pool; layout and attention the daemon compares. */
static attn_status pool_fits(const struct attn_pool *p, const struct stored *s)
{
    const struct attn_pool_spec *spec = &p->spec;
    struct seq_geometry pools = s->file.geometry;
    char why[200];
    pools.num_layers = spec->num_layers;
    pools.num_kv_heads = spec->num_kv_heads;
    pools.head_dim_k = spec->head_dim_k;
    pools.head_dim_v = spec->head_dim_v;
    pools.block_tokens = spec->block_tokens;
    pools.kv_dtype = spec->kv_dtype;
    pools.model = spec->model;
    pools.rope = spec->rope;
    if (seq_geometry_differs(&s->file.geometry, "the file", &pools, "the pool", why, sizeof why))
        return error_set(ATTN_EINVAL, "%.50s: %s", s->path, why);
    return ATTN_OK;
}

/* seq_blocks_next of those of the file. */
static uint32_t next_stored(const struct stored *s, uint32_t *first, uint32_t most)
{
    const struct seq_file *f = &s->file;
    return seq_blocks_next(f->freed_first, f->freed_past, first, f->n_blocks, most);
}

/* The sequence has what comes before them, and no more. */
static attn_status freed_send(attn_pool *p, const struct stored *s, const struct attn_seq *seq,
                              uint64_t timeout_us)
{
    const struct seq_file *f = &s->file;
    uint32_t lens[SEQ_FILE_MAX_LAYERS];
    for (uint32_t i = 0; i < f->geometry.num_layers; i++)
        lens[i] = f->freed_past * f->geometry.block_tokens;
    return seq_blocks_free(p->client, seq, &f->geometry, lens, f->freed_first, f->freed_past,
                           timeout_us);
}

static attn_status blocks_send(attn_pool *p, const struct stored *s, const struct attn_seq *seq,
                               struct seq_piece piece, uint8_t *blocks, uint64_t timeout_us)
{
    attn_status st = ATTN_OK;
    bool has_freed = s->file.freed_past > s->file.freed_first;
    for (uint32_t i = 0, n; st == ATTN_OK && i < s->file.n_blocks; i += n) {
        struct checksum sums[WIRE_MAX_CHUNK_BLOCKS];
        if (i == s->file.freed_first && has_freed)
            st = freed_send(p, s, seq, timeout_us);
        n = next_stored(s, &i, piece.n_blocks);
        if (st != ATTN_OK || n == 0)
            break;
        for (uint32_t k = 0; k < n; k++)
            sums[k] = seq_file_sum(&s->file, i + k);
        st = blocks_read(s, i, n, blocks);
        if (st == ATTN_OK)
            st = seq_blocks_put(p->client, seq, &s->file.geometry, piece, s->file.layer_len, i, n,
                                blocks, sums, timeout_us);
    }
    return st;
}

static attn_status stored_send(attn_pool *p, const struct stored *s, uint64_t id,
                               uint64_t timeout_us, struct attn_seq *out_seq)
{
    const struct attn_tokens none = {.adapter = s->file.adapter};
    uint32_t n_cached, n;
    struct seq_piece piece;
    struct attn_seq seq;
    attn_status st = seq_piece_of(p->client, &s->file.geometry, &piece);
    if (st != ATTN_OK)
        return st;
    uint8_t *blocks = malloc(piece.n_blocks * s->file.geometry.block_bytes);
    if (blocks == NULL)
        return error_set(ATTN_ENOMEM, "no memory for an import");
    for (uint32_t i = 0; st == ATTN_OK && i < s->file.n_blocks; i += n) {
        n = next_stored(s, &i, piece.n_blocks);
        st = n > 0 ? blocks_read(s, i, n, blocks) : ATTN_OK;
    }
    if (st == ATTN_OK)
        st = attn_seq_open_with(p, id, &none, timeout_us, &seq, &n_cached);
    if (st != ATTN_OK) {
        free(blocks);
        return st;
    }
    st = blocks_send(p, s, &seq, piece, blocks, timeout_us);
    if (st == ATTN_OK && s->file.n_ids > 0)
        st = attn_seq_tokens(p, &seq, 0, s->file.ids, s->file.n_ids, timeout_us);
    if (st == ATTN_OK && s->file.note_bytes > 0)
        st = attn_seq_note(p, &seq, s->file.note, s->file.note_bytes, timeout_us);
    free(blocks);
    if (st != ATTN_OK) {
        struct error_kept kept = error_keep();
        attn_seq_close(p, &seq, timeout_us);
        return error_restore(&kept);
    }
    *out_seq = seq;
    return ATTN_OK;
}

attn_status attn_seq_import(attn_pool *p, const char *path, uint64_t id, uint64_t timeout_us,
                            struct attn_seq *out_seq, uint32_t *out_layer_len)
{
    if (p == NULL || path == NULL || out_seq == NULL)
        return error_set(ATTN_EINVAL, "pool, path or out_seq is NULL");
    attn_status st = client_check(p->client);
    if (st == ATTN_OK)
        st = pool_check(p);
    if (st != ATTN_OK)
        return st;
    struct stored s;
    st = stored_open(&s, path);
    if (st == ATTN_OK)
        st = pool_fits(p, &s);
    if (st == ATTN_OK)
        st = stored_send(p, &s, id, timeout_us, out_seq);
    if (st == ATTN_OK && out_layer_len != NULL)
        memcpy(out_layer_len, s.file.layer_len, s.file.geometry.num_layers * sizeof *out_layer_len);
    stored_close(&s);
    return st;
}

attn_status attn_seq_file_info(const char *path, struct attn_seq_file *out_file)
{
    struct stored s;
    attn_status st = file_check(path, out_file);
    if (st == ATTN_OK && out_file == NULL)
        st = error_set(ATTN_EINVAL, "out_file is NULL");
    if (st != ATTN_OK)
        return st;
    st = stored_open(&s, path);
    if (st == ATTN_OK)
        tell(&s.file, s.bytes, out_file);
    stored_close(&s);
    return st;
}

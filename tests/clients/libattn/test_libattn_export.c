/* test_libattn_export.c: sequences into files, out of them, and from one daemon to another, by
 * libattn at real daemons. Calls of the file system fail by --wrap, one after the other. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/clients/libattn/seq_rig.h"
#include "tests/random.h"

static char dir[64], path[96];

/* --- calls that fail -------------------------------------------------------------------------- */

static int n_calls, failing, error; /* the failing-th call from now on gives that error; 0: none */
static bool is_short; /* what reads and writes does less than it should */
static bool is_to_become_pipe; /* path, at the next call */

static bool fails(void)
{
    if (is_to_become_pipe) {
        is_to_become_pipe = false;
        unlink(path);
        assert_int_equal(mkfifo(path, 0600), 0);
    }
    if (failing == 0 || ++n_calls != failing)
        return false;
    errno = error;
    return true;
}
static size_t less(size_t n)
{
    return is_short && n > 1 ? n / 2 : n;
}

#define WRAP(type, name, parameters, arguments, how_fails)                                         \
    type __real_##name parameters;                                                                 \
    type __wrap_##name parameters;                                                                 \
    type __wrap_##name parameters                                                                  \
    {                                                                                              \
        return fails() ? (type)(how_fails) : __real_##name arguments;                              \
    }
WRAP(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t at), (fd, b, less(n), at), -1)
WRAP(ssize_t, pread, (int fd, void *b, size_t n, off_t at), (fd, b, less(n), at), -1)
WRAP(int, fsync, (int fd), (fd), -1)
WRAP(int, rename, (const char *a, const char *b), (a, b), -1)
WRAP(int, mkostemp, (char *name, int flags), (name, flags), -1)

/* --- files ------------------------------------------------------------------------------------ */

static uint8_t *read_file(const char *name, size_t *out_n)
{
    struct stat info;
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0 && fstat(fd, &info) == 0);
    uint8_t *bytes = malloc((size_t)info.st_size + 1);
    assert_non_null(bytes);
    assert_int_equal(read(fd, bytes, (size_t)info.st_size), info.st_size);
    close(fd);
    *out_n = (size_t)info.st_size;
    return bytes;
}

static void write_file(const char *name, const uint8_t *bytes, size_t n)
{
    int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n), n);
    close(fd);
}

static uint32_t n_files(void)
{
    uint32_t n = 0;
    DIR *f = opendir(dir);
    assert_non_null(f);
    while (readdir(f) != NULL)
        n++;
    closedir(f);
    return n - 2;
}

static int start(void **state)
{
    static const char *const flags[] = {"--listen.shm_client", "1M", "--listen.shm_slots", "16",
                                        NULL};
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/attnd_export_XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/a.seq", dir);
    e2e_start(&seq_daemons[0], flags);
    e2e_start(&seq_daemons[1], flags);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&seq_daemons[0]);
    e2e_stop(&seq_daemons[1]);
    unlink(path);
    rmdir(dir);
    return 0;
}

/* --- tests ------------------------------------------------------------------------------------ */

static void to_a_file_and_back(attn_dtype kv_dtype, bool is_shm)
{
    const uint32_t lens[LAYERS] = {1000, 777};
    attn_client *a = client_of(0, is_shm), *b = client_of(1, !is_shm);
    attn_pool *p = pool_of(a, kv_dtype, "m", 0.25f, 128),
              *q = pool_of(b, kv_dtype, "m", 0.25f, 128);
    struct attn_seq seq = make_seq(p, 7, lens[0], lens[1], 990), got, more;
    struct attn_seq_file file = {.struct_size = sizeof file}, same = file;
    uint32_t got_lens[LAYERS] = {0}, n_cached, n_note = 0;
    uint8_t note[ATTN_NOTE_BYTES];
    ok(attn_seq_note(p, &seq, "request 7", 9, LONG_US));
    ok(attn_seq_export(a, 7, path, LONG_US, &file));
    assert_int_equal(n_files(), 1);
    ok(attn_seq_file_info(path, &same));
    assert_memory_equal(&same, &file, sizeof file);
    assert_int_equal(file.id, 7);
    assert_int_equal(file.n_tokens, 1000);
    assert_int_equal(file.n_ids, 990);
    assert_string_equal(file.pool, attn_pool_spec_of(p)->name);

    ok(attn_seq_import(q, path, 9, LONG_US, &got, got_lens));
    assert_memory_equal(got_lens, lens, sizeof lens);
    assert_same(p, &seq, q, &got, lens);
    ok(attn_seq_note_get(b, 9, LONG_US, note, &n_note));
    assert_int_equal(n_note, 9);
    assert_memory_equal(note, "request 7", 9);
    ok(attn_seq_import(q, path, 7, LONG_US, &more, NULL)); /* once more: the same file again */
    size_t n, n_again;
    uint8_t *first = read_file(path, &n);
    ok(attn_seq_export(b, 7, path, LONG_US, NULL));
    uint8_t *again = read_file(path, &n_again);
    assert_int_equal(n, n_again);
    assert_memory_equal(first, again, n);
    free(first);
    free(again);
    assert_int_equal(attn_seq_import(q, path, 7, LONG_US, &more, NULL), ATTN_EEXIST);

    /* both go on alike; what all layers have of known tokens is found by others */
    float x[LAST * Q_HEADS * DIM], y[LAST * Q_HEADS * DIM];
    ok(step(p, &seq, 1, 777, 5, true, x));
    ok(step(q, &got, 1, 777, 5, true, y));
    assert_memory_equal(x, y, 5 * Q_HEADS * DIM * sizeof *x);
    static uint32_t ids[MAX_TOKENS];
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        ids[i] = i * 7 + 1;
    struct attn_tokens known = {.ids = ids, .n = 990};
    ok(attn_seq_close(q, &got, LONG_US));
    ok(attn_seq_close(q, &more, LONG_US));
    ok(attn_seq_open_with(q, 11, &known, LONG_US, &more, &n_cached));
    assert_cached(n_cached, 777);
    ok(attn_seq_close(q, &more, LONG_US));
    ok(attn_seq_close(p, &seq, LONG_US));
    attn_pool_close(p);
    attn_pool_close(q);
    attn_client_close(a);
    attn_client_close(b);
}

static void a_file_brings_a_sequence_back_to_the_bit(void **state)
{
    (void)state;
    to_a_file_and_back(ATTN_F32, false);
    to_a_file_and_back(ATTN_F32, true);
    to_a_file_and_back(ATTN_NVFP4, true);
    to_a_file_and_back(ATTN_MXFP4, false);
}

/* Import is refused with one of two statuses, and leaves nothing. */
static void refused(attn_pool *q, const uint8_t *bytes, size_t n, attn_status st, const char *says)
{
    struct attn_seq got = {.id = 99};
    write_file(path, bytes, n);
    attn_status is = attn_seq_import(q, path, 5, LONG_US, &got, NULL);
    if (is != st && !(st == ATTN_EPROTO && is == ATTN_ENOTSUP)) /* a flipped version */
        fail_msg("%d, not %d: %s", is, st, attn_last_error()->message);
    if (strstr(attn_last_error()->message, says) == NULL)
        fail_msg("no \"%s\": %s", says, attn_last_error()->message);
    assert_int_equal(got.id, 99);
}

static void what_is_damaged_or_foreign_is_refused_by_name(void **state)
{
    (void)state;
    attn_client *a = client_of(0, false), *b = client_of(1, false);
    attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 32), *q = pool_of(b, ATTN_F32, "m", 0.25f, 32);
    struct attn_seq seq = make_seq(p, 7, 100, 90, 80), got;
    size_t n;
    ok(attn_seq_export(a, 7, path, LONG_US, NULL));
    uint8_t *bytes = read_file(path, &n);
    uint32_t n_before = n_free(b, q);
    uint64_t seed = 1;
    for (int i = 0; i < 300; i++) {
        size_t at = i < 128 ? (size_t)i : random_below(&seed, (uint32_t)n);
        bytes[at] ^= (uint8_t)(1 << i % 8);
        refused(q, bytes, n, ATTN_EPROTO, path);
        bytes[at] ^= (uint8_t)(1 << i % 8);
        if (i % 8 == 0)
            refused(q, bytes, random_below(&seed, (uint32_t)n), ATTN_EPROTO, path);
    }
    refused(q, bytes, 0, ATTN_EPROTO, "file has 0 bytes");
    refused(q,
            (const uint8_t *)"hello, this is no such file of a sequence, but it is long enough to "
                             "have a whole head, which it has not, however long it would go on",
            129, ATTN_EPROTO, "magic is");
    uint8_t *longer = calloc(1, n + 1);
    assert_non_null(longer);
    memcpy(longer, bytes, n);
    refused(q, longer, n + 1, ATTN_EPROTO, "bytes, it must have");
    free(longer);
    assert_int_equal(attn_seq_import(q, dir, 5, LONG_US, &got, NULL), ATTN_EPROTO);
    assert_int_equal(attn_seq_import(q, "/no/where", 5, LONG_US, &got, NULL), ATTN_EIO);
    assert_non_null(strstr(attn_last_error()->message, "/no/where: No such file"));
    attn_pool *other = pool_of(b, ATTN_F32, "other", 0.25f, 32);
    refused(other, bytes, n, ATTN_EINVAL, "model is \"m\" in the file, \"other\" in the pool");
    attn_pool *scaled = pool_of(b, ATTN_F32, "m", 0.5f, 32);
    refused(scaled, bytes, n, ATTN_EINVAL, "attention is ");
    attn_pool *small = pool_of(b, ATTN_F32, "m", 0.25f, 3);
    refused(small, bytes, n, ATTN_ENOBLOCKS, "block");
    await_free(b, small, attn_pool_free_blocks(small)); /* of when it was made */
    await_free(b, q, n_before);
    assert_gone(q, 5);
    ok(attn_seq_import(q, path, 5, LONG_US, &got, NULL));
    ok(attn_seq_close(q, &got, LONG_US));
    ok(attn_seq_close(p, &seq, LONG_US));
    free(bytes);
    attn_client_close(a);
    attn_client_close(b);
    attn_pool_close(p);
    attn_pool_close(q);
    attn_pool_close(other);
    attn_pool_close(scaled);
    attn_pool_close(small);
}

static void every_call_that_fails_changes_nothing(void **state)
{
    (void)state;
    attn_client *a = client_of(0, false);
    attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 64);
    struct attn_seq seq = make_seq(p, 7, 100, 90, 80), got;
    const uint32_t lens[LAYERS] = {100, 90};
    size_t n;
    ok(attn_seq_export(a, 7, path, LONG_US, NULL));
    uint8_t *bytes = read_file(path, &n);
    uint32_t n_before = n_free(a, p);
    for (int round = 0; round < 3; round++) {
        attn_status st = ATTN_EIO;
        is_short = round == 2;
        error = round == 0 ? ENOSPC : EIO;
        for (int i = 1; st != ATTN_OK; i++) {
            uint8_t *now;
            size_t n_now;
            failing = 0;
            write_file(path, (const uint8_t *)"old", 3);
            failing = i;
            n_calls = 0;
            st = attn_seq_export(a, 7, path, LONG_US, NULL);
            bool is_last = n_calls == failing; /* the folder's sync: the file is there */
            failing = 0;
            if (st != ATTN_OK) {
                assert_int_equal(st, ATTN_EIO);
                assert_non_null(strstr(attn_last_error()->message, strerror(error)));
            }
            assert_int_equal(n_files(), 1);
            now = read_file(path, &n_now);
            assert_true(n_now == 3 ? st != ATTN_OK && memcmp(now, "old", 3) == 0
                                   : n_now == n && memcmp(now, bytes, n) == 0 &&
                                         (st == ATTN_OK || is_last));
            free(now);
        }
        for (int i = 1, is_done = 0; !is_done; i++) {
            failing = i;
            n_calls = 0;
            st = attn_seq_import(p, path, 8, LONG_US, &got, NULL);
            is_done = st == ATTN_OK;
            failing = 0;
            if (!is_done) {
                assert_int_equal(st, ATTN_EIO);
                assert_gone(p, 8);
                await_free(a, p, n_before);
            }
        }
        assert_same(p, &seq, p, &got, lens);
        ok(attn_seq_close(p, &got, LONG_US));
    }
    is_short = false;
    struct rlimit was, small = {0}; /* a disk that is really full */
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    small = (struct rlimit){.rlim_cur = n / 2, .rlim_max = was.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_int_equal(attn_seq_export(a, 7, path, LONG_US, NULL), ATTN_EIO);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_int_equal(n_files(), 1);
    ok(attn_seq_import(p, path, 8, LONG_US, &got, NULL)); /* the one before is there */
    ok(attn_seq_close(p, &got, LONG_US));
    ok(attn_seq_close(p, &seq, LONG_US));
    free(bytes);
    attn_pool_close(p);
    attn_client_close(a);
}

/* Export to path is refused; what is there is of that kind after it. */
static void stays(attn_client *c, mode_t kind, const char *says)
{
    struct stat info;
    uint32_t n_before = n_files();
    assert_int_equal(attn_seq_export(c, 7, path, LONG_US, NULL), ATTN_EIO);
    if (strstr(attn_last_error()->message, says) == NULL)
        fail_msg("no \"%s\": %s", says, attn_last_error()->message);
    assert_int_equal(lstat(path, &info), 0);
    assert_int_equal(info.st_mode & S_IFMT, kind);
    assert_int_equal(n_files(), n_before);
    unlink(path);
}

static void what_is_no_regular_file_is_not_replaced(void **state)
{
    (void)state;
    char target[128];
    struct stat info;
    attn_client *a = client_of(0, false);
    attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 64);
    struct attn_seq seq = make_seq(p, 7, 100, 90, 80), got;
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    stays(a, S_IFIFO, "is no regular file");
    if (mknod(path, S_IFCHR | 0600, makedev(1, 3)) == 0) /* root's */
        stays(a, S_IFCHR, "is no regular file");
    snprintf(target, sizeof target, "%s/target", dir);
    assert_int_equal(mkfifo(target, 0600), 0);
    assert_int_equal(symlink("target", path), 0);
    stays(a, S_IFLNK, "target is no regular file");
    assert_int_equal(lstat(target, &info), 0);
    assert_true(S_ISFIFO(info.st_mode));
    unlink(target);
    assert_int_equal(symlink("nothing", path), 0);
    stays(a, S_IFLNK, "follow the link");
    assert_int_equal(symlink("a.seq", path), 0);
    stays(a, S_IFLNK, "follow the link");
    write_file(path, (const uint8_t *)"old", 3); /* one that becomes another meanwhile */
    is_to_become_pipe = true;
    stays(a, S_IFIFO, "is no regular file");

    /* a link goes on naming its file */
    write_file(target, (const uint8_t *)"old", 3);
    assert_int_equal(symlink("target", path), 0);
    ok(attn_seq_export(a, 7, path, LONG_US, NULL));
    assert_int_equal(n_files(), 2);
    assert_int_equal(lstat(path, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    ok(attn_seq_import(p, target, 8, LONG_US, &got, NULL));
    ok(attn_seq_close(p, &got, LONG_US));
    ok(attn_seq_close(p, &seq, LONG_US));
    unlink(target);
    unlink(path);
    attn_pool_close(p);
    attn_client_close(a);
}

/* The spec of a pool with blocks that are larger than the rig's. */
static attn_pool *large_pool(attn_client *c, const char *name, uint32_t num_layers,
                             uint32_t block_tokens, uint32_t n_blocks)
{
    attn_pool *small = pool_of(c, ATTN_F32, "m", 0.25f, 64), *p = NULL;
    struct attn_pool_spec spec = *attn_pool_spec_of(small);
    spec.name = name;
    spec.num_layers = num_layers;
    spec.block_tokens = block_tokens;
    spec.n_blocks = n_blocks;
    ok(attn_pool_create(c, &spec, LONG_US, &p));
    attn_pool_close(small);
    return p;
}

/* Tokens of a layer in a pool of many: those behind the middle are a few behind. */
static uint32_t len_of(const attn_pool *p, uint32_t layer, uint32_t n)
{
    return layer < attn_pool_spec_of(p)->num_layers / 2 ? n : n - n / 4;
}

/* A sequence of n tokens, in steps that messages take. */
static struct attn_seq make_large(attn_pool *p, uint64_t id, uint32_t n)
{
    struct attn_seq seq;
    ok(attn_seq_open(p, id, LONG_US, &seq));
    for (uint32_t l = 0; l < attn_pool_spec_of(p)->num_layers; l++)
        for (uint32_t pos = 0, n_part; pos < len_of(p, l, n); pos += n_part) {
            n_part = len_of(p, l, n) - pos < 50 ? len_of(p, l, n) - pos : 50;
            ok(step(p, &seq, l, pos, n_part, true, NULL));
        }
    return seq;
}

static void assert_large(attn_pool *p, const struct attn_seq *a, attn_pool *q,
                         const struct attn_seq *b, uint32_t n)
{
    float x[OUT], y[OUT];
    for (uint32_t l = 0; l < attn_pool_spec_of(p)->num_layers; l++) {
        ok(step(p, a, l, len_of(p, l, n) - LAST, LAST, false, x));
        ok(step(q, b, l, len_of(p, l, n) - LAST, LAST, false, y));
        assert_memory_equal(x, y, sizeof x);
    }
}

/* Through a file, and to another daemon. */
static void goes(attn_client *from, attn_pool *p, attn_pool *q, uint32_t n)
{
    struct attn_seq seq = make_large(p, 7, n), twin = make_large(p, 8, n), got;
    struct attn_moved moved = {.struct_size = sizeof moved};
    uint32_t block_tokens = attn_pool_spec_of(p)->block_tokens;
    ok(attn_seq_export(from, 7, path, LONG_US, NULL));
    ok(attn_seq_import(q, path, 9, LONG_US, &got, NULL));
    assert_large(p, &seq, q, &got, n);
    ok(attn_seq_close(q, &got, LONG_US));
    ok(attn_seq_move(from, 7, q, LONG_US, &got, &moved));
    assert_int_equal(moved.n_blocks, (n + block_tokens - 1) / block_tokens);
    assert_large(p, &twin, q, &got, n);
    ok(attn_seq_close(q, &got, LONG_US));
    ok(attn_seq_close(p, &twin, LONG_US));
}

/* A daemon whose messages take two blocks of one pool, and of another a few layers of a block. */
static void blocks_go_in_pieces_that_messages_take(void **state)
{
    (void)state;
    static const char *const flags[] = {"--listen.max_message", "64K", NULL};
    struct e2e t;
    attn_client *c = NULL, *wide = client_of(1, false);
    e2e_start(&t, flags);
    ok(attn_client_open(t.url, NULL, LONG_US, &c));
    attn_pool *p = large_pool(c, "two", 2, BLOCK, 64), *q = large_pool(wide, "two", 2, BLOCK, 64);
    goes(c, p, q, 300);
    goes(wide, q, p, 300);
    attn_pool_close(p);
    attn_pool_close(q);

    p = large_pool(c, "few layers", 15, BLOCK, 16); /* blocks of 120 KiB, 3 layers a message */
    q = large_pool(wide, "few layers", 15, BLOCK, 16);
    goes(c, p, q, 100);
    goes(wide, q, p, 100);
    attn_pool_close(p);
    attn_pool_close(q);

    struct attn_seq seq, got = {.id = 99};
    p = large_pool(c, "no layer", 2, 128, 4);
    q = large_pool(wide, "no layer", 2, 128, 4);
    seq = make_large(p, 9, 200);
    assert_int_equal(attn_seq_export(c, 9, path, LONG_US, NULL), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message,
                           "a layer of a block has 65536 bytes, a message of 65536 room for 32768 "
                           "(listen.max_message"));
    assert_int_equal(attn_seq_move(c, 9, q, LONG_US, &got, NULL), ATTN_EINVAL);
    assert_gone(q, 9);
    ok(step(p, &seq, 0, 200, 1, true, NULL)); /* it is where it was */
    attn_pool_close(p);
    attn_pool_close(q);
    attn_client_close(c);
    attn_client_close(wide);
    e2e_stop(&t);
}

/* Regions of 1 MiB: a message has less than half of that, a block more. */
static void blocks_go_in_pieces_that_regions_take(void **state)
{
    (void)state;
    attn_client *a = client_of(0, true), *b = client_of(1, true);
    attn_pool *p = large_pool(a, "half a region", 70, BLOCK, 16);
    attn_pool *q = large_pool(b, "half a region", 70, BLOCK, 16);
    goes(a, p, q, 50);
    attn_pool_close(p);
    attn_pool_close(q);
    attn_client_close(a);
    attn_client_close(b);
}

/* More ids than a message of that daemon takes. */
static void ids_go_in_pieces_that_messages_take(void **state)
{
    (void)state;
    enum { N = 30000 };
    static const char *const flags[] = {"--listen.max_message", "64K", "--cache.max_seq_tokens",
                                        "32768", NULL};
    static uint32_t ids[N];
    struct e2e t;
    struct attn_seq seq, got;
    struct attn_tokens known = {.ids = ids, .n = N};
    uint32_t n_cached;
    attn_client *c = NULL;
    e2e_start(&t, flags);
    ok(attn_client_open(t.url, NULL, LONG_US, &c));
    attn_pool *p = pool_of(c, ATTN_F32, "m", 0.25f, 64);
    for (uint32_t i = 0; i < N; i++)
        ids[i] = UINT32_MAX - i; /* five bytes each */
    ok(attn_seq_open_with(p, 7, &known, LONG_US, &seq, &n_cached));
    for (uint32_t l = 0; l < LAYERS; l++)
        ok(step(p, &seq, l, 0, 40, true, NULL));
    ok(attn_seq_export(c, 7, path, LONG_US, NULL));
    ok(attn_seq_import(p, path, 8, LONG_US, &got, NULL));
    ok(attn_seq_tokens(p, &got, 0, ids, N, LONG_US)); /* others would be refused */
    attn_pool_close(p);
    attn_client_close(c);
    e2e_stop(&t);
}

/* A client of a daemon with tenants, by the token that is the tenant's name. */
static attn_client *tenants_client(const struct e2e *daemon, const char *tenant)
{
    char token[96];
    attn_client *c = NULL;
    snprintf(token, sizeof token, "%s/token", dir);
    write_file(token, (const uint8_t *)tenant, strlen(tenant));
    struct attn_client_options o = {.struct_size = sizeof o, .token_file = token};
    ok(attn_client_open(daemon->url, &o, LONG_US, &c));
    unlink(token);
    return c;
}

static void quotas_hold_for_imports_and_tenants_see_their_own(void **state)
{
    (void)state;
    if (getenv("E2E_CARDS") != NULL)
        skip(); /* blocks are of each card */
    /* the tokens are the names */
    static const char tenants[] =
        "[small]\nsequences = 2\nblocks = 10\ntoken_sha256 = "
        "81db8ebbbbc69c6c6ad4a6aa92b76e0c08af547da236b9e2c9dbe1d8285a8130\n"
        "[narrow]\nbytes_in_flight = 100000\ntoken_sha256 = "
        "5eda958e9ddee7721fb71e7a7618c64dbf20cc77b06ba4e4d2269d6c3e50655b\n"
        "[large]\ntoken_sha256 = "
        "d35c416a85b807e9b5384915d6ebb4a9f7352713efd89857b45a242f473728a9\n";
    char name[96];
    struct e2e t;
    const char *const flags[] = {"--listen.tenants", name, NULL};
    struct attn_seq seq, got[3];
    snprintf(name, sizeof name, "%s/tenants", dir);
    write_file(name, (const uint8_t *)tenants, sizeof tenants - 1);
    e2e_start(&t, flags);
    attn_client *large = tenants_client(&t, "large"), *small = tenants_client(&t, "small");
    attn_pool *p = pool_of(large, ATTN_F32, "m", 0.25f, 64);
    attn_pool *q = pool_of(small, ATTN_F32, "m", 0.25f, 10);
    seq = make_seq(p, 7, 60, 60, 50);
    assert_int_equal(attn_seq_export(small, 7, path, LONG_US, NULL), ATTN_ENOTFOUND);
    assert_int_equal(attn_seq_move(small, 7, q, LONG_US, got, NULL), ATTN_ENOTFOUND);
    ok(attn_seq_export(large, 7, path, LONG_US, NULL));
    ok(attn_seq_import(q, path, 7, LONG_US, &got[0], NULL)); /* names are the tenant's own */
    ok(attn_seq_import(q, path, 8, LONG_US, &got[1], NULL));
    assert_int_equal(attn_seq_import(q, path, 9, LONG_US, &got[2], NULL), ATTN_EQUOTA);
    assert_non_null(strstr(attn_last_error()->message, "small"));
    assert_gone(q, 9);
    ok(attn_seq_close(q, &got[1], LONG_US));
    ok(attn_seq_open(q, 9, LONG_US, &got[2])); /* nothing of the refused one counts */
    ok(attn_seq_close(q, &got[2], LONG_US));
    ok(attn_seq_close(p, &seq, LONG_US));
    seq = make_seq(p, 7, 112, 112, 0); /* 7 blocks; of the quota's 10 four are in use */
    ok(attn_seq_export(large, 7, path, LONG_US, NULL));
    assert_int_equal(attn_seq_import(q, path, 9, LONG_US, &got[2], NULL), ATTN_ENOBLOCKS);
    assert_gone(q, 9);
    ok(attn_seq_close(q, &got[0], LONG_US));
    ok(attn_seq_import(q, path, 9, LONG_US, &got[2], NULL));
    /* a message of seven blocks is more than may be in flight; what was comes back */
    attn_client *narrow = tenants_client(&t, "narrow");
    attn_pool *r = pool_of(narrow, ATTN_F32, "m", 0.25f, 64);
    assert_int_equal(attn_seq_import(r, path, 1, LONG_US, &got[0], NULL), ATTN_EQUOTA);
    assert_non_null(strstr(attn_last_error()->message, "narrow"));
    assert_gone(r, 1);
    ok(attn_seq_close(p, &seq, LONG_US));
    seq = make_seq(p, 7, 60, 60, 0);
    ok(attn_seq_export(large, 7, path, LONG_US, NULL));
    for (uint64_t i = 1; i <= 3; i++)
        ok(attn_seq_import(r, path, i, LONG_US, &got[0], NULL));
    attn_pool_close(r);
    attn_client_close(narrow);
    attn_pool_close(p);
    attn_pool_close(q);
    attn_client_close(large);
    attn_client_close(small);
    e2e_stop(&t);
    unlink(name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_brings_a_sequence_back_to_the_bit),
        cmocka_unit_test(what_is_damaged_or_foreign_is_refused_by_name),
        cmocka_unit_test(every_call_that_fails_changes_nothing),
        cmocka_unit_test(what_is_no_regular_file_is_not_replaced),
        cmocka_unit_test(blocks_go_in_pieces_that_messages_take),
        cmocka_unit_test(blocks_go_in_pieces_that_regions_take),
        cmocka_unit_test(ids_go_in_pieces_that_messages_take),
        cmocka_unit_test(quotas_hold_for_imports_and_tenants_see_their_own),
    };
    return cmocka_run_group_tests(tests, start, stop);
}

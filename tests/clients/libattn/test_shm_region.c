/* test_shm_region.c: the client's books of a region: extents that never overlap, and a daemon that
 * writes nonsense. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/libattn/transport/shm_region.h"
#include "tests/random.h"

enum { N_SLOTS = 64, REGION_BYTES = 1 << 20, DATA = 8192 };

static const struct shm_welcome good = {
    .magic = SHM_MAGIC,
    .version = SHM_VERSION,
    .n_slots = N_SLOTS,
    .region_bytes = REGION_BYTES,
    .submit_offset = 256,
    .complete_offset = 256 + N_SLOTS * sizeof(struct shm_submit),
    .data_offset = DATA,
};

static int make_memfd(uint64_t bytes, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static struct shm_region *open_good(void)
{
    struct shm_region *r;
    int fd = make_memfd(REGION_BYTES, F_SEAL_SHRINK);
    assert_int_equal(region_open(&good, fd, eventfd(0, EFD_NONBLOCK), &r), ATTN_OK);
    close(fd);
    return r;
}

static void welcomes_that_make_no_sense_are_refused(void **state)
{
    (void)state;
    struct shm_welcome bad[12];
    for (size_t i = 0; i < 12; i++)
        bad[i] = good;
    bad[0].n_slots = 0;
    bad[1].n_slots = 65;
    bad[2].n_slots = 2048;
    bad[3].region_bytes = UINT64_MAX;
    bad[4].region_bytes = 2 * REGION_BYTES; /* more than the memfd has */
    bad[5].submit_offset = 128; /* in the control words */
    bad[6].complete_offset = 512; /* in the submit ring */
    bad[7].data_offset = 1024;
    bad[8].data_offset = REGION_BYTES;
    bad[9].data_offset = DATA + 8;
    bad[10].submit_offset = UINT64_MAX - 63;
    bad[11].complete_offset = UINT64_MAX - 63;
    int fd = make_memfd(REGION_BYTES, F_SEAL_SHRINK);
    struct shm_region *r = NULL;
    for (size_t i = 0; i < 12; i++)
        if (region_open(&bad[i], fd, -1, &r) != ATTN_EPROTO)
            fail_msg("welcome %zu was taken", i);
    close(fd);
    fd = make_memfd(REGION_BYTES, F_SEAL_GROW); /* it could be shrunk under us */
    assert_int_equal(region_open(&good, fd, -1, &r), ATTN_EPROTO);
    close(fd);
    assert_null(r);
}

static void extents_never_overlap(void **state)
{
    (void)state;
    struct shm_region *r = open_good();
    struct {
        uint8_t *p;
        size_t n;
    } held[N_SLOTS] = {0};
    uint8_t *owner = calloc(1, REGION_BYTES);
    uint64_t seed = 5;
    uint32_t n_held = 0, n_full = 0;
    for (uint32_t i = 0; i < 20000; i++) {
        uint32_t k = random_below(&seed, N_SLOTS);
        if (held[k].p == NULL) {
            size_t request = random_below(&seed, 20000), room = random_below(&seed, 20000);
            uint8_t *p = region_alloc(r, request, room);
            if (p == NULL) {
                n_full++;
                continue;
            }
            struct shm_extent *x = region_find(r, p + (request > 0 ? request - 1 : 0));
            assert_ptr_equal(x, region_find(r, p));
            assert_int_equal(x->begin % SHM_ALIGN + x->room % SHM_ALIGN, 0);
            assert_true(x->room - x->begin >= request && x->end - x->room >= room);
            assert_true(x->end - x->room >= SHM_MIN_ROOM_BYTES);
            assert_true(x->begin >= DATA && x->end <= REGION_BYTES);
            held[k].p = p;
            held[k].n = x->end - x->begin;
            for (size_t b = 0; b < held[k].n; b++)
                if (owner[x->begin + b]++ != 0)
                    fail_msg("byte %zu has two owners (seed 5, operation %u)", (size_t)x->begin + b,
                             i);
            n_held++;
        } else {
            memset(owner + (held[k].p - r->base), 0, held[k].n);
            region_free(r, region_find(r, held[k].p));
            assert_null(region_find(r, held[k].p) != NULL && owner[held[k].p - r->base] == 0
                            ? held[k].p
                            : NULL);
            held[k].p = NULL;
            n_held--;
        }
        assert_int_equal(r->n_used, n_held);
    }
    assert_true(n_full > 0); /* both ends of it were seen */
    free(owner);
    region_close(r);
}

static void a_region_takes_all_its_slots_and_no_more(void **state)
{
    (void)state;
    struct shm_region *r = open_good();
    void *p[N_SLOTS];
    for (uint32_t i = 0; i < N_SLOTS; i++)
        assert_non_null(p[i] = region_alloc(r, 100, 100));
    assert_null(region_alloc(r, 1, 1));
    region_free(r, region_find(r, p[17]));
    assert_ptr_equal(region_alloc(r, 100, 100), p[17]); /* first fit */
    region_close(r);
    r = open_good();
    assert_null(region_alloc(r, REGION_BYTES, 1024));
    assert_null(region_alloc(r, UINT64_MAX, 1));
    assert_null(region_alloc(r, 1, UINT64_MAX));
    assert_non_null(region_alloc(r, (REGION_BYTES - DATA) / 2, (REGION_BYTES - DATA) / 2));
    assert_null(region_alloc(r, 1, 1));
    region_close(r);
}

static void completions_that_make_no_sense_are_not_followed(void **state)
{
    (void)state;
    struct shm_extent *x;
    void *reply;
    uint32_t bytes;
    for (int i = 0; i < 9; i++) {
        struct shm_region *r = open_good();
        struct shm_complete *e = (struct shm_complete *)(void *)(r->base + good.complete_offset);
        void *other = region_alloc(r, 64, 1024), *p = region_alloc(r, 64, 1024);
        x = region_find(r, p);
        region_submit(r, x, 7);
        *e = (struct shm_complete){x->room, 64, (uint32_t)(x - r->extents)};
        switch (i) {
        case 1:
            e->slot = N_SLOTS;
            break;
        case 2:
            e->slot = (uint32_t)(region_find(r, other) - r->extents); /* not submitted */
            break;
        case 3:
            e->reply_offset = x->begin; /* the request */
            break;
        case 4:
            e->reply_offset = x->end;
            break;
        case 5:
            e->reply_offset += 8;
            break;
        case 6:
            e->reply_bytes = UINT32_MAX;
            break;
        case 7:
            e->reply_bytes = 0;
            break;
        case 8:
            e->reply_offset = UINT64_MAX - 63;
            break;
        }
        assert_int_equal(region_take(r, &x, &reply, &bytes), ATTN_ENOTFOUND);
        atomic_store(&r->control->completed, 1);
        if (region_take(r, &x, &reply, &bytes) != (i == 0 ? ATTN_OK : ATTN_EPROTO))
            fail_msg("completion %d", i);
        if (i == 0) {
            assert_int_equal(x->id, 7);
            assert_ptr_equal(region_find(r, reply), x);
            assert_int_equal(region_take(r, &x, &reply, &bytes), ATTN_ENOTFOUND);
        }
        region_close(r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(welcomes_that_make_no_sense_are_refused),
        cmocka_unit_test(extents_never_overlap),
        cmocka_unit_test(a_region_takes_all_its_slots_and_no_more),
        cmocka_unit_test(completions_that_make_no_sense_are_not_followed),
    };
    return cmocka_run_group_tests_name("region", tests, NULL, NULL);
}

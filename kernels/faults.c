/* faults.c: reads the text that names faults, and wraps a backend's submit and poll so that they
 * happen. One backend at a time is wrapped: what it was told and where it is, is static.
 */
#include "kernels/faults.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/attn_time.h"

enum { MAX_FAULTS = 16, NAP_NS = 1000000, MS = 1000000 };
enum kind { FAIL, LOSE, DELAY, HANG, CORRUPT, N_KINDS };

static const char *const kind_names[N_KINDS] = {"fail", "lose", "delay", "hang", "corrupt"};

struct fault {
    enum kind kind;
    uint64_t launch; /* 0: by probability */
    double probability;
    uint64_t delay_ms;
};

static struct {
    const struct backend_ops *inner;
    struct backend_ops ops;
    struct fault faults[MAX_FAULTS];
    uint32_t n_faults;
    uint64_t seed, n_launches;
    uint64_t launches[BACKEND_MAX_IN_FLIGHT]; /* of the batches in flight, the oldest first */
    uint32_t n_in_flight;
    struct backend_batch *late; /* has come back and is not given on yet */
    uint64_t late_launch, late_until_ns; /* UINT64_MAX: never */
    bool is_lost;
    char error[96]; /* of an injected failure, else empty */
} f;

/* --- the text --------------------------------------------------------------------------------- */

/* "lose@7" and so on; false: it means nothing. */
static bool parse_fault(const char *part, struct fault *out)
{
    struct fault x = {.kind = N_KINDS};
    size_t n = strcspn(part, "=@%");
    for (enum kind k = 0; k < N_KINDS; k++)
        if (strlen(kind_names[k]) == n && strncmp(part, kind_names[k], n) == 0)
            x.kind = k;
    const char *p = part + n;
    char *end = (char *)(uintptr_t)p;
    if (x.kind == N_KINDS || (x.kind == DELAY) != (*p == '='))
        return false;
    if (x.kind == DELAY)
        x.delay_ms = strtoull(p + 1, &end, 10);
    p = end;
    if (*p == '@')
        x.launch = strtoull(p + 1, &end, 10);
    else if (*p == '%')
        x.probability = strtod(p + 1, &end);
    bool is_good = end > p + 1 && *end == '\0';
    is_good &= *p == '@' ? x.launch > 0 : x.probability >= 0 && x.probability <= 1;
    if (is_good)
        *out = x;
    return is_good;
}

static attn_status parse(const char *text, char *why, size_t why_bytes)
{
    while (*text != '\0') {
        char part[64], *end;
        size_t n = strcspn(text, ",");
        snprintf(part, sizeof part, "%.*s", (int)n, text);
        bool is_good = n < sizeof part && f.n_faults < MAX_FAULTS;
        if (strncmp(part, "seed=", 5) == 0) {
            f.seed = strtoull(part + 5, &end, 10);
            is_good &= part[5] != '\0' && *end == '\0';
        } else {
            is_good = is_good && parse_fault(part, &f.faults[f.n_faults]);
            f.n_faults += is_good;
        }
        if (!is_good) {
            snprintf(
                why, why_bytes,
                "faults: \"%s\" is none of fail, lose, delay=MS, hang, corrupt with @N or %%P, "
                "or seed=S",
                part);
            return ATTN_EINVAL;
        }
        text += n + (text[n] == ',');
    }
    return ATTN_OK;
}

/* --- what happens at a launch ----------------------------------------------------------------- */

/* 0 to 1, a function of seed, launch and the fault's place. */
static double chance(uint64_t launch, uint32_t i)
{
    uint64_t x = f.seed * UINT64_C(0x9e3779b97f4a7c15) + launch * UINT64_C(0xbf58476d1ce4e5b9) + i;
    x ^= x >> 30;
    x *= UINT64_C(0x94d049bb133111eb);
    x ^= x >> 27;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 31;
    return (double)(x >> 11) / (double)(UINT64_C(1) << 53);
}

static const struct fault *fault_at(uint64_t launch, enum kind kind)
{
    for (uint32_t i = 0; launch != 0 && i < f.n_faults; i++) {
        const struct fault *x = &f.faults[i];
        bool is_now = x->launch != 0 ? x->launch == launch : chance(launch, i) < x->probability;
        if (x->kind == kind && is_now)
            return x;
    }
    return NULL;
}

static void fail_batch(struct backend_batch *batch, attn_status st, enum kind kind, uint64_t launch)
{
    batch->status = st;
    snprintf(f.error, sizeof f.error, "an injected fault: %s at launch %" PRIu64, kind_names[kind],
             launch);
}

static void corrupt(struct backend_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_items; i++) {
        if (!(batch->items[i].flags & BACKEND_ATTEND))
            continue;
        *(uint8_t *)batch->items[i].out ^= 0x40;
        return;
    }
}

/* The batch as it is given on. */
static struct backend_batch *give(struct backend_batch *batch, uint64_t launch)
{
    f.error[0] = '\0';
    f.is_lost |= fault_at(launch, LOSE) != NULL;
    if (f.is_lost)
        fail_batch(batch, ATTN_EDEVICE, LOSE, launch);
    else if (fault_at(launch, FAIL) != NULL)
        fail_batch(batch, ATTN_EINTERNAL, FAIL, launch);
    else if (fault_at(launch, CORRUPT) != NULL)
        corrupt(batch);
    return batch;
}

/* --- the slots that differ -------------------------------------------------------------------- */

static const char *faulty_last_error(const struct backend *b)
{
    return f.error[0] != '\0' ? f.error : f.inner->last_error(b);
}

static attn_status faulty_submit(struct backend *b, struct backend_batch *batch)
{
    if (f.is_lost) {
        snprintf(f.error, sizeof f.error, "an injected fault: the device is lost");
        return ATTN_EDEVICE;
    }
    attn_status st = f.inner->submit(b, batch);
    f.error[0] = '\0';
    if (st == ATTN_OK)
        f.launches[f.n_in_flight++] = batch->n_items > 0 ? ++f.n_launches : 0;
    return st;
}

static void nap(uint64_t ns)
{
    ns = ns < NAP_NS ? ns : NAP_NS;
    nanosleep(&(struct timespec){.tv_nsec = (long)ns}, NULL);
}

static struct backend_batch *faulty_poll(struct backend *b, uint64_t wait_ns)
{
    if (f.late == NULL) {
        struct backend_batch *batch = f.inner->poll(b, wait_ns);
        if (batch == NULL)
            return NULL;
        uint64_t launch = f.launches[0];
        f.n_in_flight--;
        memmove(f.launches, f.launches + 1, f.n_in_flight * sizeof f.launches[0]);
        const struct fault *delay = fault_at(launch, DELAY);
        bool is_hung = fault_at(launch, HANG) != NULL;
        if (delay == NULL && !is_hung)
            return give(batch, launch);
        f.late = batch;
        f.late_launch = launch;
        f.late_until_ns = is_hung ? UINT64_MAX : attn_now_ns() + delay->delay_ms * MS;
    }
    uint64_t now_ns = attn_now_ns();
    if (now_ns < f.late_until_ns) {
        nap(wait_ns);
        return NULL;
    }
    struct backend_batch *batch = f.late;
    f.late = NULL;
    return give(batch, f.late_launch);
}

attn_status backend_faults(const struct backend_ops *inner, const char *text,
                           const struct backend_ops **out_ops, char *why, size_t why_bytes)
{
    memset(&f, 0, sizeof f);
    f.inner = inner;
    f.seed = 1;
    attn_status st = parse(text, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    f.ops = *inner;
    f.ops.last_error = faulty_last_error;
    f.ops.submit = faulty_submit;
    f.ops.poll = faulty_poll;
    *out_ops = &f.ops;
    return ATTN_OK;
}

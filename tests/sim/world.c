/* world.c: chance, virtual time, the queue of events, the history. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

void *__real_malloc(size_t n);
void *__real_realloc(void *p, size_t n);
void __real_free(void *p);

struct event {
    uint64_t at_ns, number;
    enum sim_owner owner;
    uint64_t life; /* of the process whose it is */
    sim_fn fn;
    void *arg;
    uint64_t word;
};

enum { CHUNK_BYTES = 1 << 20 };
struct chunk {
    struct chunk *next;
    size_t n_used, n_bytes;
};

uint64_t sim_now_ns;
bool sim_is_daemon, sim_is_verbose, sim_has_faults;
struct sim_counts sim_counts;
struct sim_plan sim_plan;

static uint64_t seed_of_run, state;
static struct event *heap; /* [heap_room] the earliest first */
static size_t n_heap, heap_room;
static uint64_t n_events;
static struct chunk *chunks;

/* --- chance ----------------------------------------------------------------------------------- */

uint64_t sim_mix(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

uint64_t sim_random(void)
{
    state += UINT64_C(0x9e3779b97f4a7c15);
    return sim_mix(state);
}

uint32_t sim_below(uint32_t n)
{
    return (uint32_t)((sim_random() >> 32) * n >> 32);
}

bool sim_chance(uint32_t per_mille)
{
    return sim_below(1000) < per_mille;
}

uint64_t sim_between(uint64_t least, uint64_t most)
{
    return least + sim_random() % (most - least + 1);
}

/* --- memory of a run -------------------------------------------------------------------------- */

void *sim_alloc(size_t bytes)
{
    bytes = (bytes + 63) / 64 * 64;
    if (chunks == NULL || chunks->n_used + bytes > chunks->n_bytes) {
        size_t n = bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES;
        struct chunk *c = __real_malloc(64 + n);
        if (c == NULL)
            abort();
        *c = (struct chunk){.next = chunks, .n_bytes = n};
        chunks = c;
    }
    uint8_t *p = (uint8_t *)chunks + 64 + chunks->n_used;
    chunks->n_used += bytes;
    return memset(p, 0, bytes);
}

/* --- events ----------------------------------------------------------------------------------- */

static bool is_before(const struct event *a, const struct event *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->number < b->number;
}

static void swap(size_t i, size_t k)
{
    struct event e = heap[i];
    heap[i] = heap[k];
    heap[k] = e;
}

void sim_at(uint64_t delay_ns, enum sim_owner owner, sim_fn fn, void *arg, uint64_t word)
{
    if (n_heap == heap_room) {
        heap_room = heap_room == 0 ? 1024 : 2 * heap_room;
        heap = __real_realloc(heap, heap_room * sizeof *heap);
        if (heap == NULL)
            abort();
    }
    heap[n_heap] =
        (struct event){sim_now_ns + delay_ns, n_events++, owner, sim_life, fn, arg, word};
    for (size_t i = n_heap++; i > 0 && is_before(&heap[i], &heap[(i - 1) / 2]); i = (i - 1) / 2)
        swap(i, (i - 1) / 2);
}

static struct event pop(void)
{
    struct event first = heap[0];
    heap[0] = heap[--n_heap];
    for (size_t i = 0;;) {
        size_t least = i;
        for (size_t k = 2 * i + 1; k <= 2 * i + 2; k++)
            if (k < n_heap && is_before(&heap[k], &heap[least]))
                least = k;
        if (least == i)
            return first;
        swap(i, least);
        i = least;
    }
}

void sim_forget_process(void)
{
    sim_is_daemon = false;
    sim_life++; /* its events name another life */
}

bool sim_step(uint64_t until_ns)
{
    while (n_heap > 0 && heap[0].owner == SIM_PROCESS && heap[0].life != sim_life)
        pop();
    if (n_heap == 0 || heap[0].at_ns > until_ns) {
        sim_now_ns = until_ns > sim_now_ns ? until_ns : sim_now_ns;
        return false;
    }
    struct event e = pop();
    bool was_daemon = sim_is_daemon;
    sim_now_ns = e.at_ns > sim_now_ns ? e.at_ns : sim_now_ns;
    sim_counts.events++;
    sim_is_daemon = e.owner == SIM_PROCESS;
    if (sim_is_daemon)
        process_point();
    e.fn(e.arg, e.word);
    sim_is_daemon = was_daemon;
    threads_run();
    return true;
}

/* --- a run ------------------------------------------------------------------------------------ */

void sim_begin(uint64_t seed, bool is_verbose)
{
    seed_of_run = seed;
    state = sim_mix(seed + 1);
    sim_now_ns = SIM_S;
    sim_is_verbose = is_verbose;
    sim_is_daemon = false;
    n_heap = 0;
    n_events = 0;
}

void sim_end(void)
{
    while (chunks != NULL) {
        struct chunk *next = chunks->next;
        __real_free(chunks);
        chunks = next;
    }
}

static void tell(FILE *f, const char *format, va_list args)
{
    fprintf(f, "%12.6f  ", (double)(sim_now_ns - SIM_S) * 1e-6);
    vfprintf(f, format, args);
    fputc('\n', f);
}

void sim_say(const char *format, ...)
{
    if (!sim_is_verbose)
        return;
    bool was_daemon = sim_is_daemon;
    sim_is_daemon = false;
    va_list args;
    va_start(args, format);
    tell(stdout, format, args);
    va_end(args);
    sim_is_daemon = was_daemon;
}

_Noreturn void sim_fail(const char *format, ...)
{
    sim_is_daemon = false;
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "seed %llu FAILED at (ms): ", (unsigned long long)seed_of_run);
    tell(stderr, format, args);
    va_end(args);
    fprintf(stderr, "replay: sim --seed %llu\n", (unsigned long long)seed_of_run);
    fflush(stderr);
    exit(1);
}

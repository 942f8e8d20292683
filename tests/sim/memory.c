/* memory.c: what the daemon's code takes from the heap and maps is noted, so that a killed process
 * leaves nothing behind, one that ends is shown to have given everything back, and allocations can
 * fail. The linker puts these functions before libc's (--wrap). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <protobuf-c/protobuf-c.h>

#include "sim.h"

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t align, size_t n);
char *__real_strdup(const char *s);
void __real_free(void *p);
void *__real_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
int __real_munmap(void *p, size_t n);

void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t align, size_t n);
char *__wrap_strdup(const char *s);
void __wrap_free(void *p);
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
int __wrap_munmap(void *p, size_t n);

enum { MAX_MAPS = 64 };

/* A set of pointers: open addressing, a removed one leaves GONE. */
static void **held;
static size_t n_held, n_slots, n_used;
#define GONE ((void *)(uintptr_t)1)

static struct {
    void *p;
    size_t n;
} maps[MAX_MAPS];
static uint64_t short_until_ns;

static size_t slot_of(const void *p)
{
    size_t i = (size_t)sim_mix((uint64_t)(uintptr_t)p) & (n_slots - 1);
    while (held[i] != NULL && held[i] != p)
        i = (i + 1) & (n_slots - 1);
    return i;
}

static void grow(void)
{
    void **old = held;
    size_t n_old = n_slots;
    n_slots = n_held * 4 < 1024 ? 1024 : n_held * 4;
    while (n_slots & (n_slots - 1))
        n_slots += n_slots & -n_slots;
    held = __real_calloc(n_slots, sizeof *held);
    if (held == NULL)
        abort();
    n_used = n_held;
    for (size_t i = 0; i < n_old; i++)
        if (old[i] != NULL && old[i] != GONE)
            held[slot_of(old[i])] = old[i];
    __real_free(old);
}

static void *note(void *p)
{
    if (p == NULL || !sim_is_daemon)
        return p;
    if (2 * (n_used + 1) > n_slots)
        grow();
    held[slot_of(p)] = p;
    n_used++;
    n_held++;
    return p;
}

static void unnote(void *p)
{
    if (p == NULL || n_slots == 0)
        return;
    size_t i = slot_of(p);
    if (held[i] != p)
        return; /* libc's own, or the world's */
    held[i] = GONE;
    n_held--;
}

bool memory_fails(void)
{
    if (!sim_is_daemon)
        return false;
    process_point();
    if (sim_now_ns >= short_until_ns || !sim_chance(sim_plan.fail_alloc))
        return false;
    sim_counts.failed_allocs++;
    errno = ENOMEM;
    return true;
}

void *__wrap_malloc(size_t n)
{
    return memory_fails() ? NULL : note(__real_malloc(n));
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    return memory_fails() ? NULL : note(__real_calloc(n, bytes));
}

void *__wrap_realloc(void *p, size_t n)
{
    if (memory_fails())
        return NULL;
    unnote(p);
    void *q = __real_realloc(p, n);
    note(q != NULL ? q : p);
    return q;
}

void *__wrap_aligned_alloc(size_t align, size_t n)
{
    return memory_fails() ? NULL : note(__real_aligned_alloc(align, n));
}

char *__wrap_strdup(const char *s)
{
    return memory_fails() ? NULL : note(__real_strdup(s));
}

void __wrap_free(void *p)
{
    unnote(p);
    __real_free(p);
}

void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    void *p = __real_mmap(at, n, prot, flags, fd, offset);
    for (size_t i = 0; sim_is_daemon && p != MAP_FAILED && i < MAX_MAPS; i++) {
        if (maps[i].p != NULL)
            continue;
        maps[i].p = p;
        maps[i].n = n;
        break;
    }
    return p;
}

int __wrap_munmap(void *p, size_t n)
{
    for (size_t i = 0; i < MAX_MAPS; i++)
        if (maps[i].p == p)
            maps[i].p = NULL;
    return __real_munmap(p, n);
}

/* protobuf-c is a library of its own, whose default allocator is not wrapped. */
static void *take(void *user, size_t n)
{
    (void)user;
    return __wrap_malloc(n);
}

static void give(void *user, void *p)
{
    (void)user;
    __wrap_free(p);
}

static ProtobufCAllocator wrapped = {.alloc = take, .free = give};

ProtobufCMessage *__real_protobuf_c_message_unpack(const ProtobufCMessageDescriptor *d,
                                                   ProtobufCAllocator *a, size_t n,
                                                   const uint8_t *bytes);
ProtobufCMessage *__wrap_protobuf_c_message_unpack(const ProtobufCMessageDescriptor *d,
                                                   ProtobufCAllocator *a, size_t n,
                                                   const uint8_t *bytes);
ProtobufCMessage *__wrap_protobuf_c_message_unpack(const ProtobufCMessageDescriptor *d,
                                                   ProtobufCAllocator *a, size_t n,
                                                   const uint8_t *bytes)
{
    return __real_protobuf_c_message_unpack(d, a == NULL ? &wrapped : a, n, bytes);
}

void __real_protobuf_c_message_free_unpacked(ProtobufCMessage *m, ProtobufCAllocator *a);
void __wrap_protobuf_c_message_free_unpacked(ProtobufCMessage *m, ProtobufCAllocator *a);
void __wrap_protobuf_c_message_free_unpacked(ProtobufCMessage *m, ProtobufCAllocator *a)
{
    __real_protobuf_c_message_free_unpacked(m, a == NULL ? &wrapped : a);
}

#ifdef __SANITIZE_ADDRESS__
/* tsearch(3) takes its nodes inside of libc: those of a process that was killed stay. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:tsearch\n";
}
#endif

void memory_begin(void)
{
    memory_reap();
    short_until_ns = 0;
}

void memory_reap(void)
{
    for (size_t i = 0; i < n_slots; i++) {
        if (held[i] != NULL && held[i] != GONE)
            __real_free(held[i]);
        held[i] = NULL;
    }
    n_held = n_used = 0;
    for (size_t i = 0; i < MAX_MAPS; i++) {
        if (maps[i].p != NULL)
            __real_munmap(maps[i].p, maps[i].n);
        maps[i].p = NULL;
    }
}

uint64_t memory_n_held(void)
{
    uint64_t n = n_held;
    for (size_t i = 0; i < MAX_MAPS; i++)
        n += maps[i].p != NULL;
    return n;
}

void memory_be_short(uint64_t for_ns)
{
    short_until_ns = sim_now_ns + for_ns;
}

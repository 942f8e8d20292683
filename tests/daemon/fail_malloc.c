/* fail_malloc.c: a library to preload: allocations that fail. FAIL_MALLOC_AT=N: the N-th of the
 * process, alone. FAIL_MALLOC_EVERY=N: every N-th, once the file $FAIL_MALLOC_FROM is there. At the
 * process's end the number of its allocations is in $FAIL_MALLOC_COUNT.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static _Atomic unsigned long n_calls, n_armed;
static unsigned long fail_at, fail_every;
static const char *from;
static _Atomic bool is_armed;

__attribute__((constructor)) static void begin(void)
{
    const char *at = getenv("FAIL_MALLOC_AT"), *every = getenv("FAIL_MALLOC_EVERY");
    fail_at = at == NULL ? 0 : strtoul(at, NULL, 10);
    from = getenv("FAIL_MALLOC_FROM");
    fail_every = every == NULL ? 0 : strtoul(every, NULL, 10);
    atomic_store(&n_calls, 0);
}

__attribute__((destructor)) static void end(void)
{
    const char *path = getenv("FAIL_MALLOC_COUNT");
    unsigned long n = atomic_load(&n_calls);
    FILE *f = path == NULL ? NULL : fopen(path, "w");
    if (f == NULL)
        return;
    fprintf(f, "%lu\n", n);
    fclose(f);
}

static bool fails(void)
{
    unsigned long n = atomic_fetch_add(&n_calls, 1) + 1;
    if (n == fail_at)
        return true;
    if (fail_every == 0)
        return false;
    if (!atomic_load(&is_armed)) {
        if (n % 16 != 0 || access(from, F_OK) != 0)
            return false;
        atomic_store(&is_armed, true);
    }
    return atomic_fetch_add(&n_armed, 1) % fail_every == 0;
}

#define GIVE(call) (fails() ? (errno = ENOMEM, NULL) : (call))

void *malloc(size_t n)
{
    return GIVE(__libc_malloc(n));
}

void *calloc(size_t n, size_t bytes)
{
    return GIVE(__libc_calloc(n, bytes));
}

void *realloc(void *p, size_t n)
{
    return GIVE(__libc_realloc(p, n));
}

void *aligned_alloc(size_t align, size_t n)
{
    return GIVE(__libc_memalign(align, n));
}

int posix_memalign(void **out, size_t align, size_t n)
{
    void *p = GIVE(__libc_memalign(align, n));
    if (p == NULL)
        return ENOMEM;
    *out = p;
    return 0;
}

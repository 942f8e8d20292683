/* fuzz_trace.c: fuzz target: a trace file of attnload. What is taken keeps its promises: arrivals
 * in order, at least a token each way. */
#define _GNU_SOURCE /* memfd_create */
#include "tests/proto/fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "clients/attnload/trace.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const struct trace_scaling scalings[] = {{1, 1, 0}, {0, 0.01, 3}, {1000, 1e6, 0}};
    if (n == 0)
        return 0;
    int fd = memfd_create("trace", MFD_CLOEXEC);
    char path[64], why[256] = "";
    struct trace t;
    if (fd < 0 || write(fd, data + 1, n - 1) != (ssize_t)(n - 1))
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    attn_status st = trace_load(path, &scalings[data[0] % 3], &t, why, sizeof why);
    if ((st == ATTN_OK) != (why[0] == '\0'))
        abort();
    for (uint32_t i = 0; st == ATTN_OK && i < t.n; i++)
        if (t.requests[i].n_input == 0 || t.requests[i].n_output == 0 ||
            (i > 0 && t.requests[i].arrival_us < t.requests[i - 1].arrival_us))
            abort();
    if (st == ATTN_OK)
        trace_fini(&t);
    close(fd);
    return 0;
}

size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes)
{
    static const char *const seeds[] = {
        "0{\"timestamp\": 0, \"input_length\": 64, \"output_length\": 2, \"hash_ids\": [0]}\n"
        "{\"timestamp\": 50, \"input_length\": 3, \"output_length\": 1}\n",
        "1{\"timestamp\": 7.5, \"input_length\": 1, \"output_length\": 1}\n\n"
        "{\"output_length\": 5, \"timestamp\": 1e3, \"input_length\": 4096}\n",
        "2{\"timestamp\": 5, \"input_length\": 4294967295, \"output_length\": 1}\n"
        "{\"timestamp\": 4, \"input_length\": 1, \"output_length\": 0}\n",
    };
    if (i >= sizeof seeds / sizeof seeds[0] || strlen(seeds[i]) > out_bytes)
        return 0;
    memcpy(out, seeds[i], strlen(seeds[i]));
    return strlen(seeds[i]);
}

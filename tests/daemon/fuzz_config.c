/* fuzz_config.c: fuzz target: a configuration file, and flags behind its first zero byte, one per
 * line. What is taken can be printed, and what is printed is taken. */
#define _GNU_SOURCE /* memfd_create */
#include "tests/proto/fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/config/config.h"

enum { MAX_FLAGS = 16 };

/* A path to a file with these bytes. */
static int file_of(const void *bytes, size_t n, char path[64])
{
    int fd = memfd_create("conf", MFD_CLOEXEC);
    if (fd < 0 || write(fd, bytes, n) != (ssize_t)n)
        abort();
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

static void print_and_read_again(const struct config *c)
{
    char *text = NULL, path[64];
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    config_print(c, f);
    fclose(f);
    int fd = file_of(text, n, path);
    char *argv[] = {"attnd", "--config", path, NULL};
    struct config again;
    struct config_fault fault;
    enum config_action action;
    if (config_load(3, argv, &again, &action, &fault) != ATTN_OK)
        abort();
    config_fini(&again);
    close(fd);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    setenv("RUNTIME_DIRECTORY", "/run/attnd", 1);
    const uint8_t *zero = memchr(data, 0, n);
    size_t n_file = zero == NULL ? n : (size_t)(zero - data);
    char path[64], *flags = zero == NULL ? NULL : strndup((const char *)zero + 1, n - n_file - 1);
    char *argv[3 + MAX_FLAGS + 1] = {"attnd", "--config", path}, *rest = NULL;
    int argc = 3;
    for (char *flag = flags == NULL ? NULL : strtok_r(flags, "\n", &rest);
         flag != NULL && argc < 3 + MAX_FLAGS; flag = strtok_r(NULL, "\n", &rest))
        argv[argc++] = flag;
    int fd = file_of(data, n_file, path);
    struct config c;
    struct config_fault fault = {.why = ""};
    enum config_action action;
    attn_status st = config_load(argc, argv, &c, &action, &fault);
    if ((st == ATTN_OK) != (fault.why[0] == '\0'))
        abort();
    if (st == ATTN_OK && (action == CONFIG_RUN || action == CONFIG_PRINT))
        print_and_read_again(&c);
    if (st == ATTN_OK)
        config_fini(&c);
    close(fd);
    free(flags);
    return 0;
}

size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes)
{
    static const struct {
        const char *text;
        size_t n;
    } seeds[] = {
#define SEED(text) {text, sizeof(text) - 1}
        SEED("[device]\nbackend = cpu\nkv_memory = 64M\n[engine]\nlease = 3s # a comment\n"),
        SEED("[listen]\naddress = ipc:///tmp/x tcp://127.0.0.1:5\nhttp = off\nadmin = /tmp/y\n"),
        SEED("; nothing\n\0--backend\ncpu\n--engine.max_sessions=7\n--listen\nshm:///tmp/z"),
        SEED("[log]\nlevel = debug\n\0--print-config"),
        SEED("[cache]\nmax_seq_tokens = 99999999999999999999\n"),
    };
    if (i >= sizeof seeds / sizeof seeds[0] || seeds[i].n > out_bytes)
        return 0;
    memcpy(out, seeds[i].text, seeds[i].n);
    return seeds[i].n;
}

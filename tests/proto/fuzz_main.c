/* fuzz_main.c: drives a fuzz target without libFuzzer.
 *
 *   fuzz_X FILE_OR_FOLDER...      replays inputs
 *   fuzz_X --runs N [SEED]        N mutations of the valid inputs, the same for the same seed
 *   fuzz_X --write FOLDER         writes the valid inputs, a corpus to start from
 *
 * Mutations run in a child that leaves the seed of its input in shared memory, so that a finding is
 * named however the child died: fuzz_X --runs 1 SEED repeats it.
 */
#include "fuzz.h"
#include "tests/random.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_INPUT_BYTES = 1 << 16 };

/* Runs the target on n bytes that end where their allocation ends. */
static void run_one(const uint8_t *data, size_t n)
{
    uint8_t *exact = malloc(n + (n == 0));
    memcpy(exact, data, n);
    LLVMFuzzerTestOneInput(exact, n);
    free(exact);
}

/* One change of buf (n of MAX_INPUT_BYTES used); the new length. */
static size_t mutate(uint8_t *buf, size_t n, uint64_t *random)
{
    static const uint8_t edges[] = {0x00, 0x01, 0x7f, 0x80, 0xff, 0x08, 0x12, 0x0b};
    uint64_t r = random_mixed(random);
    size_t at = n ? (r >> 8) % n : 0, len = 1 + (r >> 40) % 16;
    if (len > n - at)
        len = n - at;
    switch (r % 7) {
    case 0: /* flip a bit */
        if (n)
            buf[at] ^= (uint8_t)(1u << (r >> 60 & 7));
        return n;
    case 1: /* a byte that matters to varints and tags */
        if (n)
            buf[at] = edges[r >> 60 & 7];
        return n;
    case 2: /* any byte */
        if (n)
            buf[at] = (uint8_t)(r >> 56);
        return n;
    case 3: /* cut the end off */
        return at;
    case 4: /* remove */
        memmove(buf + at, buf + at + len, n - at - len);
        return n - len;
    case 5: /* repeat */
        if (n + len > MAX_INPUT_BYTES)
            return n;
        memmove(buf + at + len, buf + at, n - at);
        return n + len;
    default: /* a 32-bit length */
        if (n - at >= 4)
            memcpy(buf + at, &(uint32_t){(uint32_t)(r >> 32) >> (r >> 28 & 31)}, 4);
        return n;
    }
}

static void run_seed(uint64_t seed, uint8_t *buf)
{
    uint64_t random = seed;
    size_t n_seeds = 0;
    while (fuzz_seed(n_seeds, buf, MAX_INPUT_BYTES) != 0)
        n_seeds++;
    size_t n = fuzz_seed(random_mixed(&random) % n_seeds, buf, MAX_INPUT_BYTES);
    for (uint64_t k = 1 + random_mixed(&random) % 8; k > 0; k--)
        n = mutate(buf, n, &random);
    run_one(buf, n);
}

static int run_mutations(uint64_t n_runs, uint64_t seed)
{
    uint64_t *now =
        mmap(NULL, sizeof *now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint8_t *buf = malloc(MAX_INPUT_BYTES);
    if (now == MAP_FAILED || buf == NULL)
        return 2;
    pid_t child = fork();
    if (child == 0) {
        for (*now = seed; *now < seed + n_runs; ++*now)
            run_seed(*now, buf);
        free(buf);
        exit(0);
    }
    int status = 0;
    free(buf);
    if (child < 0 || waitpid(child, &status, 0) != child)
        return 2;
    if (status != 0) {
        fprintf(stderr, "finding: repeat with --runs 1 %llu\n", (unsigned long long)*now);
        return 1;
    }
    printf("%llu mutations from seed %llu, no finding\n", (unsigned long long)n_runs,
           (unsigned long long)seed);
    return 0;
}

static int write_seeds(const char *folder)
{
    uint8_t *buf = malloc(MAX_INPUT_BYTES);
    size_t n;
    int failed = buf == NULL;
    for (size_t i = 0; !failed && (n = fuzz_seed(i, buf, MAX_INPUT_BYTES)) != 0; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/seed-%02zu", folder, i);
        FILE *f = fopen(path, "wb");
        failed = f == NULL || fwrite(buf, 1, n, f) != n;
        if (f != NULL)
            failed |= fclose(f) != 0;
        if (failed)
            perror(path);
    }
    free(buf);
    return failed;
}

static int replay(const char *path)
{
    DIR *folder = opendir(path);
    int failed = 0;
    if (folder != NULL) {
        for (struct dirent *e; (e = readdir(folder)) != NULL;) {
            char sub[4096];
            if (e->d_name[0] == '.')
                continue;
            snprintf(sub, sizeof sub, "%s/%s", path, e->d_name);
            failed |= replay(sub);
        }
        closedir(folder);
        return failed;
    }
    static uint8_t buf[2 << 20];
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        perror(path);
        return 1;
    }
    size_t n = fread(buf, 1, sizeof buf, f);
    fclose(f);
    run_one(buf, n);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--write") == 0)
        return write_seeds(argv[2]);
    if ((argc == 3 || argc == 4) && strcmp(argv[1], "--runs") == 0)
        return run_mutations(strtoull(argv[2], NULL, 10),
                             argc == 4 ? strtoull(argv[3], NULL, 10) : 1);
    if (argc < 2 || argv[1][0] == '-') {
        fprintf(stderr, "usage: %s FILE... | --runs N [SEED] | --write FOLDER\n", argv[0]);
        return 2;
    }
    int failed = 0;
    for (int i = 1; i < argc; i++)
        failed |= replay(argv[i]);
    return failed;
}

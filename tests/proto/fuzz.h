/* fuzz.h: what a fuzz target gives its driver, libFuzzer or fuzz_main.c. */
#ifndef ATTND_TESTS_PROTO_FUZZ_H
#define ATTND_TESTS_PROTO_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* Runs the code under test on one input. 0; aborts on a finding. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* The i-th valid input, for starting from; its length, 0 past the last. */
size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes);

#endif

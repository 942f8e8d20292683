/* fuzz_frame.c: fuzz target: the input is a whole message, as a transport hands it over. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "samples.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    for (int is_reply = 0; is_reply < 2; is_reply++) {
        char why[128];
        size_t again_n = 0, third_n = 0;
        uint8_t *msg = aligned_alloc(WIRE_ALIGN, (n / WIRE_ALIGN + 1) * WIRE_ALIGN);
        uint8_t *exact = msg + (n / WIRE_ALIGN + 1) * WIRE_ALIGN - n; /* ends with the memory */
        memcpy(exact, data, n);
        uint8_t *again = sample_recode(exact, n, is_reply, &again_n, why, sizeof why);
        free(msg);
        if (again == NULL)
            continue;
        uint8_t *third = sample_recode(again, again_n, is_reply, &third_n, why, sizeof why);
        if (third == NULL || third_n != again_n || memcmp(third, again, third_n) != 0)
            abort(); /* what decodes must encode to something that decodes to the same */
        free(third);
        free(again);
    }
    return 0;
}

size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes)
{
    size_t n = 0;
    uint8_t *msg = i < n_samples ? sample_build(&samples[i], &n) : NULL;
    if (msg != NULL)
        memcpy(out, msg, n <= out_bytes ? n : out_bytes);
    free(msg);
    return n <= out_bytes ? n : out_bytes;
}

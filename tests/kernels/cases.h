/* cases.h: the option product that every backend is checked over: a case is one element of each
 * table of kernels/cases.h and one shape. test_backend walks them all (or every n-th).
 */
#ifndef ATTND_TESTS_KERNELS_CASES_H
#define ATTND_TESTS_KERNELS_CASES_H

#include "kernels/cases.h"

/* One sequence: n_before tokens are cached, then a step of n_tokens. */
struct case_item {
    uint32_t n_before, n_tokens;
};

#define CASE_MAX_ITEMS 8
struct case_shape {
    const char *name;
    struct case_item items[CASE_MAX_ITEMS]; /* up to the first with n_tokens 0 */
};

static const struct case_shape case_shapes[] = {
    {"decode at edges", {{0, 1}, {1, 1}, {7, 1}, {15, 1}, {16, 1}, {31, 1}, {63, 1}, {64, 1}}},
    {"speculative", {{0, 2}, {7, 3}, {14, 4}, {30, 5}, {5, 8}, {61, 16}, {64, 17}}},
    {"ragged", {{130, 1}, {1, 4}, {40, 1}, {9, 1}, {0, 7}}},
    {"prompt chunks", {{0, 40}, {33, 70}}},
    {"one long", {{700, 1}}},
    {"long and short", {{515, 3}, {3, 1}, {260, 1}, {55, 1}, {62, 2}, {49, 1}, {60, 1}, {63, 1}}},
    {"prompts at edges", {{0, 17}, {0, 64}, {63, 65}, {1, 127}, {200, 56}, {95, 33}, {0, 129}}},
    {"long prompts", {{0, 193}, {383, 40}, {700, 18}, {0, 1}}},
};

#endif

/* stages.c: names of the stages of a step. */
#include "daemon/base/stages.h"

static const char *const names[STAGE_N] = {
#define X(name, text, help) text,
    STAGE_MAP(X)
#undef X
};

const char *stage_name(enum stage s)
{
    return names[s];
}

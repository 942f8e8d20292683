/* planted.c: which planted bug is on (plant.cmake), by KV_BUG. */
#include <stdlib.h>

int kv_bug;

__attribute__((constructor)) static void read_bug(void)
{
    const char *bug = getenv("KV_BUG");
    kv_bug = bug == NULL ? 0 : atoi(bug);
}

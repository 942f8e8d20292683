/* registry.c: which registry a url names. */
#include "registry.h"

#include <stdio.h>
#include <string.h>

attn_status registry_open(const char *url, const atomic_bool *ends, struct registry **out,
                          char why[WHY_BYTES])
{
    if (strncmp(url, "etcd://", 7) == 0)
        return etcd_open(url, ends, out, why);
    if (strncmp(url, "k8s://", 6) == 0 || strncmp(url, "etcds://", 8) == 0) {
        snprintf(why, WHY_BYTES,
                 "url is cluster+%.100s: this library reads cluster+etcd:// and cluster+file://;"
                 " Python's attnd.connect() takes this one, too",
                 url);
        return ATTN_ENOTSUP;
    }
    if (strncmp(url, "file:///", 8) == 0)
        return file_open(url, ends, out, why);
    snprintf(why, WHY_BYTES,
             "url is cluster+%.100s, expected cluster+etcd://HOST:PORT[,...][/PREFIX] or"
             " cluster+file:///PATH",
             url);
    return ATTN_EINVAL;
}

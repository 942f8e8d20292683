/* registry.h: where the members of a cluster are written down: etcd, or a file that people write.
 * What is written there is clients/cluster/src/attnd_cluster/keys.py's. Used by one thread. */
#ifndef REGISTRY_H
#define REGISTRY_H

#include <attn.h>
#include <jansson.h>
#include <stdatomic.h>

#define WHY_BYTES ATTN_MESSAGE_BYTES
#define FATE_BYTES 160

/* A line of functions for each kind; none of them waits longer than its timeout. */
struct registry {
    bool is_static; /* nobody registers there, and nobody is declared dead */
    /* Records of members by name, a new object, and which registry it was: another one, and what is
     * missing was lost, not deleted. NULL: not read, and why. */
    json_t *(*read)(struct registry *r, uint64_t timeout_us, char store[64], char why[WHY_BYTES]);
    /* What is decided of a registration whose lease ended: "dead" unless somebody came first.
     * false: it is not known. */
    bool (*decide)(struct registry *r, const char *registration, uint64_t timeout_us,
                   char out_fate[FATE_BYTES]);
    void (*close)(struct registry *r);
};

/* url without "cluster+". *ends ends what is under way. ATTN_EINVAL, ATTN_ENOTSUP, ATTN_ENOMEM. */
attn_status registry_open(const char *url, const atomic_bool *ends, struct registry **out,
                          char why[WHY_BYTES]);
attn_status file_open(const char *url, const atomic_bool *ends, struct registry **out,
                      char why[WHY_BYTES]);
attn_status etcd_open(const char *url, const atomic_bool *ends, struct registry **out,
                      char why[WHY_BYTES]);

#endif

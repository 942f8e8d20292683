/* stats.h: the daemon's metrics: atomics that any thread changes and the HTTP thread reads.
 *
 * One X-macro per kind is the single place where a metric gets its name, help text and storage. At
 * any moment steps_received = steps answered (by status) + steps in flight; request.c counts all
 * three. Metrics are only shown: nothing in the daemon depends on one.
 */
#ifndef ATTND_DAEMON_BASE_STATS_H
#define ATTND_DAEMON_BASE_STATS_H

#include <stdatomic.h>
#include <stdio.h>

#include "daemon/base/clock.h"
#include "daemon/base/stages.h"
#include "proto/attn_types.h"

/* X(field, metric name without attnd_, help). Fields that end in _ns are exported in seconds; those
 * that end in _at_ns are moments of clock_now_ns (0: none) and are exported as their age. */
#define STATS_COUNTER_MAP(X)                                                                       \
    X(requests_received, "requests_received_total", "Requests decoded, steps included")            \
    X(requests_refused_overload, "requests_refused_overload_total",                                \
      "Requests refused at the queue bound")                                                       \
    X(messages_malformed, "messages_malformed_total", "Messages that did not decode")              \
    X(steps_received, "steps_received_total", "Steps received")                                    \
    X(steps_slow, "steps_slow_total", "Steps that took longer than stats.slow_step")               \
    X(step_items, "step_items_total", "Items of answered steps")                                   \
    X(step_tokens, "step_tokens_total", "Query tokens of answered steps")                          \
    X(batches, "batches_total", "Batches launched")                                                \
    X(batch_items, "batch_items_total", "Items in launched batches")                               \
    X(batch_splits, "batch_splits_total", "Splits of launched batches")                            \
    X(batches_failed, "batches_failed_total", "Batches the backend failed")                        \
    X(kv_read_bytes, "kv_read_bytes_total", "Cached K and V read by attention")                    \
    X(kv_shared_bytes, "kv_shared_bytes_total",                                                    \
      "Cached K and V not read again where items of a batch begin alike")                          \
    X(device_ns, "device_seconds_total", "Time batches ran on the device")                         \
    X(canary_items, "canary_items_total", "Outputs compared with the float64 reference")           \
    X(canary_wrong, "canary_wrong_total", "Outputs that were beyond their bound, twice")           \
    X(canary_unrepeated, "canary_unrepeated_total",                                                \
      "Outputs that were beyond it once, but not when computed again, or could not be")            \
    X(canary_skipped, "canary_skipped_total",                                                      \
      "Outputs chosen that were too long, changed, or came while another was looked at")           \
    X(hellos_refused, "hellos_refused_total",                                                      \
      "Hellos without a tenant's token, certificate or user")                                      \
    X(prefix_hits, "prefix_hits_total", "Blocks of opened sequences that were found")              \
    X(prefix_misses, "prefix_misses_total", "Blocks of opened sequences that were not")            \
    X(prefix_hit_tokens, "prefix_hit_tokens_total", "Tokens that sequences began with")            \
    X(evictions, "evictions_total", "Cached blocks that made way for others")                      \
    X(evictions_expired, "evictions_expired_total",                                                \
      "Evictions of blocks whose time to live was over")                                           \
    X(eviction_age_seconds, "eviction_age_seconds_total",                                          \
      "Time since their last use of evicted blocks, summed up")                                    \
    X(cached_dropped, "cached_dropped_total", "Cached blocks that went with their pool")           \
    X(host_hits, "host_hits_total", "Evicted blocks found in host memory")                         \
    X(host_evictions, "host_evictions_total", "Blocks that made way in host memory")               \
    X(host_no_room, "host_no_room_total", "Evicted blocks that host memory had no room for")       \
    X(host_damaged, "host_damaged_total", "Blocks in a tier whose checksum was wrong")             \
    X(host_out_bytes, "host_out_bytes_total", "Bytes of blocks moved to host memory")              \
    X(host_in_bytes, "host_in_bytes_total", "Bytes of blocks that came back from host memory")     \
    X(host_eviction_age_seconds, "host_eviction_age_seconds_total",                                \
      "Seconds since the last use of blocks that made way in host memory")                         \
    X(host_waits, "host_waits_total", "Times an item waited for blocks on their way")              \
    X(idle_out_bytes, "idle_out_bytes_total",                                                      \
      "Bytes of idle sequences' blocks moved to host memory")                                      \
    X(idle_in_bytes, "idle_in_bytes_total", "Bytes of such blocks that came back")                 \
    X(idle_waits, "idle_waits_total", "Times a request waited for idle sequences to go or come")   \
    X(idle_damaged, "idle_damaged_total", "Sequences dropped: a block came back damaged")          \
    X(chosen_here, "chosen_here_total",                                                            \
      "Blocks that queries chose and found, where blocks of their sequences may be away")          \
    X(chosen_away, "chosen_away_total", "Chosen blocks that had to come back from idle memory")    \
    X(disk_hits, "disk_hits_total", "Evicted blocks found on disk")                                \
    X(disk_evictions, "disk_evictions_total", "Blocks that made way on disk")                      \
    X(disk_eviction_age_seconds, "disk_eviction_age_seconds_total",                                \
      "Seconds since the last use of blocks that made way on disk")                                \
    X(disk_errors, "disk_errors_total", "Blocks that could not be written or read back")           \
    X(disk_out_bytes, "disk_out_bytes_total", "Bytes of blocks written to disk")                   \
    X(disk_in_bytes, "disk_in_bytes_total", "Bytes of blocks read back from disk")                 \
    X(leases_expired, "leases_expired_total", "Sessions whose lease ended")                        \
    X(sequences_expired, "sequences_expired_total", "Sequences freed at a lease's end")            \
    X(peers_accepted, "peers_accepted_total", "Connections accepted")                              \
    X(peers_refused, "peers_refused_total", "Connections refused at the cap")                      \
    X(peers_cut_handshake, "peers_cut_handshake_total", "Peers cut: bad or late handshake")        \
    X(peers_cut_oversize, "peers_cut_oversize_total", "Peers cut: message over the limit")         \
    X(peers_cut_body_timeout, "peers_cut_body_timeout_total",                                      \
      "Peers cut: message not complete in time")                                                   \
    X(peers_cut_slow_reader, "peers_cut_slow_reader_total", "Peers cut: did not read replies")     \
    X(peers_cut_malformed, "peers_cut_malformed_total", "Peers cut: bytes outside the protocol")   \
    X(peers_cut_tls, "peers_cut_tls_total", "Peers cut: TLS refused, broken or cut short")         \
    X(tls_handshakes, "tls_handshakes_total", "TLS handshakes that were completed")                \
    X(tls_resumed, "tls_resumed_total", "Of these, by a ticket of an earlier connection")          \
    X(peers_cut_memory, "peers_cut_memory_total", "Peers cut: no memory to answer them")           \
    X(plans, "plans_total", "Plans of lanes that were accepted")                                   \
    X(bells_refused, "bells_refused_total", "Bells of lanes that were not the next of a plan")     \
    X(received_bytes, "received_bytes_total", "Bytes of messages received")                        \
    X(sent_bytes, "sent_bytes_total", "Bytes of replies sent")

#define STATS_GAUGE_MAP(X)                                                                         \
    X(steps_in_flight, "steps_in_flight", "Steps received and not answered")                       \
    X(queue_requests, "queue_requests", "Requests waiting for the engine or a batch")              \
    X(queue_bytes, "queue_bytes", "Bytes of messages held by the engine")                          \
    X(sessions, "sessions", "Sessions known")                                                      \
    X(peers, "peers", "Connections open")                                                          \
    X(lanes, "lanes", "Lanes open")                                                                \
    X(sequences, "sequences", "Sequences open")                                                    \
    X(blocks_total, "blocks", "Blocks of all pools")                                               \
    X(blocks_free, "blocks_free", "Blocks free")                                                   \
    X(blocks_used, "blocks_used", "Blocks in use")                                                 \
    X(blocks_shared, "blocks_shared", "Blocks in use by more than one sequence")                   \
    X(blocks_cached, "blocks_cached", "Blocks kept for whoever has their tokens, till needed")     \
    X(blocks_pinned, "blocks_pinned", "Of the cached blocks, those that are not evicted")          \
    X(blocks_reserved, "blocks_reserved", "Blocks set aside by sessions, in use or not")           \
    X(blocks_published, "blocks_published", "Blocks found by their tokens, in use or cached")      \
    X(blocks_tiered, "blocks_tiered", "Blocks of idle sequences in host memory")                   \
    X(blocks_host, "blocks_host", "Evicted blocks in host memory")                                 \
    X(blocks_disk, "blocks_disk", "Evicted blocks on disk")                                        \
    X(disk_used_bytes, "disk_used_bytes", "Bytes of those blocks")                                 \
    X(host_memory_bytes, "host_memory_bytes", "Host memory taken for evicted blocks")              \
    X(table_bytes, "table_bytes", "Memory that tables have taken of cache.table_memory")           \
    X(kv_memory_bytes, "kv_memory_bytes", "KV memory, as configured")                              \
    X(kv_given_bytes, "kv_memory_given_bytes", "KV memory given to pools")                         \
    X(kv_used_bytes, "kv_memory_used_bytes", "KV memory of blocks in use")                         \
    X(memory_bytes_per_s, "device_memory_bytes_per_second",                                        \
      "What the memory of all cards can give, as the driver says; 0: not known")                   \
    X(io_memory_bytes, "io_memory_bytes", "Memory for messages in flight, as taken")               \
    X(max_batch_items, "max_batch_items", "Most items of a batch, as configured")                  \
    X(max_batch_tokens, "max_batch_tokens", "Most query tokens of a batch, as configured")         \
    X(oldest_at_ns, "oldest_request_age_seconds", "Age of the oldest request the engine holds")    \
    X(engine_beat_at_ns, "engine_heartbeat_age_seconds", "Since the engine's last turn")           \
    X(loop_beat_at_ns, "loop_heartbeat_age_seconds", "Since the event loop's last turn")           \
    X(is_draining, "draining", "1 while draining")                                                 \
    X(is_ready, "ready", "1 while serving")                                                        \
    X(settings_are_good, "config_last_load_successful",                                            \
      "1 if the settings were good when they were read last; 0: others are in use")

#define X(name, value, message, is_retryable) +1
enum { STATS_N_STATUS = 0 ATTN_STATUS_MAP(X) };
#undef X
#define STATS_BUCKETS 32 /* power-of-two microseconds */

enum stats_transport { STATS_IPC, STATS_TCP, STATS_SHM, STATS_GPU, STATS_TLS, STATS_N_TRANSPORTS };
enum stats_time { STATS_QUEUE, STATS_DEVICE, STATS_TOTAL, STATS_N_TIMES };

struct stats_histogram {
    _Atomic uint64_t bucket[STATS_BUCKETS];
    _Atomic uint64_t sum_ns;
};

#define STATS_CANARY_BUCKETS 16 /* up to 2^-10, 2^-9 ... 2^4 times the bound, and above */

#define STATS_MAX_TENANTS 64
#define STATS_TENANT_MAP(X)                                                                        \
    X(0, "count", "tenant_pool_blocks", "gauge", "Blocks of the tenant's pools")                   \
    X(1, "count", "tenant_sequences", "gauge", "Sequences of the tenant")                          \
    X(2, "count", "tenant_sessions", "gauge", "Sessions of the tenant")                            \
    X(3, "count", "tenant_bytes_in_flight", "gauge", "Bytes of the tenant's steps not answered")   \
    X(4, "count", "tenant_pools", "gauge", "Pools of the tenant")                                  \
    X(5, "bytes", "tenant_host_bytes", "gauge", "Bytes of the tenant's blocks in host memory")     \
    X(6, "bytes", "tenant_disk_bytes", "gauge", "Bytes of the tenant's blocks on disk")            \
    X(7, "bytes", "tenant_table_bytes", "gauge", "Bytes of the tenant's ids and block tables")     \
    X(8, "count", "tenant_steps_total", "counter", "Steps of the tenant answered with ok")         \
    X(9, "count", "tenant_steps_failed_total", "counter",                                          \
      "Steps of the tenant answered otherwise")                                                    \
    X(10, "device_ns", "tenant_device_seconds_total", "counter",                                   \
      "Device time of the tenant's batches")
enum { STATS_TENANT_STEPS = 8, STATS_TENANT_FAILED, STATS_TENANT_DEVICE, STATS_TENANT_N };

#define STATS_MAX_CARDS 8
/* X(number, field, name, type, help): per card, where there are several */
#define STATS_CARD_MAP(X)                                                                          \
    X(0, "count", "card_sequences", "gauge", "Sequences open on a card")                           \
    X(1, "count", "card_blocks", "gauge", "Blocks of all pools on a card")                         \
    X(2, "count", "card_blocks_free", "gauge", "Blocks free on a card")                            \
    X(3, "count", "card_kv_memory_bytes", "gauge", "KV memory of a card, as configured")           \
    X(4, "count", "card_lost", "gauge", "1 if the card is lost")                                   \
    X(5, "count", "card_batches_total", "counter", "Batches that came back from a card")           \
    X(6, "count", "card_batch_items_total", "counter", "Items in those")                           \
    X(7, "count", "card_kv_read_bytes_total", "counter", "Cached K and V read on a card")          \
    X(8, "device_ns", "card_device_seconds_total", "counter", "Time batches ran on a card")        \
    X(9, "count", "card_moves_in_total", "counter", "Sequences that came from another card")       \
    X(10, "count", "card_moves_out_total", "counter", "Sequences that went to another card")       \
    X(11, "count", "card_moved_bytes_total", "counter", "Bytes of blocks that came with them")     \
    X(12, "stopped_ns", "card_moves_stopped_seconds_total", "counter",                             \
      "Time for which sequences that went were stopped")
enum {
    STATS_CARD_SEQUENCES,
    STATS_CARD_BLOCKS,
    STATS_CARD_FREE,
    STATS_CARD_MEMORY,
    STATS_CARD_LOST,
    STATS_CARD_BATCHES,
    STATS_CARD_ITEMS,
    STATS_CARD_READ,
    STATS_CARD_DEVICE,
    STATS_CARD_MOVED_IN,
    STATS_CARD_MOVED_OUT,
    STATS_CARD_MOVED_BYTES,
    STATS_CARD_STOPPED,
    STATS_CARD_N
};

struct stats_card {
    uint32_t device; /* the driver's number */
    char name[24]; /* the same, behind the backend's name if device.index has one */
    _Atomic uint64_t value[STATS_CARD_N];
};

struct stats_tenant {
    char name[64];
    _Atomic uint64_t used[STATS_TENANT_N]; /* the first eight by enum tenant_quota */
};

struct stats {
#define X(field, name, help) _Atomic uint64_t field;
    STATS_COUNTER_MAP(X)
    STATS_GAUGE_MAP(X)
#undef X
    _Atomic uint64_t steps_answered[STATS_N_STATUS]; /* by -status */
    struct stats_histogram time[STATS_N_TRANSPORTS][STATS_N_TIMES];
    struct stats_histogram stage[STAGE_N]; /* of all transports */
    _Atomic uint64_t canary_ratio[STATS_CANARY_BUCKETS];
    _Atomic uint64_t canary_ratio_sum; /* millionths */
    struct stats_card cards[STATS_MAX_CARDS];
    _Atomic uint32_t n_cards; /* 0: there is one card, and the totals are its values */
    struct stats_tenant tenants[STATS_MAX_TENANTS];
    _Atomic uint32_t n_tenants;
};

/* Pools by name, as the engine saw them last. */
enum { STATS_MAX_POOLS = 32, STATS_POOL_NAME_BYTES = 64 };
struct stats_pool {
    char name[STATS_POOL_NAME_BYTES];
    uint64_t blocks, free, tiered, sequences; /* blocks does not include tiered */
};
/* Replaces the published pools; those past STATS_MAX_POOLS are summed as one, "(others)". Any
 * thread; a short copy under a lock. */
void stats_set_pools(const struct stats_pool *pools, size_t n);

/* The process's metrics. */
extern struct stats stats;

#define stats_add(field, n) atomic_fetch_add_explicit(&stats.field, (n), memory_order_relaxed)
#define stats_sub(field, n) atomic_fetch_sub_explicit(&stats.field, (n), memory_order_relaxed)
#define stats_set(field, n) atomic_store_explicit(&stats.field, (n), memory_order_relaxed)
#define stats_get(field) atomic_load_explicit(&stats.field, memory_order_relaxed)

#define stats_card_add(card, what, n)                                                              \
    atomic_fetch_add_explicit(&stats.cards[card].value[what], (n), memory_order_relaxed)
#define stats_card_get(card, what)                                                                 \
    atomic_load_explicit(&stats.cards[card].value[what], memory_order_relaxed)
#define stats_card_set(card, what, n)                                                              \
    atomic_store_explicit(&stats.cards[card].value[what], (n), memory_order_relaxed)

/* Counts a step as answered with st; an unknown status counts as ATTN_EINTERNAL. */
void stats_count_answer(attn_status st);
void stats_observe_ns(enum stats_transport t, enum stats_time what, uint64_t ns);
void stats_observe_stage_ns(enum stage s, uint64_t ns);
/* Counts an output that the canary compared. ratio: its largest error over its bound. */
void stats_observe_canary(double ratio);
const char *stats_transport_name(enum stats_transport t); /* "ipc" */
/* Writes all metrics to f in Prometheus text format 0.0.4. */
void stats_write_prometheus(FILE *f);
#define STATS_SCHEMA 2 /* of the JSON: raised when a name is removed or changes its meaning */
/* Writes the same as one JSON object and a newline. ATTN_ENOMEM: what was written is incomplete. */
attn_status stats_write_json(FILE *f);
/* Names the commit that was built ("unknown" until then), before other threads are. */
void stats_set_commit(const char *name);
/* The tenant's index in stats.tenants, added if it is new; when the table is full, the last one. */
uint32_t stats_tenant_add(const char *name);
/* Writes what one tenant may see, as one JSON object: its metrics, since when the process runs, and
 * whether it is ready or drains. ATTN_ENOMEM as above. */
attn_status stats_write_tenant_json(FILE *f, uint32_t tenant);

#endif

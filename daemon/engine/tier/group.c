/* group.c: submits groups of block moves to the device or the file, and takes them back when they
 * are done. Used by demotion, promotion and idle paging on the engine thread; completions come from
 * the backend's threads. */
#include "daemon/engine/tier/group.h"

#include "daemon/base/log.h"
#include "daemon/base/stack.h"
#include "daemon/engine/core/health.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/tier/disk.h"

/* most bytes of a group, unless it is a single block */
#define GROUP_BYTES ((uint64_t)32 << 20)

uint32_t mover_group_size(uint64_t bytes, uint32_t most)
{
    uint64_t n = GROUP_BYTES / bytes;
    return n < 1 ? 1 : n > most ? most : (uint32_t)n;
}

static void group_done(struct backend_moves *m)
{
    struct engine *e = ((struct mover_group *)m)->engine;
    atomic_fetch_add(&e->tier.n_notifying, 1);
    stack_push(&e->tier.came, m);
    engine_wake(e);
    atomic_fetch_sub(&e->tier.n_notifying, 1);
}

void mover_group_init(struct engine *e, struct mover_group *g, struct backend_move *list,
                      void (*came)(struct engine *e, struct mover_group *g))
{
    *g = (struct mover_group){.engine = e, .came = came};
    g->moves.list = list;
    g->moves.done = group_done;
}

bool mover_group_begin(struct engine *e, struct mover_group *g, struct pool *p, uint32_t n,
                       struct tier_disk *disk)
{
    g->moves.n = n;
    g->pool = p;
    attn_status st = disk != NULL ? tier_disk_submit(disk, &g->moves)
                                  : e->env.ops->moves_submit(e->env.backend, &g->moves);
    g->is_under_way = st == ATTN_OK;
    if (st != ATTN_OK)
        log_limited("no moves", LOG_LEVEL_WARN, log_event, "blocks can't be moved", "status=%s",
                    attn_status_message(st));
    return g->is_under_way;
}

bool mover_take_back(struct engine *e)
{
    struct backend_moves *first = stack_take_all(&e->tier.came);
    bool has_any = first != NULL;
    stack_for_each(struct backend_moves, m, first) {
        struct mover_group *g = (struct mover_group *)m;
        g->is_under_way = false;
        g->came(e, g);
    }
    if (has_any) {
        e->tier.has_changed = true;
        e->is_dirty = true;
    }
    return has_any;
}

bool mover_is_moved(struct engine *e, const struct backend_move *m)
{
    if (m->status == ATTN_EDEVICE)
        device_lose(e, "a block could not be moved");
    return m->status == ATTN_OK;
}

void mover_wait_for_room(struct engine *e, uint32_t seq)
{
    if (seq_waits_for_room(e, seq))
        e->tier.n_waits++;
}

void mover_disk_failed(struct engine *e, const char *what)
{
    e->tier.n_disk_errors++;
    log_limited("disk tier", LOG_LEVEL_WARN, log_event, "a block is lost to the disk tier",
                "%s=failed setting=cache.disk_path", what);
}

uint64_t mover_tier_bytes(const struct engine *e, const struct pool *p)
{
    uint64_t bytes = pool_block_bytes(p);
    if (e->tier.disk == NULL)
        return bytes;
    return (bytes + TIER_DISK_ALIGN - 1) / TIER_DISK_ALIGN * TIER_DISK_ALIGN;
}

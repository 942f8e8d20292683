/* plan.c: the split planner (plan.h). One pass over the segments a kind; the order of runs, splits
 * and slots is a function of the arguments alone, so the same batch gives the same bytes.
 *
 * Direct, equal and fixed plans first say how many equal runs a segment gets and deal them out in a
 * row. The stream plan deals whole segments evenly and cuts the rest to measure.
 */
#include "kernels/plan.h"

#include "kernels/grow.h"

#include <stdlib.h>
#include <string.h>

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static attn_status grow_runs(struct plan *p, uint64_t n)
{
    return array_reserve(&p->runs, &p->runs_capacity, n, sizeof *p->runs);
}

/* Equal runs that a segment of n tiles is cut into; every kind but the stream plan. */
static uint32_t splits_of(const struct plan_config *c, enum plan_kind kind, uint32_t n,
                          uint32_t n_busy)
{
    uint32_t k = 1;
    if (kind == PLAN_EQUAL) {
        k = n_busy > 0 ? c->n_processors / n_busy : 1;
        if (c->min_run_tiles > 1)
            k = min_u32(k, n / c->min_run_tiles);
    } else if (kind == PLAN_FIXED) {
        k = n / c->fixed_run_tiles + (n % c->fixed_run_tiles != 0);
    }
    k = min_u32(k, min_u32(n, kind == PLAN_DIRECT ? 1 : c->max_splits));
    return k > 0 ? k : 1;
}

/* Equal runs of all segments in a row, each dealt to the processor in whose ideal share its middle
 * lies. Returns the tiles of the most loaded processor; a dry call writes nothing else. */
static uint64_t deal(struct plan *p, const struct plan_config *c, enum plan_kind kind,
                     const uint32_t *tiles, uint32_t n_segments, uint64_t total, uint32_t n_busy,
                     bool is_dry)
{
    uint64_t done = 0, load = 0, longest = 0;
    uint32_t r = 0, proc = 0, slots = 0;
    if (!is_dry)
        p->first[0] = 0;
    for (uint32_t s = 0; s < n_segments; s++) {
        uint32_t k = splits_of(c, kind, tiles[s], n_busy);
        for (uint32_t i = 0; i < k; i++, r++) {
            uint32_t t0 = (uint32_t)((uint64_t)tiles[s] * i / k);
            uint32_t n = (uint32_t)((uint64_t)tiles[s] * (i + 1) / k) - t0;
            while (proc + 1 < c->n_processors && n > 0 &&
                   (2 * done + n) * c->n_processors > 2 * total * (proc + 1)) {
                proc++;
                load = 0;
                if (!is_dry)
                    p->first[proc] = r;
            }
            if (!is_dry)
                p->runs[r] = (struct plan_run){.segment = s,
                                               .tile0 = t0,
                                               .n_tiles = n,
                                               .split = i,
                                               .n_splits = k,
                                               .slot = k > 1 ? slots : 0};
            done += n;
            load += n;
            longest = load > longest ? load : longest;
        }
        if (k > 1)
            slots += k;
    }
    if (!is_dry) {
        while (proc < c->n_processors)
            p->first[++proc] = r;
        p->n_runs = r;
        p->n_slots = slots;
    }
    return longest;
}

/* The stream plan's walk along the segments that are cut, in order. */
struct cutter {
    const uint32_t *tiles;
    const uint32_t *queue; /* segments to cut */
    uint32_t n_queue, at; /* at: index of the segment being cut */
    uint32_t offset; /* tiles of it already given */
    uint32_t split; /* runs of it already made */
};

/* Gives a processor about `want` tiles of the cut segments (everything if is_last). */
static void cut(struct plan *p, struct cutter *k, uint64_t want, uint64_t snap, uint32_t min_run,
                bool is_last)
{
    while (k->at < k->n_queue && (want > 0 || is_last)) {
        uint32_t s = k->queue[k->at], left = k->tiles[s] - k->offset;
        uint32_t n = is_last ? left : (uint32_t)min_u64(left, want);
        if (n < left && (left - n <= snap || left - n < min_run))
            n = left; /* the rest is too short to be cut off */
        if (n < left && (n < min_run || (k->offset == 0 && n <= snap)))
            return; /* too short to begin with: the next processor starts here */
        p->runs[p->n_runs++] =
            (struct plan_run){.segment = s, .tile0 = k->offset, .n_tiles = n, .split = k->split++};
        want -= min_u64(want, n);
        k->offset += n;
        if (k->offset == k->tiles[s]) {
            k->at++;
            k->offset = k->split = 0;
        }
    }
}

/* n_splits and slots, once all splits of a segment are known. count is [n_segments], zeroed. */
static void number_splits(struct plan *p, uint32_t *count)
{
    for (uint32_t i = 0; i < p->n_runs; i++)
        count[p->runs[i].segment]++;
    for (uint32_t i = 0; i < p->n_runs; i++) {
        struct plan_run *r = &p->runs[i];
        r->n_splits = count[r->segment];
    }
    /* count becomes the first slot; splits of a segment appear in order, the first is split 0 */
    for (uint32_t i = 0; i < p->n_runs; i++) {
        struct plan_run *r = &p->runs[i];
        if (r->n_splits == 1)
            continue;
        if (r->split == 0) {
            count[r->segment] = p->n_slots;
            p->n_slots += r->n_splits;
        }
        r->slot = count[r->segment];
    }
}

static attn_status stream(struct plan *p, const struct plan_config *c, const uint32_t *tiles,
                          uint32_t n_segments, uint64_t total)
{
    const uint32_t np = c->n_processors;
    uint64_t share = total / np + (total % np != 0), whole = 0, given = 0, dealt = 0;
    attn_status st = grow_runs(p, (uint64_t)n_segments + 2 * (uint64_t)np);
    if (st != ATTN_OK)
        return st;
    /* scratch: whole_end[np], queue[n_segments], count[n_segments] */
    st = array_reserve(&p->scratch, &p->scratch_capacity, 2 * (uint64_t)n_segments + np,
                       sizeof *p->scratch);
    if (st != ATTN_OK)
        return st;
    uint32_t *whole_end = p->scratch, *queue = whole_end + np, *count = queue + n_segments;
    uint32_t n_queue = 0, n_whole = 0, s = 0;

    for (uint32_t i = 0; i < n_segments; i++)
        whole += tiles[i] <= share ? tiles[i] : 0;
    /* spread the segments that fit; count[0 .. n_whole) lists them in the order dealt */
    for (uint32_t proc = 0; proc < np; proc++) {
        uint64_t load = 0, fair = (whole / np) * (proc + 1) + (whole % np) * (proc + 1) / np;
        for (; s < n_segments; s++) {
            if (tiles[s] > share) {
                queue[n_queue++] = s;
                continue;
            }
            if (load + tiles[s] > share || dealt + tiles[s] / 2 > fair)
                break;
            count[n_whole++] = s;
            load += tiles[s];
            dealt += tiles[s];
        }
        whole_end[proc] = n_whole;
    }
    for (; s < n_segments; s++)
        queue[n_queue++] = s;

    /* cut runs, then whole ones, a processor at a time. The list of whole segments shares its array
     * with the counts that come later, so it is consumed first-in first-out here. */
    struct cutter k = {.tiles = tiles, .queue = queue, .n_queue = n_queue};
    uint64_t snap = share * c->snap_percent / 100;
    for (uint32_t proc = 0, w = 0; proc < np; proc++) {
        uint64_t load = 0, fair = (total / np) * (proc + 1) + (total % np) * (proc + 1) / np;
        p->first[proc] = p->n_runs;
        for (uint32_t i = w; i < whole_end[proc]; i++)
            load += tiles[count[i]];
        uint32_t at = p->n_runs;
        if (fair > given + load || proc + 1 == np)
            cut(p, &k, fair > given + load ? fair - given - load : 0, snap, c->min_run_tiles,
                proc + 1 == np);
        for (; at < p->n_runs; at++)
            given += p->runs[at].n_tiles;
        given += load;
        for (; w < whole_end[proc]; w++)
            p->runs[p->n_runs++] =
                (struct plan_run){.segment = count[w], .n_tiles = tiles[count[w]]};
    }
    p->first[np] = p->n_runs;
    memset(count, 0, n_segments * sizeof *count);
    number_splits(p, count);
    return ATTN_OK;
}

/* The kind PLAN_AUTO stands for: the first that leaves no processor more than 5 % over its
 * share. */
static enum plan_kind choose(struct plan *p, const struct plan_config *c, const uint32_t *tiles,
                             uint32_t n_segments, uint64_t total, uint32_t n_busy)
{
    static const enum plan_kind kinds[] = {PLAN_DIRECT, PLAN_EQUAL};
    for (size_t i = 0; i < 2; i++) {
        uint64_t longest = deal(p, c, kinds[i], tiles, n_segments, total, n_busy, true);
        if (longest * c->n_processors * 100 <= total * 105)
            return kinds[i];
    }
    return PLAN_STREAM;
}

attn_status plan_make(struct plan *p, const struct plan_config *c, const uint32_t *segment_tiles,
                      uint32_t n_segments)
{
    uint64_t total = 0, n_runs = 0;
    uint32_t n_busy = 0;

    p->n_runs = p->n_slots = p->n_processors = 0;
    if (c->n_processors == 0 || c->snap_percent > 50)
        return ATTN_EINVAL;
    if ((c->kind == PLAN_AUTO || c->kind == PLAN_EQUAL || c->kind == PLAN_FIXED) &&
        c->max_splits == 0)
        return ATTN_EINVAL;
    if (c->kind == PLAN_FIXED && c->fixed_run_tiles == 0)
        return ATTN_EINVAL;
    if ((unsigned)c->kind > PLAN_FIXED)
        return ATTN_EINVAL;
    for (uint32_t s = 0; s < n_segments; s++) {
        total += segment_tiles[s];
        n_busy += segment_tiles[s] > 0;
    }
    attn_status st = array_reserve(&p->first, &p->first_capacity, (uint64_t)c->n_processors + 1,
                                   sizeof *p->first);
    if (st != ATTN_OK)
        return st;

    enum plan_kind kind = c->kind;
    if (kind == PLAN_AUTO)
        kind = choose(p, c, segment_tiles, n_segments, total, n_busy);
    if (kind == PLAN_STREAM) {
        st = stream(p, c, segment_tiles, n_segments, total);
        if (st != ATTN_OK)
            return st;
    } else {
        for (uint32_t s = 0; s < n_segments; s++)
            n_runs += splits_of(c, kind, segment_tiles[s], n_busy);
        st = grow_runs(p, n_runs);
        if (st != ATTN_OK)
            return st;
        deal(p, c, kind, segment_tiles, n_segments, total, n_busy, false);
    }
    p->n_processors = c->n_processors;
    p->kind = kind;
    return ATTN_OK;
}

void plan_fini(struct plan *p)
{
    if (p == NULL)
        return;
    free(p->runs);
    free(p->first);
    free(p->scratch);
    *p = (struct plan){0};
}

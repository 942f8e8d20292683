/* tree.h: a tree of new tokens (a speculative tree, beams): each sees the cached tokens, its
 * ancestors and itself. Known here alone: a node's position is that of the tree plus its depth,
 * whatever its place among the new tokens is, and the ancestors that a window hides.
 */
#ifndef ATTND_KERNELS_TREE_H
#define ATTND_KERNELS_TREE_H

#include "kernels/visible.h"

#define TREE_MAX_NODES 64

/* A node. Parents come before their children, so its ancestors are the lower bits, by depth. */
struct tree_node {
    uint64_t seen; /* bit j: node j is this one or one of its ancestors */
    uint32_t depth; /* how many ancestors it has */
    uint32_t pad;
};

/* The nodes of these parents: -1, or the index of a node before it. Returns the index of the first
 * that is neither; n: none is. */
static inline uint32_t tree_nodes_of(const int32_t *parents, uint32_t n, struct tree_node *out)
{
    for (uint32_t i = 0; i < n; i++) {
        if (parents[i] < -1 || parents[i] >= (int64_t)i || i >= TREE_MAX_NODES)
            return i;
        out[i].seen = UINT64_C(1) << i;
        out[i].depth = out[i].pad = 0;
        if (parents[i] >= 0) {
            out[i].seen |= out[parents[i]].seen;
            out[i].depth = out[parents[i]].depth + 1;
        }
    }
    return n;
}

/* The nodes that a node of a tree at `position` sees. */
VISIBLE_FN uint64_t tree_seen(const struct tree_node *node, uint32_t window_tokens,
                              uint32_t sink_tokens, uint32_t position)
{
    if (window_tokens == 0 || node->depth < window_tokens)
        return node->seen;
    const uint32_t hidden = sink_tokens > position ? sink_tokens - position : 0; /* by depth */
    const uint32_t shown = node->depth - window_tokens + 1;
    uint64_t seen = 0;
    uint32_t depth = 0;
    for (uint64_t rest = node->seen; rest != 0; rest &= rest - 1, depth++)
        if (depth < hidden || depth >= shown)
            seen |= rest & (~rest + 1);
    return seen;
}

/* The cached tokens that it sees. */
VISIBLE_FN struct visible tree_visible(const struct tree_node *node, uint32_t window_tokens,
                                       uint32_t sink_tokens, uint32_t position)
{
    struct visible v = visible_to(window_tokens, sink_tokens, 0, position + node->depth, position);
    v.end = position;
    v.first = v.first < position ? v.first : position;
    v.sinks = v.sinks < v.first ? v.sinks : v.first;
    return v;
}

#endif

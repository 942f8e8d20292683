# The bugs of sim_cluster_planted, which planted.sh switches on by SIM_BUG:
#   cmake -DFROM=source-tree -DTO=dir -P plant.cmake
include(${CMAKE_CURRENT_LIST_DIR}/../../plant.cmake)
set(PLANT_HEAD "extern int sim_bug;\n")

# the fence lasts one instant longer than the lease
plant(38 daemon/engine/core/status.c "    if (fence_ns <= e->turn_ns) {"
  "    if (sim_bug == 38 ? fence_ns < e->turn_ns : fence_ns <= e->turn_ns) {")
plant(38 daemon/engine/core/status.c "    req->deadline_ns = req->deadline_ns < fence_ns ? req->deadline_ns : fence_ns;"
  "    fence_ns += sim_bug == 38;
    req->deadline_ns = req->deadline_ns < fence_ns ? req->deadline_ns : fence_ns;")
# the close that ends a move leaves the sequence open: another move of it is acknowledged, too
plant(39 daemon/engine/seq/sequence.c "        moved_note(e, tenant_id(session_tenant(e, session)), c);
    return run_close(e, seq);"
  "        moved_note(e, tenant_id(session_tenant(e, session)), c);
    if (sim_bug == 39 && c->moved != NULL)
        return ATTN_OK;
    return run_close(e, seq);")
# of several moves of one name the first is told
plant(40 cache/dedup.c "        const struct kv_moved_rec *r = rec_of(kv, last - i);"
  "        const struct kv_moved_rec *r = rec_of(kv, sim_bug == 40 ? last - n + 1 + i : last - i);")
# retiring a sequence leaves old handles in force: two copies live
plant(41 daemon/engine/seq/sequence.c "    attn_status st = kv_seq_adopt(e->env.kv, seq, info.owner, KV_NO_REQUEST, &epoch);"
  "    attn_status st =
        sim_bug == 41 ? ATTN_OK : kv_seq_adopt(e->env.kv, seq, info.owner, KV_NO_REQUEST, &epoch);")
# a note that is late goes before one that was set after it
plant(43 cache/given.c "    if (old.epoch == note.epoch && old.request > request)"
  "    if (sim_bug != 43 && old.epoch == note.epoch && old.request > request)")
# a note shorter than the one before it is taken for a repeat
plant(44 cache/given.c "    if (old.epoch == note.epoch && old.request == request)"
  "    if (old.epoch == note.epoch &&
        (old.request == request || (sim_bug == 44 && n_bytes < old.n_bytes && old.request < request)))")
# a handle that is over still sets a note
plant(45 daemon/engine/seq/sequence.c "        if (h->note->has_note)
            return run_as_owner(e, req, session, seq, begun, a);"
  "        if (sim_bug == 45 && h->note->has_note)
            return run_note(e, req, seq, a);
        if (h->note->has_note)
            return run_as_owner(e, req, session, seq, begun, a);")

# The bugs of sim_planted, which planted.sh switches on by SIM_BUG:
#   cmake -DFROM=source-tree -DTO=dir -P plant.cmake
include(${CMAKE_CURRENT_LIST_DIR}/../plant.cmake)
set(PLANT_HEAD "extern int sim_bug;\n")

# dedup forgets what was carried out: a late open or adopt is carried out again
plant(1 cache/dedup.c "    if (owner == KV_NO_OWNER || request == KV_NO_REQUEST)\n        return false;"
  "    if (owner == KV_NO_OWNER || request == KV_NO_REQUEST || sim_bug == 1)\n        return false;")
# a repeated open, fork, adopt or truncation is not known again
plant(2 cache/dedup.c "return s != NULL && request != KV_NO_REQUEST &&"
  "return sim_bug != 2 && s != NULL && request != KV_NO_REQUEST &&")
# a truncation does not raise the epoch, but says so
plant(3 cache/seq.c "    kv_publish64(&s->epoch_owner, kv_epoch_owner(epoch, kv_owner_of(s)));
    s->longest = len;"
  "    if (sim_bug != 3)\n        kv_publish64(&s->epoch_owner, kv_epoch_owner(epoch, kv_owner_of(s)));
    s->longest = len;")
# blocks of an append that failed are not returned
plant(4 cache/append.c "    if (--s->n_outstanding == 0)" "    if (--s->n_outstanding == 0 && sim_bug != 4)")
# a block that a copy has replaced is never given back
plant(5 cache/append.c "        kv_block_unref(kv, &kv->pools[s->pool], old_block);"
  "        if (sim_bug != 5)\n            kv_block_unref(kv, &kv->pools[s->pool], old_block);")
# recovery does not roll copies back
plant(6 cache/recover.c "                kv_publish32(&row[e->index], e->old_block);"
  "                kv_publish32(&row[e->index], sim_bug == 6 ? e->new_block : e->old_block);")
# an item's output goes to the row before its own
plant(7 daemon/engine/step/batch.c "row = it->row;\n" "row = sim_bug == 7 && it->row > 0 ? it->row - 1 : it->row;\n")
# a batch that failed is committed
plant(8 daemon/engine/step/batch_end.c "item_appends(it) && st == ATTN_OK)"
  "item_appends(it) && (st == ATTN_OK || sim_bug == 8))")
# the patches of a failed batch are not told again
plant(9 daemon/engine/step/batch_end.c "        pool_patch_again(" "        if (sim_bug != 9)\n            pool_patch_again(")
# a copy is made under a batch that reads the table
plant(10 daemon/engine/step/batch.c "if (s->n_active > 0 &&" "if (sim_bug != 10 && s->n_active > 0 &&")
# a successor does not tell the device all block tables
plant(11 daemon/engine/restore.c "i < info.n_blocks &&" "i + (sim_bug == 11) < info.n_blocks &&")
# a successor forgets sessions
plant(12 daemon/engine/restore.c "        if (id != 0 && session_restore"
  "        if (sim_bug != 12 && id != 0 && session_restore")
# a sleeping engine is not woken
plant(13 daemon/engine/core/sleep.c "    if (write(e->wake_fd, &one, sizeof one) < 0)"
  "    if (sim_bug == 13 || write(e->wake_fd, &one, sizeof one) < 0)")
# what is left of a reply that was written in part begins at the wrong byte
plant(14 daemon/transport/sp_write.c "    p->write_offset += n;" "    p->write_offset += sim_bug == 14 ? 0 : n;")
# replies of a connection that is gone are not freed
plant(15 daemon/transport/sp_peer.c "        STAILQ_REMOVE_HEAD(&p->replies, queued);
        sp_request_done(on, req);"
  "        STAILQ_REMOVE_HEAD(&p->replies, queued);
        if (sim_bug != 15)\n            sp_request_done(on, req);")
# the rows of failed items are not made NaN
plant(16 daemon/engine/core/answer.c "        fill_failed_rows(t);" "        if (sim_bug != 16)\n            fill_failed_rows(t);")
# an item of another epoch is not refused
plant(17 daemon/engine/step/step.c "    if (info->epoch != s->epoch[i]) {"
  "    if (sim_bug != 17 && info->epoch != s->epoch[i]) {")
# a block is published when one layer has it
plant(18 cache/prefix.c "i-- > 0 && n > 0;)" "i-- > 0 && n > 0 && sim_bug != 18;)")
# a published block is written to
plant(19 cache/append.c "    take_back(kv, seq.index, p, pos, past);" "    if (sim_bug != 19)\n        take_back(kv, seq.index, p, pos, past);")
# an evicted block can still be found
plant(20 cache/blocks.c "    kv_unpublish(kv, p, block); /*" "    if (sim_bug != 20)\n        kv_unpublish(kv, p, block); /*")
# truncation keeps token ids
plant(21 cache/seq.c "    if (g->n_ids > len)" "    if (g->n_ids > len && sim_bug != 21)")
# blocks that did not come back are published
plant(22 daemon/engine/tier/promote.c "kv_promote_end(e->env.kv, f->kv, f->n_there);"
  "kv_promote_end(e->env.kv, f->kv, sim_bug == 22 ? f->n : f->n_there);")
# a batch goes on though the one before it did not tell a card the block tables
plant(23 daemon/cards/split/shard.c "if (b->oldest <= p->failed)"
  "if (sim_bug != 23 && b->oldest <= p->failed)")
# cards do not learn what others have carried out
plant(24 daemon/cards/session.c "    if (kv_owner_id(e->env.kv, n->slot) == n->session)"
  "    if (sim_bug != 24 && kv_owner_id(e->env.kv, n->slot) == n->session)")
# an export tells what lies behind the last token
plant(25 daemon/engine/seq/export.c "    zero_behind(&p->config, x->part.layers, info.layer_len, at, dst);"
  "    if (sim_bug != 25)\n        zero_behind(&p->config, x->part.layers, info.layer_len, at, dst);")
# a repeated import is refused
plant(26 daemon/engine/seq/export.c "return is_done(out_part, m, info) ? ATTN_OK" "return sim_bug != 26 && is_done(out_part, m, info) ? ATTN_OK")
# a successor forgets what the device has answered and nobody committed
plant(27 cache/early_commit.c "n <= kv_early_max(kv) && word == a->serial"
  "n <= kv_early_max(kv) && word == a->serial && sim_bug != 27")
# blocks that go to host memory are not held meanwhile
plant(28 daemon/engine/tier/demote.c "kv_cached_hold(e->env.kv, p->id, blocks, n);"
  "kv_cached_hold(e->env.kv, p->id, blocks, sim_bug == 28 ? 0 : n);")
# blocks that go to another card are not held meanwhile
plant(29 daemon/cards/move.c "(kv_seq_id){leave_of(e)->seq}, first, n);"
  "(kv_seq_id){leave_of(e)->seq}, first, sim_bug == 29 ? 0 : n);")
# a block of an idle sequence counts as moved though it was not
plant(30 daemon/engine/tier/idle.c "mover_is_moved(e, &x->out_list[i])"
  "(mover_is_moved(e, &x->out_list[i]) || sim_bug == 30)")
# an item does not wait for its sequence's blocks
plant(31 daemon/engine/tier/idle.c "    if (info.n_paged_out == 0)\n        return IDLE_HERE;"
  "    if (info.n_paged_out == 0 || (sim_bug == 31 && x->in_move != NULL))\n        return IDLE_HERE;")
# blocks of a pool that shrinks are not copied
plant(34 daemon/engine/pool/resize.c "at < s->n_copies; at += n)" "at < s->n_copies && sim_bug != 34; at += n)")
# nor is the device told of tables that name others then
plant(35 daemon/engine/pool/resize.c "i < s->n_patches; i++)" "i < s->n_patches && sim_bug != 35; i++)")
# a reservation outlives its session
plant(36 cache/dedup.c "    kv_reservations_end(kv, owner);" "    if (sim_bug != 36)\n        kv_reservations_end(kv, owner);")
# a late copy of a refused reservation is carried out after a later one
plant(37 cache/dedup.c "|| request < last_set(kv, owner, pool.index)[what];"
  "|| (sim_bug != 37 && request < last_set(kv, owner, pool.index)[what]);")
# a sequence begins at an epoch that an older one of its name has had
plant(42 cache/dedup.c "    if (epoch > kv->epochs->ended)" "    if (sim_bug != 42 && epoch > kv->epochs->ended)")

# Copies kernel sources with bugs planted behind a switch, for planted.sh:
#   cmake -DFROM=kernels/gpu -DTO=dir -P plant.cmake
# A bug is a text that must be in its file exactly once and what stands for it; simt::planted picks
# one. When a source changes so that a text is gone, plant the same bug in the new text. C sources
# ask simt_has_bug.
function(plant file number good bad)
  if(NOT DEFINED text_${file})
    file(READ ${FROM}/${file} text)
    string(REPLACE ";" "@semicolon@" text "${text}")
  else()
    set(text "${text_${file}}")
  endif()
  string(REPLACE ";" "@semicolon@" good "${good}")
  string(REPLACE ";" "@semicolon@" bad "${bad}")
  string(FIND "${text}" "${good}" first)
  string(FIND "${text}" "${good}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "planted bug ${number}: '${good}' is not in ${file} exactly once")
  endif()
  string(REPLACE "${good}" "${bad}" text "${text}")
  set(text_${file} "${text}" PARENT_SCOPE)
  string(REPLACE "@semicolon@" ";" text "${text}")
  file(WRITE ${TO}/kernels/gpu/${file} "${text}")
endfunction()

# a barrier less: products may read K and V before they are there
plant(attend_matrix.cuh 1 "                copy_wait<0>();\n            __syncthreads();\n\n            char *staged"
  "                copy_wait<0>();\n            if (simt::planted != 1)\n                __syncthreads();\n\n            char *staged")
# a barrier less: a stage may be filled while it is read
plant(attend_matrix.cuh 2 "            __syncthreads(); /* the stage may be filled again */"
  "            if (simt::planted != 2)\n                __syncthreads();")
# hidden keys are not masked
plant(attend_matrix.cuh 3 "(key < keys.end && is_visible(w.see, key)) ? x"
  "(key < keys.end && (simt::planted == 3 || is_visible(w.see, key))) ? x")
# the jump to a window's first tile jumps over sink tokens
plant(attend_matrix.cuh 4 "if (base >= keys.highest.sinks &&" "if ((simt::planted == 4 || base >= keys.highest.sinks) &&")
# sums of earlier tiles keep the old maximum
plant(attend_matrix.cuh 5 "                    o[j][i] *= factor[tile_row_of(i)];"
  "                    o[j][i] *= simt::planted == 5 ? 1.0f : factor[tile_row_of(i)];")
# V's operand with rows and columns in another order
plant(vendor/tile_mfma.h 6 "at(lane / 16 * 4 + i, lane % 16 / 8)"
  "at(simt::planted == 6 ? lane / 16 + i * 4 : lane / 16 * 4 + i, lane % 16 / 8)")
plant(vendor/tile_mma.h 6 "load_matrix4_transposed(x.w, at(lane % 16, lane / 16));"
  "if (simt::planted == 6) load_matrix4(x.w, at(lane % 16, lane / 16)); else
     load_matrix4_transposed(x.w, at(lane % 16, lane / 16));")
# rows meet only some of the lanes that share them
plant(attend_matrix.cuh 7 "top[r] = warp_max<tile_lanes, tile_step>(top[r]);"
  "top[r] = simt::planted == 7 ? warp_max<2, tile_step>(top[r]) : warp_max<tile_lanes, tile_step>(top[r]);")
# the vector kernel's groups meet without a barrier
plant(attend_vector.cu 8 "    __syncthreads();\n\n    uint32_t pieces"
  "    if (simt::planted != 8)\n        __syncthreads();\n\n    uint32_t pieces")
# the merge forgets the last split
plant(attend_vector.cu 9 "for (uint32_t s = 0; s < it.n_splits; ++s)"
  "for (uint32_t s = 0; s < it.n_splits - (simt::planted == 9); ++s)")
# a lane's own maximum becomes the row's scale
plant(append.cuh 10 "    amax = warp_max(amax);" "    amax = simt::planted == 10 ? amax : warp_max(amax);")
# only half of a block is copied
plant(blocks.cu 11 "    uint4 *dst = (uint4 *)(a.base + a.list[2 * blockIdx.y + 1] * a.block_bytes);\n    uint64_t n = a.block_bytes / 16,"
  "    uint4 *dst = (uint4 *)(a.base + a.list[2 * blockIdx.y + 1] * a.block_bytes);\n    uint64_t n = a.block_bytes / (simt::planted == 11 ? 32 : 16),")
# the last stripe of a block is not in its checksum; its lanes are mixed once too often; what was
# before a piece is forgotten; all blocks have the first one's; a barrier less before the secret
plant(sums.cu 121 "    if (kib == n_whole) {" "    if (kib == n_whole && simt::planted != 121) {")
plant(sums.cu 122 "            if (k + i < a.n_kib && k + i < n_whole)"
  "            if (k + i < a.n_kib && k + i < n_whole + (simt::planted == 122))")
plant(sums.cu 123 "a.from_kib > 0 ?" "a.from_kib > 0 && simt::planted != 123 ?")
plant(sums.cu 124 "a.list[unit / a.n_kib]" "a.list[simt::planted == 124 ? 0 : unit / a.n_kib]")
plant(sums.cu 125 "    __syncthreads();\n    const uint32_t unit" "    if (simt::planted != 125)\n        __syncthreads();\n    const uint32_t unit")
# v of a batch behind another comes from where k is
plant(prep.cu 17 ": v[v0 + i - nq - nk];" ": (simt::planted == 17 ? k : v)[v0 + i - nq - nk];")
# the append does not take what was brought for its own token
plant(prep.cu 18 "a.brought + blockIdx.x * kv_row_bytes(a.kv)"
  "a.brought + (simt::planted == 18 ? 0 : blockIdx.x) * kv_row_bytes(a.kv)")
# shared memory one piece too small: for the address sanitizer
plant(attend_matrix.cuh 12 "C::shared_bytes, stream,\n                  chained, *a);"
  "C::shared_bytes - (simt::planted == 12 ? 16 : 0), stream,\n                  chained, *a);")
# a barrier less: products may read K and V before their codes are decoded
plant(attend_matrix.cuh 14 "parts + C::tile_bytes);\n                __syncthreads();"
  "parts + C::tile_bytes);\n                if (simt::planted != 14)\n                    __syncthreads();")
# a token at a block's end is appended to the next one
plant(append.cuh 15 "(position >> kv.block_shift) - (it.pos >> kv.block_shift)]"
  "((position + (simt::planted == 15)) >> kv.block_shift) - (it.pos >> kv.block_shift)]")
# V takes K's scale
plant(attend_vector.cu 16 "vx[i] *= v_scale;" "vx[i] *= simt::planted == 16 ? k_scale : v_scale;")

# ---- the tuned kernels

# K and V are read before they have come
plant(sm90/decode_narrow.cuh 21 "        barrier_wait(bar + stage * 8, phase);\n        uint32_t tile = visible_tile_at(first"
  "        if (simt::planted != 21) barrier_wait(bar + stage * 8, phase);\n        uint32_t tile = visible_tile_at(first")
# the wrong parity
plant(sm90/decode_runs.cuh 22 "barrier_wait(bar + stage * 8, phase);\n            uint32_t tile = visible_tile_at(run.tile0"
  "barrier_wait(bar + stage * 8, phase ^ (simt::planted == 22));\n            uint32_t tile = visible_tile_at(run.tile0")
# messages to blocks that may not have begun
plant(sm90/decode_narrow.cuh 23 "        cluster_wait(); /* long since"
  "        if (simt::planted != 23) cluster_wait(); /* long since")
# the cluster's sums are read before they have come
plant(sm90/decode_narrow.cuh 24 "    barrier_wait(merge_bar, 0);" "    if (simt::planted != 24) barrier_wait(merge_bar, 0);")
# a barrier that only its maker knows of
plant(sm90/decode_narrow.cuh 25 "            barrier_init(merge_bar, 1);\n            barrier_init_fence();"
  "            barrier_init(merge_bar, 1);\n            if (simt::planted != 25) barrier_init_fence();")
# the ids of a part, of a list's begin, are another's
plant(sm90/decode_narrow.cuh 54 "(blockIdx.z << lg | rank) * p.ids_stride" "(blockIdx.z << lg | (simt::planted == 54 ? 0 : rank)) * p.ids_stride")
plant(sm90/decode_runs.cuh 55 "(is_warp ? next.item : processor) * p.ids_stride" "(simt::planted == 55 ? 0 : is_warp ? next.item : processor) * p.ids_stride")
# all warps compute the first head of a run; use its slots
plant(sm90/decode_runs.cuh 71 "r.head_unit += warp >> r.lg_team;" "r.head_unit += simt::planted == 71 ? 0 : warp >> r.lg_team;")
plant(sm90/decode_runs.cuh 72 "r.slot += (warp >> r.lg_team) *" "r.slot += (simt::planted == 72 ? 0 : warp >> r.lg_team) *")
# sums go to another segment's blocks of the launch's cluster
plant(sm90/decode_narrow.cuh 60 "cluster_rank() - rank +" "(simt::planted == 60 ? 0 : cluster_rank() - rank) +")
# hidden keys are not masked
plant(sm90/decode_tile.cuh 26 "        if (is_masked)\n            mask(" "        if (is_masked && simt::planted != 26)\n            mask(")
# 0 times NaN
plant(sm90/decode_tile.cuh 27 "        if (is_masked)\n            hide_values(" "        if (is_masked && simt::planted != 27)\n            hide_values(")
# a stage is filled again over stores under way
plant(sm90/decode_tile.cuh 28 "        proxy_fence(); /* a later" "        if (simt::planted != 28) proxy_fence(); /* a later")
# K without the swizzle
plant(sm90/decode_tile.cuh 29 "k_chunk = (kc ^ (kr % 8)) * 16" "k_chunk = (kc ^ (simt::planted == 29 ? 0 : kr % 8)) * 16")
# the products read K, V, q before they are there
plant(sm90/decode_wide.cuh 30 "        barrier_wait(ring.full + k_at.slot" "        if (simt::planted != 30) barrier_wait(ring.full + k_at.slot")
plant(sm90/decode_wide.cuh 31 "        barrier_wait(ring.full + v_at.slot" "        if (simt::planted != 31) barrier_wait(ring.full + v_at.slot")
plant(sm90/decode_wide.cuh 32 "    copies_wait();" "    if (simt::planted != 32) copies_wait();")
# values are cleared past the proxy
plant(sm90/decode_wide_stage.cuh 33 "    proxy_fence();\n    warpgroup_any" "    if (simt::planted != 33) proxy_fence();\n    warpgroup_any")
# a slot is filled again while it is read
plant(sm90/decode_wide_parts.cuh 34 "            barrier_wait(ring.empty +" "            if (simt::planted != 34) barrier_wait(ring.empty +")
# scores are read before they are made; no fence before weights go to the products
plant(sm90/decode_wide.cuh 35 "        wgmma_finish(s);" "        if (simt::planted != 35) wgmma_finish(s);")
plant(sm90/decode_wide.cuh 36 "        wgmma_fence();\n#pragma unroll\n        for (uint32_t b" "        if (simt::planted != 36) wgmma_fence();\n#pragma unroll\n        for (uint32_t b")
# the other warpgroup's sums are read before they are written
plant(sm90/decode_wide.cuh 37 "    sync_consumers();\n#pragma unroll" "    if (simt::planted != 37) sync_consumers();\n#pragma unroll")
# a part's factor is forgotten
plant(sm90/decode_wide.cuh 38 " -= gpu::log2_fast(factor[h])" " -= simt::planted == 38 ? 0.0f : gpu::log2_fast(factor[h])")
# tokens behind the last keep what the cache held
plant(sm90/decode_wide_stage.cuh 39 "? some.end - key_of(0)" "? some.end - key_of(0) + (simt::planted == 39 ? 8 : 0)")
# other clusters' sums are read before they are written; read past the proxy
plant(sm90/decode_wide.cuh 40 "        cluster_sync();" "        if (simt::planted != 40) cluster_sync();")
plant(sm90/decode_wide_parts.cuh 40 "        cluster_sync();" "        if (simt::planted != 40) cluster_sync();")
plant(sm90/decode_wide_parts.cuh 41 "                proxy_fence_all();" "                if (simt::planted != 41) proxy_fence_all();")
# ranks forget what does not divide evenly
plant(sm90/decode_wide_parts.cuh 42 "m.n_pieces = m.first_piece(m.rank + 1)"
  "m.n_pieces = simt::planted == 42 ? 8 / m.n_ranks : m.first_piece(m.rank + 1)")
# the ring's next round is taken for the last
plant(sm90/decode_wide_parts.cuh 44 "phase ^ is_next" "phase ^ (simt::planted == 44 ? 0 : is_next)")
# sums for blocks that still compute; read before they have come: (m, l), a rank's own and weights,
# the others'
plant(sm90/decode_wide_parts.cuh 56 "    cluster_wait(); /* their" "    if (simt::planted != 56) cluster_wait(); /* their")
plant(sm90/decode_wide_parts.cuh 57 "    barrier_wait(ring.merge + (way" "    if (simt::planted != 57) barrier_wait(ring.merge + (way")
plant(sm90/decode_wide.cuh 58 "    barrier_wait(ring.merge + 8, 0);" "    if (simt::planted != 58) barrier_wait(ring.merge + 8, 0);")
plant(sm90/decode_wide.cuh 59 "    sync_all(); /* the loaders have" "    if (simt::planted != 59) sync_all(); /* the loaders have")
plant(sm90/decode_wide_parts.cuh 59 "    sync_all(); /* weights" "    if (simt::planted != 59) sync_all(); /* weights")
# the batch's own tokens are read before they are appended
plant(sm90/decode_wide_parts.cuh 43 "        gpu::chain_wait();\n    if (p.items)" "        if (simt::planted != 43) gpu::chain_wait();\n    if (p.items)")
# decode_short reads q, then K and V, before they have come
plant(sm90/decode_short_score.cuh 45 "    copies_wait();" "    if (simt::planted != 45) copies_wait();")
plant(sm90/decode_short_score.cuh 46 "        barrier_wait(k_full + i * 8, 0);" "        if (simt::planted != 46) barrier_wait(k_full + i * 8, 0);")
# other warps' weights are read before they are there
plant(sm90/decode_short_sum.cuh 47 "    gpu::chain_release();\n    __syncthreads();" "    gpu::chain_release();\n    if (simt::planted != 47) __syncthreads();")
# values from the ninth tile on are read before they have come
plant(sm90/decode_short_sum.cuh 70 "        barrier_wait(v_late, 0);\n            load(near" "        if (simt::planted != 70) barrier_wait(v_late, 0);\n            load(near")
# a direct call's newest row of K, and V that comes over it later, in no order
plant(sm90/decode_short_score.cuh 73 "                proxy_fence(); /* late" "                if (simt::planted != 73) proxy_fence(); /* late")
# messages to blocks that may not have begun; read before they have come
plant(sm90/decode_short_sum.cuh 48 "    cluster_wait(); /* long since" "    if (simt::planted != 48) cluster_wait(); /* long since")
plant(sm90/decode_short.cuh 49 "    barrier_wait(met, 0);" "    if (simt::planted != 49) barrier_wait(met, 0);")
plant(sm90/decode_short.cuh 50 "    barrier_wait(merged, 0);" "    if (simt::planted != 50) barrier_wait(merged, 0);")
# a warp's weights count as if its maximum were that of all
plant(sm90/decode_short_sum.cuh 51 "const float f = gpu::exp2_fast(m[k] - all);"
  "const float f = simt::planted == 51 ? 1.0f : gpu::exp2_fast(m[k] - all);")
# 0 times NaN
plant(sm90/decode_short_score.cuh 52 "        if (!sees(tile_of(i)" "        if (simt::planted != 52 && !sees(tile_of(i)")
# the last tiles, fewer than four, are left out, or count as other warps'
plant(sm90/decode_short_sum.cuh 53 "    if (n_fours < n) {" "    if (n_fours < n && simt::planted != 53) {")
plant(sm90/decode_short_sum.cuh 69 "near, factor, n_fours % W," "near, factor, simt::planted == 69 ? 0 : n_fours % W,")

# ---- prompts

# products read K before it has come, and q before the copies' stores are in order
plant(sm90/prefill_body.cuh 74 "            at.k_ring.wait_full(use);" "            if (simt::planted != 74) at.k_ring.wait_full(use);")
plant(sm90/prefill_load.cuh 81 "        copies_wait();\n        proxy_fence();" "        copies_wait();\n        if (simt::planted != 81) proxy_fence();")
# a row sees one key too many
plant(sm90/prefill_body.cuh 75 "if (c >= end ||" "if (c >= end + (simt::planted == 75) ||")
# sums of earlier tiles keep the old maximum; or they get the new one while they are made
plant(sm90/prefill_body.cuh 76 "o[j] *= factor[j / 2 % 2];" "o[j] *= simt::planted == 76 ? 1.0f : factor[j / 2 % 2];")
plant(sm90/prefill_body.cuh 78 "            wgmma_wait<0>(x.o);\n            if" "            if (simt::planted == 78) x.catch_up();\n            wgmma_wait<0>(x.o);\n            if")
# q in another layout than the products want
plant(sm90/prefill_load.cuh 77 "(piece ^ r % 8) * 16;\n#pragma unroll\n            for (uint32_t s = 0; s < S::slabs; ++s) {\n                const bool has = r < n_rows" "(simt::planted == 77 ? piece : piece ^ r % 8) * 16;\n#pragma unroll\n            for (uint32_t s = 0; s < S::slabs; ++s) {\n                const bool has = r < n_rows")
# V is given back before the products have read it
plant(sm90/prefill_body.cuh 79 "                barrier_some_arrive(next_turn, 256);" "                barrier_some_arrive(next_turn, 256);\n                if (simt::planted == 79 && lane == 0) barrier_arrive(at.v_ring.empty(use - 1));")
plant(sm90/prefill_body.cuh 79 "            if (lane < S::arriving && (i > 0 ||" "            if (lane < S::arriving && simt::planted != 79 && (i > 0 ||")
# 0 times NaN
plant(sm90/prefill_body.cuh 80 "            if (is_masked) {" "            if (is_masked && simt::planted != 80) {")
# the next launch begins with what this one has counted
plant(sm90/prefill_load.cuh 82 "        p.counters[0] = p.counters[1] = 0;" "        p.counters[0] = simt::planted == 82, p.counters[1] = 0;")
# the tiles that a window hides are computed in place of those that it shows
plant(sm90/prefill_unit.cuh 83 "i, tiles.sinks, tiles.skip)" "i, tiles.sinks, simt::planted == 83 ? 0 : tiles.skip)")
# of dilated layers: tokens of another remainder; a branch in which the rows take no part; masks of
# the branch before; V of the last tile of a branch is never given back; rows without a stride
plant(sm90/prefill_load.cuh 89 "token = branch_token(from.of, mine);" "token = simt::planted == 89 ? mine : branch_token(from.of, mine);")
plant(sm90/prefill_unit.cuh 90 "if ((e.residue & (b.rate - 1)) != 0)" "if ((e.residue & (b.rate - 1)) != 0 && simt::planted != 90)")
plant(sm90/prefill_body.cuh 91 "                    x.go_on_with(keys);" "                    if (simt::planted != 91) x.go_on_with(keys);")
plant(sm90/prefill_body.cuh 92 "(i > 0 || !is_first_part)" "(i > 0 || (!is_first_part && simt::planted != 92))")
plant(sm90/prefill_unit.cuh 93 "min(r, u.n_rows - 1)) * u.step;" "min(r, u.n_rows - 1)) * (simt::planted == 93 ? 1 : u.step);")

# ---- batches in flight

set(declared "#include \"kernels/gpu/gpu_host.h\"")
plant(gpu_queue.c 61 "${declared}" "${declared}\nint simt_has_bug(int bug);")
# a batch runs beside one that names the same table row
plant(gpu_queue.c 61 "    return has_shared;" "    return has_shared && !simt_has_bug(61);")
# two of them use the same scratch
plant(gpu_queue.c 62 "launch_attention(s, &finish))"
  "({ struct gpu_slot x = *s@semicolon@ if (simt_has_bug(62)) x.job.staging.scratch = b->slots[0].job.staging.scratch@semicolon@ launch_attention(&x, &finish)@semicolon@ }))")
# a batch does not wait for its word; tells of its end before its outputs are there
plant(gpu_queue.c 84 "int code = wait ? runtime" "int code = wait && !simt_has_bug(84) ? runtime")
plant(gpu_queue.c 85 "    if (batch->n_signals <= GPU_FINISH_SIGNALS && batch->n_merge_waits == 0 && !batch->merges)"
  "    if (batch->n_signals > 0 && simt_has_bug(85))\n        runtime_stream_write_word(s->stream, batch->signals->word, batch->signals->value)@semicolon@\n    if (batch->n_signals <= GPU_FINISH_SIGNALS && batch->n_merge_waits == 0 && !batch->merges)")
# what comes does not follow block copies
plant(gpu_queue.c 64 "front->is_alone ||" "(front->is_alone && !simt_has_bug(64)) ||")
# a transfer does not wait for all batches in flight
plant(gpu_queue.c 65 "    if (gpu_follow_all(b) != 0 ||\n        runtime_copy" "    if ((!simt_has_bug(65) && gpu_follow_all(b) != 0) ||\n        runtime_copy")
# what was made ready for another layer runs
plant(vendor/runtime_kept.h 118 "memcmp(kept, args->p[i], args->bytes[i])"
  "memcmp(kept, args->p[i], simt::planted == 118 && i == 1 ? 0 : args->bytes[i])")
# a direct call computes with what lay where the newest K is, does not append, or leaves patches out
plant(sm90/decode_short_score.cuh 66 "            fresh.put(k_at(i), false, it.pos % DECODE_TILE);"
  "            if (simt::planted != 66)\n                fresh.put(k_at(i), false, it.pos % DECODE_TILE);")
plant(sm90/decode_short_score.cuh 67 "            if (row0 == 0) {" "            if (row0 == 0 && simt::planted != 67) {")
plant(gpu_job.c 68 "${declared}" "${declared}\nint simt_has_bug(int bug);")
plant(gpu_job.c 68 "out_device == NULL && n_patches == 0)" "out_device == NULL && (n_patches == 0 || simt_has_bug(68)))")
# what follows prompts that are beside decodes does not wait for them; they don't wait for what is
# appended
plant(gpu_launch.c 113 "${declared}" "${declared}\nint simt_has_bug(int bug);")
plant(gpu_launch.c 113 "return code ? code : gpu_stream_follow(b, s, b->prompts);"
  "return code || simt_has_bug(113) ? code : gpu_stream_follow(b, s, b->prompts);")
plant(gpu_launch.c 114 "int code = gpu_stream_follow(b, b->prompts, s);"
  "int code = simt_has_bug(114) ? 0 : gpu_stream_follow(b, b->prompts, s);")
# a branch's keys lie behind one another; queries that it does not take see the keys that others see
plant(attend_matrix.cuh 86 "uint32_t token = branch_token(from, key);"
  "uint32_t token = simt::planted == 86 ? key : branch_token(from, key);")
plant(attend_matrix.cuh 87 "is_open = keys.all_take_part &&" "is_open = (simt::planted == 87 || keys.all_take_part) &&")
plant(attend_vector.cu 88 "token = token_of<has_stripes>(kv, b, key);"
  "token = simt::planted == 88 ? key : token_of<has_stripes>(kv, b, key);")
# of a dilated layer in parts: heads are counted from the card's first; distances are the card's
plant(attend_matrix.cuh 115 "branch_at(kv, stored, nth, head);"
  "branch_at(kv, stored, nth, simt::planted == 115 ? head - kv.first_kv_head : head);")
plant(attend_vector.cu 116 "at = position_of<has_stripes>(kv, b, key);"
  "at = simt::planted == 116 ? token : position_of<has_stripes>(kv, b, key);")
plant(attend_vector.cu 117 "visible_to<has_stripes>(kv, layer, b, position[r], kv_len);"
  "visible_to<has_stripes>(kv, layer, b, position[r] + (simt::planted == 117 ? kv.stripes.first : 0), kv_len);")

# ---- f32 prompts

# K is read before it is there, V too; hidden keys count; earlier sums keep the old maximum
plant(attend_f32.cu 94 "            __syncthreads(); /* K is there," "            if (simt::planted != 94)\n                __syncthreads(); /* K is there,")
plant(attend_f32.cu 95 "            __syncthreads(); /* V is there," "            if (simt::planted != 95)\n                __syncthreads(); /* V is there,")
plant(attend_f32.cu 96 "(key < keys.end && is_visible(w.see, key)) ? x" "(key < keys.end && (simt::planted == 96 || is_visible(w.see, key))) ? x")
plant(attend_f32.cu 97 "fmaf(o[d][i][c], factor[c / 2]," "fmaf(o[d][i][c], simt::planted == 97 ? 1.0f : factor[c / 2],")
# three digits instead of seven
plant(attend_f32.cu 98 "        mma_1688_tf32(small[j], a.fin, b0[j].low, b1[j].low);" "        if (simt::planted != 98) mma_1688_tf32(small[j], a.fin, b0[j].low, b1[j].low);")
# inf makes NaN
plant(attend_f32.cu 99 "    if (!is_careful && block_any(!is_good))" "    if (!is_careful && simt::planted != 99 && block_any(!is_good))")
# the jump to a window's first tile jumps over sink tokens
plant(attend_f32.cu 100 "if (base >= keys.highest.sinks &&" "if ((simt::planted == 100 || base >= keys.highest.sinks) &&")

# ---- prompts over quantised K and V

# products do not see what was decoded; scales of another tile; half a tile is enough; a row has the
# scale of another one
plant(sm90/prefill_codes.cuh 101 "            proxy_fence();" "            if (simt::planted != 101) proxy_fence();")
plant(sm90/prefill_codes.cuh 102 "at.k_scales(use)[row + lane]" "at.k_scales(use + (simt::planted == 102))[row + lane]")
plant(sm90/prefill_body.cuh 103 "at.k_ring.init(S::has_codes ? 2 * S::arriving : 1" "at.k_ring.init(S::has_codes && simt::planted != 103 ? 2 * S::arriving : 1")
plant(sm90/prefill_codes.cuh 104 "__shfl_sync(~0u, x.scale, r);" "__shfl_sync(~0u, x.scale, simt::planted == 104 ? r ^ 1 : r);")

# ---- prompts whose keys are cut

# a part computes the tiles of another; the last to come has its own maximum alone; counts go on;
# a part goes on to the end of all keys
plant(sm90/prefill_unit.cuh 105 "x.tiles.n -= from;" "x.tiles.n -= simt::planted == 105 ? 0 : from;")
plant(sm90/prefill_body.cuh 106 "m[h] = fmaxf(m[h], ml_of(k, h)->x);" "m[h] = fmaxf(m[h], ml_of(simt::planted == 106 ? u.part : k, h)->x);")
plant(sm90/prefill_body.cuh 107 "                *n_done = 0;" "                *n_done = simt::planted == 107;")
plant(sm90/prefill_unit.cuh 108 "min(hidden.last, x.n_tiles);" "min(hidden.last, simt::planted == 108 ? ~0u : x.n_tiles);")

# ---- outputs of several devices

# parts that have nothing of a query count; weights are not of one sum; the word is not waited for;
# a launch begins with the rows of the one before
plant(merge.cu 109 "(uint64_t)k * a.stripe <= last" "(simt::planted == 109 || (uint64_t)k * a.stripe <= last)")
plant(merge.cu 110 "* log2e) / sum" "* log2e) / (simt::planted == 110 ? 1.0f : sum)")
plant(gpu_queue.c 111 "i < batch->n_merge_waits && !code" "i < batch->n_merge_waits && !simt_has_bug(111) && !code")
plant(gpu_queue.c 112 "        a.n_items = a.n_rows = 0;" "        a.n_items = 0, a.n_rows *= simt_has_bug(112);")

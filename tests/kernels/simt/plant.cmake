# The kernels' bugs, which planted.sh switches on:
#   cmake -DFROM=kernels/gpu -DTO=dir -P plant.cmake
# simt::planted is the one that is on; C sources ask simt_has_bug.
include(${CMAKE_CURRENT_LIST_DIR}/../../plant.cmake)
set(TO ${TO}/kernels/gpu)

# a barrier less: products may read K and V before they are there
plant(1 attend_matrix.cuh "                copy_wait<0>();\n            __syncthreads();\n\n            char *staged"
  "                copy_wait<0>();\n            if (simt::planted != 1)\n                __syncthreads();\n\n            char *staged")
# a barrier less: a stage may be filled while it is read
plant(2 attend_matrix.cuh "            __syncthreads(); /* the stage may be filled again */"
  "            if (simt::planted != 2)\n                __syncthreads();")
# hidden keys are not masked
plant(3 attend_matrix.cuh "(key < keys.end && is_visible(w.see, key)) ? x"
  "(key < keys.end && (simt::planted == 3 || is_visible(w.see, key))) ? x")
# the jump to a window's first tile jumps over sink tokens
plant(4 attend_matrix.cuh "if (base >= keys.highest.sinks &&" "if ((simt::planted == 4 || base >= keys.highest.sinks) &&")
# sums of earlier tiles keep the old maximum
plant(5 attend_matrix.cuh "                    o[j][i] *= factor[tile_row_of(i)];"
  "                    o[j][i] *= simt::planted == 5 ? 1.0f : factor[tile_row_of(i)];")
# V's operand with rows and columns in another order
plant(6 vendor/tile_mfma.h "at(lane / 16 * 4 + i, lane % 16 / 8)"
  "at(simt::planted == 6 ? lane / 16 + i * 4 : lane / 16 * 4 + i, lane % 16 / 8)")
plant(6 vendor/tile_mma.h "load_matrix4_transposed(x.w, at(lane % 16, lane / 16));"
  "if (simt::planted == 6) load_matrix4(x.w, at(lane % 16, lane / 16)); else
     load_matrix4_transposed(x.w, at(lane % 16, lane / 16));")
# rows meet only some of the lanes that share them
plant(7 attend_matrix.cuh "top[r] = warp_max<tile_lanes, tile_step>(top[r]);"
  "top[r] = simt::planted == 7 ? warp_max<2, tile_step>(top[r]) : warp_max<tile_lanes, tile_step>(top[r]);")
# the vector kernel's groups meet without a barrier
plant(8 attend_vector.cu "    __syncthreads();\n\n    uint32_t pieces"
  "    if (simt::planted != 8)\n        __syncthreads();\n\n    uint32_t pieces")
# the last split is forgotten where splits are joined
plant(9 merge_splits.cuh "    uint32_t split = 0;\n" "    uint32_t split = 0;\n    n_splits -= simt::planted == 9;\n")
# a lane's own maximum becomes the row's scale
plant(10 append.cuh "    amax = warp_max(amax);" "    amax = simt::planted == 10 ? amax : warp_max(amax);")
# only half of a block is copied
plant(11 blocks.cu "    uint4 *dst = (uint4 *)(a.base + a.list[2 * blockIdx.y + 1] * a.block_bytes);\n    uint64_t n = a.block_bytes / 16,"
  "    uint4 *dst = (uint4 *)(a.base + a.list[2 * blockIdx.y + 1] * a.block_bytes);\n    uint64_t n = a.block_bytes / (simt::planted == 11 ? 32 : 16),")
# the last stripe of a block is not in its checksum; its lanes are mixed once too often; what was
# before a piece is forgotten; all blocks have the first one's; a barrier less before the secret
plant(121 sums.cu "    if (kib == n_whole) {" "    if (kib == n_whole && simt::planted != 121) {")
plant(122 sums.cu "            if (k + i < a.n_kib && k + i < n_whole)"
  "            if (k + i < a.n_kib && k + i < n_whole + (simt::planted == 122))")
plant(123 sums.cu "a.from_kib > 0 ?" "a.from_kib > 0 && simt::planted != 123 ?")
plant(124 sums.cu "a.list[unit / a.n_kib]" "a.list[simt::planted == 124 ? 0 : unit / a.n_kib]")
plant(125 sums.cu "    __syncthreads();\n    const uint32_t unit" "    if (simt::planted != 125)\n        __syncthreads();\n    const uint32_t unit")
# v of a batch behind another comes from where k is
plant(17 prep.cu ": v[v0 + i - nq - nk];" ": (simt::planted == 17 ? k : v)[v0 + i - nq - nk];")
# the append does not take what was brought for its own token
plant(18 prep.cu "a.brought + blockIdx.x * kv_row_bytes(a.kv)"
  "a.brought + (simt::planted == 18 ? 0 : blockIdx.x) * kv_row_bytes(a.kv)")
# shared memory one piece too small: for the address sanitizer
plant(12 attend_matrix.cuh "C::shared_bytes, stream,\n                  chained, *a);"
  "C::shared_bytes - (simt::planted == 12 ? 16 : 0), stream,\n                  chained, *a);")
# a barrier less: products may read K and V before their codes are decoded
plant(14 attend_matrix.cuh "                }\n                __syncthreads();\n            }\n            const shared_at"
  "                }\n                if (simt::planted != 14)\n                    __syncthreads();\n            }\n            const shared_at")
# a token at a block's end is appended to the next one
plant(15 append.cuh "(position >> kv.block_shift) - (it.pos >> kv.block_shift)]"
  "((position + (simt::planted == 15)) >> kv.block_shift) - (it.pos >> kv.block_shift)]")
# V takes K's scale
plant(16 attend_vector.cu "sums[r].add(s) * v_scale;" "sums[r].add(s) * (simt::planted == 16 ? k_scale : v_scale);")

# ---- K and V that are not quantised (attend_rows.cuh)

# a tile is computed before all have brought their part; before its copies have come
plant(131 attend_rows.cuh "            __syncthreads(); /* the next tile is there"
  "            if (simt::planted != 131)\n                __syncthreads(); /* the next tile is there")
plant(132 attend_rows.cuh "copy_wait<C::stages - 2>();" "if (simt::planted != 132) copy_wait<C::stages - 2>();")
# hidden keys are not masked; a row's window begins a key early
plant(133 attend_rows.cuh "key - see.first >= n &&" "simt::planted != 133 && key - see.first >= n &&")
plant(134 attend_rows.cuh "key - see.first >= n &&" "key + (simt::planted == 134) - see.first >= n + (simt::planted == 134) &&")
# the jump to a window's first tile jumps over sink tokens
plant(135 attend_rows.cuh "if (base >= keys.highest.sinks &&" "if ((simt::planted == 135 || base >= keys.highest.sinks) &&")
# sums of earlier tiles keep the old maximum, which here never lags
plant(136 attend_rows.cuh "x > top[m][r] + rows_lag" "x > top[m][r] + (simt::planted == 136 ? 0.0f : rows_lag)")
plant(136 attend_rows.cuh "o[m][j][i] *= factor[tile_row_of(i)];"
  "o[m][j][i] *= simt::planted == 136 ? 1.0f : factor[tile_row_of(i)];")
# where the tile after the next lies goes to the wrong stage
plant(137 attend_rows.cuh "keep_key(brought, next_block, all_keys + stage * C::tile);"
  "keep_key(brought, next_block, all_keys + (simt::planted == 137 ? stage ^ 1 : stage) * C::tile);")
# a row's sum is of one lane
plant(138 attend_rows.cuh "const uint32_t at = rows[row].at;\n            const float all = warp_sum<tile_lanes, tile_step>(sum[m][r]);"
  "const uint32_t at = rows[row].at;\n            const float all = simt::planted == 138 ? sum[m][r] * 4 : warp_sum<tile_lanes, tile_step>(sum[m][r]);")
# the second row tile has the first one's rows of Q; the last chunk writes rows that are not there
plant(139 attend_rows.cuh "return s_q + (r + m * 16) * C::row_bytes"
  "return s_q + (r + (simt::planted == 139 ? 0 : m * 16)) * C::row_bytes")
plant(140 attend_rows.cuh "if (row < place.n && piece * 8 < kv.dv)" "if ((row < place.n || simt::planted == 140) && piece * 8 < kv.dv)")

# few rows: all warps mask the tokens of the first; their results meet without a barrier; the last
# split but one joins them; the next launch finds that some have arrived; weights are read early
plant(170 attend_rows.cuh "rows + warp_row, base + warp_token, keys.end)"
  "rows + warp_row, base + (simt::planted == 170 ? 0 : warp_token), keys.end)")
plant(171 attend_rows.cuh "    __syncthreads();\n#pragma unroll 1\n    for (int i = threadIdx.x"
  "    if (simt::planted != 171)\n        __syncthreads();\n#pragma unroll 1\n    for (int i = threadIdx.x")
plant(172 attend_rows.cuh "== it.n_splits - 1;" "== it.n_splits - 1 - (simt::planted == 172);")
plant(173 attend_rows.cuh "            *arrivals = 0;" "            *arrivals = simt::planted == 173;")
plant(174 attend_rows.cuh "    __syncthreads();\n    const uint64_t stride"
  "    if (simt::planted != 174)\n        __syncthreads();\n    const uint64_t stride")

# ---- the tuned kernels

# K and V are read before they have come
plant(21 sm90/decode_narrow.cuh "        barrier_wait(bar + stage * 8, phase);\n        uint32_t tile = visible_tile_at(first"
  "        if (simt::planted != 21) barrier_wait(bar + stage * 8, phase);\n        uint32_t tile = visible_tile_at(first")
# the wrong parity
plant(22 sm90/decode_runs.cuh "barrier_wait(bar + stage * 8, phase);\n            uint32_t tile = visible_tile_at(run.tile0"
  "barrier_wait(bar + stage * 8, phase ^ (simt::planted == 22));\n            uint32_t tile = visible_tile_at(run.tile0")
# messages to blocks that may not have begun
plant(23 sm90/decode_narrow.cuh "        cluster_wait(); /* long since"
  "        if (simt::planted != 23) cluster_wait(); /* long since")
# the cluster's sums are read before they have come
plant(24 sm90/decode_narrow.cuh "    barrier_wait(merge_bar, 0);" "    if (simt::planted != 24) barrier_wait(merge_bar, 0);")
# a barrier that only its maker knows of
plant(25 sm90/decode_narrow.cuh "            barrier_init(merge_bar, 1);\n            barrier_init_fence();"
  "            barrier_init(merge_bar, 1);\n            if (simt::planted != 25) barrier_init_fence();")
# the ids of a part, of a list's begin, are another's
plant(54 sm90/decode_narrow.cuh "(blockIdx.z << lg | rank) * p.ids_stride" "(blockIdx.z << lg | (simt::planted == 54 ? 0 : rank)) * p.ids_stride")
plant(55 sm90/decode_runs.cuh "(is_warp ? next.item : processor) * p.ids_stride" "(simt::planted == 55 ? 0 : is_warp ? next.item : processor) * p.ids_stride")
# all warps compute the first head of a run; use its slots
plant(71 sm90/decode_runs.cuh "r.head_unit += warp >> r.lg_team;" "r.head_unit += simt::planted == 71 ? 0 : warp >> r.lg_team;")
plant(72 sm90/decode_runs.cuh "r.slot += (warp >> r.lg_team) *" "r.slot += (simt::planted == 72 ? 0 : warp >> r.lg_team) *")
# sums go to another segment's blocks of the launch's cluster
plant(60 sm90/decode_narrow.cuh "cluster_rank() - rank +" "(simt::planted == 60 ? 0 : cluster_rank() - rank) +")
# hidden keys are not masked
plant(26 sm90/decode_tile.cuh "        if (is_masked)\n            mask(" "        if (is_masked && simt::planted != 26)\n            mask(")
# 0 times NaN
plant(27 sm90/decode_tile.cuh "        if (is_masked)\n            hide_values(" "        if (is_masked && simt::planted != 27)\n            hide_values(")
# a stage is filled again over stores under way
plant(28 sm90/decode_tile.cuh "        proxy_fence(); /* a later" "        if (simt::planted != 28) proxy_fence(); /* a later")
# K without the swizzle
plant(29 sm90/decode_tile.cuh "k_chunk = (kc ^ (kr % 8)) * 16" "k_chunk = (kc ^ (simt::planted == 29 ? 0 : kr % 8)) * 16")
# the products read K, V, q before they are there
plant(30 sm90/decode_wide.cuh "        barrier_wait(ring.full + k_at.slot" "        if (simt::planted != 30) barrier_wait(ring.full + k_at.slot")
plant(31 sm90/decode_wide.cuh "        barrier_wait(ring.full + v_at.slot" "        if (simt::planted != 31) barrier_wait(ring.full + v_at.slot")
plant(32 sm90/decode_wide.cuh "    copies_wait();" "    if (simt::planted != 32) copies_wait();")
# values are cleared past the proxy
plant(33 sm90/decode_wide_stage.cuh "    proxy_fence();\n    warpgroup_any" "    if (simt::planted != 33) proxy_fence();\n    warpgroup_any")
# a slot is filled again while it is read
plant(34 sm90/decode_wide_parts.cuh "            barrier_wait(ring.empty +" "            if (simt::planted != 34) barrier_wait(ring.empty +")
# scores are read before they are made; no fence before weights go to the products
plant(35 sm90/decode_wide.cuh "        wgmma_finish(s);" "        if (simt::planted != 35) wgmma_finish(s);")
plant(36 sm90/decode_wide.cuh "        wgmma_fence();\n#pragma unroll\n        for (uint32_t b" "        if (simt::planted != 36) wgmma_fence();\n#pragma unroll\n        for (uint32_t b")
# the other warpgroup's sums are read before they are written
plant(37 sm90/decode_wide.cuh "    sync_consumers();\n#pragma unroll" "    if (simt::planted != 37) sync_consumers();\n#pragma unroll")
# a part's factor is forgotten
plant(38 sm90/decode_wide.cuh " -= gpu::log2_fast(factor[h])" " -= simt::planted == 38 ? 0.0f : gpu::log2_fast(factor[h])")
# tokens behind the last keep what the cache held
plant(39 sm90/decode_wide_stage.cuh "? some.end - key_of(0)" "? some.end - key_of(0) + (simt::planted == 39 ? 8 : 0)")
# other clusters' sums are read before they are written; read past the proxy
plant(40 sm90/decode_wide.cuh "        cluster_sync();" "        if (simt::planted != 40) cluster_sync();")
plant(40 sm90/decode_wide_parts.cuh "        cluster_sync();" "        if (simt::planted != 40) cluster_sync();")
plant(41 sm90/decode_wide_parts.cuh "                proxy_fence_all();" "                if (simt::planted != 41) proxy_fence_all();")
# ranks forget what does not divide evenly
plant(42 sm90/decode_wide_parts.cuh "m.n_pieces = m.first_piece(m.rank + 1)"
  "m.n_pieces = simt::planted == 42 ? 8 / m.n_ranks : m.first_piece(m.rank + 1)")
# the ring's next round is taken for the last
plant(44 sm90/decode_wide_parts.cuh "phase ^ is_next" "phase ^ (simt::planted == 44 ? 0 : is_next)")
# sums for blocks that still compute; read before they have come: (m, l), a rank's own and weights,
# the others'
plant(56 sm90/decode_wide_parts.cuh "    cluster_wait(); /* their" "    if (simt::planted != 56) cluster_wait(); /* their")
plant(57 sm90/decode_wide_parts.cuh "    barrier_wait(ring.merge + (way" "    if (simt::planted != 57) barrier_wait(ring.merge + (way")
plant(58 sm90/decode_wide.cuh "    barrier_wait(ring.merge + 8, 0);" "    if (simt::planted != 58) barrier_wait(ring.merge + 8, 0);")
plant(59 sm90/decode_wide.cuh "    sync_all(); /* the loaders have" "    if (simt::planted != 59) sync_all(); /* the loaders have")
plant(59 sm90/decode_wide_parts.cuh "    sync_all(); /* weights" "    if (simt::planted != 59) sync_all(); /* weights")
# the batch's own tokens are read before they are appended
plant(43 sm90/decode_wide_parts.cuh "        gpu::chain_wait();\n    if (p.items)" "        if (simt::planted != 43) gpu::chain_wait();\n    if (p.items)")
# decode_short reads q, then K and V, before they have come
plant(45 sm90/decode_short_score.cuh "    copies_wait();" "    if (simt::planted != 45) copies_wait();")
plant(46 sm90/decode_short_score.cuh "        barrier_wait(k_full + i * 8, 0);" "        if (simt::planted != 46) barrier_wait(k_full + i * 8, 0);")
# other warps' weights are read before they are there
plant(47 sm90/decode_short_sum.cuh "    gpu::chain_release();\n    __syncthreads();" "    gpu::chain_release();\n    if (simt::planted != 47) __syncthreads();")
# values from the ninth tile on are read before they have come
plant(70 sm90/decode_short_sum.cuh "        barrier_wait(v_late, 0);\n            load(near" "        if (simt::planted != 70) barrier_wait(v_late, 0);\n            load(near")
# a direct call's newest row of K, and V that comes over it later, in no order
plant(73 sm90/decode_short_score.cuh "                proxy_fence(); /* late" "                if (simt::planted != 73) proxy_fence(); /* late")
# messages to blocks that may not have begun; read before they have come
plant(48 sm90/decode_short_sum.cuh "    cluster_wait(); /* long since" "    if (simt::planted != 48) cluster_wait(); /* long since")
plant(49 sm90/decode_short.cuh "    barrier_wait(met, 0);" "    if (simt::planted != 49) barrier_wait(met, 0);")
plant(50 sm90/decode_short.cuh "    barrier_wait(merged, 0);" "    if (simt::planted != 50) barrier_wait(merged, 0);")
# a warp's weights count as if its maximum were that of all
plant(51 sm90/decode_short_sum.cuh "const float f = gpu::exp2_fast(m[k] - all);"
  "const float f = simt::planted == 51 ? 1.0f : gpu::exp2_fast(m[k] - all);")
# 0 times NaN
plant(52 sm90/decode_short_score.cuh "        if (!sees(tile_of(i)" "        if (simt::planted != 52 && !sees(tile_of(i)")
# the last tiles, fewer than four, are left out, or count as other warps'
plant(53 sm90/decode_short_sum.cuh "    if (n_fours < n) {" "    if (n_fours < n && simt::planted != 53) {")
plant(69 sm90/decode_short_sum.cuh "near, factor, n_fours % W," "near, factor, simt::planted == 69 ? 0 : n_fours % W,")

# ---- prompts

# products read K before it has come, and q before the copies' stores are in order
plant(74 sm90/prefill_body.cuh "            at.k_ring.wait_full(use);" "            if (simt::planted != 74) at.k_ring.wait_full(use);")
plant(81 sm90/prefill_load.cuh "        copies_wait();\n        proxy_fence();" "        copies_wait();\n        if (simt::planted != 81) proxy_fence();")
plant(255 sm90/prefill_body.cuh "        proxy_fence();\n        barrier_some_wait(OWN_ROWS" "        if (simt::planted != 255) proxy_fence();\n        barrier_some_wait(OWN_ROWS")
# a row sees one key too many
plant(75 sm90/prefill_body.cuh "if (c >= end ||" "if (c >= end + (simt::planted == 75) ||")
# sums of earlier tiles keep the old maximum; or they get the new one while they are made
plant(76 sm90/prefill_body.cuh "o[j] *= factor[j / 2 % 2];" "o[j] *= simt::planted == 76 ? 1.0f : factor[j / 2 % 2];")
plant(78 sm90/prefill_body.cuh "            wgmma_wait<0>(x.o);\n            if" "            if (simt::planted == 78) x.catch_up();\n            wgmma_wait<0>(x.o);\n            if")
# q in another layout than the products want
plant(77 sm90/prefill_load.cuh "(piece ^ r % 8) * 16;\n#pragma unroll\n            for (uint32_t s = 0; s < S::slabs; ++s) {\n                const bool has = r < n_rows" "(simt::planted == 77 ? piece : piece ^ r % 8) * 16;\n#pragma unroll\n            for (uint32_t s = 0; s < S::slabs; ++s) {\n                const bool has = r < n_rows")
# V is given back before the products have read it
plant(79 sm90/prefill_body.cuh "                barrier_some_arrive(next_turn, 256);" "                barrier_some_arrive(next_turn, 256);\n                if (simt::planted == 79 && lane == 0) barrier_arrive(at.v_ring.empty(use - 1));")
plant(79 sm90/prefill_body.cuh "            if (lane < S::arriving && (i > 0 ||" "            if (lane < S::arriving && simt::planted != 79 && (i > 0 ||")
# 0 times NaN
plant(80 sm90/prefill_body.cuh "            if (is_masked) {" "            if (is_masked && simt::planted != 80) {")
# the next launch begins with what this one has counted
plant(82 sm90/prefill_load.cuh "        p.counters[0] = p.counters[1] = 0;" "        p.counters[0] = simt::planted == 82, p.counters[1] = 0;")
# the tiles that a window hides are computed in place of those that it shows
plant(83 sm90/prefill_unit.cuh "i, tiles.sinks, tiles.skip)" "i, tiles.sinks, simt::planted == 83 ? 0 : tiles.skip)")
# of dilated layers: tokens of another remainder; a branch in which the rows take no part; masks of
# the branch before; V of the last tile of a branch is never given back; rows without a stride;
# blocks of the next tile
plant(89 sm90/prefill_load.cuh "const uint32_t token = branch_token(from.of, key + i * 32 + lane);" "const uint32_t token = simt::planted == 89 ? key + i * 32 + lane : branch_token(from.of, key + i * 32 + lane);")
plant(253 sm90/prefill_load.cuh "gather_tile<S>(p, from, now, key, to);" "gather_tile<S>(p, from, simt::planted == 253 ? blocks : now, key, to);")
plant(90 sm90/prefill_unit.cuh "if ((e.residue & (b.rate - 1)) != 0)" "if ((e.residue & (b.rate - 1)) != 0 && simt::planted != 90)")
plant(91 sm90/prefill_body.cuh "                    x.go_on_with(keys);" "                    if (simt::planted != 91) x.go_on_with(keys);")
plant(92 sm90/prefill_body.cuh "(i > 0 || !is_first_part)" "(i > 0 || (!is_first_part && simt::planted != 92))")
plant(93 sm90/prefill_unit.cuh "min(r, u.n_rows - 1)) * u.step;" "min(r, u.n_rows - 1)) * (simt::planted == 93 ? 1 : u.step);")

# ---- batches in flight

set(declared "#include \"kernels/gpu/gpu_host.h\"")
plant(61 gpu_queue.c "${declared}" "${declared}\nint simt_has_bug(int bug);")
# a batch runs beside one that names the same table row
plant(61 gpu_queue.c "    return has_shared;" "    return has_shared && !simt_has_bug(61);")
# two of them use the same scratch
plant(62 gpu_queue.c "launch_attention(s, &finish))"
  "({ struct gpu_slot x = *s@semicolon@ if (simt_has_bug(62)) x.job.staging.scratch = b->slots[0].job.staging.scratch@semicolon@ launch_attention(&x, &finish)@semicolon@ }))")
# a batch does not wait for its word; tells of its end before its outputs are there
plant(84 gpu_queue.c "int code = wait ? runtime" "int code = wait && !simt_has_bug(84) ? runtime")
plant(85 gpu_queue.c "    if (batch->n_signals <= GPU_FINISH_SIGNALS && batch->n_merge_waits == 0 && !batch->merges)"
  "    if (batch->n_signals > 0 && simt_has_bug(85))\n        runtime_stream_write_word(s->stream, batch->signals->word, batch->signals->value)@semicolon@\n    if (batch->n_signals <= GPU_FINISH_SIGNALS && batch->n_merge_waits == 0 && !batch->merges)")
# what comes does not follow block copies
plant(64 gpu_queue.c "front->is_alone ||" "(front->is_alone && !simt_has_bug(64)) ||")
# a transfer does not wait for all batches in flight
plant(65 gpu_queue.c "    if (gpu_follow_all(b) != 0 ||\n        runtime_copy" "    if ((!simt_has_bug(65) && gpu_follow_all(b) != 0) ||\n        runtime_copy")
# what was made ready for another layer runs
plant(118 vendor/runtime_kept.h "memcmp(kept, args->p[i], args->bytes[i])"
  "memcmp(kept, args->p[i], simt::planted == 118 && i == 1 ? 0 : args->bytes[i])")
# a direct call computes with what lay where the newest K is, does not append, or leaves patches out
plant(66 sm90/decode_short_score.cuh "            fresh.put(k_at(i), false, it.pos % DECODE_TILE);"
  "            if (simt::planted != 66)\n                fresh.put(k_at(i), false, it.pos % DECODE_TILE);")
plant(67 sm90/decode_short_score.cuh "            if (row0 == 0) {" "            if (row0 == 0 && simt::planted != 67) {")
plant(68 gpu_job.c "${declared}" "${declared}\nint simt_has_bug(int bug);")
plant(68 gpu_job.c "out_device == NULL && n_patches == 0 && !has_groups)" "out_device == NULL && (n_patches == 0 || simt_has_bug(68)))")
# what follows prompts that are beside decodes does not wait for them; they don't wait for what is
# appended
plant(113 gpu_launch.c "${declared}" "${declared}\nint simt_has_bug(int bug);")
plant(113 gpu_launch.c "return code ? code : gpu_stream_follow(b, s, b->prompts);"
  "return code || simt_has_bug(113) ? code : gpu_stream_follow(b, s, b->prompts);")
plant(114 gpu_launch.c "int code = gpu_stream_follow(b, b->prompts, s);"
  "int code = simt_has_bug(114) ? 0 : gpu_stream_follow(b, b->prompts, s);")
# a branch's keys lie behind one another; queries that it does not take see the keys that others see
plant(86 attend_matrix.cuh "uint32_t token = branch_token(from, key);"
  "uint32_t token = simt::planted == 86 ? key : branch_token(from, key);")
plant(87 attend_matrix.cuh "is_open = keys.all_take_part &&" "is_open = (simt::planted == 87 || keys.all_take_part) &&")
plant(86 attend_rows.cuh "return C::has_branches ? branch_token(from, key) : key;"
  "return C::has_branches && simt::planted != 86 ? branch_token(from, key) : key;")
plant(87 attend_rows.cuh "is_open = keys.all_take_part &&" "is_open = (simt::planted == 87 || keys.all_take_part) &&")
plant(88 attend_vector.cu "token = list(kv, b, key, is_live);"
  "token = simt::planted == 88 ? key : list(kv, b, key, is_live);")
# of a dilated layer in parts: heads are counted from the card's first; distances are the card's
plant(115 attend_matrix.cuh "branch_at(kv, stored, nth, head);"
  "branch_at(kv, stored, nth, simt::planted == 115 ? head - kv.first_kv_head : head);")
plant(115 attend_rows.cuh "branch_at(kv, layer, nth, place.head)"
  "branch_at(kv, layer, nth, simt::planted == 115 ? place.head - kv.first_kv_head : place.head)")
# many rows see keys that are elsewhere
plant(221 attend_rows.cuh "? stripes_even_visible(kv.stripes, from,"
  "? stripes_even_visible(simt::planted == 221 ? stripes{0, 0, 0} : kv.stripes, from,")
plant(116 attend_vector.cu "at = key_position<kind>(a, it, b, key, token);"
  "at = simt::planted == 116 ? token : key_position<kind>(a, it, b, key, token);")
plant(117 attend_vector.cu "see[r].look(a, layer, b, it, position[r],"
  "see[r].look(a, layer, b, it, position[r] + (simt::planted == 117 ? kv.stripes.first : 0),")
# of a tree: hidden nodes count; positions are places; all items have the nodes of the first; tokens
# are copied without their scales
plant(126 attend_vector.cu "!is_live || !see[r].has(it, key)"
  "!is_live || !(simt::planted == 126 || see[r].has(it, key))")
plant(127 attend_vector.cu "position[r] = query_position<kind>(a, it, token);"
  "position[r] = simt::planted == 127 ? it.pos + token : query_position<kind>(a, it, token);")
plant(128 gpu_job.c ".node0 = node0," ".node0 = simt_has_bug(128) ? 0 : node0,")
plant(129 blocks.cu "kv.is_quantised ? p.scale_bytes / 4 : 0;"
  "simt::planted != 129 && kv.is_quantised ? p.scale_bytes / 4 : 0;")
# the same in the prompts' kernels: hidden nodes count, also in latents'; what is NaN in a node does
# not reach those below it; all items have the nodes of the first; nodes have no tiles of their own
plant(265 sm90/prefill_body.cuh "c >= end && !has_node(" "c >= end && simt::planted != 265 && !has_node(")
plant(266 sm90/latent/latent_body.cuh "c >= sink)) && !has_node("
  "c >= sink)) && (simt::planted != 266 || c < end) && !has_node(")
plant(267 sm90/prefill_body.cuh "(S::has_nodes && has_node(nodes[h], key + r - u.pos))"
  "(S::has_nodes && simt::planted != 267 && has_node(nodes[h], key + r - u.pos))")
plant(268 sm90/prefill_unit.cuh "        x.node0 = it.node0;" "        x.node0 = simt::planted == 268 ? 0 : it.node0;")
plant(269 sm90/prefill_unit.cuh "            together.some.end = x.total;"
  "            together.some.end = simt::planted == 269 ? x.pos : x.total;")

# of lists: all items have those of the first; they begin where the caller's do; distances are to
# places in them; a list ends a token early
plant(150 gpu_job.c "items[i].node0 = n_starts;" "items[i].node0 = simt_has_bug(150) ? 0 : n_starts;")
plant(151 gpu_job.c "*n_listed + from->starts[t] - from->starts[0];"
  "(simt_has_bug(151) ? 0 : *n_listed) + from->starts[t] - from->starts[0];")
plant(152 device.cuh "        return token;\n    if (kind != of_tree)"
  "        return simt::planted == 152 ? key : token;\n    if (kind != of_tree)")
plant(153 device.cuh "keys.end = min(keys.begin + it.split_tokens, n);"
  "keys.end = min(keys.begin + it.split_tokens - (simt::planted == 153 ? 1 : 0), n);")
# of lists on matrix units: keys are the first ones; a key's place in its block is that of its place
# in the list
plant(263 attend_rows.cuh "return list(kv, from, key, true);" "return simt::planted == 263 ? key : list(kv, from, key, true);")
plant(264 attend_rows.cuh "(is_live ? token_of(key) : 0) &" "(is_live ? (simt::planted == 264 ? key : token_of(key)) : 0) &")

# of choices: codes count without their scales; all of q takes maxima; the last heads of a group
# have their way alone; counts are read before they are there, or of other lanes not added; lists
# are the first kv head's, the kernel for matrices reads the first query's; what was made is not
# forgotten, by appends and by copies of tokens
plant(160 choose.cu "fminf(min[i], x[i] * scale);" "fminf(min[i], x[i] * (simt::planted == 160 ? 1.0f : scale));")
plant(161 choose.cu "q[r][c][i] > 0.0f ? above[i] : below[i]" "simt::planted == 161 || q[r][c][i] > 0.0f ? above[i] : below[i]")
plant(162 choose.cu "row > 0 ? max(best, bounds[at]) : best" "row > 0 && simt::planted != 162 ? max(best, bounds[at]) : best")
plant(163 choose.cu "        sums[warp_id()] = all;\n    __syncthreads();" "        sums[warp_id()] = all;\n    if (simt::planted != 163)\n        __syncthreads();")
plant(164 choose.cu "before += lane_id() & d ? other : 0.0f;" "before += lane_id() & d && simt::planted != 164 ? other : 0.0f;")
plant(165 device.cuh "chosen_at(a.kv, it, a.n_chosen, query, head);" "chosen_at(a.kv, it, a.n_chosen, query, simt::planted == 165 ? 0 : head);")
plant(166 attend_matrix.cuh "chosen_at(kv, it, a.n_chosen, row0 / kv.group, head);" "chosen_at(kv, it, a.n_chosen, simt::planted == 166 ? 0 : row0 / kv.group, head);")
plant(167 gpu_choose.c "${declared}" "${declared}\nint simt_has_bug(int bug);")
plant(167 gpu_choose.c "        if (!(it->flags & BACKEND_APPEND))" "        if (!(it->flags & BACKEND_APPEND) || simt_has_bug(167))")
plant(210 gpu_choose.c "k->n = k->n < index ?" "k->n = k->n < index || simt_has_bug(210) ?")
# minima count for all of q; q is read before it is there; the first thread block of a row takes its
# blocks, or leaves its count behind; a factor's elements are in another order; of more than 16
# heads the last count, or come too early
plant(256 choose.cu "keep_signed(all[k % 2].w[i], k / 2)" "keep_signed(all[k % 2].w[i], simt::planted == 256 || k / 2)")
plant(257 choose.cu "split_q(x, row, c, q);\n            __syncthreads();"
  "split_q(x, row, c, q);\n            if (simt::planted != 257)\n                __syncthreads();")
plant(258 choose.cu "atomicAdd(arrivals, 1) == gridDim.y - 1;" "simt::planted == 258 ? blockIdx.y == 0 : atomicAdd(arrivals, 1) == gridDim.y - 1;")
plant(259 choose.cu "        if (*is_last)\n            *arrivals = 0;" "        if (*is_last && simt::planted != 259)\n            *arrivals = 0;")
plant(260 vendor/tile_mma.h "x[1] = {{a.z, a.w, b.z, b.w}};" "x[1] = simt::planted == 260 ? tile_operand{{a.w, a.z, b.w, b.z}} : tile_operand{{a.z, a.w, b.z, b.w}};")
plant(261 choose.cu "bounds[at] = is_first ? most" "bounds[at] = is_first || simt::planted == 261 ? most")
plant(262 choose.cu "            if (row > 0)\n                __syncthreads();" "            if (row > 0 && simt::planted != 262)\n                __syncthreads();")
# extremes that are given: the minima are left out; blocks are counted as if all tokens were here;
# those of the block in front are made
# of summaries: what is not there is read; a row says blocks in the place of places, or nothing
# behind its last; all layers have the first one's; they are made behind copies, or where the
# block's are; a pool takes their room; who did not ask is passed over; other items may name them;
# one that nothing was copied to is made of what is there
plant(270 choose.cu "= block < a.n_blocks ?" "= block < a.n_blocks || simt::planted == 270 ?")
plant(271 choose.cu "a.places[first + i] = place;" "a.places[first + i] = simt::planted == 271 ? block : place;")
plant(272 choose.cu "a.places && i < a.n_chosen;" "a.places && i < a.n_chosen && simt::planted != 272;")
plant(273 choose.cu "layer = nth % a.extremes.num_layers;" "layer = simt::planted == 273 ? 0 : nth % a.extremes.num_layers;")
plant(274 gpu_queue.c "    int code = gpu_summaries_make(batch, s);" "    int code = simt_has_bug(274) ? 0 : gpu_summaries_make(batch, s);")
plant(274 gpu_queue.c "        a.n = 0;\n    }\n    return code;" "        a.n = 0;\n    }\n    return code || !simt_has_bug(274) ? code : gpu_summaries_make(batch, s);")
plant(275 gpu_choose.c "p->config.n_summaries > 0)\n            continue;" "(p->config.n_summaries > 0 && !simt_has_bug(275)))\n            continue;")
plant(276 gpu_choose.c "        from += n;" "        from += it->chosen || !simt_has_bug(276) ? n : 0;")
plant(277 choose.cu "to_block = a.list[2 * of + 1];" "to_block = simt::planted == 277 ? block : a.list[2 * of + 1];")
plant(278 gpu_job.c "c->n_summaries > 0 && !it->chosen &&" "c->n_summaries > 0 && !it->chosen && !simt_has_bug(278) &&")
plant(279 gpu_choose.c "        if (block >= c->n_blocks)\n" "        if (block >= c->n_blocks && !simt_has_bug(279))\n")
plant(223 choose.cu "row < 2; ++row) { /* maxima, minima */" "row < (simt::planted == 223 ? 1 : 2); ++row) {")
plant(224 device.cuh "return choice_of(n_chosen, kv.block_shift, kv.stripes,"
  "return choice_of(n_chosen, kv.block_shift, simt::planted == 224 ? stripes{0, 0, 0} : kv.stripes,")
plant(225 choose.cu "a.bytes + given_at(kv, nth, head)\n                       : extremes_at"
  "a.bytes + given_at(kv, nth - (simt::planted == 225 && nth > 0), head)\n                       : extremes_at")
plant(211 attend_rows.cuh "list(a, it, place.row0 / kv.group,"
  "list(a, it, simt::planted == 211 ? 0 : place.row0 / kv.group,")
plant(168 gpu_queue.c "        gpu_extremes_forget(p, list[i].to_block);" "        if (!simt_has_bug(168))\n            gpu_extremes_forget(p, list[i].to_block);")

# of what items have in common: they keep their beginning, or begin where their groups do; later
# queries of a group are its first; a group inside another leaves its results where that one does,
# or has its keys; a group does not see all of its keys, as trees show; the last part of an item is
# forgotten; sink logits count once a part
plant(190 gpu_shared.c "${declared}" "${declared}\nint simt_has_bug(int bug);")
plant(190 gpu_shared.c "        it->pos -= n_blocks << shift;" "        it->pos -= simt_has_bug(190) ? 0 : n_blocks << shift;")
plant(191 gpu_shared.c "        it->table_at += x->groups[group].end_block;" "        it->table_at += simt_has_bug(191) ? 0 : x->groups[group].end_block;")
plant(192 gpu_shared.c "first->q + q * q_row," "first->q + (simt_has_bug(192) ? 0 : q) * q_row,")
plant(193 gpu_shared.c "out_at(b, p, level, query + q)" "out_at(b, p, simt_has_bug(193) ? 1 : level, query + q)")
plant(194 gpu_shared.c "row + g->first_block," "row + (simt_has_bug(194) ? 0 : g->first_block),")
plant(197 gpu_shared.c ".pos = keys - n," ".pos = simt_has_bug(197) ? 0 : keys - n,")
plant(195 merge.cu "k < it.n_parts ?" "k + (simt::planted == 195) < it.n_parts ?")
plant(196 merge.cu "if (sinks != nullptr)" "if (sinks != nullptr && simt::planted != 196)")

# of FP4: a lane's own maximum is its group's; values take another group's scale; they come in
# another order; scales of later groups are the first ones; halves of bytes are swapped; of mxfp4 no
# row reads as NaN, or is stored so; what stands for its row's scale is what was there before
plant(180 append.cuh "        max = warp_max<lanes>(max);" "        max = simt::planted == 180 ? max : warp_max<lanes>(max);")
plant(181 attend_matrix.cuh "of_row[piece * 8 / group_of(dtype)]" "of_row[piece * 8 / (simt::planted == 181 ? 32 : group_of(dtype))]")
plant(182 attend_matrix.cuh "        x[i] = bf16x2_multiply(" "        x[simt::planted == 182 ? i ^ 1 : i] = bf16x2_multiply(")
plant(183 attend_matrix.cuh "groups_at(kv.kv_dtype) + at : 0), has);" "groups_at(kv.kv_dtype) + (simt::planted == 183 ? 0 : at) : 0), has);")
plant(184 device.cuh "e2m1_decode(codes >> (4 * i)) * scale;" "e2m1_decode(codes >> (4 * (simt::planted == 184 ? i ^ 1 : i))) * scale;")
plant(185 device.cuh "*(const uint8_t *)scales == 255 ? NAN" "*(const uint8_t *)scales == 255 && simt::planted != 185 ? NAN")
plant(186 append.cuh "code = is_bad ? 255" "code = is_bad && simt::planted != 186 ? 255")
# two tokens' scales of V are swapped; a row's scales are all its first; two of K's codes are others
plant(188 codes_fp4.cuh "group_scales<is_nv>(group[0], group[1]);" "group_scales<is_nv>(group[simt::planted == 188], group[simt::planted != 188]);")
plant(222 codes_fp4.cuh "lane * record + w, scales + w," "lane * record + w, scales + (simt::planted == 222 ? 0 : w),")
plant(189 codes_fp4.cuh "fp4_pair<is_nv>(c << 8, scales));" "fp4_pair<is_nv>(simt::planted == 189 ? c << 4 : c << 8, scales));")
plant(187 attend_matrix.cuh "        if (piece == 0 && dtype == ATTN_MXFP4)" "        if (piece == 0 && dtype == ATTN_MXFP4 && simt::planted != 187)")

# ---- f32 prompts

# K is read before it is there, V too; hidden keys count; earlier sums keep the old maximum
plant(94 attend_f32.cu "            __syncthreads(); /* K is there," "            if (simt::planted != 94)\n                __syncthreads(); /* K is there,")
plant(95 attend_f32.cu "            __syncthreads(); /* V is there," "            if (simt::planted != 95)\n                __syncthreads(); /* V is there,")
plant(96 attend_f32.cu "(key < keys.end && is_visible(w.see, key)) ? x" "(key < keys.end && (simt::planted == 96 || is_visible(w.see, key))) ? x")
plant(97 attend_f32.cu "fmaf(o[d][i][c], factor[c / 2]," "fmaf(o[d][i][c], simt::planted == 97 ? 1.0f : factor[c / 2],")
# three digits instead of seven
plant(98 attend_f32.cu "        mma_1688_tf32(small[j], a.fin, b0[j].low, b1[j].low);" "        if (simt::planted != 98) mma_1688_tf32(small[j], a.fin, b0[j].low, b1[j].low);")
# inf makes NaN
plant(99 attend_f32.cu "    if (!is_careful && block_any(!is_good))" "    if (!is_careful && simt::planted != 99 && block_any(!is_good))")
# the jump to a window's first tile jumps over sink tokens
plant(100 attend_f32.cu "if (base >= keys.highest.sinks &&" "if ((simt::planted == 100 || base >= keys.highest.sinks) &&")

# ---- prompts over quantised K and V

# keys are decoded before they are appended; scales of another tile; products do not wait for
# scales; all launches have the first heads' keys; items have each other's keys
plant(101 sm90/prefill_codes.cu "    chain_wait();" "    if (simt::planted != 101) chain_wait();")
plant(102 sm90/prefill_load.cuh "at.k_scales(x))," "at.k_scales(x + (simt::planted == 102))),")
plant(103 sm90/prefill_load.cuh "S::slabs * 128 + more);" "S::slabs * 128 + (simt::planted == 103 ? 0 : more));")
plant(104 sm90/prefill_codes.cu "head = a.head0 + blockIdx.y;" "head = (simt::planted == 104 ? 0 : a.head0) + blockIdx.y;")
plant(220 gpu_job.c "            n += more;" "            n += simt_has_bug(220) ? 0 : more;")

# ---- prompts whose keys are cut

# a part computes the tiles of another; the last to come has its own maximum alone; counts go on;
# a part goes on to the end of all keys
plant(105 sm90/prefill_unit.cuh "x.tiles.n -= from;" "x.tiles.n -= simt::planted == 105 ? 0 : from;")
plant(106 sm90/prefill_body.cuh "m[h] = fmaxf(m[h], ml_of(k, h)->x);" "m[h] = fmaxf(m[h], ml_of(simt::planted == 106 ? u.part : k, h)->x);")
plant(107 sm90/prefill_body.cuh "                *n_done = 0;" "                *n_done = simt::planted == 107;")
plant(108 sm90/prefill_unit.cuh "min(hidden.last, x.n_tiles);" "min(hidden.last, simt::planted == 108 ? ~0u : x.n_tiles);")

# of units of few rows: the other half of q is that of another unit; parts' maxima lie where others'
# do
plant(251 sm90/prefill_load.cuh "from, from + half,"
  "from, from + (simt::planted == 251 && S::R == PREFILL_FEW_ROWS ? from ^ half : half),")
plant(252 sm90/prefill_body.cuh "(float2 *)p.part_ml + slot_of(k) * S::R + row"
  "(float2 *)p.part_ml + slot_of(k) * (simt::planted == 252 && S::R == PREFILL_FEW_ROWS ? 32 : S::R) + row")
# a block's second unit is that of its neighbour
plant(250 sm90/prefill_load.cuh "2 * gridDim.x - 1 - blockIdx.x"
  "2 * gridDim.x - (simt::planted != 250) - blockIdx.x")

# ---- latents

# weights are used before they are there; factors of another tile; what is hidden is not cleared; a
# row's parts have no common maximum; weights do not lie in the order that they are looked for
plant(140 sm90/latent/latent_body.cuh "            barrier_wait(at.weighed_bar(nth), nth / S::stages & 1);" "            if (simt::planted != 140) barrier_wait(at.weighed_bar(nth), nth / S::stages & 1);")
plant(141 sm90/latent/latent_body.cuh "x.catch_up(at.factors + nth % S::stages" "x.catch_up(at.factors + (nth + (simt::planted == 141)) % S::stages")
plant(142 sm90/latent/latent_body.cuh "            if (!is_seen)" "            if (!is_seen && simt::planted != 142)")
plant(143 sm90/latent/latent_body.cuh "    m = gpu::warp_max<32>(m);" "    m = simt::planted == 143 ? m : gpu::warp_max<32>(m);")
plant(144 sm90/latent/latent_body.cuh "(j % 2 ^ g / 4) * 16" "(j % 2 ^ (simt::planted == 144 ? 0 : g / 4)) * 16")

# of lists: rows are passed on before they are there; a token of another place of its block; the
# list of the next query; what lies behind a row is read
plant(212 sm90/latent/latent_body.cuh "        gpu::copy_wait<pending>();" "        if (simt::planted != 212) gpu::copy_wait<pending>();")
plant(213 sm90/latent/latent_body.cuh "(listed & (p.block_tokens - 1))" "((listed ^ (simt::planted == 213)) & (p.block_tokens - 1))")
plant(214 sm90/prefill_unit.cuh "u->list0 = starts[0];" "u->list0 = starts[simt::planted == 214];")
plant(215 sm90/latent/latent_body.cuh "from != 0 && piece * 16 < row_bytes" "from != 0 && (piece * 16 < row_bytes || simt::planted == 215)")

# ---- outputs of several devices

# parts that have nothing of a query count; weights are not of one sum; the word is not waited for;
# a launch begins with the rows of the one before
plant(109 merge.cu "(uint64_t)k * a.stripe <= last" "(simt::planted == 109 || (uint64_t)k * a.stripe <= last)")
plant(110 merge.cu "* log2e) / sum" "* log2e) / (simt::planted == 110 ? 1.0f : sum)")
plant(111 gpu_queue.c "i < batch->n_merge_waits && !code" "i < batch->n_merge_waits && !simt_has_bug(111) && !code")
plant(112 gpu_queue.c "        a.n_items = a.n_rows = 0;" "        a.n_items = 0, a.n_rows *= simt_has_bug(112);")

# ---- heads and latents

# products before what they need is there; a stage is filled while it is read; what follows a row
# counts; the rotated part comes from the row's beginning; weights of another layer; other weights
# are not refused; blocks lie where weights do; a row's outs go on behind its end
plant(230 heads/heads.cu "        __syncthreads(); /* the step is there */" "        if (simt::planted != 230) __syncthreads();")
plant(231 heads/heads.cu "        __syncthreads(); /* its stage may be filled again */" "        if (simt::planted != 231) __syncthreads();")
plant(232 heads/heads.cu "        const bool has_x = r < p.n_rows && k < p.k;\n        copy16" "        const bool has_x = r < p.n_rows && (simt::planted == 232 || k < p.k);\n        copy16")
plant(233 heads/heads.cu "(x_row<false>(a, p, r) + a.nope * e))[piece];" "(x_row<false>(a, p, r) + (simt::planted == 233 ? 0 : a.nope * e)))[piece];")
plant(234 heads/gpu_heads.c "${declared}" "${declared}\nint simt_has_bug(int bug);")
plant(234 heads/gpu_heads.c "j->head_rows[at - 1].layer == it->layer)" "(simt_has_bug(234) || j->head_rows[at - 1].layer == it->layer))")
plant(235 heads/gpu_heads.c "memcmp(there, bytes, n) != 0)" "memcmp(there, bytes, n) != 0 && !simt_has_bug(235))")
plant(236 heads/heads.cu "        if (column < p.n)\n            *(uint4 *)" "        if (column < p.n || simt::planted == 236)\n            *(uint4 *)")
# outputs of cards are merged as if they were latents, not heads
plant(285 gpu_queue.c ".dv = backend_out_dim(c)," ".dv = simt_has_bug(285) ? c->head_dim_v : backend_out_dim(c),")
plant(237 heads/gpu_heads.c "weights_counted(&p->config, p->weights_have[i]);" "simt_has_bug(237) ? 0 : weights_counted(&p->config, p->weights_have[i]);")

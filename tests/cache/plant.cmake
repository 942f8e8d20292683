# The bugs that planted.sh switches on by KV_BUG:
#   cmake -DFROM=source-tree -DTO=dir -P plant.cmake
include(${CMAKE_CURRENT_LIST_DIR}/../plant.cmake)
set(PLANT_HEAD "extern int kv_bug;\n")

# an append writes to a block that is in idle memory
plant(280 cache/append.c "        if (kv_is_place(row[i]) && !kv_in_hole(kv, p, seq, i))\n            return true;"
  "        if (kv_bug != 280 && kv_is_place(row[i]) && !kv_in_hole(kv, p, seq, i))\n            return true;")
# a block that an append has replaced on its way out goes all the same
plant(281 cache/idle.c "kv_own_row(kv, m->seq)[x->index] == x->block &&"
  "(kv_own_row(kv, m->seq)[x->index] == x->block || kv_bug == 281) &&")
# what lies behind a block that is out is published
plant(282 cache/prefix.c "            break; /* until it is back */"
  "            if (kv_bug != 282)\n                break;")
# a block goes out though another one refers to it
plant(283 cache/idle.c "           kv_block(kv, p, entry)->n_refs == 1;" "           (kv_block(kv, p, entry)->n_refs == 1 || kv_bug == 283);")

/* peers.c: fills the engines' table of peers_ops with the functions of this folder. It turns an
 * engine's sequence ids into the names and cards that those take. */
#include "daemon/cards/peers.h"

#include "daemon/cards/internal.h"
#include "daemon/cards/move.h"
#include "daemon/cards/move_hold.h"
#include "daemon/cards/move_leave.h"
#include "daemon/cards/names.h"
#include "daemon/cards/route.h"
#include "daemon/cards/session.h"
#include "daemon/cards/split/backend.h"
#include "daemon/cards/step.h"
#include "daemon/cards/step_shard.h"

static struct kv_seq_info info_of(const struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    return info;
}

static bool know(struct engine *e, struct seq_name name)
{
    return cards_know(cards_of(e), name);
}

static bool know_elsewhere(struct engine *e, struct seq_name name)
{
    return cards_are_elsewhere(cards_of(e), e->env.card, name);
}

static void seq_opened(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info = info_of(e, seq);
    cards_opened(cards_of(e), e->env.card, (struct seq_name){info.tenant, info.name},
                 info.pool.index, info.epoch);
}

static void seq_epoch(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info = info_of(e, seq);
    cards_epoch(cards_of(e), e->env.card, (struct seq_name){info.tenant, info.name}, info.epoch);
    cards_move_cut(e, seq.index, info.n_blocks);
}

static void seq_closes(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info = info_of(e, seq);
    cards_move_closed(e, seq.index);
    cards_closed(cards_of(e), e->env.card, (struct seq_name){info.tenant, info.name});
}

const struct peers_ops cards_peers_ops = {
    .split = &cards_split_ops,
    .submit = cards_route,
    .others_of_plan = cards_of_plan,
    .know = know,
    .know_elsewhere = know_elsewhere,
    .seq_opened = seq_opened,
    .seq_epoch = seq_epoch,
    .seq_closes = seq_closes,
    .session_begin = cards_session_begin,
    .session_end = cards_session_end,
    .session_release = cards_session_release,
    .request_begin = cards_request_begin,
    .request_done = cards_request_done,
    .step_counts = cards_step_counts,
    .item_is_foreign = cards_step_is_foreign,
    .step_reserve = cards_step_reserve,
    .step_done = cards_step_shard_done,
    .turn = cards_move_turn,
    .stop = cards_move_stop,
    .hold = cards_hold,
    .held = cards_hold_end,
    .move = cards_move_ask,
    .moves_pool = cards_move_is_of,
    .moves_seq = cards_move_is_of_seq,
    .is_there = cards_move_is_there,
    .reads_pool = cards_move_reads,
};

/* peers.h: the functions that an engine of several cards calls to reach the others
 * (engine/core/peers.h). */
#ifndef ATTND_DAEMON_CARDS_PEERS_H
#define ATTND_DAEMON_CARDS_PEERS_H

#include "daemon/engine/core/peers.h"

extern const struct peers_ops cards_peers_ops;

#endif

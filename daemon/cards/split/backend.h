/* backend.h: a backend on top of the backends of all devices, for pools that are split over
 * them. */
#ifndef ATTND_DAEMON_CARDS_SPLIT_BACKEND_H
#define ATTND_DAEMON_CARDS_SPLIT_BACKEND_H

#include "daemon/engine/core/peers.h"

extern const struct split_ops cards_split_ops;

#endif

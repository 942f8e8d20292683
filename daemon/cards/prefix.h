/* prefix.h: which card a prompt's beginning is likely to be on. Any thread. */
#ifndef ATTND_DAEMON_CARDS_PREFIX_H
#define ATTND_DAEMON_CARDS_PREFIX_H

#include "daemon/cards/cards.h"

/* The live card that is likely to have most of what the prompt begins with; CARDS_MAX: none is. */
uint32_t cards_prefix_card(struct cards *c, const Attnd__Open *o);
void cards_prefix_note(struct cards *c, const Attnd__Open *o, uint32_t card);

#endif

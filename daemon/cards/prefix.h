/* prefix.h: guesses which card has a prompt's beginning in its cache. Any thread. */
#ifndef ATTND_DAEMON_CARDS_PREFIX_H
#define ATTND_DAEMON_CARDS_PREFIX_H

#include "daemon/cards/cards.h"

/* The live card that is likely to have the longest beginning of the prompt; CARDS_MAX: none. */
uint32_t cards_prefix_card(struct cards *c, const Attnd__Open *o);
/* Notes that the prompt went to this card. */
void cards_prefix_note(struct cards *c, const Attnd__Open *o, uint32_t card);

#endif

/* record.h: a member as it is written down, clients/cluster/src/attnd_cluster/keys.py's Member. */
#ifndef RECORD_H
#define RECORD_H

#include <jansson.h>
#include <stdbool.h>

/* "" where it has no such text. */
const char *text_of(const json_t *record, const char *name);
/* Whether it has a name and a url. */
bool record_is_member(const json_t *record);

#endif

/* record.c: what a member's record has. */
#include "record.h"

const char *text_of(const json_t *record, const char *name)
{
    const char *text = json_string_value(json_object_get(record, name));
    return text != NULL ? text : "";
}

bool record_is_member(const json_t *record)
{
    return text_of(record, "name")[0] != '\0' && text_of(record, "url")[0] != '\0';
}

/* file.c: a registry that people write, read whole each time: write a new one and rename it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "record.h"
#include "registry.h"

struct file_registry {
    struct registry registry;
    char path[];
};

static json_t *file_read(struct registry *r, uint64_t timeout_us, char store[64],
                         char why[WHY_BYTES])
{
    (void)timeout_us;
    const char *path = ((struct file_registry *)r)->path;
    json_error_t wrong;
    json_t *content = json_load_file(path, 0, &wrong), *found = json_object();
    const json_t *listed = json_object_get(content, "members");
    size_t i;
    json_t *record;
    bool is_right = json_is_array(listed);
    if (content == NULL)
        snprintf(why, WHY_BYTES, "%.100s: line %d: %.100s", path, wrong.line, wrong.text);
    else if (!is_right)
        snprintf(why, WHY_BYTES, "%.200s: members is missing", path);
    json_array_foreach(listed, i, record)
    {
        const char *name = text_of(record, "name");
        bool is_new = json_object_get(found, name) == NULL;
        if (is_right && !(record_is_member(record) && is_new))
            snprintf(why, WHY_BYTES,
                     "%.100s: members: entry %zu (%.60s) has no name and url of its own", path, i,
                     name);
        is_right &= record_is_member(record) && is_new && json_object_set(found, name, record) == 0;
    }
    json_decref(content);
    strcpy(store, "file");
    if (is_right)
        return found;
    json_decref(found);
    return NULL;
}

static void file_close(struct registry *r)
{
    free(r);
}

attn_status file_open(const char *url, const atomic_bool *ends, struct registry **out,
                      char why[WHY_BYTES])
{
    (void)ends, (void)why;
    const char *path = url + strlen("file://");
    struct file_registry *f = calloc(1, sizeof *f + strlen(path) + 1);
    if (f == NULL)
        return ATTN_ENOMEM;
    f->registry = (struct registry){.is_static = true, .read = file_read, .close = file_close};
    strcpy(f->path, path);
    *out = &f->registry;
    return ATTN_OK;
}

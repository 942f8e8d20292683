/* path.c: which file of settings belongs to this program. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config/option.h"

void config_path(char *out, size_t out_bytes)
{
    char prefix[1000];
    ssize_t n = readlink("/proc/self/exe", prefix, sizeof(prefix) - 1);
    prefix[n > 0 ? n : 0] = '\0';
    for (int i = 0; i < 2; i++) { /* without /bin/attnd */
        char *slash = strrchr(prefix, '/');
        if (slash != NULL)
            *slash = '\0';
    }
    snprintf(out, out_bytes, "%s/etc/attnd/attnd.conf", strcmp(prefix, "/usr") == 0 ? "" : prefix);
}

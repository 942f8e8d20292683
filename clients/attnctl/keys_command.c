/* keys_command.c: attnctl keys: certificates and tokens for networked workers. It needs no daemon,
 * so it has a command line of its own. */
#include <getopt.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clients/attnctl/attnctl.h"
#include "clients/attnctl/keys.h"

enum { MAX_NAMES = 64, DEFAULT_DAYS = 730 };

static const char help[] =
    "usage: attnctl keys DIR [--host NAME]... [--tenant NAME]... [--days N] [--json]\n"
    "\n"
    "Makes in DIR what a daemon and its workers need to know each other: a CA, a certificate of "
    "the\n"
    "daemon, and for each tenant a certificate, a token and a section of tenants.conf. Prints the\n"
    "lines for attnd.conf and for the workers' environment. What DIR has already stays as it is, "
    "so\n"
    "that a later call adds tenants.\n"
    "\n"
    "  --host NAME     a name or address of the daemon's host (default: this host's name,\n"
    "                  localhost, 127.0.0.1 and ::1)\n"
    "  --tenant NAME   who connects (default: workers)\n"
    "  --days N        that certificates are good for (default 730; the CA's has 3650)\n"
    "  --json          the files as one JSON object\n";

static int usage(const char *what, const char *value)
{
    fprintf(stderr, "attnctl keys: %s%s (attnctl keys --help)\n", what, value);
    return 2;
}

static json_t *path_of(const struct keys_wanted *w, const char *name, const char *ending)
{
    return json_sprintf("%s/%s%s", w->dir, name, ending);
}

static json_t *json_of(const struct keys_wanted *w)
{
    json_t *tenants = json_array();
    for (size_t i = 0; i < w->n_tenants; i++) {
        const char *name = w->tenants[i];
        json_array_append_new(tenants,
                              json_pack("{s:s, s:o, s:o, s:o}", "tenant", name, "token",
                                        path_of(w, name, ".token"), "cert",
                                        path_of(w, name, ".crt"), "key", path_of(w, name, ".key")));
    }
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "ca", path_of(w, "ca", ".crt"), "ca_key",
                     path_of(w, "ca", ".key"), "server_cert", path_of(w, "server", ".crt"),
                     "server_key", path_of(w, "server", ".key"), "tenants_file",
                     path_of(w, "tenants", ".conf"), "tenants", tenants);
}

int keys_command(int argc, char **argv, bool is_json)
{
    static const struct option own_options[] = {
        {"host", required_argument, NULL, 'o'}, {"tenant", required_argument, NULL, 't'},
        {"days", required_argument, NULL, 'd'}, {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},       {NULL, 0, NULL, 0},
    };
    char own_name[256] = "localhost", why[512], *end;
    const char *hosts[MAX_NAMES + 4], *tenants[MAX_NAMES];
    struct keys_wanted w = {.hosts = hosts, .tenants = tenants, .days = DEFAULT_DAYS};
    int opt;
    while ((opt = getopt_long(argc, argv, "h", own_options, NULL)) != -1) {
        if (opt == 'h') {
            fputs(help, stdout);
            return printed();
        }
        if (opt == '?')
            return 2; /* getopt has said why */
        if (opt == 'j') {
            is_json = true;
        } else if (opt == 'd') {
            long days = strtol(optarg, &end, 10);
            if (*end != '\0' || end == optarg || days < 1 || days > 36500)
                return usage("--days is not a number from 1 to 36500: ", optarg);
            w.days = (int)days;
        } else if ((opt == 'o' ? w.n_hosts : w.n_tenants) == MAX_NAMES) {
            return usage("more than 64 names: ", optarg);
        } else if (opt == 'o') {
            hosts[w.n_hosts++] = optarg;
        } else {
            tenants[w.n_tenants++] = optarg;
        }
    }
    if (argc - optind != 1)
        return usage("expected one directory", "");
    w.dir = argv[optind];
    if (w.n_tenants == 0)
        tenants[w.n_tenants++] = "workers";
    if (w.n_hosts == 0) {
        gethostname(own_name, sizeof own_name - 1);
        hosts[w.n_hosts++] = own_name;
        hosts[w.n_hosts++] = "localhost";
        hosts[w.n_hosts++] = "127.0.0.1";
        hosts[w.n_hosts++] = "::1";
    }
    if (!keys_make(&w, why, sizeof why)) {
        fprintf(stderr, "attnctl keys: %s\n", why);
        return 1;
    }
    if (is_json) {
        json_t *root = json_of(&w);
        print_json(root);
        json_decref(root);
    } else {
        keys_explain(&w, stdout);
    }
    return printed();
}

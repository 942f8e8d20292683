/* live.c: top and watch: ask again and again, until the count is reached, the daemon goes or the
 * reader of stdout does.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "clients/attnctl/attnctl.h"
#include "proto/attn_time.h"

static const uint64_t WATCH_WAIT_US = 500000; /* which a signal does not cut short */
static const double SOON_SECONDS = 0.01;

static volatile sig_atomic_t ended_by; /* a signal; 0: none has come */

static void on_signal(int number)
{
    ended_by = number;
}

/* The first SIGINT, SIGTERM or SIGHUP ends the command in good order; a second one at once. */
static void catch_signals(void)
{
    const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND}, was;
    for (int i = 0; i < 3; i++)
        if (sigaction(numbers[i], NULL, &was) == 0 && was.sa_handler != SIG_IGN)
            sigaction(numbers[i], &a, NULL);
}

void die_of_signal(void)
{
    if (ended_by == 0)
        return;
    signal(ended_by, SIG_DFL);
    raise(ended_by);
}

void pause_for(uint64_t us)
{
    struct timespec t = {.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000};
    while (ended_by == 0 && nanosleep(&t, &t) != 0)
        ;
}

static double now_seconds(void)
{
    return (double)attn_now_ns() * 1e-9;
}

static double number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

/* --- top -------------------------------------------------------------------------------------- */

struct sample {
    json_t *stats, *pools;
    double at;
};

static void sample_free(struct sample *s)
{
    json_decref(s->stats);
    json_decref(s->pools);
    *s = (struct sample){0};
}

static attn_status sample_take(attn_client *c, const struct arguments *a, struct sample *out)
{
    *out = (struct sample){.at = now_seconds()};
    attn_status st = ask_stats(c, a, &out->stats);
    if (st != ATTN_OK || json_object_get(out->stats, "tenant") != NULL)
        return st;
    return ask_pools(c, a, &out->pools);
}

static double rate(const struct sample *now, const struct sample *old, const char *counter)
{
    double seconds = now->at - old->at;
    return seconds > 0 ? (number(now->stats, counter) - number(old->stats, counter)) / seconds : 0;
}

/* Steps that were answered with anything but ok, per second. */
static double refused_rate(const struct sample *now, const struct sample *old)
{
    double n = 0;
    const char *status;
    json_t *value;
    const json_t *before = json_object_get(old->stats, "steps_answered_total");
    json_object_foreach(json_object_get(now->stats, "steps_answered_total"), status, value)
    {
        if (strcmp(status, "ok") != 0)
            n += json_number_value(value) - number(before, status);
    }
    return n / (now->at > old->at ? now->at - old->at : 1);
}

/* What each card does, where there are several. */
static json_t *top_cards(const struct sample *now, const struct sample *old)
{
    json_t *list = json_array(), *card;
    const json_t *before = json_object_get(old->stats, "cards");
    double seconds = now->at > old->at ? now->at - old->at : 1;
    size_t i;
    json_array_foreach(json_object_get(now->stats, "cards"), i, card)
    {
        const json_t *was = json_array_get(before, i);
        double busy =
            number(card, "card_device_seconds_total") - number(was, "card_device_seconds_total");
        double batches = number(card, "card_batches_total") - number(was, "card_batches_total");
        double bytes =
            number(card, "card_kv_read_bytes_total") - number(was, "card_kv_read_bytes_total");
        json_array_append_new(list,
                              json_pack("{s:I, s:f, s:f, s:f, s:I, s:I, s:I, s:b}", "device",
                                        (json_int_t)number(card, "device"), "busy", busy / seconds,
                                        "batches_per_second", batches / seconds,
                                        "kv_read_bytes_per_second", bytes / seconds, "sequences",
                                        (json_int_t)number(card, "card_sequences"), "blocks",
                                        (json_int_t)number(card, "card_blocks"), "blocks_free",
                                        (json_int_t)number(card, "card_blocks_free"), "is_lost",
                                        number(card, "card_lost") != 0));
    }
    return list;
}

/* What a tenant sees: its own work. */
static json_t *top_of_tenant(const struct sample *now, const struct sample *old)
{
    double failed = rate(now, old, "tenant_steps_failed_total");
    return json_pack("{s:s, s:f, s:f, s:f, s:I, s:I, s:I, s:I}", "tenant",
                     json_string_value(json_object_get(now->stats, "tenant")), "steps_per_second",
                     rate(now, old, "tenant_steps_total") + failed, "refused_per_second", failed,
                     "device_busy", rate(now, old, "tenant_device_seconds_total"),
                     "bytes_in_flight", (json_int_t)number(now->stats, "tenant_bytes_in_flight"),
                     "sessions", (json_int_t)number(now->stats, "tenant_sessions"), "sequences",
                     (json_int_t)number(now->stats, "tenant_sequences"), "pool_blocks",
                     (json_int_t)number(now->stats, "tenant_pool_blocks"));
}

static json_t *top_object(const struct sample *now, const struct sample *old)
{
    if (json_object_get(now->stats, "tenant") != NULL)
        return top_of_tenant(now, old);
    double batches = rate(now, old, "batches_total");
    json_t *stages = json_object(), *h;
    const char *name;
    const json_t *before = json_object_get(old->stats, "step_stage_seconds");
    json_object_foreach(json_object_get(now->stats, "step_stage_seconds"), name, h)
    {
        json_object_set_new(stages, name, latency_of(h, json_object_get(before, name)));
    }
    json_t *cards = top_cards(now, old);
    size_t n_cards = json_array_size(cards) > 0 ? json_array_size(cards) : 1;
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:O, "
                     "s:o}",
                     "steps_per_second", rate(now, old, "steps_received_total"),
                     "tokens_per_second", rate(now, old, "step_tokens_total"), "refused_per_second",
                     refused_rate(now, old), "batches_per_second", batches, "items_per_batch",
                     batches > 0 ? rate(now, old, "batch_items_total") / batches : 0.0,
                     "device_busy", rate(now, old, "device_seconds_total") / (double)n_cards,
                     "kv_read_bytes_per_second", rate(now, old, "kv_read_bytes_total"),
                     "steps_in_flight", (json_int_t)number(now->stats, "steps_in_flight"),
                     "queue_requests", (json_int_t)number(now->stats, "queue_requests"), "sessions",
                     (json_int_t)number(now->stats, "sessions"), "sequences",
                     (json_int_t)number(now->stats, "sequences"), "blocks",
                     (json_int_t)number(now->stats, "blocks"), "blocks_free",
                     (json_int_t)number(now->stats, "blocks_free"), "cards", cards, "pools",
                     json_object_get(now->pools, "pools"), "stages", stages);
}

static void print_tenant_line(const json_t *t, bool is_first)
{
    if (is_first)
        printf("%10s %9s %6s %15s %8s %9s %11s\n", "steps/s", "refused/s", "busy%",
               "bytes_in_flight", "sessions", "sequences", "pool_blocks");
    printf("%10.0f %9.0f %6.1f %15.0f %8.0f %9.0f %11.0f\n", number(t, "steps_per_second"),
           number(t, "refused_per_second"), 100 * number(t, "device_busy"),
           number(t, "bytes_in_flight"), number(t, "sessions"), number(t, "sequences"),
           number(t, "pool_blocks"));
}

static void print_top_line(const json_t *t, bool is_first)
{
    if (is_first)
        printf("%10s %10s %9s %9s %8s %6s %9s %9s %10s %12s\n", "steps/s", "tokens/s", "refused/s",
               "batches/s", "items", "busy%", "GB/s", "in_flight", "sequences", "blocks_free");
    printf("%10.0f %10.0f %9.0f %9.0f %8.1f %6.1f %9.2f %9.0f %10.0f %12.0f\n",
           number(t, "steps_per_second"), number(t, "tokens_per_second"),
           number(t, "refused_per_second"), number(t, "batches_per_second"),
           number(t, "items_per_batch"), 100 * number(t, "device_busy"),
           number(t, "kv_read_bytes_per_second") * 1e-9, number(t, "steps_in_flight"),
           number(t, "sequences"), number(t, "blocks_free"));
    json_t *card;
    size_t i;
    json_array_foreach(json_object_get(t, "cards"), i, card)
    {
        printf("%10s %10.0f %9s %9.0f %8s %6.1f %9.2f %9s %10.0f %12.0f%s\n", "card",
               number(card, "device"), "", number(card, "batches_per_second"), "",
               100 * number(card, "busy"), number(card, "kv_read_bytes_per_second") * 1e-9, "",
               number(card, "sequences"), number(card, "blocks_free"),
               json_is_true(json_object_get(card, "is_lost")) ? "  lost" : "");
    }
}

/* A bar of the share. */
static void print_bar(double share, bool has_colour)
{
    enum { WIDTH = 30 };
    int n = (int)(share * WIDTH + 0.5);
    n = n < 0 ? 0 : n > WIDTH ? WIDTH : n;
    const char *green = "\x1b[32m", *yellow = "\x1b[33m", *red = "\x1b[31m";
    const char *colour = !has_colour ? "" : share < 0.75 ? green : share < 0.95 ? yellow : red;
    printf("[%s%.*s%s%*s] %5.1f %%", colour, n, "||||||||||||||||||||||||||||||",
           has_colour ? "\x1b[0m" : "", WIDTH - n, "", 100 * share);
}

static void print_top_cards(const json_t *t, bool has_colour)
{
    json_t *card;
    size_t i;
    json_array_foreach(json_object_get(t, "cards"), i, card)
    {
        printf("card %-3.0f ", number(card, "device"));
        print_bar(number(card, "busy"), has_colour);
        printf("  %8.2f GB/s %8.0f sequences %10.0f blocks free%s\n",
               number(card, "kv_read_bytes_per_second") * 1e-9, number(card, "sequences"),
               number(card, "blocks_free"),
               json_is_true(json_object_get(card, "is_lost")) ? "  lost" : "");
    }
}

static void print_top_screen(const struct arguments *a, const json_t *t, bool has_colour)
{
    const char *bold = has_colour ? "\x1b[1m" : "", *off = has_colour ? "\x1b[0m" : "", *name;
    json_t *row;
    size_t i;
    printf("\x1b[H\x1b[J%sattnd%s %s\n\n", bold, off, a->endpoint);
    printf("steps    %10.0f /s  %10.0f tokens/s  %8.0f refused/s  %6.0f in flight  %6.0f queued\n",
           number(t, "steps_per_second"), number(t, "tokens_per_second"),
           number(t, "refused_per_second"), number(t, "steps_in_flight"),
           number(t, "queue_requests"));
    printf("batches  %10.0f /s  %10.1f items     %8.2f GB/s of K and V\n",
           number(t, "batches_per_second"), number(t, "items_per_batch"),
           number(t, "kv_read_bytes_per_second") * 1e-9);
    printf("sessions %10.0f     %10.0f sequences\n", number(t, "sessions"), number(t, "sequences"));
    printf("device   ");
    print_bar(number(t, "device_busy"), has_colour);
    double blocks = number(t, "blocks");
    printf("\nblocks   ");
    print_bar(blocks > 0 ? 1 - number(t, "blocks_free") / blocks : 0, has_colour);
    printf("\n");
    print_top_cards(t, has_colour);
    printf("\n%s%-10s %10s %10s %10s  us%s\n", bold, "stage", "p50", "p90", "p99", off);
    json_object_foreach(json_object_get(t, "stages"), name, row)
    {
        printf("%-10s %10.1f %10.1f %10.1f\n", name, number(row, "p50") * 1e6,
               number(row, "p90") * 1e6, number(row, "p99") * 1e6);
    }
    printf("\n%s%-40s %10s %10s %10s%s\n", bold, "pool", "blocks", "free", "sequences", off);
    json_array_foreach(json_object_get(t, "pools"), i, row)
    {
        printf("%-40s %10.0f %10.0f %10.0f\n", json_string_value(json_object_get(row, "name")),
               number(row, "blocks"), number(row, "free_blocks"), number(row, "sequences"));
    }
}

int run_top(attn_client *c, const struct arguments *a)
{
    bool is_terminal = isatty(STDOUT_FILENO);
    const char *no_colour = getenv("NO_COLOR");
    bool has_colour = is_terminal && (no_colour == NULL || no_colour[0] == '\0');
    struct sample old, now = {0};
    attn_status st = sample_take(c, a, &old);
    int rc = EXIT_DONE;
    catch_signals();
    for (uint32_t i = 0; st == ATTN_OK && rc == EXIT_DONE && (a->count == 0 || i < a->count); i++) {
        pause_for(a->interval_us);
        if (ended_by != 0)
            break;
        st = sample_take(c, a, &now);
        if (st != ATTN_OK)
            break;
        json_t *t = top_object(&now, &old);
        if (a->is_json)
            print_json(t);
        else if (json_object_get(t, "tenant") != NULL)
            print_tenant_line(t, i == 0);
        else if (is_terminal)
            print_top_screen(a, t, has_colour);
        else
            print_top_line(t, i == 0);
        json_decref(t);
        rc = printed();
        sample_free(&old);
        old = now;
        now = (struct sample){0};
    }
    sample_free(&old);
    sample_free(&now);
    return st == ATTN_OK ? rc : failed(st);
}

/* --- watch ------------------------------------------------------------------------------------ */

static void print_event(const json_t *event)
{
    const char *key;
    json_t *value;
    const char *ts = json_string_value(json_object_get(event, "ts"));
    const char *level = json_string_value(json_object_get(event, "level"));
    const char *msg = json_string_value(json_object_get(event, "msg"));
    printf("%s %-5s %s", ts != NULL ? ts : "?", level != NULL ? level : "?",
           msg != NULL ? msg : "?");
    json_object_foreach((json_t *)event, key, value)
    {
        if (strcmp(key, "ts") == 0 || strcmp(key, "level") == 0 || strcmp(key, "msg") == 0 ||
            strcmp(key, "number") == 0)
            continue;
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
        printf(" %s=%s", key, text != NULL ? text : "?");
        free(text);
    }
    putchar('\n');
}

/* What is in a page, up to the count; false: that is reached. */
static bool print_page(const struct arguments *a, const json_t *page, uint32_t *n_printed)
{
    json_t *event;
    size_t i;
    double dropped = number(page, "dropped");
    if (dropped > 0 && a->is_json) {
        json_t *lost = json_pack("{s:I}", "dropped", (json_int_t)dropped);
        print_json(lost);
        json_decref(lost);
    } else if (dropped > 0) {
        printf("... %.0f events went by unseen\n", dropped);
    }
    json_array_foreach(json_object_get(page, "events"), i, event)
    {
        (a->is_json ? print_json : print_event)(event);
        if (++*n_printed == a->count)
            return false;
    }
    return true;
}

/* The daemon keeps each question until something is logged; where it answers at once with nothing
 * (it drains, or too many watch), we wait ourselves. */
int run_watch(attn_client *c, const struct arguments *a)
{
    uint64_t after = 0;
    uint32_t n_printed = 0;
    catch_signals();
    for (bool goes_on = true; goes_on && ended_by == 0;) {
        char *text = NULL;
        double asked_at = now_seconds();
        attn_status st = attn_client_watch(c, after, WATCH_WAIT_US, a->timeout_us, &text);
        if (st != ATTN_OK)
            return failed(st);
        json_t *page = json_loads(text, 0, NULL);
        attn_free(text);
        goes_on = print_page(a, page, &n_printed);
        bool is_early = json_array_size(json_object_get(page, "events")) == 0 &&
                        now_seconds() - asked_at < SOON_SECONDS;
        after = (uint64_t)number(page, "next");
        json_decref(page);
        int rc = printed();
        if (rc != EXIT_DONE)
            return rc;
        if (is_early)
            pause_for(a->interval_us);
    }
    return EXIT_DONE;
}

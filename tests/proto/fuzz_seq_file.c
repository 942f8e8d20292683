/* fuzz_seq_file.c: fuzz target: the input is the head of an exported sequence, as a file has it
 * whose blocks are all there. A head with a wrong checksum gets the right one, or nothing behind
 * the checksum would ever be looked at. What decodes encodes to the same bytes. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "proto/seq_file.h"

enum { FILE_BYTES_AT = 88 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char why[128];
    uint64_t file_bytes = n, head_bytes;
    if (n >= SEQ_FILE_FIXED_BYTES)
        memcpy(&file_bytes, data + FILE_BYTES_AT, sizeof file_bytes);
    size_t n_fixed = n < SEQ_FILE_FIXED_BYTES ? n : SEQ_FILE_FIXED_BYTES;
    attn_status st = seq_file_head_find(data, n_fixed, file_bytes, &head_bytes, why, sizeof why);
    if (st != ATTN_OK || head_bytes > n)
        return 0;
    uint8_t *head = malloc(head_bytes), *again = malloc(head_bytes);
    struct seq_file f;
    if (head == NULL || again == NULL)
        abort();
    memcpy(head, data, head_bytes);
    struct checksum sum = checksum_of(head, head_bytes - sizeof sum);
    memcpy(head + head_bytes - sizeof sum, &sum, sizeof sum);
    if (seq_file_decode(head, head_bytes, &f, why, sizeof why) == ATTN_OK) {
        if (seq_file_head_bytes(&f) != head_bytes)
            abort();
        seq_file_encode(&f, again);
        if (memcmp(again, head, head_bytes) != 0)
            abort();
    }
    free(head);
    free(again);
    return 0;
}

size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes)
{
    static const uint32_t lens[2] = {20, 9}, ids[5] = {1, 2, 3, 4, 5};
    static const uint8_t sums[2 * SEQ_FILE_SUM_BYTES] = {7};
    struct seq_file f = {
        .geometry = {.layout = 1,
                     .num_layers = 2,
                     .num_kv_heads = 1,
                     .head_dim_k = 8,
                     .head_dim_v = 8,
                     .block_tokens = 16,
                     .kv_dtype = ATTN_BF16,
                     .block_bytes = 1024,
                     .model = i == 0 ? "" : "m",
                     .rope = "r"},
        .pool = i == 0 ? "" : "pool",
        .n_blocks = 2,
        .n_ids = i == 0 ? 0 : 5,
        .layer_len = lens,
        .ids = ids,
        .sums = sums,
    };
    static const uint32_t longer[2] = {40, 33};
    if (i == 2) { /* without its second block */
        f.layer_len = longer;
        f.n_blocks = 3;
        f.freed_first = 1;
        f.freed_past = 2;
    }
    if (i > 2 || seq_file_head_bytes(&f) > out_bytes)
        return 0;
    seq_file_encode(&f, out);
    return (size_t)seq_file_head_bytes(&f);
}

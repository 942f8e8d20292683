/* wire_codes.h: q, k and v of a step as codes of 8 bits: 132 bytes for each 128 elements of bf16,
 * which take 256.
 *
 * The elements of a payload are cut in groups of 128, the last one shorter; a group is a scale
 * (f32, little-endian) and its codes (fp8 E4M3), each element the nearest that code * scale has.
 * The scale is that of the group's largest element / 448, so for a head_dim of 128 a group is a row
 * of a head, and a pool that caches in fp8 has the same bytes as without. An element is off by
 * 2^-4 of itself at most, and by 2^-10 of the scale where that is more. NaN stays NaN, infinities
 * become NaN, a group of elements below 2^-100 becomes zeros.
 */
#ifndef ATTN_WIRE_CODES_H
#define ATTN_WIRE_CODES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { WIRE_CODES_GROUP = 128 };

/* Bytes that n elements take as codes. */
size_t wire_codes_bytes(size_t n);
/* Elements that bytes of codes are; false: no number of elements takes so many. */
bool wire_codes_count(size_t bytes, size_t *out_n);
/* n elements of bf16 as codes. out may be where bf16 is. */
void wire_codes_put(const uint16_t *bf16, size_t n, uint8_t *out);
/* And back, to the nearest bf16; of any bytes: a group whose scale is negative or not finite is
 * NaN. Not in place. */
void wire_codes_get(const uint8_t *codes, size_t n, uint16_t *out_bf16);

#endif

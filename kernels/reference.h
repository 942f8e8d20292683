/* reference.h: attention in plain float64 over contiguous K and V, the oracle of every test, of
 * attnload --verify and of attnbench. Slow and obvious on purpose.
 */
#ifndef ATTND_KERNELS_REFERENCE_H
#define ATTND_KERNELS_REFERENCE_H

#include "kernels/backend.h"

/* reference_attend: one item's attention.
 *
 * Shapes   q [n_q][num_q_heads][dk]; k [n_kv][num_kv_heads][dk]; v [n_kv][num_kv_heads][dv]
 *          out [n_q][num_q_heads][dv] f64; lse [n_q][num_q_heads] f64, may be NULL
 * Units    query t is at position pos + t; keys at 0 .. n_kv - 1; n_kv >= pos + n_q unless empty
 * Masks    query p sees key j when j <= p (is_full: j < pos + n_q), and with a window also
 *          j > p - window or j < sink_tokens
 * Dilated  for each branch in which p and j are both kv_head mod rate (modulo rate) and in one
 *          segment, p sees j once more; the masks above hold, too
 * Scores   scale, then soft cap, then ALiBi; a sink logit is used as it is
 * Empty    a query that sees no key, or only scores of -inf, gives out = 0 and lse = -inf (or the
 *          sink logit's lse)
 * Errors   ATTN_EINVAL dk or dv is beyond BACKEND_MAX_LATENT_K; ATTN_ENOMEM
 */
attn_status reference_attend(const struct attn_layer_spec *spec, uint32_t num_q_heads,
                             uint32_t num_kv_heads, uint32_t dk, uint32_t dv, attn_dtype dtype,
                             const void *q, uint32_t n_q, uint32_t pos, const void *k,
                             const void *v, uint32_t n_kv, double *out, double *lse);

/* What else there is to what the queries see. */
struct reference_seen {
    /* [n_q] the tokens at pos are a tree: query t sees those below pos, and itself and the tokens
     * that its parents lead to; -1: none. The position of such a token is pos plus how many they
     * are. NULL: no tree */
    const int32_t *parents;
    /* [n_q + 1] query t visits, of what it sees, only the tokens at tokens[starts[t]] to
     * tokens[starts[t + 1]], in any order, one that is there twice once. NULL: all */
    const uint32_t *starts, *tokens;
};
/* The same with that; NULL: nothing. */
attn_status reference_attend_seen(const struct attn_layer_spec *spec, uint32_t num_q_heads,
                                  uint32_t num_kv_heads, uint32_t dk, uint32_t dv, attn_dtype dtype,
                                  const void *q, uint32_t n_q, uint32_t pos, const void *k,
                                  const void *v, uint32_t n_kv, const struct reference_seen *seen,
                                  double *out, double *lse);

/* The tokens that a query which chooses blocks visits for one kv head (backend_item.n_chosen).
 *
 * Shapes   q [group][dk] of the kv head's q heads; k [n_seen][dk] as the cache reads back, n_seen
 *          at least 1; out_tokens [n_seen], ascending
 * Returns  how many they are; 0: there is no memory. *out_margin: by how much the lowest bound that
 *          was taken is above the highest other one that it is not equal to. *out_is_tied: another
 *          one is equal to it; may be NULL
 */
uint32_t reference_choose(uint32_t n_chosen, uint32_t block_tokens, uint32_t group, uint32_t dk,
                          const float *q, const float *k, uint32_t n_seen, uint32_t *out_tokens,
                          double *out_margin, bool *out_is_tied);

/* A head's projections, in a pool with q_nope_dim (backend.h), by its weights: w [q_nope_dim +
 * out_dim][head_dim_v]. What attention takes and gives is rounded to q_dtype.
 *
 * absorb   q [backend_q_dim(c)] of a step -> out_q [head_dim_k] as it attends
 * expand   latents [head_dim_v] that attention gives -> out [out_dim]
 */
void reference_absorb(const struct backend_pool_config *c, const float *w, const float *q,
                      float *out_q);
void reference_expand(const struct backend_pool_config *c, const float *w, const double *latents,
                      double *out);

/* Element i of an array of dtype (f32, f16, bf16), widened or rounded to nearest even. */
double reference_get(attn_dtype dtype, const void *array, size_t i);
void reference_put(attn_dtype dtype, void *array, size_t i, double x);

/* The quantisation every backend applies on append to a quantised pool, to one head's row of n
 * elements. out_codes and out_scales are as kv_layout.h has them, kv_row_bytes and kv_scale_bytes
 * long. All arithmetic is f32, so that codes and scales agree bit by bit.
 *
 * fp8_e4m3, int8   scale = max|x| / (448, 127); codes are x / scale, rounded to nearest even and
 *                  saturated
 * nvfp4            scale = max|x| / 2688; a group's is its max|x| / scale / 6 as E4M3, and its
 *                  codes are x / (E4M3 * scale) as E2M1, both rounded and saturated like the above
 * mxfp4            a group's scale is 2^(e - 2), where 2^e is the highest power of two in its
 *                  max|x|, or 2^(e - 1) where that is 1.75 * 2^e or more, within 2^-127 and 2^125;
 *                  its codes are x / scale
 *
 * Where a scale is 0 (all zeros, or too small for it) so are the codes. With a NaN or inf the f32,
 * of mxfp4 all scales, are NaN, the rest is 0, and all of the row reads as NaN. */
void reference_quantise(attn_dtype kv_dtype, const double *row, uint32_t n, uint8_t *out_codes,
                        void *out_scales);
/* The first n elements of a row. */
void reference_dequantise(attn_dtype kv_dtype, const uint8_t *codes, const void *scales, uint32_t n,
                          double *out_row);

/* What a cache of kv_dtype reads back of one head's row that was appended: n (at most
 * BACKEND_MAX_LATENT_K) elements of q_dtype, from element `at` of an array on. */
void reference_cached_row(attn_dtype q_dtype, attn_dtype kv_dtype, const void *from, size_t at,
                          uint32_t n, float *out_row);

/* Error bound of an output computed with this dtype against the reference over the K and V that
 * were sent, for values of about unit size: pass when |out - ref| <= atol + rtol * |ref| for every
 * element and the relative L2 error is below l2. An lse is a float whatever the dtype: its bound is
 * that of a dot product in f32. With quantised KV most of the bound is the quantisation: a
 * reference over the dequantised K and V holds the bound of kv_dtype = q_dtype. */
struct reference_bound {
    double atol, rtol, l2;
    double lse_atol, lse_rtol;
};
struct reference_bound reference_bound_of(attn_dtype q_dtype, attn_dtype kv_dtype);

#endif

/* softmax.cuh: the online softmax of the generic kernels: a query row's maximum and sum of weights
 * as keys are added, and how the results of parts of its keys become one.
 *
 * Scores, and so maxima, are in units of log 2; a row that has seen nothing has maximum -inf and
 * sum 0. What is summed beside the weights (the row of O) stays with the caller, who multiplies it
 * by the factors given here.
 *
 * The tuned kernels of sm90/ have their own: a maximum that lags behind by up to 2^8
 * (decode_tile.cuh), maxima that are integers (decode_short.cuh), sums of two warpgroups
 * (decode_wide.cuh).
 */
#ifndef ATTND_GPU_SOFTMAX_CUH
#define ATTND_GPU_SOFTMAX_CUH

#include "kernels/gpu/params.h"
#include "kernels/gpu/vendor/gpu.h"

namespace gpu
{

constexpr float log2e = 1.4426950408889634f;
constexpr float ln2 = 0.6931471805599453f;

/* The weight of a score where the maximum is m. */
GPU_DEVICE float exp2_diff(float a, float m)
{
    return a == -INFINITY ? 0.0f : exp2_fast(a - m);
}

struct softmax_row {
    float m = -INFINITY, sum = 0.0f;

    /* The maximum becomes `top`, which is no smaller. Gives the factor for what has been summed. */
    GPU_DEVICE float raise(float top)
    {
        float f = exp2_diff(m, top);
        m = top;
        sum *= f;
        return f;
    }

    /* Adds a score that is no larger than the maximum. Gives its weight. */
    GPU_DEVICE float add(float s)
    {
        float w = exp2_diff(s, m);
        sum += w;
        return w;
    }

    /* Adds another part's (m, sum), whose maximum is no larger. Gives the factor for its sums. */
    GPU_DEVICE float take(const float *part)
    {
        float f = exp2_diff(part[0], m);
        sum = fmaf(f, part[1], sum);
        return f;
    }
};

/* Adds a sink logit, then gives the factor that finishes the sums and the natural-log lse. */
GPU_DEVICE float finish_row(const gpu_layer &l, uint32_t q_head, float m, float sum, float &out_lse)
{
    float factor = 1.0f;
    if (l.sink_logits) {
        float sink = l.sink_logits[q_head] * log2e;
        float top = fmaxf(m, sink);
        if (top != -INFINITY) {
            factor = exp2_diff(m, top);
            sum = sum * factor + exp2_diff(sink, top);
            m = top;
        }
    }
    /* a sum that is NaN stays so in every element; nothing seen gives 0 and -inf */
    out_lse = sum == 0.0f ? -INFINITY : (m + log2f(sum)) * ln2;
    return sum == 0.0f ? 0.0f : factor / sum;
}

} // namespace gpu
#endif

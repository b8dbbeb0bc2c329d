// The filters of one row, as a draft and as the walk take them, for a test to call.

#include "filters.h"

extern "C" float cut(const float* scores, int32_t vocab, int32_t top_k, float top_p, float min_p, int32_t exact) {
    const Filter filter{1.0f, top_k, top_p, min_p};
    return exact != 0 ? cut_of<true>(filter, scores, vocab) : cut_of<false>(filter, scores, vocab);
}

// The filters of one row of a draft, for a test to call.

#include "drafts.h"

extern "C" float cut(const float* scores, int32_t vocab, int32_t top_k, float top_p, float min_p) {
    Draft draft{};
    draft.vocab_size = vocab;
    draft.top_k = &top_k, draft.top_p = &top_p, draft.min_p = &min_p;
    return cut_of(draft, 0, scores);
}

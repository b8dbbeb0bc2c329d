// Penalties, which depend on each node's path, and biases: `SamplingBatch.adjusted`.

#pragma once

#include "lanes.h"

namespace {

struct Adjust {  // of one row
    float repetition, presence, frequency;  // 1, 0 and 0 for none
    int32_t num_biases;
    const int64_t* tokens;  // committed, the prompt's first
    int64_t num_tokens, num_prompt;
    const int64_t* biased;  // tokens, each once
    const float* biases;  // added to their scores; -inf for banned tokens

    bool penalises() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }

    // The adjusted score of a token that has occurred, `written` times in the output. Products are rounded before the
    // subtraction, as in numpy.
    float changed(float score, int32_t written) const {
        score = score > 0.0f ? score / repetition : score * repetition;
        score -= static_cast<float>(static_cast<double>(frequency) * written);
        return written > 0 ? score - presence : score;
    }
};

// The distinct tokens of a row, and how often each occurs in the output (the prompt does not count).
struct TokenCounts {
    int32_t *ids, *written;
    int32_t count;
};

thread_local Scratch said_numbers, said_places, said_changed;

// The counts of every row, valid until the next call.
const TokenCounts* count_tokens(const Adjust* adjusts, int rows, int vocab) {
    size_t total = 0;
    for (int row = 0; row < rows; ++row) total += adjusts[row].num_tokens;
    TokenCounts* all = said_numbers.get<TokenCounts>(rows + (total * 2 * sizeof(int32_t) + sizeof(TokenCounts) - 1) / sizeof(TokenCounts));
    int32_t* own = reinterpret_cast<int32_t*>(all + rows);
    int32_t* places = said_places.get<int32_t>(vocab);  // index of each token among the distinct ones; -1 if it has not occurred
    memset(places, -1, vocab * sizeof(int32_t));
    for (int row = 0; row < rows; ++row) {
        const Adjust& adjust = adjusts[row];
        TokenCounts& found = all[row];
        found = TokenCounts{own, own + adjust.num_tokens, 0};
        own += 2 * adjust.num_tokens;
        for (int64_t i = 0; adjust.penalises() && i < adjust.num_tokens; ++i) {
            const int64_t token = adjust.tokens[i];
            if (token < 0 || token >= vocab) continue;
            if (places[token] < 0) {
                found.ids[found.count] = static_cast<int32_t>(token), found.written[found.count] = 0;
                places[token] = found.count++;
            }
            found.written[places[token]] += i >= adjust.num_prompt;
        }
        for (int32_t i = 0; i < found.count; ++i) places[found.ids[i]] = -1;
    }
    return all;
}

// Adjusts the scores after a node; `tokens` are those on its path, the root first.
void adjust_scores(const Adjust& adjust, const TokenCounts& said, const int64_t* tokens, int count, float* scores, int vocab) {
    if (adjust.penalises()) {
        float* changed = said_changed.get<float>(count);
        for (int i = 0; i < count; ++i) {
            int32_t written = 0;
            for (int32_t k = 0; k < said.count; ++k)
                if (said.ids[k] == tokens[i]) written = said.written[k];
            for (int k = 0; k < count; ++k)  // the root is part of the prompt if nothing has been written
                written += tokens[k] == tokens[i] && (k > 0 || adjust.num_tokens >= adjust.num_prompt);
            changed[i] = adjust.changed(scores[tokens[i]], written);
        }
        for (int32_t k = 0; k < said.count; ++k) scores[said.ids[k]] = adjust.changed(scores[said.ids[k]], said.written[k]);
        for (int i = 0; i < count; ++i) scores[tokens[i]] = changed[i];
    }
    for (int32_t i = 0; i < adjust.num_biases; ++i)
        if (adjust.biased[i] < vocab) scores[adjust.biased[i]] += adjust.biases[i];
}

}  // namespace

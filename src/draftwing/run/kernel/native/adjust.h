// Penalties by each node's own path, and biases: `SamplingBatch.adjusted`.

#pragma once

#include "lanes.h"

namespace {

struct Adjust {  // of one row
    float repetition, presence, frequency;  // 1, 0 and 0: none
    int32_t num_biases;
    const int64_t* said;  // committed tokens, the prompt's first
    int64_t num_said, num_prompt;
    const int64_t* biased;  // tokens, each once
    const float* biases;  // what is added to their scores; -inf: banned

    bool penalises() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }

    // The score of a token that was seen, and written so often. Products are rounded before they are subtracted, as
    // numpy's are.
    float changed(float score, int32_t written) const {
        score = score > 0.0f ? score / repetition : score * repetition;
        score -= static_cast<float>(static_cast<double>(frequency) * written);
        return written > 0 ? score - presence : score;
    }
};

// Each token that a row has said once, and how often it was written: what the prompt says is not.
struct Said {
    int32_t *ids, *written;
    int32_t count;
};

thread_local Scratch said_numbers, said_places, said_changed;

// Of every row; they stand until the next call.
const Said* said_of(const Adjust* adjusts, int rows, int vocab) {
    size_t total = 0;
    for (int row = 0; row < rows; ++row) total += adjusts[row].num_said;
    Said* all = said_numbers.get<Said>(rows + (total * 2 * sizeof(int32_t) + sizeof(Said) - 1) / sizeof(Said));
    int32_t* own = reinterpret_cast<int32_t*>(all + rows);
    int32_t* places = said_places.get<int32_t>(vocab);  // of a token among those that were said; -1: it was not
    memset(places, -1, vocab * sizeof(int32_t));
    for (int row = 0; row < rows; ++row) {
        const Adjust& adjust = adjusts[row];
        Said& found = all[row];
        found = Said{own, own + adjust.num_said, 0};
        own += 2 * adjust.num_said;
        for (int64_t i = 0; adjust.penalises() && i < adjust.num_said; ++i) {
            const int64_t token = adjust.said[i];
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

// Changes the scores after a node whose path holds `tokens`, the root first.
void adjust_scores(const Adjust& adjust, const Said& said, const int64_t* tokens, int count, float* scores, int vocab) {
    if (adjust.penalises()) {
        float* changed = said_changed.get<float>(count);
        for (int i = 0; i < count; ++i) {
            int32_t written = 0;
            for (int32_t k = 0; k < said.count; ++k)
                if (said.ids[k] == tokens[i]) written = said.written[k];
            for (int k = 0; k < count; ++k)  // the root is the prompt's last token, or written
                written += tokens[k] == tokens[i] && (k > 0 || adjust.num_said >= adjust.num_prompt);
            changed[i] = adjust.changed(scores[tokens[i]], written);
        }
        for (int32_t k = 0; k < said.count; ++k) scores[said.ids[k]] = adjust.changed(scores[said.ids[k]], said.written[k]);
        for (int i = 0; i < count; ++i) scores[tokens[i]] = changed[i];
    }
    for (int32_t i = 0; i < adjust.num_biases; ++i)
        if (adjust.biased[i] < vocab) scores[adjust.biased[i]] += adjust.biases[i];
}

}  // namespace

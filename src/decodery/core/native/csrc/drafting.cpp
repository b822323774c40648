// How much `auto` drafts in a step of texts in arrays, and what these drafts may lose: speculative/drafters/draft_credit.py, number
// for number.
#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "abi.h"

// See prices.cpp.
extern "C" void decodery_prices(Prices* p, int32_t texts, double context, int32_t nodes, double* seconds);
extern "C" int32_t decodery_knows_plain(const Prices* p, int32_t texts, double context);

// See expect.cpp.
extern "C" int32_t decodery_propose(Proposed* step);
extern "C" int32_t decodery_learn_step(Expected* const* texts, const int32_t* places, const ArrayStep* step, int32_t count, int32_t k, int32_t* failed);
extern "C" void decodery_follow(Expected* const* texts, const int32_t* places, const ArrayStep* step, int32_t count);

namespace {

// What one of the drafted rows takes, in units of a step without drafts; never more than the row of a text.
double row_price(const Drafting* d, int32_t drafted) {
    return std::min((d->costs[drafted] / d->costs[0] - 1) / drafted, 1.0 / d->sequences);
}

// What drafts may lose in this step, in units of steps without any. Where some texts are in the lead others may follow.
double allowance(const Drafting* d, double row) {
    double mean = 0;
    for (int32_t i = 0; i < d->step.count; ++i) mean += d->leads[i] / d->step.count;
    return d->balance + std::min((1 - d->sequences * row) * mean, d->exposed) - d->look / d->costs[0];
}

// How many of `most` tokens may be drafted in this step, by `costs`; if none, so many steps pass before one is affordable.
int32_t affords(Drafting* d, int32_t most) {
    if (most < 1) return 0;
    const double may = allowance(d, row_price(d, 1)), affordable = d->costs[0] * (1 + may);
    int32_t drafted = 0;
    while (drafted < most && d->costs[drafted + 1] <= affordable) ++drafted;
    if (drafted == 0) {
        const double missing = d->costs[1] / d->costs[0] - 1 - may;
        d->noted = d->sequences;
        d->resting = int32_t(std::min(ceil(missing / std::max(d->share, 1e-9)), double(d->longest)));
    }
    return drafted;
}

// The pass of a step ends for all texts at once: that a text far ahead of the slowest one is faster saves no more than its row.
void weigh(Drafting* d) {
    const double row = std::max(d->sequences * row_price(d, 1), 1e-3);
    for (int32_t i = 0; i < d->step.count; ++i) d->weights[i] = d->leads[i] < d->ahead ? 1.0 : row;
    d->step.weights = d->weights;
}

// A step with drafts has ended, accepted [count] tokens of each text. A step is saved when every text has saved one; until then a
// text that ends earlier saves its row.
void settle(Drafting* d, const int32_t* accepted) {
    const double row = row_price(d, d->drafted);
    double common = d->step.count < d->sequences ? 0 : HUGE_VAL, all = 0;
    for (int32_t i = 0; i < d->step.count; ++i) {
        all += accepted[i];
        d->leads[i] += accepted[i];
        common = std::min(common, d->leads[i]);
    }
    for (int32_t i = 0; i < d->step.count; ++i) d->leads[i] -= common;
    d->balance += row * all + (1 - d->sequences * row) * common - (d->costs[d->drafted] / d->costs[0] - 1);
}

}  // namespace

// Decides whether texts in arrays draft in this step, and how much; and drafts. context: tokens of each text on average. nodes: of
// each at most. Returns how many are drafted in all.
EXPORT int32_t decodery_draft_all(Drafting* d, double context, int32_t nodes) {
    Proposed& step = d->step;
    d->drafted = 0;
    d->skipped = 1;
    step.promised = 0;
    step.weights = nullptr;
    if (d->prices != nullptr) d->balance += d->share;
    // What did not pay with more texts may pay now.
    if (d->sequences < d->noted) d->resting = 0;
    if (d->resting > 0) {
        --d->resting;
        return 0;
    }
    if (d->prices != nullptr) {
        if (!decodery_knows_plain(d->prices, d->sequences, context)) {
            // Prices are known after a few steps; with several texts a try in each of them costs more than drafts bring.
            d->noted = d->sequences;
            d->resting = d->sequences > 1 ? d->rests / 2 : 0;
            return 0;
        }
        const int32_t most = std::min(d->nodes, step.count * nodes);
        decodery_prices(d->prices, d->sequences, context, most, d->costs);
        for (int32_t n = 1; n <= most; ++n) d->costs[n] *= d->margin;
        step.cost_count = 1 + affords(d, most);
        if (step.cost_count < 2) return 0;
        weigh(d);
        // A promise that is worth less than a token is the same as steps that give more without any.
        step.given = d->sequences / std::min(*d->kept / *d->promised, 1.0);
    }
    d->skipped = 0;
    step.nodes = nodes;
    const int32_t drafted = decodery_propose(&step);
    d->silent = drafted < 0;
    d->drafted = std::max(drafted, 0);
    d->noted = d->sequences;
    if (d->sequences > 1) {
        // With as many texts as now it will not pay in the next steps either.
        d->resting = d->silent ? d->rests : 0;
    } else if (!d->silent) {
        d->fruitless = d->drafted > 0 ? 0 : d->fruitless + 1;
        d->resting = std::min(std::max(d->fruitless - d->patience, 0), d->pause);
    }
    return d->drafted;
}

// What drafts of decodery_draft_all have brought; the prices know of the step by now. k and failed as in decodery_learn_step. Returns
// how many texts have logits that are no numbers.
EXPORT int32_t decodery_drafts_learn(Drafting* d, const ArrayStep* step, double context, int32_t k, int32_t* failed) {
    const int32_t count = d->step.count;
    if (d->skipped) {
        decodery_follow(d->step.texts, d->step.places, step, count);
        return 0;
    }
    const int32_t found = decodery_learn_step(d->step.texts, d->step.places, step, count, k, failed);
    if (d->drafted == 0) return found;
    const double accepted = failed[count];
    if (d->prices != nullptr) {
        std::vector<int32_t> each(count);
        for (int32_t i = 0; i < count; ++i) each[i] = std::max(step->sampling.accepted[d->step.places[i]], 0);
        decodery_prices(d->prices, d->sequences, context, d->drafted, d->costs);
        settle(d, each.data());
    }
    *d->kept = d->remembered * *d->kept + accepted;
    *d->promised = d->remembered * *d->promised + d->step.promised;
    return found;
}

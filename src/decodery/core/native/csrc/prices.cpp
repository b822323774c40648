// What steps take, learned from the steps themselves: step/pass_prices.py, number for number. Between two passes everything
// it needs has left the caches, and the same in Python takes as long as the rest of a step beside its pass.
#include <math.h>
#include <stdint.h>

#include <algorithm>

#include "abi.h"

namespace {

constexpr int32_t kinds = 18, magnitudes = 8;
constexpr double nodes_of[kinds] = {0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512};
constexpr double context_unit = 256, near_texts = 0.3, near_contexts = 0.15, near_nodes = 0.3, others = 0.1, known_least = 0.001;
constexpr double recent = 20, stale = 0.998, high = 1e12, machine_share = 0.2, outlier = 0.3, late = 0.5;
constexpr int32_t trusted_after = 4;
constexpr double plain_of_many = 5, plain_of_one = 0.5;

int32_t magnitude(double value, double unit) {
    if (value < unit) return 0;
    int64_t whole = int64_t(value / unit);
    int32_t bits = 0;
    for (; whole > 0; whole >>= 1) ++bits;
    return std::min(bits, magnitudes) - 1;
}

double prior(const Prices& p, double rows, double texts, double context) {
    return hypot(p.read, p.row * rows) + context * (p.token * texts + p.row_token * rows) + p.text * texts;
}

// part^0, part^1, ... [kinds]
struct Powers {
    double of[kinds];
    explicit Powers(double part) {
        of[0] = 1;
        for (int32_t n = 1; n < kinds; ++n) of[n] = of[n - 1] * part;
    }
};

// Logarithms of factors [kinds], by what steps like these and others took.
void corrections(const Prices& p, int32_t texts, int32_t contexts, double* found) {
    static const Powers of_texts(near_texts), of_contexts(near_contexts), of_nodes(near_nodes);
    double weights[kinds] = {}, sums[kinds] = {};
    for (int32_t t = 0; t < magnitudes; ++t)
        for (int32_t c = 0; c < magnitudes; ++c) {
            const double near = of_texts.of[abs(t - texts)] * of_contexts.of[abs(c - contexts)] / p.gain;
            const int32_t first = (t * magnitudes + c) * kinds;
            for (int32_t n = 0; n < kinds; ++n) {
                weights[n] += near * p.weights[first + n];
                sums[n] += near * p.weights[first + n] * p.factors[first + n];
            }
        }
    const int32_t first = (texts * magnitudes + contexts) * kinds;
    for (int32_t n = 0; n < kinds; ++n) {
        double sum = 0, weight = known_least;
        for (int32_t other = 0; other < kinds; ++other) {
            const double alike = of_nodes.of[abs(n - other)];
            sum += alike * sums[other];
            weight += alike * weights[other];
        }
        const double own = p.weights[first + n] / p.gain;
        found[n] = (others * sum / weight + own * p.factors[first + n]) / (others + own);
    }
}

// The nearest values that never fall.
void rise(double* values, const double* weights) {
    double means[kinds], heavy[kinds];
    int32_t counts[kinds], blocks = 0;
    for (int32_t n = 0; n < kinds; ++n) {
        double mean = values[n], weight = weights[n];
        int32_t count = 1;
        for (; blocks > 0 && means[blocks - 1] > mean; --blocks) {
            const double whole = heavy[blocks - 1] + weight;
            mean = (means[blocks - 1] * heavy[blocks - 1] + mean * weight) / whole;
            weight = whole;
            count += counts[blocks - 1];
        }
        means[blocks] = mean, heavy[blocks] = weight, counts[blocks++] = count;
    }
    for (int32_t block = 0, n = 0; block < blocks; ++block)
        for (int32_t i = 0; i < counts[block]; ++i) values[n++] = means[block];
}

}  // namespace

// Seconds [nodes + 1] of steps of `texts` texts after `context` tokens each with 0, 1, 2, ... drafted rows.
EXPORT void decodery_prices(Prices* p, int32_t texts, double context, int32_t nodes, double* seconds) {
    const int32_t t = magnitude(texts, 1), c = magnitude(context, context_unit), kind = t * magnitudes + c;
    double* curve = p->curves + kind * kinds;
    if (p->made[kind] < 0 || p->steps - p->made[kind] >= std::min<int64_t>(8, 1 + p->steps / 32)) {
        double weights[kinds], before[kinds];
        corrections(*p, t, c, curve);
        for (int32_t n = 0; n < kinds; ++n) {
            before[n] = log(prior(*p, nodes_of[n] + texts, texts, context));
            weights[n] = p->weights[kind * kinds + n] / p->gain + others;
            curve[n] += before[n];
        }
        rise(curve, weights);
        for (int32_t n = 0; n < kinds; ++n) curve[n] -= before[n];
        p->made[kind] = p->steps;
    }
    const double machine = exp(p->machine);
    double most = 0;
    for (int32_t n = 0, at = 0; n <= nodes; ++n) {
        while (at + 2 < kinds && nodes_of[at + 1] <= n) ++at;
        const double from = log1p(nodes_of[at]), to = log1p(nodes_of[at + 1]);
        const double part = std::min((log1p(n) - from) / (to - from), 1.0);
        const double factor = exp(curve[at] + part * (curve[at + 1] - curve[at]));
        most = std::max(most, prior(*p, double(n) + texts, texts, context) * factor * machine);
        seconds[n] = most;
    }
}

// Whether steps of so many texts without drafts were seen lately.
EXPORT int32_t decodery_knows_plain(const Prices* p, int32_t texts, double context) {
    const int32_t kind = magnitude(texts, 1) * magnitudes + magnitude(context, context_unit);
    return p->weights[kind * kinds] >= p->gain * (texts > 1 ? plain_of_many : plain_of_one);
}

// A step of so many rows and texts took so long.
EXPORT void decodery_price(Prices* p, int32_t rows, int32_t texts, double context, double seconds) {
    const int32_t t = magnitude(texts, 1), c = magnitude(context, context_unit), drafted = std::max(rows - texts, 0);
    int32_t n = 0;
    while (n + 1 < kinds && sqrt((nodes_of[n] + 1) * (nodes_of[n + 1] + 1)) - 1 < drafted) ++n;
    const int32_t place = (t * magnitudes + c) * kinds + n;
    const double took = log(std::max(seconds, 1e-9) / prior(*p, rows, texts, context));
    if (p->steps == 0) p->machine = took;
    double count = p->counts[place], known = p->factors[place];
    if (count == 0) {
        double found[kinds];
        corrections(*p, t, c, found);
        known = found[n];
    }
    double surprise = took - p->machine - known;
    int32_t outliers = p->outliers[place];
    if (fabs(surprise) <= outlier) outliers = 0;
    else outliers = surprise > 0 ? std::max(outliers, 0) + 1 : std::min(outliers, 0) - 1;
    if (abs(outliers) >= trusted_after) outliers = 0, count = 0;
    else if (count > 0) surprise = std::min(std::max(surprise, -outlier), outlier) * (surprise > 0 ? late : 1.0);
    count = std::min(count + 1, recent);
    const double shared = count >= trusted_after ? machine_share * surprise : 0.0;
    p->machine += shared;
    p->factors[place] = known + (surprise - shared) / count;
    p->outliers[place] = outliers;
    p->counts[place] = count;
    p->gain /= stale;
    p->weights[place] += p->gain;
    if (p->gain > high) {
        for (int32_t i = 0; i < magnitudes * magnitudes * kinds; ++i) p->weights[i] /= p->gain;
        p->gain = 1;
    }
    ++p->steps;
    if (count < trusted_after) std::fill(p->made, p->made + magnitudes * magnitudes, -1);
}

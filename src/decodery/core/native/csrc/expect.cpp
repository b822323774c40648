// `auto` for all texts of a pass in one call each: the trees of the most likely tokens, with one price for all rows, and what is
// learned of what became of them. speculative/tree_building/most_likely.py is the same for one text, number for number. A step
// has a few dozen candidates a text, and finding them one by one in Python takes as long as two layers of a small model.
#include "expect.h"

// See native.cpp: the k largest of rows anywhere; strange [count] is set where a row holds no number.
void topk_of_rows(const float* const* rows, int32_t count, int32_t n, int32_t k, int32_t* ids, bool* strange);

namespace {

struct Node {
    int64_t token;
    int32_t depth;
    double chance;
    int64_t followed;
    Context context;
    std::vector<Candidate> offers;
};

struct Offer {
    double negative, chance;
    int32_t text, parent, place;
    bool operator<(const Offer& other) const {    // a heap has the largest on top
        if (negative != other.negative) return negative > other.negative;
        if (text != other.text) return text > other.text;
        if (parent != other.parent) return parent > other.parent;
        return place > other.place;
    }
};

// Which number of nodes gives most tokens per second: `ExpectedSpeedup` of most_likely.py. spent: seconds of the nodes taken beyond
// `costs`, which depend on whose they are.
struct Worth {
    const double* costs;
    int32_t sizes;
    double tokens, most, spent = 0.0, promised = 0.0, best_promised = 0.0;
    int32_t nodes = 0, best = 0;

    double bar() const {
        double lowest = HUGE_VAL;
        for (int32_t n = nodes + 1; n < sizes; ++n)
            lowest = std::min(lowest, (most * (costs[n] + spent) - tokens) / double(n - nodes));
        return lowest;
    }
    bool full() const { return nodes + 1 >= sizes; }
    void take(double chance, double weight, double own) {
        tokens += chance * weight;
        promised += chance;
        spent += own;
        ++nodes;
        if (tokens / (costs[nodes] + spent) > most) most = tokens / (costs[nodes] + spent), best = nodes, best_promised = promised;
    }
};

// What followed the text's end before, in the text itself or, where it agrees for longer, in an earlier one.
void find(Expected* e, int32_t length) {
    const Ngrams &text = *static_cast<const Ngrams*>(e->text), *past = static_cast<const Ngrams*>(e->past);
    e->copied_count = e->repeated = e->others = 0;
    int64_t place = text.find(text.tokens);
    if (place >= 0) {
        e->repeated = text.agrees(place, text.tokens, lengths[few - 1]);
        e->copied_count = text.copy(place, length, true, e->copied);
    }
    if (past == nullptr || e->repeated >= lengths[few - 1] || (place = past->find(text.tokens)) < 0) return;
    const int32_t repeated = past->agrees(place, text.tokens, lengths[few - 1]);
    if (repeated <= e->repeated || past->tokens[place] == text_end) return;
    e->repeated = repeated;
    e->others = 1;
    for (e->copied_count = 0; e->copied_count < length; ++e->copied_count) {
        const int64_t at = place + e->copied_count;
        if (at >= int64_t(past->tokens.size()) || past->tokens[at] == text_end) break;
        e->copied[e->copied_count] = past->tokens[at];
    }
}

// One text's tree as it grows. own: seconds of each of its nodes beyond what nodes of any text cost. weight: what its tokens are worth.
struct Growing {
    Expected* e;
    int32_t limit, depth;
    double own, weight;
    Guesses guesses;
    std::vector<Node> nodes;

    void expand(double least) {
        Node& node = nodes.back();
        const bool ended = nodes.size() > 1 && std::find(e->ends, e->ends + e->ends_count, node.token) != e->ends + e->ends_count;
        if (node.depth >= depth || ended) return;
        guesses.look(node.context, node.followed, least / (node.chance * weight), node.depth + 1);
        node.offers = guesses.found;
    }
};

}  // namespace

// An index of the n-grams of a text, `count` lengths n from the longest on; see ngrams.h.
EXPORT void* decodery_ngrams(const int32_t* orders, int32_t count, int32_t first) { return new Ngrams(orders, count, first != 0); }
EXPORT void decodery_ngrams_free(void* ngrams) { delete static_cast<Ngrams*>(ngrams); }
EXPORT void decodery_ngrams_clear(void* ngrams) { static_cast<Ngrams*>(ngrams)->clear(); }
EXPORT void decodery_ngrams_extend(void* ngrams, const int64_t* tokens, int64_t count) {
    static_cast<Ngrams*>(ngrams)->extend(tokens, count);
}
EXPORT int64_t decodery_ngrams_size(const void* ngrams) { return int64_t(static_cast<const Ngrams*>(ngrams)->tokens.size()); }

// The drafts of a step's texts number places [count]: of each what followed its end before, limits [count] tokens at most, and
// where `ends` [count] are given none from the first of these ends_counts [count] tokens on. Returns how many there are in all.
EXPORT int32_t decodery_copies(void* const* texts, const int32_t* places, const int32_t* limits, const int64_t* const* ends,
                               const int32_t* ends_counts, int32_t count, int32_t wraps, ArrayStep* step) {
    int32_t drafted = 0;
    for (int32_t i = 0; i < count; ++i) {
        const Ngrams& text = *static_cast<const Ngrams*>(texts[i]);
        const int64_t place = limits[i] > 0 ? text.find(text.tokens) : -1;
        int64_t* tokens = const_cast<int64_t*>(step->drafts) + int64_t(places[i]) * step->stride;
        int64_t* parents = tokens + int64_t(step->room) * step->stride;
        int32_t length = place < 0 ? 0 : text.copy(place, std::min(limits[i], step->stride - 1), wraps != 0, tokens + 1);
        for (int32_t n = 0; n < length; ++n) {
            if (std::find(ends[i], ends[i] + ends_counts[i], tokens[n + 1]) != ends[i] + ends_counts[i]) length = n;
            parents[n + 1] = n;
        }
        step->sizes[places[i]] = 1 + length;
        drafted += length;
    }
    return drafted;
}
// These texts go on by what the step gave them.
EXPORT void decodery_copies_follow(void* const* texts, const int32_t* places, int32_t count, const ArrayStep* step) {
    for (int32_t i = 0; i < count; ++i)
        static_cast<Ngrams*>(texts[i])->extend(step->emitted + step->sampling.first[places[i]], step->kept[places[i]]);
}

// The trees of n texts: of all candidates of all texts the most likely, as long as the next row pays. Fills tokens, parents and
// sizes of `step`, and sets what `decodery_learn` goes by. Returns how many nodes are drafted in all, -1 where no row could pay,
// however likely: then nothing was looked for.
EXPORT int32_t decodery_propose(Proposed* step) {
    Worth worth = {step->costs, step->cost_count, step->given, step->given / step->costs[0]};
    double cheapest = step->costs[0];
    for (int32_t n = 1; n < step->cost_count; ++n) cheapest = std::min(cheapest, step->costs[n] - step->costs[n - 1]);
    const double least = std::max(least_left, cheapest * worth.most), second = worth.most;
    const bool silent = worth.full() || worth.bar() >= 1;
    std::vector<Growing> texts;
    std::vector<Offer> heap;
    std::vector<int32_t> taken;
    texts.reserve(step->count);
    const auto offer = [&](int32_t number, int32_t parent, int32_t place) {
        const Growing& text = texts[number];
        if (place >= int32_t(text.nodes[parent].offers.size())) return;
        const double chance = text.nodes[parent].chance * text.nodes[parent].offers[place].chance;
        heap.push_back({-(chance * text.weight - text.own * second), chance, number, parent, place});
        std::push_heap(heap.begin(), heap.end());
    };
    const auto at = [&](int32_t i) { return int64_t(step->places == nullptr ? i : step->places[i]); };
    for (int32_t i = 0; i < step->count; ++i) {
        Expected* e = step->texts[i];
        e->asked = !silent;
        step->sizes[at(i)] = 1;
        step->tokens[at(i) * step->stride] = e->last[0];
        step->parents[at(i) * step->stride] = -1;
        int32_t limit = std::min(step->limits[i], step->stride - 1);
        if (step->ends != nullptr) limit = std::min(limit, step->nodes);
        const double weight = step->weights == nullptr ? 1.0 : step->weights[i];
        if (silent) continue;
        const int32_t depth = step->ends == nullptr ? step->depths[i] : int32_t(step->ends[i] - step->next[at(i)]);
        if (e->text != nullptr) find(e, std::min(limit, depth));
        texts.push_back({e, limit, depth, step->own == nullptr ? 0.0 : step->own[i], weight, {e, {}}, {}});
        texts.back().nodes.push_back({e->last[0], 0, 1.0, 0, begin(e), {}});
        texts.back().expand(least);
        offer(i, 0, 0);
    }
    while (!heap.empty() && !worth.full()) {
        const Offer top = heap.front();
        std::pop_heap(heap.begin(), heap.end());
        heap.pop_back();
        Growing& text = texts[top.text];
        const int32_t number = int32_t(text.nodes.size());
        if (number > text.limit) continue;
        if (-top.negative < worth.bar()) break;
        worth.take(top.chance, text.weight, text.own);
        taken.push_back(top.text);
        const Node& parent = text.nodes[top.parent];
        const int64_t token = parent.offers[top.place].token;
        step->tokens[at(top.text) * step->stride + number] = token;
        step->parents[at(top.text) * step->stride + number] = top.parent;
        text.nodes.push_back({token, parent.depth + 1, top.chance, text.guesses.follows(parent.followed, token),
                              parent.context.behind(token), {}});
        offer(top.text, top.parent, top.place + 1);
        text.expand(least);
        offer(top.text, number, 0);
    }
    for (int32_t n = 0; n < worth.best; ++n) ++step->sizes[at(taken[n])];
    step->promised = worth.best_promised;
    return silent ? -1 : worth.best;
}

// Learns of a step of n texts, and moves each behind what it emitted. Returns how many of them had logits that are no numbers;
// `failed` of their steps is set, and nothing is learned of these.
EXPORT int32_t decodery_learn(Expected* const* texts, Happened* const* steps, int32_t count, int32_t vocab, int32_t k) {
    std::vector<const float*> rows;
    for (int32_t i = 0; i < count; ++i)
        for (int64_t row = 0; row < steps[i]->rows; ++row) rows.push_back(steps[i]->logits + row * vocab);
    std::vector<int32_t> ranked(rows.size() * k);
    std::vector<char> strange(rows.size());
    topk_of_rows(rows.data(), int32_t(rows.size()), vocab, k, ranked.data(), reinterpret_cast<bool*>(strange.data()));
    int32_t failed = 0;
    size_t first = 0;
    for (int32_t i = 0; i < count; first += steps[i]->rows, ++i) {
        Happened& step = *steps[i];
        step.failed = std::find(strange.begin() + first, strange.begin() + first + step.rows, 1) != strange.begin() + first + step.rows;
        failed += step.failed;
        if (!step.failed) learn_step(texts[i], step, ranked.data() + first * k, k);
    }
    return failed;
}

// As decodery_learn, of texts whose numbers in a step are `places`. failed: [count + 1], set where logits are no numbers; the last
// one is how many drafted tokens were accepted in all.
EXPORT int32_t decodery_learn_step(Expected* const* texts, const int32_t* places, const ArrayStep* step, int32_t count, int32_t k, int32_t* failed) {
    const Sampling& s = step->sampling;
    std::vector<Happened> each(count);
    std::vector<int64_t> wide(size_t(s.first[s.texts]) * 2);
    std::vector<Expected*> learning;
    std::vector<Happened*> steps;
    std::vector<int32_t> numbers;
    failed[count] = 0;
    for (int32_t i = 0; i < count; ++i) {
        const int32_t text = places[i], first = s.first[text], rows = step->sizes[text], length = s.accepted[text];
        failed[i] = 0;
        failed[count] += std::max(length, 0);
        if (step->kept[text] == 0) continue;
        int64_t *parents = wide.data() + 2 * first, *path = parents + rows;
        std::copy(s.parents + first, s.parents + first + rows, parents);
        std::copy(s.paths + first, s.paths + first + length, path);
        each[i] = {step->emitted + first, s.tokens + first, parents, path, s.logits + int64_t(first) * s.vocab, step->kept[text], rows, length, 0};
        learning.push_back(texts[i]);
        steps.push_back(&each[i]);
        numbers.push_back(i);
    }
    const int32_t found = decodery_learn(learning.data(), steps.data(), int32_t(steps.size()), s.vocab, k);
    for (size_t i = 0; i < numbers.size(); ++i) failed[numbers[i]] = steps[i]->failed;
    return found;
}

// The texts go on by what a step gave them, and nothing is learned of it.
EXPORT void decodery_follow(Expected* const* texts, const int32_t* places, const ArrayStep* step, int32_t count) {
    for (int32_t i = 0; i < count; ++i) {
        const int32_t text = places[i];
        move(texts[i], step->emitted + step->sampling.first[text], step->kept[text]);
    }
}

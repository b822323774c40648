// What `auto` expects to come next, and what it learns of what came: speculative/stores/expectations.py, number for number.
#pragma once
#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "abi.h"
#include "ngrams.h"

namespace {

constexpr int32_t orders = 3, nowhere = orders, place_bits = 17, few = 8;
constexpr uint64_t golden = 0x9E3779B97F4A7C15u;
constexpr double least_left = 0.01, forget = 0.97;
constexpr int32_t lengths[few] = {1, 2, 3, 4, 6, 9, 14, 22};
constexpr double trusted[few] = {0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95};

int32_t bucket(int32_t length) {
    int32_t at = 0;
    while (at + 1 < few && lengths[at + 1] <= length) ++at;
    return at;
}

// SplitMix64: core/noise.py.
uint64_t finish(uint64_t state) {
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

// The last tokens of a text, the latest first, and how many there are.
struct Context {
    int64_t last[orders];
    int32_t known;
    Context behind(int64_t token) const { return {{token, last[0], last[1]}, std::min(known + 1, orders)}; }
};

struct Candidate {
    double chance;
    int64_t token;
    int32_t best, order, rank;    // order -1: a copy
};

struct Guesses {
    const Expected* e;
    std::vector<Candidate> found;

    int64_t follows(int64_t followed, int64_t token) const {
        return followed >= 0 && followed < e->copied_count && e->copied[followed] == token ? followed + 1 : -1;
    }

    // What may follow a context, most likely first. depth: of the token to come below the pending one, 0: heed no noise.
    void look(const Context& context, int64_t followed, double least, int32_t depth) {
        found.clear();
        double left = 1.0, all = 0.0;
        if (followed >= 0 && followed < e->copied_count) {
            const int32_t at = bucket(e->repeated + int32_t(followed));
            const double chance = e->hits[e->others][at] / e->tried[e->others][at];
            found.push_back({chance, e->copied[followed], -1, -1, -1});
            left -= chance;
            all += chance;
        }
        uint64_t keys[orders + 1] = {};
        for (int32_t n = 0; n < context.known; ++n) keys[n + 1] = (keys[n] + uint64_t(context.last[n]) + 1) * golden;
        int32_t best = -1;
        for (int32_t order = 0; order < orders; ++order) {
            const int32_t n = orders - order;
            if (n > context.known) continue;
            const uint64_t place = keys[n] >> (64 - place_bits);
            if (e->keys[order][place] != keys[n]) continue;
            if (best < 0) best = order;
            const int32_t* row = e->rows[order] + place * e->width;
            const double* rates = e->rates + (best * orders + order) * e->width;
            double spent = 0.0;
            for (int32_t rank = 0; rank < e->width; ++rank) {
                const int64_t token = row[rank];
                if (token < 0 || told(token)) continue;
                const double chance = left * rates[rank];
                spent += chance;
                found.push_back({chance, token, best, order, rank});
            }
            all += spent;
            left = std::max(left - spent, least_left);
        }
        if (e->noise > 0 && depth > 0) heed_noise(all, depth);
        if (least > 0) {
            const auto poor = [least](const Candidate& each) { return each.order >= 0 && !(each.chance >= least); };
            found.erase(std::remove_if(found.begin(), found.end(), poor), found.end());
        }
        std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
            return a.chance > b.chance;
        });
    }

    // The noise of the token to come is known before its logits are: who has much of it is likelier.
    void heed_noise(double all, int32_t depth) {
        uint64_t key = 0;
        const uint64_t words[] = {e->seed, 0, uint64_t(e->position + depth - 1)};
        for (uint64_t word : words) key = finish((key ^ word) + golden);
        double sum = std::max(1.0 - all, least_left) * e->noise_mean;
        for (Candidate& each : found) {
            const double unit = (double(finish(key + uint64_t(each.token) * golden) >> 12) + 0.5) * 0x1p-52;
            each.chance *= pow(-log(unit), -e->noise);
            sum += each.chance;
        }
        for (Candidate& each : found) each.chance /= sum;
    }

    bool told(int64_t token) const {
        for (const Candidate& each : found)
            if (each.token == token) return true;
        return false;
    }
};

Context begin(const Expected* e) {
    Context context = {{}, e->known};
    for (int32_t i = 0; i < e->known; ++i) context.last[i] = e->last[i];
    return context;
}

void put(const Expected* e, const Context& context, const int32_t* ranked, int32_t count) {
    uint64_t key = 0;
    for (int32_t n = 0; n < context.known; ++n) {
        key = (key + uint64_t(context.last[n]) + 1) * golden;
        const int32_t order = orders - 1 - n;
        const uint64_t place = key >> (64 - place_bits);
        e->keys[order][place] = key;
        std::copy(ranked, ranked + count, e->rows[order] + place * e->width);
    }
}

void learn(const Expected* e, Guesses& guesses, const Context& context, int64_t followed, int64_t token) {
    const bool copies = followed >= 0 && followed < e->copied_count;
    guesses.look(context, followed, 0.0, 0);
    if (copies) {
        const int32_t at = bucket(e->repeated + int32_t(followed));
        const bool right = e->copied[followed] == token;
        double &hits = e->hits[e->others][at], &tried = e->tried[e->others][at];
        hits = hits * forget + double(right) + (1 - forget) * trusted[at];
        tried = tried * forget + 1 + (1 - forget);
        if (right) return;
    }
    int32_t order = nowhere;
    for (const Candidate& each : guesses.found)
        if (each.order >= 0 && each.token == token) order = each.order;
    for (const Candidate& each : guesses.found) {
        if (each.order < 0 || each.order > order) continue;
        const int32_t at = (each.best * orders + each.order) * e->width + each.rank;
        e->rated[at] += 1;
        e->rates[at] += (double(each.token == token) - e->rates[at]) / e->rated[at];
    }
}

// The text goes on by these tokens.
void move(Expected* e, const int64_t* tokens, int32_t count) {
    Context context = begin(e);
    for (int32_t i = 0; i < count; ++i) context = context.behind(tokens[i]);
    std::copy(context.last, context.last + context.known, e->last);
    e->known = context.known;
    e->position += count;
    e->copied_count = 0;
    if (e->text != nullptr) static_cast<Ngrams*>(e->text)->extend(tokens, count);
}

// One text's step. ranked: [rows][k], the most likely tokens after each node.
void learn_step(Expected* e, const Happened& step, const int32_t* ranked, int32_t k) {
    Guesses guesses = {e, {}};
    Context context = begin(e);
    int64_t followed = 0;
    for (int32_t i = 0; e->asked && i < step.count; ++i) {
        const int64_t token = step.emitted[i];
        learn(e, guesses, context, followed, token);
        followed = guesses.follows(followed, token);
        context = context.behind(token);
    }
    std::vector<Context> contexts = {begin(e)};
    for (int32_t node = 1; node < step.rows; ++node)
        contexts.push_back(contexts[step.parents[node]].behind(step.tokens[node]));
    const auto keep = [&](int64_t node) { put(e, contexts[node], ranked + node * k, k); };
    for (int32_t node = 0; node < step.rows; ++node) keep(node);
    keep(0);
    for (int32_t i = 0; i < step.length; ++i) keep(step.accepted[i]);
    move(e, step.emitted, step.count);
}

}  // namespace

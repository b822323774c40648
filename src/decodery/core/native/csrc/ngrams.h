// Where the n-grams of a growing text stood last, or first: speculative/stores/ngrams.py and past.py, number for number.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <vector>

constexpr int64_t text_end = -1;    // between two texts; no token is

class Ngrams {
    // Open addressing; a place of -1 is free.
    struct Table {
        std::vector<uint64_t> keys;
        std::vector<int32_t> places;
        int64_t used = 0;

        size_t slot(uint64_t key) const {
            size_t at = key >> 7 & (keys.size() - 1);
            while (places[at] >= 0 && keys[at] != key) at = (at + 1) & (keys.size() - 1);
            return at;
        }
        int32_t get(uint64_t key) const { return keys.empty() ? -1 : places[slot(key)]; }
        void put(uint64_t key, int32_t place, bool once) {
            if (2 * (used + 1) > int64_t(keys.size())) grow();
            const size_t at = slot(key);
            if (once && places[at] >= 0) return;
            used += places[at] < 0;
            keys[at] = key;
            places[at] = place;
        }
        void grow() {
            const size_t size = std::max<size_t>(64, 2 * keys.size());
            std::vector<uint64_t> old_keys(size);
            std::vector<int32_t> old_places(size, -1);
            keys.swap(old_keys);
            places.swap(old_places);
            for (size_t i = 0; i < old_keys.size(); ++i) {
                if (old_places[i] < 0) continue;
                const size_t at = slot(old_keys[i]);
                keys[at] = old_keys[i];
                places[at] = old_places[i];
            }
        }
    };

    std::vector<int32_t> orders;    // longest first
    std::vector<Table> tables;
    bool first;    // of several places the first is kept, else the last

    // Keys of the last n tokens before `end`, for every order n; 0 where there are too few.
    void hash(const std::vector<int32_t>& text, int64_t end, uint64_t* keys) const {
        uint64_t key = 0;
        int32_t order = int32_t(orders.size()) - 1;
        std::fill(keys, keys + orders.size(), 0);
        for (int64_t n = 1; order >= 0 && n <= end; ++n) {
            key = (key + uint64_t(int64_t(text[end - n])) + 2) * 0x9E3779B97F4A7C15u;
            key ^= key >> 29;
            if (n == orders[order]) keys[order--] = key;
        }
    }

public:
    std::vector<int32_t> tokens;

    Ngrams(const int32_t* lengths, int32_t count, bool first) : orders(lengths, lengths + count), tables(count), first(first) {}

    void clear() {
        tokens.clear();
        tables.assign(orders.size(), Table{});
    }
    void extend(const int64_t* more, int64_t count) {
        std::vector<uint64_t> keys(orders.size());
        for (int64_t i = 0; i < count; ++i) {
            const int64_t place = int64_t(tokens.size());
            hash(tokens, place, keys.data());
            // The n-gram that ends at the last token has no follower yet, which also excludes self-matches.
            for (size_t order = 0; order < orders.size(); ++order)
                if (orders[order] <= place) tables[order].put(keys[order], int32_t(place), first);
            tokens.push_back(int32_t(more[i]));
        }
    }
    // The place after the last occurrence here of the longest n-gram that ends `text`, -1 where there is none.
    int64_t find(const std::vector<int32_t>& text) const {
        std::vector<uint64_t> keys(orders.size());
        const int64_t size = int64_t(text.size());
        hash(text, size, keys.data());
        for (size_t order = 0; order < orders.size(); ++order) {
            const int64_t n = orders[order];
            if (n > size) continue;
            const int64_t place = tables[order].get(keys[order]);
            if (place >= n && std::equal(text.end() - n, text.end(), tokens.begin() + (place - n))) return place;
        }
        return -1;
    }
    // Up to `length` tokens from `place` on; where the text ends, a copy that `wraps` goes on into itself. Returns how many.
    int32_t copy(int64_t place, int32_t length, bool wraps, int64_t* to) const {
        const int64_t period = int64_t(tokens.size()) - place;
        if (!wraps) length = int32_t(std::min<int64_t>(length, period));
        for (int32_t i = 0; i < length; ++i) to[i] = i < period ? tokens[place + i] : to[i - period];
        return length;
    }
    // Over how many tokens, `most` at most, what stands before `place` agrees with the end of `text`.
    int32_t agrees(int64_t place, const std::vector<int32_t>& text, int64_t most) const {
        most = std::min({most, place, int64_t(text.size())});
        int32_t length = 0;
        while (length < most && tokens[place - 1 - length] == text[text.size() - 1 - length]) ++length;
        return length;
    }
};

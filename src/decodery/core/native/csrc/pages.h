// Pages of key-value memory: 16 slots of one layer and one key-value head. How numbers lie in a page is known here and to
// the kernels that read whole pages (tiles.h, attention.h).
//
// float32, float16: keys [wide][16], then values [16][wide].
// Coded: bytes (number + 128) of keys [wide / 4][16][4], then of values [4][wide][4], whose first axis is of four slots,
// then 16 scales of keys and 16 of values in bfloat16.
// wide: head_dim, rounded up to a multiple of 16; added numbers are never used. One vector has a number, or four, of each of
// 16 keys, so that scores need no sums over lanes.
#pragma once
#include <stdint.h>
#include <string.h>

#include <vector>

#include "abi.h"

constexpr int32_t page_slots = 16;
constexpr int32_t scale_bytes = 2;    // of a coded row
constexpr int32_t most_dim = 1024;    // of a head

inline int32_t round_up(int32_t n, int32_t unit) { return (n + unit - 1) / unit * unit; }

// kind: 0 of keys, 1 of values.
template <class T>
T* numbers_of(char* page, int32_t kind, int32_t wide) { return reinterpret_cast<T*>(page) + kind * page_slots * wide; }
inline uint16_t* scales_of(char* page, int32_t kind, int32_t wide) {
    return reinterpret_cast<uint16_t*>(page + 2 * page_slots * wide) + kind * page_slots;
}

// Calls work(number of a row [dim], its place in a page) for all of them. T: of two or four bytes, or of one if coded. wide: of
// the page, where the row is a part of what is there.
template <class T, class Work>
inline void each_number(char* page, int32_t kind, int32_t slot, int32_t dim, int32_t wide, const Work& work) {
    const int32_t lane = slot % page_slots;
    T* to = numbers_of<T>(page, kind, wide);
    if (sizeof(T) > 1) {
        if (kind == 0)
            for (int32_t i = 0; i < dim; ++i) work(i, to + i * page_slots + lane);
        else
            for (int32_t i = 0; i < dim; ++i) work(i, to + lane * wide + i);
    } else if (kind == 0)
        for (int32_t i = 0; i < dim; ++i) work(i, to + i / 4 * 4 * page_slots + lane * 4 + i % 4);
    else
        for (int32_t i = 0; i < dim; ++i) work(i, to + lane / 4 * 4 * wide + i * 4 + lane % 4);
}
template <class T, class Work>
inline void each_number(char* page, int32_t kind, int32_t slot, int32_t dim, const Work& work) {
    each_number<T>(page, kind, slot, dim, round_up(dim, 16), work);
}
template <class T>
inline void put_numbers(char* page, int32_t kind, int32_t slot, int32_t dim, const T* row) {
    each_number<T>(page, kind, slot, dim, [&](int32_t i, T* to) {
        if constexpr (sizeof(T) > 1) *to = row[i];
        else *to = T(row[i] ^ 0x80);
    });
}
inline void put_coded(char* page, int32_t kind, int32_t slot, int32_t dim, const uint8_t* row, uint16_t scale) {
    put_numbers(page, kind, slot, dim, row);
    scales_of(page, kind, round_up(dim, 16))[slot % page_slots] = scale;
}

// Calls work(row in memory, its page, null where there is none, kind, slot) for all of them.
template <class Work>
void each_page_row(const PageRows& rows, const Work& work) {
    char* at = rows.rows;
    for (int32_t layer = 0; layer < rows.layers; ++layer)
        for (int32_t kind = 0; kind < 2; ++kind)
            for (int32_t head = 0; head < rows.heads; ++head) {
                const int32_t* table = rows.tables + (int64_t(layer) * rows.heads + head) * rows.table_pages;
                for (int64_t i = 0; i < rows.count; ++i, at += rows.row_bytes) {
                    const int32_t slot = rows.slots != nullptr ? rows.slots[i] : int32_t(rows.start + i);
                    const int32_t page = table[slot / page_slots];
                    work(at, page < 0 ? nullptr : rows.base + page * rows.page_bytes, kind, slot);
                }
            }
}
// Calls work(a number of the kind that rows are made of, how many there are in one).
template <class Work>
void by_numbers(const PageRows& rows, const Work& work) {
    const int32_t dim = int32_t(rows.row_bytes) / rows.number_bytes;
    if (rows.number_bytes == 8) work(uint64_t(), dim);
    else if (rows.number_bytes == 4) work(uint32_t(), dim);
    else if (rows.number_bytes == 2) work(uint16_t(), dim);
    else work(uint8_t(), dim - scale_bytes);
}

// What no page holds is read as zeros.
inline void read_page_rows(const PageRows& rows) {
    by_numbers(rows, [&](auto number, int32_t dim) {
        using T = decltype(number);
        each_page_row(rows, [&](char* row, char* page, int32_t kind, int32_t slot) {
            if (page == nullptr) {
                memset(row, 0, size_t(rows.row_bytes));
                return;
            }
            T* to = reinterpret_cast<T*>(row);
            each_number<T>(page, kind, slot, dim, [&](int32_t i, const T* held) { to[i] = sizeof(T) > 1 ? *held : T(*held ^ 0x80); });
            if (sizeof(T) == 1) memcpy(row + dim, scales_of(page, kind, round_up(dim, 16)) + slot % page_slots, scale_bytes);
        });
    });
}

inline void write_page_rows(const PageRows& rows) {
    by_numbers(rows, [&](auto number, int32_t dim) {
        using T = decltype(number);
        each_page_row(rows, [&](const char* row, char* page, int32_t kind, int32_t slot) {
            if (page == nullptr) return;
            put_numbers(page, kind, slot, dim, reinterpret_cast<const T*>(row));
            if (sizeof(T) == 1) memcpy(scales_of(page, kind, round_up(dim, 16)) + slot % page_slots, row + dim, scale_bytes);
        });
    });
}

// Copies the keys and values of one slot of a layer's key-value head to another slot.
inline void copy_slot(const Segment& segment, int32_t layer, int32_t head, int32_t from, int32_t to, int32_t dim) {
    const int32_t* table = segment.table(layer, head);
    char* source = segment.base + table[from / page_slots] * segment.page_bytes;
    char* target = segment.base + table[to / page_slots] * segment.page_bytes;
    const auto move = [&](auto number) {
        using T = decltype(number);
        for (int32_t kind = 0; kind < 2; ++kind) {
            T row[most_dim];
            each_number<T>(source, kind, from, dim, [&](int32_t i, const T* held) { row[i] = *held; });
            each_number<T>(target, kind, to, dim, [&](int32_t i, T* held) { *held = row[i]; });
            if (sizeof(T) > 1) continue;
            const int32_t wide = round_up(dim, 16);
            scales_of(target, kind, wide)[to % page_slots] = scales_of(source, kind, wide)[from % page_slots];
        }
    };
    if (segment.element == float32_elements) move(uint32_t());
    else if (segment.element == float16_elements) move(uint16_t());
    else move(uint8_t());
}

// Lets 16 slots of a page hold those of two pages that follow each other, from slot `by` of the first on. Slots may move down
// within a page: every row is read before it is written.
template <class T>
void shift_lanes(T* to, const T* here, const T* next, int32_t by, int32_t rows) {
    if (by == 1) {    // what is read is not what was just written in other pieces, which would wait for that
        for (int32_t row = 0; row < rows; ++row, to += page_slots, here += page_slots, next += page_slots) {
            memmove(to, here + 1, (page_slots - 1) * sizeof(T));
            to[page_slots - 1] = next[0];
        }
        return;
    }
    T both[2 * page_slots];
    for (int32_t row = 0; row < rows; ++row) {
        memcpy(both, here + row * page_slots, sizeof both / 2);
        memcpy(both + page_slots, next + row * page_slots, sizeof both / 2);
        memcpy(to + row * page_slots, both + by, sizeof both / 2);
    }
}
template <class T>
void shift_page(char* to, char* here, char* next, int32_t by, int32_t dim) {
    const int32_t wide = round_up(dim, 16);
    if (sizeof(T) > 1) {
        shift_lanes(numbers_of<T>(to, 0, wide), numbers_of<T>(here, 0, wide), numbers_of<T>(next, 0, wide), by, dim);
        T* values = numbers_of<T>(to, 1, wide);
        const int32_t stay = page_slots - by;
        memmove(values, numbers_of<T>(here, 1, wide) + by * wide, size_t(stay) * wide * sizeof(T));
        memcpy(values + stay * wide, numbers_of<T>(next, 1, wide), size_t(by) * wide * sizeof(T));
        return;
    }
    shift_lanes(numbers_of<uint32_t>(to, 0, 0), numbers_of<uint32_t>(here, 0, 0), numbers_of<uint32_t>(next, 0, 0), by, wide / 4);
    // Values of four slots are a word.
    const auto words = [&](char* first, char* second, int32_t quad) {
        return reinterpret_cast<uint32_t*>(numbers_of<T>(quad < 4 ? first : second, 1, wide)) + quad % 4 * wide;
    };
    const int32_t bits = by % 4 * 8;
    for (int32_t quad = 0; quad < 4; ++quad) {
        uint32_t* target = words(to, to, quad);
        const uint32_t *first = words(here, next, quad + by / 4), *second = bits == 0 ? first : words(here, next, quad + by / 4 + 1);
        for (int32_t i = 0; i < wide; ++i) target[i] = bits == 0 ? first[i] : first[i] >> bits | second[i] << (32 - bits);
    }
    for (int32_t kind = 0; kind < 2; ++kind) shift_lanes(scales_of(to, kind, wide), scales_of(here, kind, wide), scales_of(next, kind, wide), by, 1);
}
// Lets slots [from, end) of one head hold what lies `by` slots after them.
template <class T>
void move_up(const Lost& lost, const int32_t* table, int32_t from, int32_t end, int32_t by, int32_t dim) {
    const auto page = [&](int32_t slot) { return lost.base + table[slot / page_slots] * lost.page_bytes; };
    for (int32_t slot = from; slot < end;) {
        if (slot % page_slots == 0 && slot + page_slots <= end) {
            shift_page<T>(page(slot), page(slot + by), page(slot + by + page_slots - 1), (slot + by) % page_slots, dim);
            slot += page_slots;
            continue;
        }
        for (int32_t kind = 0; kind < 2; ++kind) {
            T row[most_dim];
            each_number<T>(page(slot + by), kind, slot + by, dim, [&](int32_t i, const T* held) { row[i] = *held; });
            each_number<T>(page(slot), kind, slot, dim, [&](int32_t i, T* held) { *held = row[i]; });
            if (sizeof(T) > 1) continue;
            const int32_t wide = round_up(dim, 16);
            scales_of(page(slot), kind, wide)[slot % page_slots] = scales_of(page(slot + by), kind, wide)[(slot + by) % page_slots];
        }
        ++slot;
    }
}
// Lets a slot hold a row that is stored as pages have it.
template <class T>
inline void put_stored(char* page, int32_t kind, int32_t slot, int32_t dim, const char* row) {
    each_number<T>(page, kind, slot, dim, [&](int32_t i, T* held) { memcpy(held, row + i * int32_t(sizeof(T)), sizeof(T)); });
    if (sizeof(T) == 1) memcpy(scales_of(page, kind, round_up(dim, 16)) + slot % page_slots, row + dim, scale_bytes);
}
inline void put_merged(const Lost& lost, int32_t dim) {
    const char* row = lost.merged;
    for (int32_t i = 0; i < lost.layers * lost.heads * lost.merged_count; ++i)
        for (int32_t kind = 0; kind < 2; ++kind, row += lost.row_bytes) {
            const int32_t slot = lost.targets[i];
            if (slot < 0) continue;
            char* page = lost.base + lost.tables[int64_t(i / lost.merged_count) * lost.table_pages + slot / page_slots] * lost.page_bytes;
            if (lost.number_bytes == 4) put_stored<uint32_t>(page, kind, slot, dim, row);
            else if (lost.number_bytes == 2) put_stored<uint16_t>(page, kind, slot, dim, row);
            else put_stored<uint8_t>(page, kind, slot, dim, row);
        }
}
inline void lose_slots(const Lost& lost) {
    const int32_t dim = int32_t(lost.row_bytes) / lost.number_bytes - (lost.number_bytes == 1 ? scale_bytes : 0);
    put_merged(lost, dim);
    for (int32_t layer = 0; layer < lost.layers; ++layer) {
        const int32_t length = int32_t(lost.lengths[layer]);
        const int32_t* gone = lost.slots + int64_t(layer) * lost.heads * lost.count;
        int32_t count = 0, first = length;
        while (count < lost.count && gone[count] < length) ++count;
        for (int32_t head = 0; head < lost.heads; ++head) {
            const int32_t *own = gone + head * lost.count, *table = lost.tables + (int64_t(layer) * lost.heads + head) * lost.table_pages;
            double* worths = lost.worths == nullptr ? nullptr : lost.worths + (int64_t(layer) * lost.heads + head) * lost.worth_slots;
            for (int32_t i = 0; i < count; ++i) {
                const int32_t by = i + 1, from = own[i] - i, end = (by < count ? own[by] : length) - by;
                first = from < first ? from : first;
                if (lost.number_bytes == 4) move_up<uint32_t>(lost, table, from, end, by, dim);
                else if (lost.number_bytes == 2) move_up<uint16_t>(lost, table, from, end, by, dim);
                else move_up<uint8_t>(lost, table, from, end, by, dim);
                if (worths != nullptr) memmove(worths + from, worths + from + by, size_t(end - from) * sizeof(double));
            }
        }
        if (count == 0) continue;
        int32_t* positions = lost.positions + layer * lost.positions_layer;
        std::vector<int32_t> latest(positions + first, positions + length - count);
        for (int32_t head = 0; head < lost.heads; ++head) {
            const int32_t* own = gone + head * lost.count;
            for (int32_t by = 1; by <= count; ++by)
                for (int32_t slot = own[by - 1] - by + 1, end = (by < count ? own[by] : length) - by; slot < end; ++slot)
                    latest[slot - first] = positions[slot + by] > latest[slot - first] ? positions[slot + by] : latest[slot - first];
        }
        memcpy(positions + first, latest.data(), latest.size() * sizeof(int32_t));
    }
}

// Pages of key-value memory: 16 slots of one layer and one key-value head, the rows of keys before those of values. Nothing
// else knows what a page looks like.
#pragma once
#include <stdint.h>
#include <string.h>

#include "abi.h"

constexpr int32_t page_slots = 16;

// Where a row of keys (kind 0) or values (kind 1) begins in its page, in bytes.
inline int64_t row_offset(int32_t kind, int32_t slot, int64_t row_bytes) {
    return (int64_t(kind) * page_slots + slot % page_slots) * row_bytes;
}

// Calls work(row in memory, row in its page, null where there is none) for all of them.
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
                    work(at, page < 0 ? nullptr
                                      : rows.base + page * rows.page_bytes + row_offset(kind, slot, rows.row_bytes));
                }
            }
}

// What no page holds is read as zeros.
inline void read_page_rows(const PageRows& rows) {
    each_page_row(rows, [&](char* row, const char* held) {
        if (held != nullptr) memcpy(row, held, size_t(rows.row_bytes));
        else memset(row, 0, size_t(rows.row_bytes));
    });
}

inline void write_page_rows(const PageRows& rows) {
    each_page_row(rows, [&](const char* row, char* held) {
        if (held != nullptr) memcpy(held, row, size_t(rows.row_bytes));
    });
}

// Copies the keys and values of one slot of a layer's key-value head to another slot.
inline void copy_slot(const Segment& segment, int32_t layer, int32_t head, int32_t from, int32_t to, int32_t dim) {
    const bool coded = segment.element == coded_elements;
    const int64_t bytes = coded ? dim + 2 : int64_t(dim) * (segment.element == float32_elements ? 4 : 2);
    const int32_t* table = segment.table(layer, head);
    char* source = segment.base + table[from / page_slots] * segment.page_bytes;
    char* target = segment.base + table[to / page_slots] * segment.page_bytes;
    for (int32_t kind = 0; kind < 2; ++kind)
        memcpy(target + row_offset(kind, to, bytes), source + row_offset(kind, from, bytes), size_t(bytes));
}

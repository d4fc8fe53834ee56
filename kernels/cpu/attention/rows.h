// Which rows attention reads: the arguments of kvseek_attend, and a cursor over the rows of one (request, KV head).
#pragma once

#include <cstdint>

#include "kernels/cpu/kernel.h"
#include "kernels/cpu/simd.h"
#include "kernels/request.h"

namespace kvseek {

constexpr int64_t EXTENT_TOKENS = 1024;
constexpr int64_t SCALE_BYTES = 4;  // of a row of 8-bit integers: a scale of the key, then one of the value

// Row: K [dim], V [dim]. Strides are in elements.
struct AttendArguments {
    const void* queries;      // [batch, kv_heads * group, dim]
    void* out;                // same shape and type; float32 if lse is wanted
    float* lse;               // [batch, kv_heads * group] natural logarithm of the weights' sum; null: not wanted
    const Request* requests;  // [batch]
    const void* window;       // [slots, kv_heads, window_rows, 2, dim], contiguous but for the slot stride
    const void* rows;         // [extents, kv_heads, 1024, 2, dim], contiguous but for the extent stride and scales
    const int32_t* table;     // [slots, max_extents]
    const int32_t* selected;  // [batch, kv_heads, entries], places; negative: none; null: every row
    int64_t batch, kv_heads, group, dim;
    int64_t window_rows, window_stride, sink;
    int64_t extent_stride, max_extents;
    int64_t entries;
    int64_t bfloat16, float16;  // type of rows, queries and out; neither: float32. Of float16, lse must be wanted
    int64_t rounded;            // rows have 8 bits: behind an extent's of a head are their scales, bfloat16 [1024, 2]
    int64_t threads;
    double scaling;
};

namespace {

inline const int32_t* entries_of(const AttendArguments& a, int64_t request, int64_t head) {
    return a.selected == nullptr ? nullptr : a.selected + (request * a.kv_heads + head) * a.entries;
}

inline int64_t count_rows(const AttendArguments& a, int64_t request, int64_t head) {
    const int32_t* entries = entries_of(a, request, head);
    const Request& read = a.requests[request];
    int64_t rows = read.sink_rows + read.ring_rows;
    if (entries == nullptr) return rows + read.length;
    for (int64_t entry = 0; entry < a.entries; entry++) rows += entries[entry] >= 0 && entries[entry] < read.length;
    return rows;
}

// A number of rows in 8 bits, in an engine of type T.
template <class T>
struct Rounded {
    int8_t number;
};
template <class Row>
constexpr bool is_rounded = false;
template <class T>
constexpr bool is_rounded<Rounded<T>> = true;

// Of what a request attends to: rows that are rounded are none of the window.
enum class Part { BOTH, WINDOW, RETRIEVAL };

// Walks sink rows and ring rows (in two runs if they wrap), then selected rows one by one, or every row of the region:
// all but single rows in runs that are contiguous in memory.
template <class T>
class RowCursor {
  public:
    RowCursor(const AttendArguments& a, int64_t request, int64_t head, Part part = Part::BOTH)
        : a_(a),
          entries_(part == Part::WINDOW ? nullptr : entries_of(a, request, head)),
          table_(a.table + a.requests[request].slot * a.max_extents),
          length_(part == Part::WINDOW ? 0 : a.requests[request].length),
          row_(2 * a.dim),
          window_(static_cast<const T*>(a.window) + a.requests[request].slot * a.window_stride +
                  head * a.window_rows * row_),
          retrieval_(static_cast<const T*>(a.rows) + head * EXTENT_TOKENS * (row_ + is_rounded<T> * SCALE_BYTES)),
          ring_first_(a.requests[request].ring_first),
          ring_left_(part == Part::RETRIEVAL ? 0 : a.requests[request].ring_rows) {
        next_ = window_;
        run_ = part == Part::RETRIEVAL ? 0 : a.requests[request].sink_rows;
    }

    void skip(int64_t count) {
        while (count > 0 && (run_ > 0 || start_run())) {
            const int64_t step = count < run_ ? count : run_;
            advance(step);
            count -= step;
        }
        if (entries_ == nullptr) return;
        for (; count > 0 && entry_ < a_.entries; entry_++) count -= is_row(entries_[entry_]);
    }

    // Addresses of up to `limit` further rows, and the scales of keys and values if they are rounded; returns how many
    // there were.
    int take(const T** rows, int64_t limit, float* key_scales, float* value_scales) {
        int taken = 0;
        const auto add = [&](const T* row, const Bfloat16* scales) {
            rows[taken] = row;
            if constexpr (is_rounded<T>)
                key_scales[taken] = to_float(scales[0]), value_scales[taken] = to_float(scales[1]);
            taken++;
        };
        while (taken < limit && (run_ > 0 || start_run())) {
            const int64_t step = limit - taken < run_ ? limit - taken : run_;
            for (int64_t i = 0; i < step; i++) add(next_ + i * row_, is_rounded<T> ? next_scales_ + 2 * i : nullptr);
            advance(step);
        }
        if (entries_ == nullptr) return taken;
        for (; taken < limit && entry_ < a_.entries; entry_++)
            if (is_row(entries_[entry_])) add(row_at(entries_[entry_]), scales_at(entries_[entry_]));
        return taken;
    }

  private:
    bool is_row(int32_t entry) const { return entry >= 0 && entry < length_; }

    const T* row_at(int64_t place) const {
        return retrieval_ + table_[place / EXTENT_TOKENS] * a_.extent_stride + place % EXTENT_TOKENS * row_;
    }

    const Bfloat16* scales_at(int64_t place) const {
        if (!is_rounded<T>) return nullptr;
        const T* block = retrieval_ + table_[place / EXTENT_TOKENS] * a_.extent_stride;
        return reinterpret_cast<const Bfloat16*>(block + EXTENT_TOKENS * row_) + 2 * (place % EXTENT_TOKENS);
    }

    void advance(int64_t step) {
        next_ += step * row_;
        if constexpr (is_rounded<T>) next_scales_ += 2 * step;
        run_ -= step;
    }

    bool start_run() {
        if (ring_left_ > 0) {
            const int64_t ring = a_.window_rows - a_.sink, to_end = ring - ring_first_;
            next_ = window_ + (a_.sink + ring_first_) * row_;
            run_ = ring_left_ < to_end ? ring_left_ : to_end;
            ring_left_ -= run_;
            ring_first_ = 0;
            return true;
        }
        if (entries_ != nullptr || position_ == length_) return false;
        const int64_t to_border = EXTENT_TOKENS - position_ % EXTENT_TOKENS;
        next_ = row_at(position_), next_scales_ = scales_at(position_);
        run_ = length_ - position_ < to_border ? length_ - position_ : to_border;
        position_ += run_;
        return true;
    }

    const AttendArguments& a_;
    const int32_t *entries_, *table_;
    int64_t length_, row_;
    const T *window_, *retrieval_;
    int64_t ring_first_, ring_left_;
    const T* next_;
    const Bfloat16* next_scales_ = nullptr;  // of rows that are rounded
    int64_t run_;
    int64_t entry_ = 0, position_ = 0;
};

}  // namespace
}  // namespace kvseek

KVSEEK_PUBLIC void kvseek_attend(const void* arguments);

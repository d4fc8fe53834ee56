// How rows of float or bfloat16 numbers become operands of the products (products.h). Numbers of `Floats` are widened.
#pragma once

#include "products.h"

namespace kvseek {
namespace {

// [count, dim] numbers; the stride is in numbers.
template <class T>
struct Rows {
    const T* first;
    int64_t stride, count, dim;
    const T* operator[](int64_t row) const { return first + row * stride; }
};

// Ask for rows that will be packed soon: with few queries, memory is what packing waits for. Asking for a row behind
// the last one does no harm.
template <class T>
inline void prefetch(const Rows<T>& rows, int64_t row) {
    constexpr int64_t AHEAD = 16;
    const char* from = reinterpret_cast<const char*>(rows[row + AHEAD]);
    for (int64_t offset = 0; offset < rows.dim * static_cast<int64_t>(sizeof(T)); offset += 64)
        __builtin_prefetch(from + offset);
}

// Word `step` of a row.
template <class Words, class T>
inline uint32_t word_of(const T* row, int64_t step) {
    if constexpr (Words::PAIR * sizeof(T) == sizeof(uint32_t)) {
        return load_as<uint32_t>(row + step * Words::PAIR);
    } else {
        const float value = to_float(row[step]);
        return load_as<uint32_t>(&value);
    }
}

// A row of the left operand.
template <class Words, class T>
void pack_row(const T* row, int64_t dim, uint32_t* words) {
    for (int64_t step = 0; step < dim / Words::PAIR; step++) words[step] = word_of<Words>(row, step);
}

#if defined(__x86_64__)
// Words step .. step + 3 of a row.
template <class Words, class T>
inline __m128 four_words(const T* row, int64_t step) {
    if constexpr (Words::PAIR * sizeof(T) == sizeof(uint32_t)) {
        return load_as<__m128>(row + step * Words::PAIR);
    } else {
        const __m128i halves = _mm_cvtsi64_si128(load_as<int64_t>(row + step));
        return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), halves));
    }
}

// Four rows at a time; returns how many rows and steps are done, each a multiple of 4.
template <class Words, class T>
inline void pack_square_columns(const Rows<T>& rows, int64_t done_rows, int64_t done_steps, int64_t columns,
                                uint32_t* words) {
    for (int64_t row = 0; row < done_rows; row += 4) {
        for (int i = 0; i < 4; i++) prefetch(rows, row + i);
        for (int64_t step = 0; step < done_steps; step += 4) {
            __m128 a = four_words<Words>(rows[row], step), b = four_words<Words>(rows[row + 1], step);
            __m128 c = four_words<Words>(rows[row + 2], step), d = four_words<Words>(rows[row + 3], step);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            float* to = reinterpret_cast<float*>(words + step * columns + row);
            _mm_storeu_ps(to, a);
            _mm_storeu_ps(to + columns, b);
            _mm_storeu_ps(to + 2 * columns, c);
            _mm_storeu_ps(to + 3 * columns, d);
        }
    }
}
#endif

// Rows become columns of a right operand [steps, columns]; columns without a row are zero.
template <class Words, class T>
void pack_columns(const Rows<T>& rows, int64_t columns, uint32_t* words) {
    const int64_t steps = rows.dim / Words::PAIR;
    int64_t done_rows = 0, done_steps = 0;
#if defined(__x86_64__)
    done_rows = rows.count / 4 * 4, done_steps = steps / 4 * 4;
    pack_square_columns<Words>(rows, done_rows, done_steps, columns, words);
#endif
    for (int64_t row = 0; row < rows.count; row++)
        for (int64_t step = row < done_rows ? done_steps : 0; step < steps; step++)
            words[step * columns + row] = word_of<Words>(rows[row], step);
    for (int64_t step = 0; step < steps; step++)
        std::memset(words + step * columns + rows.count, 0, sizeof(uint32_t) * (columns - rows.count));
}

// Rows become rows of a right operand [steps, columns], one for each PAIR of them; what is missing is zero.
template <class Words, class T>
void pack_summed(const Rows<T>& rows, int64_t columns, uint32_t* words) {
    const int64_t vectors_end = rows.dim / LANES * LANES;
    for (int64_t row = 0; row < rows.count; row += Words::PAIR, words += columns) {
        for (int i = 0; i < Words::PAIR; i++) prefetch(rows, row + i);
        if constexpr (Words::PAIR == 1) {
            for (int64_t d = 0; d < vectors_end; d += LANES)
                store(reinterpret_cast<float*>(words + d), load(rows[row] + d));
            for (int64_t d = vectors_end; d < rows.dim; d++) words[d] = word_of<Words>(rows[row], d);
        } else {
            const bool second = row + 1 < rows.count;
            const T *low = rows[row], *high = second ? rows[row + 1] : low;
            const uint32_t mask = second ? 0xffff0000 : 0;
            for (int64_t d = 0; d < vectors_end; d += LANES) {
                const WordVec lows = __builtin_convertvector(load_as<HalfVec>(low + d), WordVec);
                const WordVec highs = __builtin_convertvector(load_as<HalfVec>(high + d), WordVec);
                const WordVec both = lows | (highs << 16 & mask);
                std::memcpy(words + d, &both, sizeof(both));
            }
            for (int64_t d = vectors_end; d < rows.dim; d++)
                words[d] = low[d].bits | (static_cast<uint32_t>(high[d].bits) << 16 & mask);
        }
        std::memset(words + rows.dim, 0, sizeof(uint32_t) * (columns - rows.dim));
    }
}

}  // namespace
}  // namespace kvseek

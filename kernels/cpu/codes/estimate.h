// Estimates of q·k from nested key codes (kernels/reference/codes/key_codes.py): integer products of rounded queries
// with the codes of keys that lie one after another. Keys at given places are copied together first (gather_rows).
#pragma once

#include "kernels/cpu/extent_rows.h"
#include "kernels/cpu/half.h"
#include "products.h"

namespace kvseek {
namespace {

constexpr int MAX_QUERIES = 16;  // query heads of a group
constexpr float QUERY_LARGEST = 127.0f;

// Round the rotated query lane [size].
void round_query(const float* lane, int size, RoundedQuery* query) {
    int32_t integers[MAX_PADDED_DIM], sum = 0, square = 0;
    Operand operands[MAX_PADDED_DIM];
    query->step = round_vector(lane, size, QUERY_LARGEST, integers);
    for (int d = 0; d < size; d++) {
        operands[d] = static_cast<Operand>(integers[d]), query->channels[d] = static_cast<int16_t>(integers[d]);
        sum += integers[d], square += integers[d] * integers[d];
    }
    query->sum = sum;
    query->length = __builtin_sqrtf(static_cast<float>(square));
    order_operands(operands, size / FIELDS, query->operands);
}

// The means that codes leave out: of blocks of `block` neighbouring rows.
struct Means {
    const int8_t* integers;  // [extents, kv_heads, 1024 / block, 2, size]: 256 times the first plus the second
    const float* steps;      // [extents, kv_heads, 1024 / block]
    int64_t block;
    int size;

    // <M, query's integers> of the block of a row, times the mean's step.
    float product(int64_t row, const RoundedQuery& query) const {
        const int8_t* mean = integers + row / block * 2 * size;
        int32_t first = 0, second = 0;
        for (int d = 0; d < size; d++) {
            first += mean[d] * query.channels[d];
            second += mean[size + d] * query.channels[d];
        }
        return static_cast<float>(256 * first + second) * steps[row / block];
    }

    // The same times `worth`, of neighbouring rows from `first` on, whose blocks are new ones but for the first.
    void products(int64_t first, int count, const RoundedQuery& query, float worth, float* to) const {
        for (int done = 0; done < count;) {
            const int64_t left = block - (first + done) % block;
            const int same = static_cast<int>(left < count - done ? left : count - done);
            const float of_block = product(first + done, query) * worth;
            for (int i = 0; i < same; i++) to[done + i] = of_block;
            done += same;
        }
    }

    // The same of any rows. Neighbours in the list are often of one block.
    void products(const int64_t* rows, int count, const RoundedQuery& query, float worth, float* to) const {
        for (int i = 0; i < count; i++) {
            const bool again = i > 0 && rows[i] / block == rows[i - 1] / block;
            to[i] = again ? to[i - 1] : product(rows[i], query) * worth;
        }
    }
};

template <class Arguments>
inline Means means_of(const Arguments& a) {
    return {a.means, a.mean_steps, a.block, static_cast<int>(a.padded_dim)};
}

// Rotate and round the queries [group, dim] of a KV head.
template <class T>
void round_lanes(const T* queries, int64_t group, int64_t dim, const float* signs, int size, RoundedQuery* lanes) {
    for (int64_t q = 0; q < group; q++) {
        float x[MAX_PADDED_DIM] = {};
        for (int64_t d = 0; d < dim; d++) x[d] = to_float(queries[q * dim + d]);
        rotate(x, signs, size);
        round_query(x, size, lanes + q);
    }
}

// The same for a KV head of a request, from a selection's arguments: queries [batch, kv_heads * group, dim].
template <class Arguments>
void round_queries(const Arguments& a, int64_t request, int64_t head, RoundedQuery* lanes) {
    const int64_t first = (request * a.kv_heads + head) * a.group * a.dim;
    const int size = static_cast<int>(a.padded_dim);
    if (a.bfloat16)
        round_lanes(static_cast<const Bfloat16*>(a.queries) + first, a.group, a.dim, a.signs, size, lanes);
    else
        round_lanes(static_cast<const float*>(a.queries) + first, a.group, a.dim, a.signs, size, lanes);
}

// What plane_sums does, for any row: ROW, or `row` if ROW is 0.
template <int ROW>
void key_sums(const Planes& planes, int row, int count, const RoundedQuery* queries, int lanes, int32_t* sums,
              int64_t stride) {
    const int bytes = ROW == 0 ? row : ROW;
    int16_t codes[MAX_PADDED_DIM];
    for (int key = 0; key < count; key++) {
        const int64_t from = static_cast<int64_t>(key) * bytes;
        for (int f = 0; f < FIELDS; f++) {
            for (int b = 0; b < bytes; b++) {
                const int high = planes.high[from + b] >> (2 * f) & 3;
                codes[f * bytes + b] = planes.low == nullptr ? high : 4 * high + (planes.low[from + b] >> (2 * f) & 3);
            }
        }
        for (int lane = 0; lane < lanes; lane++) {
            int32_t sum = 0;
            for (int d = 0; d < FIELDS * bytes; d++) sum += codes[d] * queries[lane].operands[d];
            sums[lane * stride + key] = sum;
        }
    }
}

// <codes, query> of `count` keys that lie one after another and queries [lanes] into sums[lane * stride + key]. Planes
// are readable and `sums` writable up to the next multiple of 32 keys.
void plane_sums(const Planes& planes, int row, int count, const RoundedQuery* queries, int lanes, int32_t* sums,
                int64_t stride) {
    with_constant<16, 32, 64, 0>(row, [&](auto own) {
#if defined(__AVX2__)
        if constexpr (own != 0) return vector_sums<own>(planes, count, queries, lanes, sums, stride);
#endif
        key_sums<own>(planes, row, count, queries, lanes, sums, stride);
    });
}

// Estimates of LANES keys from their sums: `bits` planes' bits, a query's sum of integers, and what half a cell is
// worth; `offsets` is the query's product with their means.
inline Vec scale_sums(const int32_t* sums, Vec scales, int bits, int32_t query_sum, float worth, const float* offsets) {
    const IntVec twice = 2 * load_as<IntVec>(sums) - ((1 << bits) - 1) * query_sum;
    Vec centred = __builtin_convertvector(twice, Vec) * scales * worth;
#if defined(__x86_64__)
    asm("" : "+x"(centred));  // the reference rounds before it adds: no fused product
#endif
    return centred + load(offsets);
}

// Copy rows of `row` bytes of a plane to where they lie one after another.
inline void gather_rows(const uint8_t* plane, int row, const int64_t* rows, int count, uint8_t* to) {
    with_constant<16, 32, 0>(row, [&](auto own) {
        const int bytes = own == 0 ? row : own;
        for (int i = 0; i < count; i++) std::memcpy(to + i * bytes, plane + rows[i] * bytes, bytes);
    });
}

}  // namespace
}  // namespace kvseek

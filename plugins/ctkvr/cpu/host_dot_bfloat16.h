// Inner products of bfloat16 keys by instructions that not every AVX-512 processor has: vdpbf16ps, and AMX tiles.
//
// Both multiply exactly and add in float32; subnormal numbers count as zero. Queries are bfloat16 [group, dim] as they
// are. Functions carry their instruction set themselves, so the compiler keeps it out of all others.
#pragma once

#include "host_dot.h"

#if KVSEEK_LEVEL == 4

namespace kvseek {
namespace {

#define KVSEEK_BF16_DOTS __attribute__((target("avx512bf16")))
#define KVSEEK_TILES __attribute__((target("amx-tile,amx-bf16")))

constexpr int WORDS = 32;  // bfloat16 numbers of a vector, or of a tile's row

KVSEEK_BF16_DOTS inline __m512bh load_words(const Bfloat16* from) {
    return (__m512bh)_mm512_loadu_si512(from);
}

template <int COUNT>
KVSEEK_BF16_DOTS inline void multiply_words(const Bfloat16* queries, const KeyRun<Bfloat16>& run, int key,
                                            const Bfloat16* const* next, float* products) {
    const Bfloat16* const* keys = run.keys + key;
    __m512 sums[KEYS][COUNT];
    for (int k = 0; k < KEYS; k++)
        for (int q = 0; q < COUNT; q++) sums[k][q] = _mm512_setzero_ps();
    int d = 0;
    do {
        __m512bh words[KEYS];
        for (int k = 0; k < ASKED; k++) prefetch(next[k] + d, WORDS * sizeof(Bfloat16));
        for (int k = 0; k < KEYS; k++) words[k] = load_words(keys[k] + d);
        for (int q = 0; q < COUNT; q++) {
            const __m512bh query = load_words(queries + q * run.dim + d);
            for (int k = 0; k < KEYS; k++) sums[k][q] = _mm512_dpbf16_ps(sums[k][q], words[k], query);
        }
        d += WORDS;
    } while (d < run.dim);
    for (int q = 0; q < COUNT; q++)
        sum4((Vec)sums[0][q], (Vec)sums[1][q], (Vec)sums[2][q], (Vec)sums[3][q], products + q * run.stride + key);
}

KVSEEK_BF16_DOTS void multiply_keys_by_dots(const Bfloat16* queries, const KeyRun<Bfloat16>& run) {
    for (int key = 0; key < run.count; key += KEYS) {
        for (int q = 0; q < run.group; q += QUERIES) {
            const Bfloat16* chunk = queries + q * run.dim;
            const Bfloat16* const* next = q == 0 ? run.next + key / KEYS * ASKED : run.keys + key;
            float* products = run.products + q * run.stride;
            switch (run.group - q) {
                case 1:
                    multiply_words<1>(chunk, run, key, next, products);
                    break;
                case 2:
                    multiply_words<2>(chunk, run, key, next, products);
                    break;
                case 3:
                    multiply_words<3>(chunk, run, key, next, products);
                    break;
                default:
                    multiply_words<QUERIES>(chunk, run, key, next, products);
            }
        }
    }
}

// AMX: products of 16 keys (rows of a tile) by the group's queries (columns). Tiles 0 and 1 hold sums of two blocks of
// keys, 2 and 3 their keys, 4 the queries.
constexpr int TILE_KEYS = 16;
constexpr int TILE_ROW_BYTES = 64;

struct alignas(64) TileShapes {  // what LDTILECFG reads
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Queries of a group as tiles want them: for each pair of dimensions the numbers of all queries. [dim / 2, group, 2]
inline void pair_queries(const Bfloat16* queries, int group, int dim, Bfloat16* paired) {
    for (int q = 0; q < group; q++)
        for (int d = 0; d < dim; d++) paired[(d / 2 * group + q) * 2 + d % 2] = queries[q * dim + d];
}

inline TileShapes tile_shapes(int group) {
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 5; tile++) {
        const bool keys = tile == 2 || tile == 3;
        shapes.rows[tile] = TILE_KEYS;  // of the queries: WORDS / 2 pairs, which is the same number
        shapes.row_bytes[tile] = static_cast<uint16_t>(keys ? TILE_ROW_BYTES : group * sizeof(float));
    }
    return shapes;
}

// `gathered` [KEY_BLOCK, dim]: the keys side by side, for a tile is loaded with one distance between its rows.
KVSEEK_TILES inline void multiply_tiles(const Bfloat16* paired, const Bfloat16* gathered, int dim, int group,
                                        float* sums) {
    const int key_bytes = dim * static_cast<int>(sizeof(Bfloat16)),
              query_bytes = group * static_cast<int>(sizeof(float));
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < dim; d += WORDS) {
        _tile_loadd(4, paired + d * group, query_bytes);
        _tile_loadd(2, gathered + d, key_bytes);
        _tile_loadd(3, gathered + TILE_KEYS * dim + d, key_bytes);
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, sums, query_bytes);
    _tile_stored(1, sums + TILE_KEYS * group, query_bytes);
}

inline void gather_keys(const KeyRun<Bfloat16>& run, int key, Bfloat16* gathered) {
    for (int k = 0; k < KEY_BLOCK; k++) {
        const Bfloat16* next = run.next[(key + k) * ASKED / KEYS];
        for (int d = 0; d < run.dim; d += WORDS) {
            prefetch(next + d, WORDS * sizeof(Bfloat16));
            _mm512_store_si512(gathered + k * run.dim + d, _mm512_loadu_si512(run.keys[key + k] + d));
        }
    }
}

KVSEEK_TILES void multiply_keys_by_tiles(const Bfloat16* queries, const KeyRun<Bfloat16>& run) {
    alignas(64) Bfloat16 paired[16 * 256], gathered[KEY_BLOCK * 256];
    alignas(64) float sums[KEY_BLOCK * 16];
    const TileShapes shapes = tile_shapes(run.group);
    pair_queries(queries, run.group, run.dim, paired);
    _tile_loadconfig(&shapes);
    for (int key = 0; key < run.count; key += KEY_BLOCK) {
        gather_keys(run, key, gathered);
        multiply_tiles(paired, gathered, run.dim, run.group, sums);
        for (int q = 0; q < run.group; q++)
            for (int k = 0; k < KEY_BLOCK; k++) run.products[q * run.stride + key + k] = sums[k * run.group + q];
    }
    _tile_release();  // a thread with tiles in use has more state to save
}

}  // namespace
}  // namespace kvseek

#endif

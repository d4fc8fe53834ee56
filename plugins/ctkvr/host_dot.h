// Inner products of a group's queries with keys that lie anywhere: what a rerank spends its instructions on.
//
// All variants take the pointers of a run of keys, `count` of them plus repetitions up to a multiple of KEY_BLOCK, ask
// for keys some way ahead, and write products [group, stride]. Each product is a float32 sum over the head size.
#pragma once

#include "host_rows.h"

namespace kvseek {
namespace {

constexpr int KEY_BLOCK = 32;
constexpr int KEYS = 4;  // that share the registers of one pass
#if defined(__AVX512F__)
constexpr int QUERIES = 4;  // likewise: 16 sums in 32 registers
#else
constexpr int QUERIES = 2;
#endif
#ifndef KVSEEK_KEYS_AHEAD
#define KVSEEK_KEYS_AHEAD 12
#endif
constexpr int KEYS_AHEAD = KVSEEK_KEYS_AHEAD;  // asked for before they are read: some 100 ns of memory latency

// A run of keys and where their products go.
template <class T>
struct KeyRun {
    const T* const* keys;
    int count, dim, group;
    float* products;  // [group, stride]
    int64_t stride;
};

template <class T>
inline void prefetch_first(const KeyRun<T>& run) {
    for (int key = 0; key < KEYS_AHEAD && key < run.count; key++) prefetch(run.keys[key], run.dim * sizeof(T));
}

template <class T>
inline void prefetch_ahead(const KeyRun<T>& run, int key, int keys) {
    for (int ahead = key + KEYS_AHEAD; ahead < key + KEYS_AHEAD + keys && ahead < run.count; ahead++)
        prefetch(run.keys[ahead], run.dim * sizeof(T));
}

// KEYS keys by COUNT queries [COUNT, dim] in the order of load_pair.
template <class T, int COUNT>
inline void multiply(const float* queries, const KeyRun<T>& run, int key, float* products) {
    const T* const* keys = run.keys + key;
    Vec sums[KEYS][COUNT] = {};
    for (int d = 0; d < run.dim; d += PAIR) {
        Vec first[KEYS], second[KEYS];
        for (int k = 0; k < KEYS; k++) load_pair(keys[k] + d, first[k], second[k]);
        for (int q = 0; q < COUNT; q++) {
            const Vec a = load(queries + q * run.dim + d), b = load(queries + q * run.dim + d + LANES);
            for (int k = 0; k < KEYS; k++) sums[k][q] += first[k] * a + second[k] * b;
        }
    }
    for (int q = 0; q < COUNT; q++)
        sum4(sums[0][q], sums[1][q], sums[2][q], sums[3][q], products + q * run.stride + key);
}

// Queries as float [group, dim] in the order of load_pair.
template <class T>
void multiply_keys(const float* queries, const KeyRun<T>& run) {
    prefetch_first(run);
    for (int key = 0; key < run.count; key += KEYS) {
        prefetch_ahead(run, key, KEYS);
        for (int q = 0; q < run.group; q += QUERIES) {
            const float* chunk = queries + q * run.dim;
            float* products = run.products + q * run.stride;
            switch (run.group - q) {
                case 1:
                    multiply<T, 1>(chunk, run, key, products);
                    break;
#if defined(__AVX512F__)
                case 2:
                    multiply<T, 2>(chunk, run, key, products);
                    break;
                case 3:
                    multiply<T, 3>(chunk, run, key, products);
                    break;
#endif
                default:
                    multiply<T, QUERIES>(chunk, run, key, products);
            }
        }
    }
}

}  // namespace
}  // namespace kvseek

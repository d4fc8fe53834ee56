// Sizes of a ParisKV index as the GPU kernels see it, fixed when they are compiled (builder/compile/cuda.py).
#pragma once

#include "kernels/cuda/codes/rotate.cuh"

namespace kvseek {
namespace pariskv {

using codes::DIM, codes::EACH, codes::GROUP, codes::HEAD_DIM, codes::load_vector, codes::rotate;
constexpr int LANES = PARISKV_LANES;  // queries that vote: one, or all heads of the group
constexpr bool MEAN = PARISKV_MEAN;   // whether estimates of the mean query rank keys, or the heads' softmax weights
static_assert(LANES == (MEAN ? 1 : GROUP), "the mean query is the only lane; otherwise each head is one");
static_assert(GROUP <= 16, "at most 16 query heads share a KV head");

constexpr int BLOCK = 8;             // coordinates that share a centroid id
constexpr int BLOCKS = DIM / BLOCK;  // also bytes of ids, and weights, of a key
constexpr int CODE_BYTES = DIM / 2;
constexpr int CENTROIDS = 256;
constexpr int LEVELS = 8;
constexpr int VOTE_BYTES = LANES <= 4 ? 4 : LANES <= 8 ? 8 : 16;  // of a centroid: a byte for each lane
constexpr int QUAD = 4;                                           // blocks whose ids are one word
// The rerank is a product of keys (rows) and rotated queries (columns), 16 coordinates a step (rerank.cu).
constexpr int STEPS = DIM / 16;
constexpr int COLUMN_TILES = (2 * LANES + 7) / 8;  // of 8 columns: two a lane
constexpr int QUARTER = DIM / 4;                   // coordinates of a thread of a quad

constexpr int CHUNKS_OF_SCAN = 4;  // chunks of a block of the scan
constexpr int SCORES = 256;        // bins of a histogram of votes; a key gets at most 6 * BLOCKS of them
static_assert(6 * BLOCKS < SCORES, "votes of a lane must fit a byte");

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int BLOCK_THREADS = BLOCK / EACH;  // lanes that hold one block

}  // namespace pariskv
}  // namespace kvseek

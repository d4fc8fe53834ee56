// ParisKV, second step: sum each key's votes over the blocks, and keep the best-voted keys as candidates.
//
// Sums stay below 256 because a block gives at most 6 votes and there are at most 32 blocks. The query heads of a group
// ("lanes") vote apart; a key's score is its best lane's. Ballots hold the centroids' votes in one of two layouts:
// bytes [lanes, blocks, 256] where the processor looks 64 bytes up at once (byte_votes.h), else words [packs, blocks,
// 256] in which each byte is a lane, so that one addition serves four.
#pragma once

#include "byte_votes.h"
#include "kernels/cpu/simd.h"
#include "layout.h"
#include "tiers.h"

namespace kvseek {
namespace {

constexpr int PACK = 4;  // lanes of a word

// Largest byte of each word, and of what `best` holds already: best uint8 [count].
void keep_best_lane(const uint32_t* sums, int count, uint8_t* best) {
    for (int i = 0; i < count; i++) {
        const uint32_t a = sums[i] & 255, b = sums[i] >> 8 & 255, c = sums[i] >> 16 & 255, d = sums[i] >> 24;
        const uint32_t ab = a > b ? a : b, cd = c > d ? c : d, abcd = ab > cd ? ab : cd;
        best[i] = static_cast<uint8_t>(abcd > best[i] ? abcd : best[i]);
    }
}

// Votes of `count` <= 1024 keys: ids [count, BLOCKS], words [packs, BLOCKS, 256] to best uint8 [count].
template <int BLOCKS>
void sum_word_votes(const uint8_t* ids, int count, const uint32_t* words, int packs, uint8_t* best) {
    uint32_t sums[INDEX_EXTENT];
    std::memset(best, 0, count);
    for (int pack = 0; pack < packs; pack++, words += BLOCKS * CENTROIDS) {
        for (int key = 0; key < count; key++) {
            const uint8_t* id = ids + key * BLOCKS;
            uint32_t sum = 0;
            for (int b = 0; b < BLOCKS; b++) sum += words[b * CENTROIDS + id[b]];
            sums[key] = sum;
        }
        keep_best_lane(sums, count, best);
    }
}

void sum_word_votes(const uint8_t* ids, int count, int64_t blocks, const uint32_t* words, int packs, uint8_t* best) {
    switch (blocks) {
        case 1:
            return sum_word_votes<1>(ids, count, words, packs, best);
        case 2:
            return sum_word_votes<2>(ids, count, words, packs, best);
        case 4:
            return sum_word_votes<4>(ids, count, words, packs, best);
        case 8:
            return sum_word_votes<8>(ids, count, words, packs, best);
        case 16:
            return sum_word_votes<16>(ids, count, words, packs, best);
        default:
            return sum_word_votes<32>(ids, count, words, packs, best);
    }
}

// Write one lane's votes uint8 [256] of one block into the ballots.
void cast_votes(const uint8_t* votes, int lane, int64_t block, int64_t blocks, uint8_t* ballots) {
    if (looks_up_bytes(blocks)) {
        std::memcpy(ballots + (lane * blocks + block) * CENTROIDS, votes, CENTROIDS);
        return;
    }
    uint32_t* words = reinterpret_cast<uint32_t*>(ballots) + (lane / PACK * blocks + block) * CENTROIDS;
    const int shift = lane % PACK * 8;
    for (int id = 0; id < CENTROIDS; id++) {
        const uint32_t others = lane % PACK == 0 ? 0 : words[id];
        words[id] = others | static_cast<uint32_t>(votes[id]) << shift;
    }
}

// Scores of `count` <= 1024 keys of an extent: ids [1024, blocks] to best uint8 [count, rounded up to 64].
void sum_votes(const uint8_t* ids, int count, int64_t blocks, const uint8_t* ballots, int lanes, uint8_t* best) {
    if (looks_up_bytes(blocks)) return sum_byte_votes(ids, count, blocks, ballots, lanes, best);
    const int packs = (lanes + PACK - 1) / PACK;
    sum_word_votes(ids, count, blocks, reinterpret_cast<const uint32_t*>(ballots), packs, best);
}

// How many of votes [n] are at least `least`. Readable up to the next multiple of 64, whose votes must be 0.
inline int64_t count_reaching(const uint8_t* votes, int64_t n, int least) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 64)
        count += __builtin_popcountll(at_least64(votes + i, static_cast<uint8_t>(least)));
    return count;
}

// Places of the `wanted` <= n keys with the most votes, ties cut by lowest place; ascending. Votes have room up to the
// next multiple of 64.
void collect_candidates(uint8_t* votes, int64_t n, int64_t wanted, int32_t* places) {
    for (int64_t i = n; i % 64 != 0; i++) votes[i] = 0;
    int cutoff = 0;  // most votes that at least `wanted` keys reach
    int64_t above = 0;
    for (int bit = 128; bit != 0; bit >>= 1) {
        const int64_t reached = count_reaching(votes, n, cutoff + bit);
        if (reached >= wanted)
            cutoff += bit;
        else
            above = reached;
    }
    int64_t ties = wanted - above;
    for (int64_t first = 0; first < n; first += 64) {
        const uint64_t valid = n - first < 64 ? (1ull << (n - first)) - 1 : ~0ull;
        const uint64_t reached = at_least64(votes + first, static_cast<uint8_t>(cutoff)) & valid;
        const uint64_t over = at_least64(votes + first, static_cast<uint8_t>(cutoff + 1));
        const uint64_t tied = lowest_bits(reached & ~over, ties);
        ties -= __builtin_popcountll(tied);
        places += append_places(over | tied, static_cast<int32_t>(first), places);
    }
}

}  // namespace
}  // namespace kvseek

// Draws the next tokens of requests from their logits; kernels/cpu/draw/draw.py calls it. A row is drawn by one thread.
//
// Nothing is sorted. Where top-k, top-p or the likeliest tokens end is searched digit by digit: tokens are counted, or
// their weights added up, by the first bits of their ranks (rank_of), and the search goes on among those that share the
// bits where the limit is reached. The n best tokens are searched among few: none of them is below the n-th highest
// peak of blocks of tokens.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernel.h"
#include "kernels/cpu/parallel.h"

#define KVSEEK_DRAW static inline
#include "kernels/draw.h"

namespace kvseek {

struct DrawArguments {
    const float* logits;  // [any, vocabulary]
    const DrawRow* rows;  // [count]
    DrawnToken* drawn;    // [count]
    int64_t count, vocabulary, threads;
};

namespace {

constexpr int DIGIT = 11;                                                  // bits
constexpr int64_t BLOCK = 64;                                              // tokens that have a peak
constexpr unsigned MINUS_INFINITE = ~0xff800000u, INFINITE = 0xff800000u;  // rank_bits of the infinities

// What a row's draw works with, [vocabulary] each but for the peaks, one for each BLOCK.
struct Space {
    float *scores, *peaks;
    uint64_t* weights;
    int *kept, *searched;

    explicit Space(int64_t vocabulary) {
        static thread_local Scratch scratch;
        weights = static_cast<uint64_t*>(scratch.reserve(vocabulary * (sizeof(uint64_t) + 4 * sizeof(int))));
        scores = reinterpret_cast<float*>(weights + vocabulary);
        kept = reinterpret_cast<int*>(scores + vocabulary);
        searched = kept + vocabulary;
        peaks = reinterpret_cast<float*>(searched + vocabulary);
    }
};

// The lowest rank, but for its last `last` bits, whose tokens and all of higher ranks have together `limit` of the
// amount or more; 0 if all have less. `ids` [count], all ids below `count` if null, is not changed, `space` is.
template <class Amount>
uint64_t lowest_rank(const float* scores, const int* ids, int64_t count, int id_bits, int last, uint64_t limit,
                     int* space, const Amount& amount) {
    uint64_t sums[1 << DIGIT], above = 0;
    for (int shift = 32 + id_bits - DIGIT;; shift -= DIGIT) {
        if (shift < last) shift = last;
        std::memset(sums, 0, sizeof(sums));
        for (int64_t i = 0; i < count; i++) {
            const int id = ids == nullptr ? static_cast<int>(i) : ids[i];
            sums[rank_of(scores[id], id, id_bits) >> shift & ((1 << DIGIT) - 1)] += amount(id);
        }
        int digit = (1 << DIGIT) - 1;
        while (digit >= 0 && above + sums[digit] < limit) above += sums[digit--];
        if (digit < 0) return 0;
        int64_t left = 0;
        uint64_t rank = 0;
        for (int64_t i = 0; i < count; i++) {
            const int id = ids == nullptr ? static_cast<int>(i) : ids[i];
            const uint64_t own = rank_of(scores[id], id, id_bits) >> shift;
            if (static_cast<int>(own & ((1 << DIGIT) - 1)) == digit) space[left++] = id, rank = own;
        }
        if (shift == last || above + sums[digit] == limit || left == 1) return rank << shift;
        ids = space, count = left;
    }
}

// rank_bits of the largest and of the smallest number; a NaN is beyond the infinities.
void ends_of(const float* numbers, int64_t count, unsigned& largest, unsigned& smallest) {
    unsigned most = 0, least = ~0u;
    for (int64_t i = 0; i < count; i++) {
        const unsigned bits = rank_bits(numbers[i]);
        most = bits > most ? bits : most;
        least = bits < least ? bits : least;
    }
    largest = most, smallest = least;
}

// Write to space.kept, ascending, ids of tokens among which are the `wanted` of the highest ranks; returns how many.
int64_t find_candidates(const float* scores, int64_t vocabulary, int64_t wanted, int id_bits, Space& space) {
    const int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
    const auto end_of = [&](int64_t block) { return block + 1 < blocks ? (block + 1) * BLOCK : vocabulary; };
    unsigned lowest = 0;
    if (wanted < blocks) {
        for (int64_t block = 0; block < blocks; block++) {
            unsigned most, least;
            ends_of(scores + block * BLOCK, end_of(block) - block * BLOCK, most, least);
            space.peaks[block] = of_rank_bits(most);
        }
        const uint64_t rank =
            lowest_rank(space.peaks, nullptr, blocks, id_bits, id_bits, wanted, space.searched, [](int) { return 1; });
        lowest = static_cast<unsigned>(rank >> id_bits);
    }
    int64_t found = 0;
    for (int64_t block = 0; block < blocks; block++) {
        if (lowest > 0 && rank_bits(space.peaks[block]) < lowest) continue;
        for (int64_t id = block * BLOCK; id < end_of(block); id++)
            if (rank_bits(scores[id]) >= lowest) space.kept[found++] = static_cast<int>(id);
    }
    return found;
}

// Apply all that changes logits before the temperature.
void adjust(const DrawRow& row, float* scores, int64_t vocabulary) {
    for (int i = 0; i < row.bias_count; i++) scores[row.bias_ids[i]] += row.biases[i];
    if (row.occurrences != nullptr)
        for (int64_t id = 0; id < vocabulary; id++)
            if (row.occurrences[id] != 0) scores[id] = penalised(row, scores[id], row.occurrences[id]);
    if (row.allowed != nullptr)
        for (int64_t id = 0; id < vocabulary; id++)
            scores[id] = row.allowed[id / 32] >> id % 32 & 1 ? scores[id] : -__builtin_inff();
    for (int i = 0; i < row.bans; i++) scores[row.banned[i]] = -__builtin_inff();
}

// The token that the request's random bits choose among those that top-k, top-p and min-p leave.
int choose(const DrawRow& row, const float* scores, float largest, int64_t vocabulary, int id_bits, Space& space) {
    const int* ids = nullptr;
    int64_t count = vocabulary;
    const auto keep_if = [&](const auto& kept) {
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            const int id = ids == nullptr ? static_cast<int>(i) : ids[i];
            if (kept(id)) space.kept[left++] = id;
        }
        ids = space.kept, count = left;
    };
    const auto keep_from = [&](uint64_t lowest) {
        keep_if([&](int id) { return rank_of(scores[id], id, id_bits) >= lowest; });
    };
    if (row.top_k > 0 && row.top_k < vocabulary) {
        count = find_candidates(scores, vocabulary, row.top_k, id_bits, space);
        ids = space.kept;
        keep_from(lowest_rank(scores, ids, count, id_bits, id_bits, row.top_k, space.searched, [](int) { return 1; }));
    }
    uint64_t* weights = space.weights;
    uint64_t total = 0;
    if (ids == nullptr) {
        for (int64_t id = 0; id < count; id++) weights[id] = weight_of(scores[id], largest, row.inverse_temperature);
        for (int64_t id = 0; id < count; id++) total += weights[id];
    } else {
        for (int64_t i = 0; i < count; i++)
            total += weights[ids[i]] = weight_of(scores[ids[i]], largest, row.inverse_temperature);
    }
    if (row.top_p < 1) {
        const uint64_t limit = share_of(total, row.top_p);
        // All tokens with less weight have together less than what top-p leaves out.
        const uint64_t rest = total > limit ? (total - limit) / vocabulary : 0;
        keep_if([&](int id) { return weights[id] >= rest; });
        keep_from(
            lowest_rank(scores, ids, count, id_bits, 0, limit, space.searched, [&](int id) { return weights[id]; }));
    }
    const uint64_t least = static_cast<uint64_t>(row.least_weight);
    const auto weight_at = [&](int64_t i) {
        const uint64_t weight = weights[ids == nullptr ? i : ids[i]];
        return weight >= least ? weight : 0;
    };
    uint64_t kept = 0;
    for (int64_t i = 0; i < count; i++) kept += weight_at(i);
    const uint64_t target = high_product(random_bits(row.seed, row.number), kept);
    uint64_t before = 0;
    for (int64_t i = 0;; i++) {
        before += weight_at(i);
        if (before > target) return static_cast<int>(ids == nullptr ? i : ids[i]);
    }
}

// Log probabilities of the drawn token and of the likeliest, from the model's own logits.
void tell(const DrawRow& row, const float* logits, float largest, int64_t vocabulary, int id_bits, Space& space,
          DrawnToken& out) {
    uint64_t total = 0;
    for (int64_t id = 0; id < vocabulary; id++) total += weight_of(logits[id], largest, 1.0);
    const double base = largest + std::log(static_cast<double>(total) / (1ull << WEIGHT_BITS));
    out.log_probability = static_cast<float>(logits[out.token] - base);
    const int64_t count = row.likeliest < vocabulary ? row.likeliest : vocabulary;
    if (count == 0) return;
    const int64_t candidates = find_candidates(logits, vocabulary, count, id_bits, space);
    const uint64_t lowest =
        lowest_rank(logits, space.kept, candidates, id_bits, 0, count, space.searched, [](int) { return 1; });
    uint64_t ranks[MOST_LIKELIEST];
    int found = 0;
    for (int64_t i = 0; i < candidates; i++) {
        const int id = space.kept[i];
        const uint64_t rank = rank_of(logits[id], id, id_bits);
        if (rank < lowest) continue;
        int place = found++;
        for (; place > 0 && ranks[place - 1] < rank; place--)
            ranks[place] = ranks[place - 1], out.ids[place] = out.ids[place - 1];
        ranks[place] = rank, out.ids[place] = id;
    }
    for (int i = 0; i < found; i++) out.log_probabilities[i] = static_cast<float>(logits[out.ids[i]] - base);
}

void draw_row(const DrawRow& row, const float* logits, int64_t vocabulary, DrawnToken& out) {
    int id_bits = 1;
    while (int64_t{1} << id_bits < vocabulary) id_bits++;
    unsigned most, least;
    ends_of(logits, vocabulary, most, least);
    const float largest = least < MINUS_INFINITE ? __builtin_nanf("") : of_rank_bits(most);
    out.largest = largest, out.token = -1, out.status = NOT_FINITE;
    if (!is_finite(largest)) return;
    Space space(vocabulary);
    const float* scores = logits;
    if (row.bias_count > 0 || row.occurrences != nullptr || row.allowed != nullptr || row.bans > 0) {
        std::memcpy(space.scores, logits, vocabulary * sizeof(float));
        adjust(row, space.scores, vocabulary);
        scores = space.scores;
        ends_of(scores, vocabulary, most, least);
    }
    out.status = NOTHING_LEFT;
    if (most <= MINUS_INFINITE || most >= INFINITE) return;
    out.status = DRAWN;
    if (row.greedy) {
        out.token = 0;
        while (rank_bits(scores[out.token]) != most) out.token++;
    } else {
        out.token = choose(row, scores, of_rank_bits(most), vocabulary, id_bits, space);
    }
    if (row.likeliest >= 0) tell(row, logits, largest, vocabulary, id_bits, space, out);
    if (row.occurrences != nullptr) row.occurrences[out.token] = (row.occurrences[out.token] + 1) | SEEN;
}

void draw(const DrawArguments& a) {
    for_each_chunk(a.threads, a.count, 1, 1, [&](int64_t i, int64_t, int64_t) {
        draw_row(a.rows[i], a.logits + a.rows[i].row * a.vocabulary, a.vocabulary, a.drawn[i]);
    });
}

}  // namespace

KVSEEK_KERNEL(kvseek_draw, DrawArguments, draw)

}  // namespace kvseek

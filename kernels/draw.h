// What the CPU's and the GPU's kernels for drawing tokens have in common (cpu/draw/draw.cpp, cuda/draw/draw.cu): the
// same bits from both. engine/draws/reference.py says what is computed; engine/draws/compiled.py fills a DrawRow.
//
// Whoever includes this defines KVSEEK_DRAW, how a function is declared. Sums of weights are sums of whole numbers, so
// their order does not matter. Other arithmetic is of single operations and fused ones, which every compiler and every
// processor rounds alike.
#pragma once

namespace kvseek {

constexpr int MOST_LIKELIEST = 20;  // MAX_LOGPROBS of core/request.py
constexpr int WEIGHT_BITS = 44;     // the likeliest token has the weight 2^44

// One request of a draw. Pointers are those of the device that draws.
struct DrawRow {
    unsigned long long seed;
    double inverse_temperature;
    double top_p;
    long long least_weight;  // min_p as a weight
    const int* bias_ids;     // [biases], all different
    const float* biases;     // [biases]
    int* occurrences;        // [vocabulary], or null: how often a token has occurred, and SEEN; the draw adds its token
    const unsigned* allowed;  // [vocabulary / 32, rounded up] bits of the guide's mask, or null
    const int* banned;        // [bans]
    int* latest;              // gets the token too, for the next step, or null
    int row;                  // of the logits
    int number;               // tokens that the request has drawn before
    int greedy;               // 1: take the likeliest
    int top_k;                // 0: all
    int bias_count, bans;
    int likeliest;  // tokens whose log probabilities are asked for; -1: not even the drawn token's
    float repetition_penalty, presence_penalty, frequency_penalty;
};

constexpr int SEEN = static_cast<int>(
    0x80000000u);  // the repetition penalty counts the token; the other bits count for the other penalties

enum DrawStatus { DRAWN = 0, NOT_FINITE = 1, NOTHING_LEFT = 2 };

struct DrawnToken {
    int token, status;
    float largest;  // logit
    float log_probability;
    int ids[20];  // MOST_LIKELIEST
    float log_probabilities[20];
};

// The number-th 64 random bits of a seed: Philox 4x32 with 10 rounds (Salmon and others, SC 2011), counter (number, 0,
// 0, 0), the first two words of the result.
KVSEEK_DRAW unsigned long long random_bits(unsigned long long seed, unsigned number) {
    unsigned x0 = number, x1 = 0, x2 = 0, x3 = 0;
    unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const unsigned long long a = 0xD2511F53ull * x0, b = 0xCD9E8D57ull * x2;
        const unsigned y0 = static_cast<unsigned>(b >> 32) ^ x1 ^ k0, y2 = static_cast<unsigned>(a >> 32) ^ x3 ^ k1;
        x1 = static_cast<unsigned>(b), x3 = static_cast<unsigned>(a), x0 = y0, x2 = y2;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return x0 | static_cast<unsigned long long>(x1) << 32;
}

// floor(a * b / 2^64)
KVSEEK_DRAW unsigned long long high_product(unsigned long long a, unsigned long long b) {
    const unsigned long long low = 0xffffffffull, a0 = a & low, a1 = a >> 32, b0 = b & low, b1 = b >> 32;
    const unsigned long long middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (middle & low);
    return a1 * b1 + (middle >> 32) + (other >> 32);
}

// 2^44 exp((score - largest) / temperature), rounded to a whole number; 2^44 exactly for the largest score. The largest
// is finite, the score is not larger.
KVSEEK_DRAW unsigned long long weight_of(float score, float largest, double inverse_temperature) {
    constexpr double TO_WHOLE = 6755399441055744.0;  // 1.5 * 2^52: what is added to it becomes a whole number
    constexpr double LOG2_E = 1.4426950408889634, LN2_HIGH = 0.69314718036912382, LN2_LOW = 1.9082149292705877e-10;
    double x = (static_cast<double>(score) - static_cast<double>(largest)) * inverse_temperature;
    x = x > -40.0 ? x : -40.0;  // whose weight is 0
    const double shifted = fma(x, LOG2_E, TO_WHOLE), whole = shifted - TO_WHOLE;
    const double rest = fma(-whole, LN2_LOW, fma(-whole, LN2_HIGH, x));
    // Taylor's series to the power 11; |rest| <= ln(2) / 2, so it is wrong by less than a tenth of a unit of the
    // weight.
    double p = 1.0 / 39916800.0;
    p = fma(p, rest, 1.0 / 3628800.0);
    p = fma(p, rest, 1.0 / 362880.0);
    p = fma(p, rest, 1.0 / 40320.0);
    p = fma(p, rest, 1.0 / 5040.0);
    p = fma(p, rest, 1.0 / 720.0);
    p = fma(p, rest, 1.0 / 120.0);
    p = fma(p, rest, 1.0 / 24.0);
    p = fma(p, rest, 1.0 / 6.0);
    p = fma(p, rest, 0.5);
    p = fma(p, rest, 1.0);
    p = fma(p, rest, 1.0);
    const long long power = __builtin_bit_cast(long long, shifted) - __builtin_bit_cast(long long, TO_WHOLE);
    const double scale = __builtin_bit_cast(double, (power + WEIGHT_BITS + 1023) << 52);
    constexpr double WHOLE = 4503599627370496.0;  // 2^52
    const double weight = fma(p, scale, WHOLE);
    return __builtin_bit_cast(unsigned long long, weight) - __builtin_bit_cast(unsigned long long, WHOLE);
}

// The weight that top-p's tokens reach together.
KVSEEK_DRAW unsigned long long share_of(unsigned long long total, double top_p) {
    const double share = top_p * static_cast<double>(total);
    const unsigned long long whole = static_cast<unsigned long long>(share);
    return whole + (static_cast<double>(whole) < share || whole == 0);
}

// Bits that compare as unsigned integers as the numbers do that they stand for; -0 equals 0, NaN is not meant.
KVSEEK_DRAW unsigned rank_bits(float number) {
    const unsigned bits = __builtin_bit_cast(unsigned, number + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

KVSEEK_DRAW float of_rank_bits(unsigned ranked) {
    return __builtin_bit_cast(float, ranked & 0x80000000u ? ranked & 0x7fffffffu : ~ranked);
}

// Orders tokens: larger scores first, of equal scores the lower id. The low `id_bits` bits are the id, turned round.
KVSEEK_DRAW unsigned long long rank_of(float score, int id, int id_bits) {
    return static_cast<unsigned long long>(rank_bits(score)) << id_bits | ((1u << id_bits) - 1u - id);
}

KVSEEK_DRAW bool is_finite(float x) {
    return (__builtin_bit_cast(unsigned, x) & 0x7f800000u) != 0x7f800000u;
}

// A token's score after the penalties; `occurred` is its entry of DrawRow.occurrences.
KVSEEK_DRAW float penalised(const DrawRow& row, float score, int occurred) {
    if (occurred & SEEN && row.repetition_penalty != 1.0f)
        score = score > 0.0f ? score / row.repetition_penalty : score * row.repetition_penalty;
    const int count = occurred & ~SEEN;
    if (count == 0) return score;
    const double once = static_cast<double>(score) - static_cast<double>(row.presence_penalty);
    return static_cast<float>(fma(-static_cast<double>(row.frequency_penalty), count, once));
}

}  // namespace kvseek

// Recall on host cores: the places in the lists of the nearest centroids, none twice (CTkvr paper, algorithm 2, part
// b).
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace kvseek {

struct HostRecall {
    const int32_t* lists;         // [slots, kv_heads, ring, width] places, negative: none
    const int32_t* probed;        // [batch, kv_heads, probes] centroids, negative: none
    const int32_t* slots;         // [batch]
    const int32_t* first_recent;  // [batch] first of the places that are recalled in any case
    const int32_t* lengths;       // [batch] places of the region, 0: nothing to do; they end the recent ones
    int32_t* recalled;            // [batch, kv_heads, capacity] out, ascending
    int32_t* recalled_count;      // [batch, kv_heads] out
    int64_t batch, kv_heads, ring, width, probes, capacity;
    int64_t threads;
};

namespace {

constexpr int64_t WORD = 64;

// One (request, KV head). A bit a place, then the bits in order.
void recall_one(const HostRecall& a, int64_t pair) {
    static thread_local Scratch memory;
    const int64_t request = pair / a.kv_heads, length = a.lengths[request], words = (length + WORD - 1) / WORD;
    a.recalled_count[pair] = 0;
    if (length == 0) return;
    uint64_t* bits = static_cast<uint64_t*>(memory.reserve(sizeof(uint64_t) * words));
    std::memset(bits, 0, sizeof(uint64_t) * words);
    const int64_t first_list = (a.slots[request] * a.kv_heads + pair % a.kv_heads) * a.ring;
    for (int64_t probe = 0; probe < a.probes; probe++) {
        const int32_t centroid = a.probed[pair * a.probes + probe];
        if (centroid < 0) continue;
        const int32_t* list = a.lists + (first_list + centroid) * a.width;
        for (int64_t i = 0; i < a.width; i++)
            if (list[i] >= 0 && list[i] < length) bits[list[i] / WORD] |= uint64_t{1} << list[i] % WORD;
    }
    for (int64_t place = a.first_recent[request]; place < length; place++)
        bits[place / WORD] |= uint64_t{1} << place % WORD;
    int32_t* to = a.recalled + pair * a.capacity;
    int64_t count = 0;
    for (int64_t word = 0; word < words; word++)
        for (uint64_t left = bits[word]; left != 0 && count < a.capacity; left &= left - 1)
            to[count++] = static_cast<int32_t>(word * WORD + __builtin_ctzll(left));
    a.recalled_count[pair] = static_cast<int32_t>(count);
}

void recall(const HostRecall& a) {
    Counter pairs;
    const int64_t count = a.batch * a.kv_heads;
    parallel(static_cast<int>(a.threads < count ? a.threads : count), [&] {
        for (int64_t pair = pairs.take(); pair < count; pair = pairs.take()) recall_one(a, pair);
    });
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_ctkvr_host_recall, kvseek::HostRecall, kvseek::recall)

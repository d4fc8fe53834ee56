// ParisKV, second kernel of a selection: add up each key's votes, and count the keys of each score (paper,
// section 4.2).
//
// A key looks one entry up for each of its blocks, at an address that its centroid id decides. Were the votes one table
// in shared memory, the 32 threads of a warp would meet in its 32 banks, 3.5 of them in the fullest on average. So a
// row of the table, 128 bytes, holds the entries of one id for four blocks, and that in as many copies as fit; threads
// that share a copy take its four blocks in different orders: no two threads of a warp meet in a bank. One
// instruction, a product of bytes, turns the four ids of a word into the address of one of them. Where the table does
// not fit with rows of 128 bytes (ROW_BYTES), they are shorter and some threads meet after all.
#include "select.cuh"

namespace kvseek {
namespace pariskv {

constexpr int SCAN_THREADS = EXTENT_TOKENS;  // one key of an extent each
constexpr int AHEAD = 2;                     // extents whose ids are on their way

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ / 100 == 9 || __CUDA_ARCH__ / 100 == 10)
constexpr int TABLE_LIMIT = 128 << 10;  // of 227 KiB that a block may have (device.py asks for as much)
#else
constexpr int TABLE_LIMIT = 64 << 10;  // of 99 KiB on the smallest of the other architectures
#endif
constexpr int QUADS = BLOCKS / QUAD;
constexpr int ID_BYTES = QUAD * VOTE_BYTES;               // entries of one id for four blocks
__host__ __device__ constexpr int row_bytes(int bytes) {  // as many copies as fit, at most one in each bank
    return bytes > ID_BYTES && QUADS * CENTROIDS * bytes > TABLE_LIMIT ? row_bytes(bytes / 2) : bytes;
}
constexpr int ROW_BYTES = row_bytes(128);
constexpr int COPIES = ROW_BYTES / ID_BYTES;
constexpr bool IN_SHARED = QUADS * CENTROIDS * ROW_BYTES <= TABLE_LIMIT;  // else votes are read where they lie
static_assert(IN_SHARED || COPIES == 1, "the table in global memory has one copy");

template <int BYTES>
struct EntryOf;
template <>
struct EntryOf<4> {
    using Type = unsigned;
};
template <>
struct EntryOf<8> {
    using Type = uint2;
};
template <>
struct EntryOf<16> {
    using Type = uint4;
};
using Entry = EntryOf<VOTE_BYTES>::Type;

// Centroid ids of one key.
struct Ids {
    unsigned words[BLOCKS / 4];

    __device__ __forceinline__ void load(const unsigned char* from) {
        if constexpr (BLOCKS == 8) {
            const uint2 both = __ldcs(reinterpret_cast<const uint2*>(from));
            words[0] = both.x, words[1] = both.y;
        } else {
#pragma unroll
            for (int i = 0; i < BLOCKS / 16; i++) {
                const uint4 four = __ldcs(reinterpret_cast<const uint4*>(from) + i);
                words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
            }
        }
    }
};

// Sums of votes, a byte a lane: 6 votes in each of 32 blocks fit.
__device__ __forceinline__ void add(unsigned& sum, unsigned first, unsigned second) {
    sum += first + second;
}
__device__ __forceinline__ void add(uint2& sum, uint2 first, uint2 second) {
    add(sum.x, first.x, second.x), add(sum.y, first.y, second.y);
}
__device__ __forceinline__ void add(uint4& sum, uint4 first, uint4 second) {
    add(sum.x, first.x, second.x), add(sum.y, first.y, second.y);
    add(sum.z, first.z, second.z), add(sum.w, first.w, second.w);
}

__device__ __forceinline__ unsigned largest_byte(unsigned word) {
    return max(max(word & 255, word >> 8 & 255), max(word >> 16 & 255, word >> 24));
}
__device__ __forceinline__ unsigned largest(unsigned sums) {
    return LANES == 1 ? sums : largest_byte(sums);
}
__device__ __forceinline__ unsigned largest(uint2 sums) {
    return max(largest_byte(sums.x), largest_byte(sums.y));
}
__device__ __forceinline__ unsigned largest(uint4 sums) {
    return max(largest(make_uint2(sums.x, sums.y)), largest(make_uint2(sums.z, sums.w)));
}

// How one thread finds entries: its copy, and the order in which it takes the four blocks of a word.
struct Lookup {
    const unsigned char* table;
    unsigned factors[QUAD],
        starts[QUAD];  // offset of an entry = ids * factors + start, summed over the bytes of a word

    __device__ __forceinline__ explicit Lookup(const unsigned char* all) : table(all) {
        const unsigned copy = threadIdx.x % COPIES, turn = threadIdx.x / COPIES;
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            const unsigned block = (i + turn) % QUAD;
            factors[i] = static_cast<unsigned>(ROW_BYTES) << 8 * block;
            starts[i] = copy * ID_BYTES + block * VOTE_BYTES;
            asm volatile("" : "+r"(factors[i]), "+r"(starts[i]));  // keep them in registers: the compiler would rather
        }  // compute them again for every key
    }

    __device__ __forceinline__ Entry entry(int quad, unsigned ids, int i) const {
        const unsigned offset = __dp4a(ids, factors[i], starts[i]);
        return *reinterpret_cast<const Entry*>(table + quad * (CENTROIDS * ROW_BYTES) + offset);
    }

    __device__ __forceinline__ unsigned votes(const Ids& ids) const {
        Entry sum = {};
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            const unsigned word = ids.words[quad];
            add(sum, entry(quad, word, 0), entry(quad, word, 1));
            add(sum, entry(quad, word, 2), entry(quad, word, 3));
        }
        return largest(sum);
    }
};

// Copy the votes of a task into the table. A thread takes whole rows and begins at another copy than its neighbours.
__device__ __forceinline__ void fill_table(const uint4* votes, unsigned char* table) {
    constexpr int PARTS = ID_BYTES / 16;
    for (int i = threadIdx.x; i < QUADS * CENTROIDS * PARTS; i += SCAN_THREADS) {
        const uint4 part = votes[i];
        const int row = i / PARTS;
#pragma unroll
        for (int k = 0; k < COPIES; k++) {
            const int copy = (k + row) % COPIES;
            *reinterpret_cast<uint4*>(table + row * ROW_BYTES + copy * ID_BYTES + i % PARTS * 16) = part;
        }
    }
}

// Store how many keys of a chunk have at least each score, and add it to the task's totals; one warp.
__device__ __forceinline__ void store_totals(const SelectArguments& a, int task, int chunk, const int* histogram) {
    constexpr int EACH_BINS = SCORES / WARP;
    const int lane = threadIdx.x % WARP;
    int counts[EACH_BINS], sum = 0;
#pragma unroll
    for (int i = EACH_BINS - 1; i >= 0; i--) {
        sum += histogram[lane * EACH_BINS + i];
        counts[i] = sum;
    }
    const int above = sum_from_here_on(sum, lane) - sum;
#pragma unroll
    for (int i = 0; i < EACH_BINS; i++) {
        const int bin = lane * EACH_BINS + i, count = counts[i] + above;
        a.chunk_totals[static_cast<long long>(chunk) * SCORES + bin] = count;
        if (count != 0) atomicAdd(a.totals + task * SCORES + bin, count);
    }
}

}  // namespace pariskv
}  // namespace kvseek

// grid: as many blocks as requests at least, kv_heads; dynamic shared memory: TABLE_LIMIT
extern "C" __global__ void __launch_bounds__(kvseek::pariskv::SCAN_THREADS, 1)
    kvseek_pariskv_scan(const __grid_constant__ kvseek::pariskv::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::pariskv;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    __shared__ int histograms[CHUNKS_OF_SCAN][SCORES];
    __shared__ Units units;
    // The requests and the ids are older than this step's kernels.
    const Unit block = share_keys(a, units, blockIdx.x);
    const Task task(a, block.request);
    const int length = block.exists ? task.length() : 0, extents = (length + EXTENT_TOKENS - 1) / EXTENT_TOKENS;
    const int chunks = block.parts * CHUNKS_OF_SCAN, chunk = block.part * CHUNKS_OF_SCAN;
    const int first = Share(extents, chunks, chunk).first;
    const int last = Share(extents, chunks, chunk + CHUNKS_OF_SCAN - 1).last;
    Ids ahead[AHEAD];
    const unsigned char* own_ids = a.ids + threadIdx.x * BLOCKS;
    auto fetch = [&](int extent, int i) {  // beyond the length too: an extent is allocated whole
        if (extent >= last) return;
        ahead[i].load(own_ids + static_cast<size_t>(task.extent(a, extent)) * (EXTENT_TOKENS * BLOCKS));
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(first + i, i);
    for (int i = threadIdx.x; i < CHUNKS_OF_SCAN * SCORES; i += SCAN_THREADS) histograms[0][i] = 0;
    await_earlier_kernels();
    allow_later_kernels();
    if (!block.exists) return;
    const unsigned char* votes = a.votes + static_cast<long long>(task.number) * (QUADS * CENTROIDS * ID_BYTES);
    if (IN_SHARED && first < last) fill_table(reinterpret_cast<const uint4*>(votes), dynamic_memory);
    __syncthreads();
    const Lookup lookup(IN_SHARED ? dynamic_memory : votes);
    unsigned char* own_scores = a.scores + threadIdx.x;
    int* histogram = histograms[0];
    int part = 0, part_end = Share(extents, chunks, chunk).last;
    for (int start = first; start < last; start += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int extent = start + i;
            if (extent >= last) break;
            while (extent >= part_end) {
                part_end = Share(extents, chunks, chunk + ++part).last;
                histogram = histograms[part];
            }
            if (extent * EXTENT_TOKENS + static_cast<int>(threadIdx.x) < length) {
                const unsigned score = lookup.votes(ahead[i]);
                own_scores[static_cast<size_t>(task.scratch_extent(a, extent)) * EXTENT_TOKENS] =
                    static_cast<unsigned char>(score);
                atomicAdd(&histogram[score], 1);
            }
            fetch(extent + AHEAD, i);
        }
    }
    __syncthreads();
    const int warp = threadIdx.x / WARP;
    if (warp < CHUNKS_OF_SCAN) store_totals(a, task.number, first_chunk(a, blockIdx.x) + warp, histograms[warp]);
}

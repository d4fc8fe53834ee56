// Clusters of a region: the places of the best ones.
#pragma once

#include "kernels/cpu/extent_rows.h"
#include "kernels/cpu/inner_products.h"
#include "kernels/cpu/top.h"

namespace kvseek {
namespace {

// Where the best clusters of a region end: those of a higher rank are taken whole, and of those of this rank, in the
// order of their numbers, `left` rows.
struct ClusterCut {
    int32_t rank;
    int64_t left;
};

// The cut at `wanted` rows, at most as many as all clusters have. Ranks [count] and sizes are followed by INT32_MIN and
// by 0 up to the next multiple of LANES. Bisection, a bit of the rank a pass, as find_cut does it for single rows.
ClusterCut cut_clusters(const int32_t* ranks, const int32_t* sizes, int64_t count, int64_t wanted) {
    int32_t rank = INT32_MIN;
    int64_t above = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        const int32_t least = static_cast<int32_t>(static_cast<uint32_t>(rank) + bit);
        IntVec rows = {};
        for (int64_t i = 0; i < count; i += LANES) rows += (load(ranks + i) >= least) & load(sizes + i);
        const int64_t reached = sum(rows);
        if (reached >= wanted)
            rank = least;
        else
            above = reached;
    }
    return {rank, wanted - above};
}

// Rows to take of cluster `c`; to be asked for one cluster after another.
inline int64_t rows_taken(ClusterCut& cut, const int32_t* ranks, const int32_t* sizes, int64_t c) {
    if (ranks[c] > cut.rank) return sizes[c];
    if (ranks[c] < cut.rank) return 0;
    const int64_t taken = sizes[c] < cut.left ? sizes[c] : cut.left;
    cut.left -= taken;
    return taken;
}

// Copy entries first .. first + count - 1 of a slot's sorted places [extents, kv_heads, 1024].
inline void copy_entries(const int32_t* places, const int32_t* extents, int64_t kv_heads, int64_t head, int64_t first,
                         int64_t count, int32_t* to) {
    while (count > 0) {
        const int64_t room = INDEX_EXTENT - first % INDEX_EXTENT, run = count < room ? count : room;
        std::memcpy(to, places + row_of(extents, kv_heads, head, first), run * sizeof(int32_t));
        first += run, count -= run, to += run;
    }
}

}  // namespace
}  // namespace kvseek

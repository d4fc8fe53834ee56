// The keys that a new static set is chosen by (PRKV paper, section 4.1, "Periodic static token update").
#include "layout.cuh"

namespace kvseek {
namespace prkv {

struct KeysArguments {
    const Number* pool;       // rows of the layer, in host or device memory
    const int* table;         // [max_extents] of the slot
    const int* tokens;        // [kv_heads, count]
    Number* keys;             // [kv_heads, count, HEAD_DIM]
    long long extent_stride;  // numbers from one extent of the pool to the next
    int count;
};

constexpr int EACH = 16 / static_cast<int>(sizeof(Number));  // numbers of 16 bytes
constexpr int LOADS = DIM / EACH;                            // of a key

}  // namespace prkv
}  // namespace kvseek

// grid: blocks, kv_heads. Few blocks suffice for PCIe: they run beside decode steps.
extern "C" __global__ void __launch_bounds__(256)
    kvseek_prkv_gather(const __grid_constant__ kvseek::prkv::KeysArguments a) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    const int head = blockIdx.y;
    const long long items = static_cast<long long>(a.count) * LOADS;
    const long long first = static_cast<long long>(head) * a.count;
#pragma unroll 4
    for (long long item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += gridDim.x * blockDim.x) {
        const long long row = first + item / LOADS;
        const int offset = static_cast<int>(item % LOADS) * EACH;
        const Number* from = a.pool + row_start(a.table, a.extent_stride, head, a.tokens[row]) + offset;
        *reinterpret_cast<uint4*>(a.keys + row * DIM + offset) = *reinterpret_cast<const uint4*>(from);
    }
}

// Copies pages of rows from host memory into device memory, for benchmarks/studies/page_fetch.py.

namespace kvseek {

struct PageFetchArguments {
    const char* pool;
    const long long* offsets;  // [pages] bytes from `pool` to a page's first row; multiples of 16
    char* out;                 // [pages, rows, row_bytes]
    long long row_stride;      // bytes from one row of a page to the next
    int first;                 // page that the first CTAs copy
    int rows;                  // of a page
    int row_bytes;             // a multiple of 16
    int unused;
};

constexpr int FETCH_THREADS = 256;
constexpr int FETCH_BYTES = 16;  // of one load

}  // namespace kvseek

// grid: parts of a page, pages. Neighbouring threads read neighbouring bytes of a row.
extern "C" __global__ void __launch_bounds__(kvseek::FETCH_THREADS)
    kvseek_page_fetch(const __grid_constant__ kvseek::PageFetchArguments a) {
    using namespace kvseek;
    const int page = a.first + blockIdx.y, pieces = a.row_bytes / FETCH_BYTES, items = a.rows * pieces;
    const char* from = a.pool + a.offsets[page];
    char* to = a.out + static_cast<long long>(page) * a.rows * a.row_bytes;
    for (int item = blockIdx.x * FETCH_THREADS + threadIdx.x; item < items; item += gridDim.x * FETCH_THREADS) {
        const int row = item / pieces, byte = item % pieces * FETCH_BYTES;
        uint4 value;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "l"(from + row * a.row_stride + byte));
        *reinterpret_cast<uint4*>(to + static_cast<long long>(row) * a.row_bytes + byte) = value;
    }
}

// Codes of the keys of all rows, which score pages with page_score = "codes".
#ifdef PRKV_CODES
#include "kernels/cuda/codes/encode.cuh"

extern "C" __global__ void __launch_bounds__(kvseek::codes::ENCODE_WARPS * 32)
    kvseek_codes_encode(const __grid_constant__ kvseek::codes::EncodeArguments a) {
    kvseek::codes::encode_keys<2>(a);
}
#endif

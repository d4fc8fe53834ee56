// ClusterKV with a rerank by codes: encode keys.
#if CLUSTERKV_RERANK_BITS
#include "kernels/cuda/codes/encode.cuh"

extern "C" __global__ void __launch_bounds__(kvseek::codes::ENCODE_WARPS * 32)
    kvseek_codes_encode(const __grid_constant__ kvseek::codes::EncodeArguments a) {
    kvseek::codes::encode_keys<CLUSTERKV_RERANK_BITS>(a);
}
#endif

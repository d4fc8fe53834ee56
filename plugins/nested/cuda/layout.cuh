// Sizes of an index of nested codes, fixed when the kernels are compiled (builder/compile/cuda.py).
#pragma once

#include "plugins/codes/cuda/nested_codes.cuh"

namespace kvseek {
namespace nested {

using codes::DIM, codes::EACH, codes::GROUP, codes::HEAD_DIM, codes::FIELD, codes::FIELDS;
constexpr int LANES = NESTED_LANES;  // queries that rank on their own: one, or all heads of the group
constexpr int REDUCTION = NESTED_REDUCTION;
using codes::MEAN, codes::MAX, codes::SOFTMAX_MEAN, codes::LOG2_E;
static_assert(LANES == (REDUCTION == MEAN ? 1 : GROUP), "the mean query is the only lane; otherwise each head is one");
static_assert(GROUP <= 16, "at most 16 query heads share a KV head");

}  // namespace nested
}  // namespace kvseek

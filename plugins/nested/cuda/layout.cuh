// Sizes of an index of nested codes, fixed when the kernels are compiled (builder/compile/cuda.py).
#pragma once

#include "plugins/codes/cuda/nested_codes.cuh"

namespace kvseek {
namespace nested {

using codes::DIM, codes::EACH, codes::GROUP, codes::HEAD_DIM, codes::FIELD, codes::FIELDS;
constexpr int LANES = NESTED_LANES;  // queries that rank on their own: one, or all heads of the group
constexpr int REDUCTION = NESTED_REDUCTION;
enum { MEAN = 0, MAX = 1, SOFTMAX_MEAN = 2 };  // as plugins/shared/group.py lists them
static_assert(LANES == (REDUCTION == MEAN ? 1 : GROUP), "the mean query is the only lane; otherwise each head is one");
static_assert(GROUP <= 16, "at most 16 query heads share a KV head");

constexpr float LOG2_E = 1.4426950408889634f;

}  // namespace nested
}  // namespace kvseek

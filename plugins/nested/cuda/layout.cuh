// Sizes of an index of nested codes, fixed when the kernels are compiled (builder/compile/cuda.py).
#pragma once

#include "kernels/cuda/codes/nested_codes.cuh"

namespace kvseek {
namespace nested {

using codes::DIM, codes::EACH, codes::GROUP, codes::HEAD_DIM, codes::FIELD, codes::FIELDS;
constexpr int LANES = GROUP;  // queries, each of which ranks on its own
using codes::LOG2_E;
static_assert(GROUP <= 16, "at most 16 query heads share a KV head");

}  // namespace nested
}  // namespace kvseek

// Sizes that ParisKV's kernels share (the arrays: plugins/pariskv/reference.py).
#pragma once

#include "kernels/cpu/codes/rotation.h"
#include "kernels/cpu/extent_rows.h"

namespace kvseek {
namespace {

constexpr int BLOCK = 8;        // coordinates of a block
constexpr int CENTROIDS = 256;  // sign patterns of a block
constexpr int LEVELS = 8;       // magnitudes of a coordinate

}  // namespace
}  // namespace kvseek

// Numbers of frames of the hot rows (kernels/cuda/attention/hot_rows.cuh), as the kernels of a method see them.
#pragma once

namespace kvseek {

using FrameNumber = unsigned short;
constexpr FrameNumber NO_FRAME = 0xffff;  // no frame holds a copy of the row

}  // namespace kvseek

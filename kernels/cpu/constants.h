// Numbers that are known when a kernel runs, and that its code is compiled for: a copy for each of a few.
#pragma once

#include <cstdint>
#include <type_traits>

namespace kvseek {
namespace {

// Call run(number) with the one of these numbers that `value` is, as a constant; with the last one if it is none.
template <int NUMBER, int... MORE, class Run>
inline void with_constant(int64_t value, const Run& run) {
    if constexpr (sizeof...(MORE) == 0)
        run(std::integral_constant<int, NUMBER>());
    else if (value == NUMBER)
        run(std::integral_constant<int, NUMBER>());
    else
        with_constant<MORE...>(value, run);
}

}  // namespace
}  // namespace kvseek

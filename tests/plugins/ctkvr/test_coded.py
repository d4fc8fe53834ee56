"""The estimates of a tile on the GPU (cuda/coded.cu), without one: the function runs on the host, a thread for each lane."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from tests.plugins.index_cases import random_keys, random_queries
from torch import Tensor

import kvseek.plugins
from kvseek.plugins.codes.key_codes import KeyCodes, encode, estimate_all, round_lanes
from kvseek.plugins.codes.rotation import padded_dim, rotate, rotation_signs

EXTENTS, KV_HEADS, CAPACITY, HEAD = 3, 2, 40, 1
PLUGINS = Path(kvseek.plugins.__file__).parent

# What the device functions need of CUDA and of their headers. Shuffles meet at a barrier of the 32 threads.
SHIMS = """
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::min;
struct uint2 { unsigned x, y; };
struct int2 { int x, y; };
struct float2 { float x, y; };
typedef float __half;
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __half2float(float x) { return x; }
inline float power_of_two(float x) { return exp2f(x); }
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
    return sum;
}
thread_local struct { unsigned x; } threadIdx;
std::barrier<> warp(32);
int64_t exchanged[32];
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    std::memcpy(exchanged + threadIdx.x, &value, sizeof(T));
    warp.arrive_and_wait();
    std::memcpy(&value, exchanged + (threadIdx.x ^ mask), sizeof(T));
    warp.arrive_and_wait();
    return value;
}
namespace kvseek {
constexpr int WARP = 32, EXTENT_TOKENS = 1024;
constexpr unsigned EVERYONE = ~0u;
constexpr float INFINITE = INFINITY;
inline uint2 load_once_8(const void* from) { uint2 x; std::memcpy(&x, from, 8); return x; }
namespace codes {
constexpr int FIELDS = 4, FIELD = DIM / 4;
template <int LANES>
struct Queries {
    alignas(16) signed char integers[LANES][DIM];
    int sums[LANES];
    float steps[LANES];
};
}
namespace ctkvr { namespace decode {
constexpr int TILE = 16;
struct Task { int number, head; };
struct StepArguments { const int* recalled; float* scores; float2* statistics; int kv_heads, capacity; float scale; };
} }
}
"""

MAIN = """
template <class T>
std::vector<T> read(FILE* from, size_t count) {
    std::vector<T> values(count);
    if (fread(values.data(), sizeof(T), count, from) != count) std::abort();
    return values;
}
int main(int, char** arguments) {
    using namespace kvseek::ctkvr::decode;
    FILE* file = fopen(arguments[1], "rb");
    const size_t rows = EXTENTS * KV_HEADS * 1024;
    auto high = read<unsigned char>(file, rows * DIM / 4), low = read<unsigned char>(file, rows * LOW);
    auto scales = read<float>(file, rows);
    auto integers = read<signed char>(file, GROUP * DIM);
    auto sums = read<int>(file, GROUP);
    auto steps = read<float>(file, GROUP);
    auto recalled = read<int>(file, 2 * CAPACITY), extents = read<int>(file, EXTENTS);
    std::vector<float> scores(2 * CAPACITY * GROUP, -7.0f), statistics(2 * 3 * GROUP * 2, -7.0f);
    static kvseek::codes::Queries<GROUP> queries;
    std::memcpy(queries.integers, integers.data(), integers.size());
    std::memcpy(queries.sums, sums.data(), sizeof(queries.sums));
    std::memcpy(queries.steps, steps.data(), sizeof(queries.steps));
    CodedStepArguments a = {};
    a.step = {recalled.data(), scores.data(), reinterpret_cast<float2*>(statistics.data()), KV_HEADS, CAPACITY, 0.125f};
    a.high = high.data(), a.low = low.data(), a.scales = scales.data();
    std::vector<std::thread> lanes;
    for (unsigned lane = 0; lane < 32; lane++)
        lanes.emplace_back([&, lane] {
            threadIdx.x = lane;
            for (int first = 0; first < COUNT; first += TILE)
                estimate_tile(a, queries, Task{1, HEAD}, extents.data(), first, COUNT);
        });
    for (auto& lane : lanes) lane.join();
    fwrite(scores.data(), 4, scores.size(), stdout);
    fwrite(statistics.data(), 4, statistics.size(), stdout);
}
"""


def device_functions() -> str:
    """The functions that estimate a tile, from their sources."""
    codes, estimate, coded = (
        (PLUGINS / name).read_text(encoding="utf-8")
        for name in ("codes/cuda/nested_codes.cuh", "codes/cuda/estimate.cuh", "ctkvr/cuda/coded.cu")
    )
    (shared,) = re.findall(r"(// A code of 2 or 4 bits\..*?)// Encode a rotated vector", codes, re.DOTALL)
    (own,) = re.findall(r'#include "recall.cuh"\n(.*?)extern "C"', coded, re.DOTALL)
    body = re.sub(r"^#(include|pragma once).*$", "", estimate, flags=re.MULTILINE)
    return f"namespace kvseek {{ namespace codes {{\n{shared}\n}} }}\n{body}\n{own}"


def run(folder: Path, count: int, bits: int, codes: KeyCodes, arrays: list[Tensor], group: int, dim: int) -> Tensor:
    """Scores and statistics that the program writes, float32, -7 where it wrote nothing."""
    program, data = folder / "tile", folder / "data"
    macros = {"DIM": dim, "GROUP": group, "CTKVR_CODE_BITS": bits, "LOW": dim // 4 if bits == 4 else 0, "COUNT": count}
    sizes = {"EXTENTS": EXTENTS, "KV_HEADS": KV_HEADS, "CAPACITY": CAPACITY, "HEAD": HEAD}
    (folder / "tile.cpp").write_text(SHIMS + device_functions() + MAIN, encoding="utf-8")
    defines = [f"-D{name}={value}" for name, value in {**macros, **sizes}.items()]
    flags = ["-std=c++20", "-pthread", "-Wno-unknown-pragmas"]
    subprocess.run(["g++", *flags, *defines, folder / "tile.cpp", "-o", program], check=True)
    parts = [codes.high, codes.low, codes.scales.float(), *arrays]
    data.write_bytes(b"".join(part.contiguous().numpy().tobytes() for part in parts))
    found = subprocess.run([program, data], check=True, capture_output=True).stdout
    return torch.frombuffer(bytearray(found), dtype=torch.float32)


@pytest.mark.parametrize(("dim", "group", "bits", "count"), [(128, 4, 2, 37), (256, 9, 4, 1)])
def test_a_tile_is_estimated_as_by_the_reference(tmp_path: Path, dim: int, group: int, bits: int, count: int) -> None:
    signs = rotation_signs(0, padded_dim(dim))
    keys = random_keys(EXTENTS * 1024, dim).view(KV_HEADS, EXTENTS, 1024, dim).transpose(0, 1)
    codes = encode(rotate(keys, signs), bits)
    lanes = round_lanes(rotate(random_queries(1, group, dim), signs))
    places = torch.randperm(EXTENTS * 1024, generator=torch.Generator().manual_seed(1))[:count]
    recalled = torch.full((2, CAPACITY), 1 << 30, dtype=torch.int32)
    recalled[1, :count] = places.int()
    extents = torch.tensor([2, 0, 1], dtype=torch.int32)
    integers = lanes.integers[0]
    arrays = [integers.to(torch.int8), integers.sum(dim=-1).int(), lanes.steps[0], recalled, extents]
    found = run(tmp_path, count, bits, codes, arrays, group, dim)
    scores = found[: 2 * CAPACITY * group].view(2, CAPACITY, group)
    statistics = found[2 * CAPACITY * group :].view(2, 3, group, 2)
    where = extents[places // 1024].long(), HEAD, places % 1024
    own = KeyCodes(codes.high[where][None], codes.low[where][None], codes.scales[where][None])
    expected = estimate_all(own, lanes)[0].T
    torch.testing.assert_close(scores[1, :count], expected, rtol=1e-6, atol=0)
    assert (scores[0] == -7).all(), "another task's"
    assert (scores[1, count:] == -7).all(), "keys that are not there have no score"
    tiles = (expected * 0.125).split(16)
    for tile, exponents in enumerate(tiles):
        largest = exponents.amax(dim=0)
        sums = (exponents - largest).exp2().sum(dim=0)
        torch.testing.assert_close(statistics[1, tile], torch.stack((largest, sums), dim=1), rtol=1e-5, atol=1e-6)
    assert (statistics[1, len(tiles) :] == -7).all()

"""What of the kernels can be checked without a GPU: scores of pages by codes, computed by the kernel's code on the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from tests.plugins.index_cases import KV_HEADS, make_context, random_keys, random_queries

import kvseek.plugins
from kvseek.plugins.codes.rotation import padded_dim, rotation_signs
from kvseek.plugins.prkv.config import Config
from kvseek.plugins.prkv.summaries import Codes
from kvseek.plugins.shared.group import GROUP_REDUCTIONS

ROOT = Path(kvseek.plugins.__file__).parents[1]
SUPPORT = Path(__file__).parents[2] / "support"
PROGRAM = """
#include "warp.h"
#include <fstream>
#include "plugins/prkv/cuda/estimates.cuh"

template <class T>
std::vector<T> read(const char* name) {
    std::ifstream file(name, std::ios::binary | std::ios::ate);
    std::vector<T> content(file.tellg() / sizeof(T));
    file.seekg(0);
    file.read(reinterpret_cast<char*>(content.data()), content.size() * sizeof(T));
    return content;
}

// Arguments: length, KV head, KV heads, extents, softmax scale. Writes the scores of all pages, then sums of the lanes.
int main(int, char** argv) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    const int length = std::atoi(argv[1]);
    Request request{};
    request.length = length;
    const auto queries = read<float>("queries"), signs = read<float>("signs");
    const auto high = read<unsigned char>("high");
    const auto scales = read<__half>("scales");
    const auto table = read<int>("table");
    SelectArguments a{};
    a.queries = queries.data(), a.requests = &request, a.table = table.data();
    a.high = high.data(), a.scales = scales.data(), a.signs = signs.data();
    a.kv_heads = std::atoi(argv[3]), a.max_extents = std::atoi(argv[4]), a.scaling = std::atof(argv[5]);
    blockIdx.y = std::atoi(argv[2]);
    const int pages = (length + PAGE - 1) / PAGE;
    std::vector<float> scores(pages * LANES), sums(LANES);
    warp::run_warp([&] {
        const Task task(a);
        Estimates scorer(a);
        scorer.load(a, task, 0);
        scorer.load_queries(a, task);
        for (int first = 0; first < pages; first += TILE)
            scorer.score(
                a, [&](int page) { return first + page < pages; },
                [&](int page, int lane, float score) { scores[(first + page) * LANES + lane] += score; },
                [&] { if (first + TILE < pages) scorer.load(a, task, first + TILE); });
        if (REDUCTION != MEAN)
            scorer.finish([&](int lane, const PowerSum& sum) { sums[lane] += sum.largest + std::log2(sum.sum); });
    });
    std::ofstream file("results", std::ios::binary);
    file.write(reinterpret_cast<const char*>(scores.data()), scores.size() * 4);
    file.write(reinterpret_cast<const char*>(sums.data()), sums.size() * 4);
}
"""


def compile_scores(folder: Path, dim: int, group: int, page: int, reduce: str) -> None:
    """Compile the scores of one shape; the headers of CUDA and of machine instructions are those of warp.h."""
    for name in ("cuda_fp16.h", "cuda_bf16.h", "plugins/shared/instructions.cuh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "scores.cpp").write_text(PROGRAM)
    macros = {"KVSEEK_DTYPE": 0, "KVSEEK_HEAD_DIM": dim, "KVSEEK_GROUP": group, "PRKV_CODES": 1, "PRKV_PAGE": page}
    macros |= {"PRKV_PAGES": 1, "PRKV_REDUCTION": GROUP_REDUCTIONS.index(reduce)}
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    command = ["g++", "-std=c++20", "-O1", "-w", *defined, f"-I{folder}", f"-I{SUPPORT}", f"-I{ROOT}", "scores.cpp"]
    subprocess.run([*command, "-o", "scores"], check=True, cwd=folder)


@pytest.mark.parametrize(
    ("dim", "group", "page", "reduce"),
    [
        (128, 4, 8, "softmax_mean"),
        (96, 3, 16, "max"),
        (64, 7, 32, "mean"),
        (256, 8, 64, "softmax_mean"),
        (64, 16, 128, "softmax_mean"),
    ],
)
def test_the_kernels_scores_are_the_references(dim: int, group: int, page: int, reduce: str, tmp_path: Path) -> None:
    """Rows beyond the length, which hold anything, do not count; extents lie in any order."""
    config = Config(top_k=512, page=page, page_score="codes", group_reduce=reduce)
    context = make_context(config, dim, group, [5, 2125])
    context.codebooks["signs"] = rotation_signs(0, padded_dim(dim))
    codes = Codes(context)
    codes.store.high.fill_(255)
    codes.store.scales.fill_(torch.nan)
    codes.build(1, random_keys(2125, dim))
    queries = random_queries(KV_HEADS, group, dim)
    compile_scores(tmp_path, dim, group, page, reduce)
    arrays = {"high": codes.store.high, "scales": codes.store.scales, "signs": codes.store.signs, "queries": queries}
    arrays["table"] = context.extents.table[1]
    for name, array in arrays.items():
        (tmp_path / name).write_bytes(array.contiguous().numpy().tobytes())
    sizes = [str(KV_HEADS), str(context.extents.max_extents), str(context.scaling)]
    for head, length in ((0, 2125), (1, 2049), (1, 1)):
        subprocess.run([tmp_path / "scores", str(length), str(head), *sizes], check=True, cwd=tmp_path)
        found = torch.frombuffer(bytearray((tmp_path / "results").read_bytes()), dtype=torch.float32)
        want = codes.scores(queries, 1, length, 0)[head]
        lanes = want.shape[0]
        torch.testing.assert_close(found[:-lanes].view(-1, lanes).T, want, rtol=1e-5, atol=1e-5)
        if reduce != "mean":
            sums = (want * context.scaling).logsumexp(dim=-1) / torch.tensor(2.0).log()
            torch.testing.assert_close(found[-lanes:], sums, rtol=1e-5, atol=1e-4)

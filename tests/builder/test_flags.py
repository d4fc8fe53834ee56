"""Flags of `kvseek build`: sections and texts of --help; refused words, with status 2, and refused values, with 1."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import RandomModel

from kvseek.builder import build
from kvseek.builder.flags import FlagParser, field_texts
from kvseek.core.config import CacheConfig, TensorRtConfig
from kvseek.plugins import registry
from kvseek.plugins.registry import METHODS, PEERS, get_method


@dataclass
class Example:
    """What it is.

    Parameters
    ----------
    other : int
        Of no interest.

    Attributes
    ----------
    one, two : int
        Both of them: 100 %,
        on two lines.

        And a paragraph.
    three : str

    Raises
    ------
    ValueError
        Never.
    """


class Bare:
    """No sections here: only words, and one : that."""


class Silent:
    pass


def test_texts_come_from_the_attributes_section() -> None:
    both = "Both of them: 100 %, on two lines. And a paragraph."
    assert field_texts(Example) == {"one": both, "two": both, "three": ""}
    assert field_texts(Bare) == field_texts(Silent) == {}


@pytest.mark.parametrize("name", ["cache", "tensorrt", *METHODS, *PEERS])
def test_every_field_has_a_text(name: str) -> None:
    own = {"cache": CacheConfig, "tensorrt": TensorRtConfig}
    config_class = own.get(name) or get_method(name).config_class
    fields, texts = [f.name for f in dataclasses.fields(config_class)], field_texts(config_class)
    assert list(texts) == fields, "in the order of the fields"
    assert all(len(text.split()) > 1 for text in texts.values())


def test_sections_and_defaults() -> None:
    parser = FlagParser()
    titles = [group.title for group in parser._action_groups][2:]
    methods = [f"--method {name}" for name in METHODS]
    assert titles == [
        "what to build",
        "limits",
        "cache",
        *methods,
        "--runtime tensorrt",
        "--prefill_attention block_sparse",
        "calibrate",
        "plan",
        "inspect, verify and check",
    ]
    groups: dict[str | None, list[argparse.Action]] = {g.title: g._group_actions for g in parser._action_groups}
    for name in METHODS:
        fields = dataclasses.fields(get_method(name).config_class)
        flags = [action.option_strings[0] for action in groups[f"--method {name}"]]
        assert flags == [f"--{name}.{field.name}" for field in fields]
        assert all("(default: " in str(action.help) for action in groups[f"--method {name}"])
    calibrate = [(action.option_strings[0], str(action.help)) for action in groups["calibrate"]]
    assert [flag for flag, _ in calibrate] == ["--calibrate", "--calibrate_tokens", "--calibrate_window"]
    assert all("(default: 2048" in text for _, text in calibrate[1:])
    assert {flag for action in groups["plan"] for flag in action.option_strings} == {
        "--plan",
        "--gpu_memory",
        "--host_memory",
        "--json",
    }


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        build.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--ctkvr.centroid_divisor N A prompt of n retrieval tokens" in text
    assert "Section 4.1: 16. (default: 16)" in text
    assert "kvseek build --plan --model MODEL --method METHOD --gpu_memory SIZE --host_memory SIZE" in text
    assert '--tensorrt.form TEXT "engine": one plan, in which attention is a plugin\'s layers' in text
    assert "--method full: no options of its own" in text
    assert "First tokens of a request, which every step attends to. (default: 64)" in text


MODEL = ("--model", "m")
FULL = (*MODEL, "--method", "full")
BUILD = (*FULL, "--output_dir", "x")
PLAN = ("--plan", *FULL, "--gpu_memory", "1GiB", "--host_memory", "1GiB")
PARIS, FLAT, CTKVR = (("--method", name) for name in ("pariskv", "flat", "ctkvr"))
TENSORRT = ("--device", "cuda", "--dtype", "bfloat16", "--runtime", "tensorrt")
SPARSE = ("--prefill_attention", "block_sparse")
WHOLE_PROMPTS = "--prefill_chunk_tokens does not go with --tensorrt.form engine, which reads a prompt in one call"

USAGE: list[tuple[tuple[str, ...], str]] = [
    ((*BUILD, "--method", "nope"), "invalid choice: 'nope' (choose from"),
    ((*BUILD, "--gemm_plugin", "auto"), "unrecognized arguments: --gemm_plugin auto; see kvseek build --help"),
    ((*BUILD, *FLAT, "--pariskv.top_k", "5"), "--pariskv.top_k belongs to --method pariskv; flags of --method flat"),
    ((*BUILD, "--pariskv.top_k", "5"), "flags of --method full: none"),
    ((*BUILD, *PARIS, "--pariskv.bogus", "5"), "arguments: --pariskv.bogus 5; there are --pariskv.group_reduce,"),
    ((*BUILD, "--cache.sink", "many"), "argument --cache.sink: invalid int value: 'many'"),
    ((*BUILD, *CTKVR, "--ctkvr.update", "1"), "invalid boolean value: '1'"),
    ((*BUILD, *PARIS, "--pariskv.schedule_steps", "[1"), "invalid json_value value: '[1'"),
    ((*BUILD, "--max_seq", "100"), "unrecognized arguments: --max_seq 100"),
    ((*BUILD, "--device", "tpu"), "argument --device: invalid choice: 'tpu'"),
    ((*BUILD, "--device", "cuda", "--cuda_archs", "ninety"), "argument --cuda_archs: invalid architectures value: 'ni"),
    ((*BUILD, "--cuda_archs", "90"), "--cuda_archs belongs to --device cuda; --device is cpu"),
    ((*BUILD, "--prefill_attention", "sparse"), "argument --prefill_attention: invalid choice: 'sparse'"),
    ((*BUILD, "--block_sparse.budget", "8192"), "--block_sparse.budget belongs to --prefill_attention block_sparse; "),
    *(
        row
        for mode in (BUILD, PLAN)
        for row in (
            (
                (*mode, "--tensorrt.form", "segments"),
                "--tensorrt.form belongs to --runtime tensorrt; --runtime is torch",
            ),
            ((*mode, "--tensorrt.module", "tensorrt"), "--tensorrt.module belongs to --runtime tensorrt"),
            ((*mode, "--runtime", "tensorrt", "--prefill_chunk_tokens", "64"), WHOLE_PROMPTS),
        )
    ),
    ((*BUILD, "--calibrate_tokens", "5"), "--calibrate_tokens goes only with --calibrate TEXT"),
    ((*BUILD, "--calibrate_window", "5"), "--calibrate_window goes only with --calibrate TEXT"),
    ((*BUILD, "--calibrate", "t", "--calibrate_tokens", "all"), "invalid int value: 'all'"),
    ((*BUILD, "--json"), "goes only with --plan or --inspect"),
    ((*BUILD, "--gpu_memory", "1"), "--gpu_memory goes only with --plan; leave it out"),
    ((*PLAN, "--gpu_memory", "80GX"), "--gpu_memory: '80GX': must be a number > 0 and a unit, one of KB, KiB, MB"),
    ((*PLAN, "--host_memory", "0"), "argument --host_memory: '0': must be a number > 0"),
    ((*PLAN, "--device", "cpu"), "--gpu_memory belongs to --device cuda; --device is cpu: leave it out"),
    ((*PLAN, "--force"), "--force does not go with --plan; leave it out"),
    ((*PLAN, "--inspect", "x"), "--inspect does not go with --plan"),
    ((*PLAN, "--calibrate", "t"), "--calibrate does not go with --plan; leave it out"),
    ((*PLAN, "--prkv.page", "8"), "--prkv.page belongs to --method prkv"),
    (("--plan", *FULL, "--gpu_memory", "1"), "required with --plan: --host_memory"),
    (("--plan", *FULL, "--device", "cpu"), "required with --plan: --host_memory"),
    (("--inspect", "x", "--method", "full"), "--method does not go with --inspect; leave it out"),
    (("--verify", "x", "--json"), "--json does not go with --verify; leave it out"),
    (("--verify", "x", "--check"), "--check does not go with --verify; leave it out"),
    (("--check", "--output_dir", "x", "--force"), "--force does not go with --check without --method; leave it out"),
    (("--check", *MODEL), "the following arguments are required: --output_dir"),
    (("--output_dir", "x", "--no-check"), "the following arguments are required: --model, --method"),
    (MODEL, "the following arguments are required: --method, --output_dir"),
]


@pytest.mark.parametrize(("flags", "message"), USAGE)
def test_bad_usage(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build.main(flags)
    assert message in " ".join(capsys.readouterr().err.split())


EXTENT = "the rows of one extent"
VALUES: list[tuple[tuple[str, ...], str]] = [
    (("--cache.local", "0"), "cache.local = 0: must be >= 1"),
    (("--max_seq_len", "0"), "max_seq_len = 0: must be >= 2"),
    (("--max_seq_len", "1"), "max_seq_len = 1: must be >= 2; a prompt of one token and its answer take two"),
    (("--max_input_len", "0"), "max_input_len = 0: must be >= 1; set --max_input_len"),
    (("--max_seq_len", "2048"), "max_seq_len = 2048: must be <= max_position_embeddings = 1024"),
    (("--max_input_len", "900", "--max_seq_len", "800"), "= 900: must be <= max_seq_len = 800; lower it, or raise"),
    (("--max_input_len", "2000"), "max_input_len = 2000: must be <= max_seq_len = 1024; lower it: the model was not"),
    (SPARSE, "block_sparse.budget = 8192: must be < max_input_len = 1024; no prompt would"),
    (
        (*SPARSE, "--block_sparse.budget", "512", "--block_sparse.dense_layers", "3"),
        "block_sparse.dense_layers = 3: must be < num_layers = 3; no prompt would be sparse",
    ),
    (
        ("--cache.kv_cache_host_memory_bytes", "1000"),
        f"cache.kv_cache_host_memory_bytes = 1,000: {EXTENT} of 1024 tokens take 1,572,864 bytes in 3 layers; raise",
    ),
    (("--cache.reuse_host_bytes", "1000"), f"cache.reuse_host_bytes = 1,000: must be >= 1,572,864, {EXTENT}"),
    ((*FLAT, "--flat.top_k", "0"), "top_k = 0: must be >= 1"),
    ((*PARIS, "--pariskv.schedule_steps", '[{"rho": 1}]'), "key 'below_tokens' is missing"),
    ((*PARIS, "--pariskv.schedule_steps", '[{"speed": 1}]'), "unknown key 'speed'"),
    (("--dtype", "float16"), "dtype = 'float16': must be float32 or bfloat16 with device = 'cpu'"),
    (("--device", "cuda"), "kernels = 'reference': must be 'native' with device = 'cuda'"),
    (("--device", "cuda", "--kernels", "native", "--cuda_archs", "75"), "cuda_archs = 75: must be one of 80,"),
    (("--device", "cuda", "--cache.offload", "never ever"), "cache.offload = 'never ever': must be one of"),
    ((*TENSORRT, "--tensorrt.module", "tensorrt_rtx"), "must be 'segments' with module = 'tensorrt_rtx'"),
    ((*TENSORRT, "--tensorrt.module", "onnx"), "tensorrt.module = 'onnx': must be one of"),
    ((*TENSORRT, "--tensorrt.form", "layers"), "tensorrt.form = 'layers': must be one of"),
    ((*TENSORRT, "--device", "cpu"), "runtime = 'tensorrt': must be 'torch' with device = 'cpu'"),
    ((*TENSORRT, "--tp_size", "2"), "tp_size = 2: must be 1 with runtime = 'tensorrt'"),
    (("--tp_size", "0"), "tp_size = 0: must be >= 1"),
    (("--tp_size", "4"), "tp_size = 4: must be a divisor of num_heads = 6"),
    ((*TENSORRT, "--weight_only_precision", "int8"), "= 'int8': must be 'none' with runtime = 'tensorrt'"),
]


@pytest.mark.parametrize(("flags", "message"), VALUES)
def test_bad_values(
    flags: tuple[str, ...], message: str, random_model: RandomModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--model", str(random_model("llama")), "--output_dir", str(tmp_path / "engine"), "--method", "full")
    kernels = () if "tensorrt" in flags else ("--kernels", "reference")
    assert build.main([*where, *kernels, *flags]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


PLANS: list[tuple[tuple[str, ...], str]] = [
    (("--method", "toy"), "method = 'toy' does not run with device = 'cuda'; choose one of full, clusterkv"),
    (("--max_batch_size", "65"), "max_batch_size = 65: must be <= 64"),
    (("--tp_size", "3"), "tp_size = 3: must be a divisor of intermediate_size = 160; choose"),
    (("--kernels", "reference"), "kernels = 'reference': must be 'native'"),
]


@pytest.mark.parametrize(("flags", "message"), PLANS)
def test_bad_values_of_plans(
    flags: tuple[str, ...],
    message: str,
    random_model: RandomModel,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry.METHODS, "toy", "tests.plugins.toy_method")
    assert build.main([*PLAN, "--model", str(random_model("llama", head_dim=64)), *flags]) == 1
    assert message in capsys.readouterr().err

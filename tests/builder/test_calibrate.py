"""`kvseek build --calibrate`: perplexities beside transformers', windows, 16 bits, memory; what builds print, keep and refuse."""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.builder.checkpoints.quantised_checkpoints import quantise_checkpoint
from tests.conftest import ROOT
from tests.engine.model.test_logits import load_transformers
from tests.support.checkpoint_files import edit_tensors, save_dequantised
from tests.support.random_models import ARCHITECTURES, HYBRIDS, MIXTURES, save_random_model, save_tokenizer
from torch import Tensor

from kvseek.builder import build, calibration
from kvseek.builder.calibration import (
    CALIBRATION_FILE,
    Calibration,
    Calibrator,
    Text,
    WindowedText,
    checkpoint_layers,
    stored_layers,
)
from kvseek.builder.checkpoints import storage
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, weight_reader, write_weights
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError, EngineDirectoryError
from kvseek.core.manifest import read_manifest, verify
from kvseek.core.weight_only import dequantise, quantise
from kvseek.engine.model.layer import Head, Layer
from kvseek.engine.model.weights import load_weights
from kvseek.engine.tokenizer import Tokenizer

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HARBOUR_LOG = ROOT / "examples/harbour_log.txt"


def run(model: Path, output_dir: Path, text: Path, *flags: str) -> int:
    arguments = ["--model", str(model), "--method", "full", "--kernels", "reference", "--output_dir", str(output_dir)]
    return build.main([*arguments, "--calibrate", str(text), *flags])


def calibrated(model: Path, output_dir: Path, text: Path, *flags: str) -> Calibration:
    assert run(model, output_dir, text, "--quiet", *flags) == 0
    return Calibration.load(output_dir)


def reference(model: Path, ids: list[int], window: int) -> tuple[float, Tensor]:
    """Perplexity by transformers, and log probabilities [predictions, vocabulary]."""
    return reference_of(load_transformers(model), ids, window)


@torch.inference_mode()
def reference_of(network: Any, ids: list[int], window: int) -> tuple[float, Tensor]:
    rows, losses = [], []
    for start in range(0, len(ids), window):
        part = torch.tensor(ids[start : start + window])
        found = network(part[None]).logits[0, :-1].log_softmax(dim=-1)
        rows.append(found)
        losses.append(F.nll_loss(found.double(), part[1:], reduction="sum"))
    log_probabilities = torch.cat(rows)
    return math.exp(sum(float(loss) for loss in losses) / len(log_probabilities)), log_probabilities


# 257 tokens in windows of 64: the last has one token, which predicts nothing.
@pytest.mark.parametrize(
    ("architecture", "tokens", "window"),
    [*((name, 300, 128) for name in ARCHITECTURES), ("llama", 257, 64), ("qwen2", 2, 2), ("qwen3", 200, 1000)],
)
def test_perplexity_is_that_of_transformers(
    architecture: str, tokens: int, window: int, text: Path, tmp_path: Path
) -> None:
    model = save_random_model(tmp_path / "model", architecture)
    flags = ("--calibrate_tokens", str(tokens), "--calibrate_window", str(window))
    found = calibrated(model, tmp_path / "engine", text, *flags)
    ids = Tokenizer(tmp_path / "engine").encode(text.read_text(encoding="utf-8"))
    expected, rows = reference(model, ids[:tokens], window)
    assert found.perplexity == pytest.approx(expected, rel=1e-4)
    assert found.quantised is None, "nothing to compare with"
    assert (found.text_tokens, found.tokens, found.predictions) == (len(ids), tokens, len(rows))
    assert (found.window, found.device, found.dtype) == (min(tokens, window), DEVICE, "float32")
    assert (found.text, found.text_sha256) == ("text.txt", hashlib.sha256(text.read_bytes()).hexdigest())
    verify(tmp_path / "engine")
    assert CALIBRATION_FILE in read_manifest(tmp_path / "engine").files


@pytest.mark.parametrize(
    ("architecture", "precision", "head"),
    [*((name, "int8", True) for name in ARCHITECTURES), ("llama", "int8", False), ("qwen3", "fp8", False)],
)
def test_stored_weights_are_those_of_a_dequantised_model(
    architecture: str, precision: str, head: bool, text: Path, tmp_path: Path
) -> None:
    model = save_random_model(tmp_path / "model", architecture)
    other = save_dequantised(model, tmp_path / "dequantised", precision, quantize_lm_head=head)
    flags = ("--calibrate_tokens", "300", "--calibrate_window", "128", *(("--quantize_lm_head",) if head else ()))
    found = calibrated(model, tmp_path / "engine", text, *flags, "--weight_only_precision", precision)
    ids = Tokenizer(tmp_path / "engine").encode(text.read_text(encoding="utf-8"))[:300]
    (plain, before), (quantised, after) = (reference(path, ids, 128) for path in (model, other))
    cost = found.quantised
    assert found.weight_only_precision == precision
    assert found.perplexity == pytest.approx(plain, rel=1e-4)
    assert cost.perplexity == pytest.approx(quantised, rel=1e-4)
    assert cost.perplexity_ratio == pytest.approx(quantised / plain, rel=1e-4)
    divergence = (before.exp() * (before - after)).sum(dim=-1).double().mean()
    assert 0 < cost.mean_kl_divergence == pytest.approx(float(divergence), rel=0.02)
    same = (before.argmax(dim=-1) == after.argmax(dim=-1)).double().mean()
    assert cost.same_token_share == pytest.approx(float(same), abs=1.01 / len(before)), "but for a tie"


def written(model: Path, directory: Path, dtype: str, precision: str = "none") -> EngineConfig:
    """Weights and tokenizer of an engine for a GPU, without its kernels."""
    checkpoint = open_checkpoint(model)
    config = EngineConfig(
        checkpoint.config,
        "full",
        dtype=dtype,
        device="cuda",
        weight_only_precision=precision,
        max_input_len=512,
        max_seq_len=512,
    )
    directory.mkdir()
    write_weights(checkpoint, directory, WeightFormat.of(config))
    save_tokenizer(directory / "tokenizer")
    return config


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype: str, model: Path, text: Path, tmp_path: Path) -> None:
    config = written(model, tmp_path / "engine", dtype, "int8")
    calibrator = Calibrator(Text.read(text), config, Tokenizer(tmp_path / "engine"), 300)
    steps: list[int] = []
    found = calibrator.run(open_checkpoint(model), tmp_path / "engine", steps.append)
    ids = Tokenizer(tmp_path / "engine").encode(text.read_text(encoding="utf-8"))[:300]
    expected, _ = reference(model, ids, 512)
    assert (found.dtype, found.window, sum(steps)) == (dtype, 300, calibrator.units)
    assert found.perplexity == pytest.approx(expected, rel=0.03)
    assert found.quantised.perplexity_ratio == pytest.approx(1, abs=0.03)


def test_a_perplexity_that_is_not_finite_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    loud = tmp_path / "loud"
    save_dequantised(model, loud, "int8")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(loud / "model.safetensors", lambda weights: weights[name].mul_(3e4))
    config = written(loud, tmp_path / "engine", "float16")
    calibrator = Calibrator(Text.read(text), config, Tokenizer(tmp_path / "engine"), 300)
    with pytest.raises(
        ConfigError,
        match=r"perplexity = nan: must be a finite number with the weights in float16; float16 ends .* bfloat16",
    ):
        calibrator.run(open_checkpoint(loud), tmp_path / "engine", lambda amount: None)


def hidden_states(model: Path, directory: Path, ids: list[int], window: int) -> Tensor:
    windows = WindowedText(open_checkpoint(model).config, ids, window, CPU)
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    return windows.hidden_states(embedding, stored_layers(directory), lambda amount: None)


def test_windows_do_not_see_each_other(model: Path, tmp_path: Path) -> None:
    written(model, tmp_path / "engine", "float32")
    ids = torch.arange(150).mul(7).remainder(100).tolist()
    together = hidden_states(model, tmp_path / "engine", ids, 64)
    parts = [hidden_states(model, tmp_path / "engine", ids[start : start + 64], 64) for start in (0, 64, 128)]
    assert torch.equal(together, torch.cat(parts))
    assert not torch.allclose(together, hidden_states(model, tmp_path / "engine", ids, 150))


def test_slices_of_the_vocabulary_projection_change_nothing(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--weight_only_precision", "fp8", "--calibrate_tokens", "200", "--calibrate_window", "90")
    whole = calibrated(model, tmp_path / "whole", text, *flags)
    heads: list[int] = []

    class CountedHead(Head):
        def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
            heads.append(len(x))
            return super().__call__(x, prompt=prompt)

    monkeypatch.setattr(calibration, "Head", CountedHead)
    monkeypatch.setattr(calibration, "LOGIT_BYTES", 7 * 4 * open_checkpoint(model).config.vocab_size)
    sliced = calibrated(model, tmp_path / "sliced", text, *flags)
    assert max(heads) == 7, "logits of so many tokens at once"
    assert sum(heads) == 4 * sliced.predictions == 4 * (200 - 3), "float32, fp8, int8 and int4"
    assert sliced.perplexity == pytest.approx(whole.perplexity, rel=1e-6)
    assert sliced.quantised.mean_kl_divergence == pytest.approx(whole.quantised.mean_kl_divergence, rel=1e-4)
    assert sliced.quantised.same_token_share == whole.quantised.same_token_share


def test_losses_of_distant_distributions(model: Path) -> None:
    """By hand, where the divergence of the second from the first is far from that of the first from the second."""
    config, generator = open_checkpoint(model).config, torch.Generator().manual_seed(3)
    ids = torch.randint(config.vocab_size, (11,), generator=generator)
    hidden = [torch.randn(11, config.hidden_size, generator=generator) for _ in range(2)]
    weight = torch.randn(config.vocab_size, config.hidden_size, generator=generator) * 0.3
    head = Head(config, torch.ones(config.hidden_size), weight)
    steps: list[int] = []
    found = WindowedText(config, ids.tolist(), 5, CPU).losses([head, head], hidden, steps.append)
    before, after = (head(states).double().log_softmax(dim=-1) for states in hidden)
    predicting = [0, 1, 2, 3, 5, 6, 7, 8]  # windows 0 to 4, 5 to 9, and 10
    likely = [rows[predicting, ids[[place + 1 for place in predicting]]] for rows in (before, after)]
    assert found.perplexities == pytest.approx([float((-rows.mean()).exp()) for rows in likely], rel=1e-5)
    forward, backward = (
        float((one.exp() * (one - other)).sum(dim=-1)[predicting].mean())
        for one, other in ((before, after), (after, before))
    )
    assert abs(forward - backward) > 0.01 * forward
    assert found.kl_divergences == pytest.approx([0, forward], rel=1e-4)
    assert found.same_tokens[0] == 1
    assert found.same_tokens[1] == (before.argmax(dim=-1) == after.argmax(dim=-1))[predicting].double().mean()
    assert len(steps) == 2


class Live:
    """Counts the bytes of tensors, and the layers, that exist at a time."""

    def __init__(self) -> None:
        self.bytes = self.most_bytes = self.layers = self.most_layers = 0

    def counted(self, source: Callable[[int], dict[str, Tensor]]) -> Callable[[int], dict[str, Tensor]]:
        def read(number: int) -> dict[str, Tensor]:
            found = source(number)
            for tensor in found.values():
                self.bytes += tensor.nbytes
                weakref.finalize(tensor, self._drop, tensor.nbytes)
            self.most_bytes = max(self.most_bytes, self.bytes)
            return found

        return read

    def layer(self, *arguments: Any) -> Layer:
        made = Layer(*arguments)
        self.layers += 1
        self.most_layers = max(self.most_layers, self.layers)
        weakref.finalize(made, self._drop_layer)
        return made

    def _drop(self, size: int) -> None:
        self.bytes -= size

    def _drop_layer(self) -> None:
        self.layers -= 1


def test_one_layer_is_in_memory_at_a_time(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_random_model(tmp_path / "model", "qwen3", num_hidden_layers=12)
    live = Live()
    monkeypatch.setattr(calibration, "stored_layers", lambda *values: live.counted(stored_layers(*values)))
    monkeypatch.setattr(calibration, "checkpoint_layers", lambda *values: live.counted(checkpoint_layers(*values)))
    monkeypatch.setattr(calibration, "Layer", live.layer)
    calibrated(model, tmp_path / "engine", text, "--weight_only_precision", "int8", "--calibrate_window", "100")
    layer = 4 * (96 * (6 + 2 * 2) * 32 + 96 * 6 * 32 + 3 * 96 * 160 + 2 * 96 + 2 * 32)
    assert layer <= live.most_bytes <= layer + 4 * 96, "a layer in float32, and norm.weight"
    assert live.most_layers == 1
    assert (live.bytes, live.layers) == (0, 0)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2(smollm2_gguf: Path, tmp_path: Path) -> None:
    flags = ("--weight_only_precision", "int8", "--calibrate_tokens", "256")
    found = calibrated(smollm2_gguf, tmp_path / "engine", HARBOUR_LOG, *flags)
    assert 5 < found.perplexity < 200, "it has read English"
    assert found.quantised.perplexity_ratio == pytest.approx(1, abs=0.01)
    assert found.quantised.same_token_share > 0.9


# As builds: what is printed and kept, when an engine is built again, what is refused


SENTENCE = "the harbour master wrote the log, and the light was lit at dusk in 1931; "


def test_what_is_printed_and_kept(model: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = text.rename(tmp_path / "[red] text.txt")
    assert run(model, tmp_path / "engine", text, "--weight_only_precision", "int8", "--calibrate_tokens", "100") == 0
    output = capsys.readouterr().err
    found = Calibration.load(tmp_path / "engine")
    cost, other = found.quantised, found.int4
    lines = [line.split() for line in output.splitlines()]
    table = [
        ["weights", "float32", "int8", "int4,", "not", "stored"],
        ["perplexity", f"{found.perplexity:,.4f}", f"{cost.perplexity:,.4f}", f"{other.perplexity:,.4f}"],
        ["ratio", f"{cost.perplexity_ratio:.5f}", f"{other.perplexity_ratio:.5f}"],
        ["mean", "KL", "divergence,", "nats"] + [f"{one.mean_kl_divergence:.6f}" for one in (cost, other)],
        ["most", "probable", "token", "the", "same"] + [f"{one.same_token_share:.2%}" for one in (cost, other)],
        f"99 predictions in windows of 100 tokens of [red] text.txt, on {DEVICE}".split(),
    ]
    assert all(row in lines for row in table)
    assert f"calibrate on {DEVICE}" in output, "the progress bar says where"
    assert build.main(["--inspect", str(tmp_path / "engine")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all(row in lines for row in table)
    assert build.main(["--inspect", str(tmp_path / "engine"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["calibration"]
    assert document == json.loads((tmp_path / "engine" / CALIBRATION_FILE).read_text())
    assert document["quantised"]["perplexity"] == cost.perplexity


def test_a_column_for_each_choice(model: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that the engine does not store have the figures of engines that do."""
    assert run(model, tmp_path / "engine", text) == 0
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    found = Calibration.load(tmp_path / "engine")
    assert ["weights", "float32", "int8,", "not", "stored", "int4,", "not", "stored"] in lines
    assert f"text.txt has {found.tokens:,} tokens, fewer than calibrate_tokens = 2,048: all are used".split() in lines
    assert (found.tokens, found.window) == (found.text_tokens, 1024), "no longer than max_seq_len"
    for precision, other in (("int8", "int4"), ("int4", "int8")):
        own = calibrated(model, tmp_path / precision, text, "--weight_only_precision", precision)
        assert getattr(found, precision) == own.quantised
        assert (getattr(own, precision), getattr(own, other)) == (None, getattr(found, other))
    odd = save_random_model(tmp_path / "odd", "llama", intermediate_size=168)
    found = calibrated(odd, tmp_path / "odd engine", text, "--calibrate_tokens", "100")
    assert found.int8 is not None
    assert found.int4 is None, "its groups do not divide the inputs"


@pytest.mark.parametrize("architecture", ARCHITECTURES + MIXTURES + HYBRIDS)
def test_errors_of_int4_count_by_the_texts_activations(architecture: str, text: Path, tmp_path: Path) -> None:
    """Of what transformers multiplies with each matrix, the mean square of each input, relative to their mean.

    That of an expert is what the tokens have that pass it; with 300 tokens each has some.
    """
    model = save_random_model(tmp_path / "model", architecture)
    flags = ("--weight_only_precision", "int4", "--calibrate_tokens", "300", "--calibrate_window", "128")
    found = calibrated(model, tmp_path / "engine", text, *flags)
    ids = Tokenizer(tmp_path / "engine").encode(text.read_text(encoding="utf-8"))[:300]
    network, squares = load_transformers(model), dict[str, Tensor]()
    sources = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj", "gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
    sources |= {
        f"shared.{name}": f"mlp.shared_expert.{name.removeprefix('gate_')}_proj" for name in ("gate_up", "down")
    }
    of_states = [("qkvz", "linear_attn.in_proj_qkvz"), ("qkvz", "linear_attn.in_proj_z"), ("o", "linear_attn.out_proj")]
    for number, layer in enumerate(network.model.layers):
        prefix, modules = f"layers.{number}.", dict(layer.named_modules())
        for name, source in [*sources.items(), *of_states]:

            def record(module: Any, inputs: tuple[Tensor], key: str = f"{prefix}{name}.weight") -> None:
                squares[key] = squares.get(key, 0) + inputs[0].flatten(0, -2).square().sum(dim=0, keepdim=True)

            if source in modules:
                modules[source].register_forward_pre_hook(record)

        def record_experts(module: Any, inputs: tuple[Tensor, Tensor, Tensor], prefix: str = prefix) -> None:
            for expert in range(module.num_experts):
                x = inputs[0][(inputs[1] == expert).any(dim=1)]
                gate, up = (x @ module.gate_up_proj[expert].T).chunk(2, dim=1)
                for name, own in (("gate_up", x), ("down", F.silu(gate) * up)):
                    key = f"{prefix}experts.{name}.weight"
                    found = squares.setdefault(key, torch.zeros(module.num_experts, own.shape[1]))
                    found[expert] += own.square().sum(dim=0)

        if "mlp.experts" in modules:
            modules["mlp.experts"].register_forward_pre_hook(record_experts)
    reference_of(network, ids, 128)
    checkpoint, weights = open_checkpoint(model), load_weights(tmp_path / "engine", CPU)
    read = weight_reader(checkpoint, torch.float32)
    assert {f"{name}_scale" for name in squares} == {name for name in weights if name.endswith("_scale")}
    for name, each in squares.items():
        means = each / each.mean(dim=1, keepdim=True) + calibration.LITTLE
        matrices = read(name).chunk(len(means))
        parts = (quantise(one, "int4", 32, own) for one, own in zip(matrices, means, strict=True))
        expected = [torch.cat(part) for part in zip(*parts, strict=True)]
        importance = means.repeat_interleave(matrices[0].shape[0], dim=0)
        same = (weights[name] == expected[0]).double().mean()
        assert same > 0.99, "but for numbers that lie in the middle between two"
        errors = [
            ((dequantise(*parts, torch.float32) - read(name)).square() * importance).sum()
            for parts in ((weights[name], weights[f"{name}_scale"]), quantise(read(name), "int4", 32, torch.ones(1)))
        ]
        assert errors[0] < errors[1]
    assert found.quantised.mean_kl_divergence > 0


def test_a_quantised_checkpoint_has_one_column(
    model: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantise_checkpoint(model, tmp_path / "m", "gptq 3")
    assert run(tmp_path / "m", tmp_path / "engine", text) == 0
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["weights", "float32"] in lines
    assert ["perplexity", f"{Calibration.load(tmp_path / 'engine').perplexity:,.4f}"] in lines
    assert not any(line[:1] == ["ratio"] for line in lines)


def test_an_engine_without_calibration_shows_none(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(model), "--method", "full", "--kernels", "reference", "--output_dir", str(tmp_path / "e")]
    assert build.main([*flags, "--quiet"]) == 0
    assert not (tmp_path / "e" / CALIBRATION_FILE).exists()
    assert build.main(["--inspect", str(tmp_path / "e"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"] is None


def test_what_decides_whether_an_engine_is_up_to_date(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def built(*flags: str) -> bool:
        assert run(model, tmp_path / "engine", text, "--calibrate_tokens", "60", *flags) == 0
        return "isuptodate" not in "".join(capsys.readouterr().err.split())  # lines are folded anywhere

    assert built()
    assert not built()
    assert built("--calibrate_window", "50")
    assert Calibration.load(tmp_path / "engine").predictions == 58
    assert built("--calibrate_window", "50", "--calibrate_tokens", "61")
    text.write_text(SENTENCE * 20, encoding="utf-8")
    assert built("--calibrate_window", "50", "--calibrate_tokens", "61")
    assert Calibration.load(tmp_path / "engine").text_sha256 == hashlib.sha256(text.read_bytes()).hexdigest()


REFUSED = [
    (None, (), "does not exist; name a text file"),
    (b"", (), "tokens of text.txt = 0: must be >= 2; name a longer text with --calibrate"),
    (b"a", (), "tokens of text.txt = 1: must be >= 2; name a longer text with --calibrate"),
    (b"caf\xe9 au lait", (), "byte 3 is not UTF-8 (invalid continuation byte); convert the text to UTF-8"),
    (b"a text", ("--calibrate_tokens", "1"), "calibrate_tokens = 1: must be >= 2; the first token of a text"),
    (b"a text", ("--calibrate_window", "1"), "calibrate_window = 1: must be between 2 and max_seq_len = 1024; set"),
    (
        b"a text",
        ("--calibrate_window", "300", "--max_seq_len", "200"),
        "calibrate_window = 300: must be between 2 and max_seq_len = 200; set --calibrate_window, or leave it out",
    ),
]


@pytest.mark.parametrize(("content", "flags", "message"), REFUSED)
def test_refused_before_weights_are_written(
    content: bytes | None,
    flags: tuple[str, ...],
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "texts" / "text.txt"
    text.parent.mkdir()
    if content is not None:
        text.write_bytes(content)
    monkeypatch.setattr(storage, "write_weights", lambda *values, **options: pytest.fail("weights were written"))
    assert run(model, tmp_path / "engine", text, "--quiet", *flags) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_directory_is_no_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, tmp_path / "engine", model) == 1
    assert f"calibrate = {str(model)!r}: is a directory; name a text file" in capsys.readouterr().err


def test_a_processor_without_bfloat16(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(calibration, "bfloat16_works", lambda: False)
    assert run(model, tmp_path / "engine", text, "--quiet", "--dtype", "bfloat16") == 1
    assert "calibrate: this processor cannot multiply dtype = 'bfloat16'; build where" in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()
    assert run(model, tmp_path / "engine", text, "--quiet") == 0


def test_a_failure_on_the_way_leaves_the_old_engine(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = calibrated(model, tmp_path / "engine", text)

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")

    monkeypatch.setattr(WindowedText, "losses", fail)
    assert run(model, tmp_path / "engine", text, "--quiet", "--calibrate_tokens", "77") == 1
    error = capsys.readouterr().err
    assert "does not hold one layer and 77 tokens (CUDA out of memory. Tried); lower --calibrate_tokens" in error
    assert Calibration.load(tmp_path / "engine") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "text.txt"]


@pytest.mark.parametrize("damage", ["", "[]", '{"text": 1}', "\xff"])
def test_a_damaged_record_is_named(damage: str, tmp_path: Path) -> None:
    with pytest.raises(EngineDirectoryError, match=r"calibration\.json is missing; build the engine again"):
        Calibration.load(tmp_path)
    (tmp_path / CALIBRATION_FILE).write_text(damage, encoding="latin-1")
    with pytest.raises(EngineDirectoryError, match=r"calibration\.json is corrupt \(.*build the engine again"):
        Calibration.load(tmp_path)

"""GGUF files: tensor types up to the weights of an engine; texts are encoded as vocabulary, scores and split say."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.support.checkpoint_files import add_tokenizer, interleave, write_gguf
from tests.support.random_models import ARCHITECTURES, save_random_model
from tests.support.sentencepiece import BYTES, SPACE, SPECIAL, sentencepiece_backend
from tokenizers import AddedToken, Tokenizer

from kvseek.builder.checkpoints.gguf_tokenizer import ARRAYS, SCORES, TOKENS, TYPES, load_tokenizer
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, write_weights
from kvseek.core.errors import ConfigError
from kvseek.engine.model.weights import load_weights

HEAD_DIM = 32
# A super-block holds 256 weights of a row, so every row length is a multiple of that.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}
# Type → bytes of a block of 256 weights, and where its float16 scales lie.
SUPER_BLOCKS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}


def engine_weights(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    write_weights(open_checkpoint(path), folder, WeightFormat(torch.float32))
    return load_weights(folder, torch.device("cpu"))


def fused_names(layer: int) -> dict[str, tuple[str, ...]]:
    """Fused weight of an engine → its parts, as a GGUF file names them."""
    block, own = f"blk.{layer}.", f"layers.{layer}."
    return {
        f"{own}qkv.weight": (f"{block}attn_q.weight", f"{block}attn_k.weight", f"{block}attn_v.weight"),
        f"{own}o.weight": (f"{block}attn_output.weight",),
        f"{own}gate_up.weight": (f"{block}ffn_gate.weight", f"{block}ffn_up.weight"),
        f"{own}down.weight": (f"{block}ffn_down.weight",),
    }


@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_super_blocks_of_random_bytes(name: str, tmp_path: Path) -> None:
    """The package cannot quantise to these types, so the blocks are random bytes with finite scales."""
    kind, generator = GGMLQuantizationType[name], np.random.default_rng(7)
    size, scales = SUPER_BLOCKS[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (256, size)

    def encode(tensor: torch.Tensor) -> tuple[np.ndarray, GGMLQuantizationType]:
        rows, columns = tensor.shape
        blocks = generator.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
        for offset in scales:
            values = generator.uniform(1e-4, 1e-2, (rows, columns // 256, 1)).astype(np.float16)
            blocks[:, :, offset : offset + 2] = values.view(np.uint8)
        return blocks.reshape(rows, -1), kind

    model = save_random_model(tmp_path / "model", "llama", **SHAPE)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", encode=encode)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = engine_weights(path, tmp_path / "engine")

    def dequantised(part: str) -> torch.Tensor:
        assert stored[part].tensor_type == kind
        return torch.tensor(gguf.dequantize(stored[part].data, kind))

    for ours, parts in itertools.chain.from_iterable(fused_names(layer).items() for layer in range(2)):
        found = weights[ours]
        if ours.endswith("qkv.weight"):  # the file has the queries' and keys' rows in llama's own order
            values = 2 * HEAD_DIM
            found = torch.cat((interleave(found[:-values], HEAD_DIM), found[-values:]))
        assert torch.equal(found, torch.cat([dequantised(part) for part in parts]))
        assert found.isfinite().all()
        assert found.std() > 0
    assert torch.equal(weights["embed.weight"], dequantised("token_embd.weight"))
    assert torch.equal(weights["lm_head.weight"], dequantised("output.weight"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "tolerance"), [("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", None)])
def test_types_that_the_package_writes(name: str, tolerance: float | None, architecture: str, tmp_path: Path) -> None:
    """Rounding to a 16-bit type errs by at most half a unit of a weight, to Q8_0 by half a step of its block of 32."""
    kind = GGMLQuantizationType[name]

    def encode(tensor: torch.Tensor) -> tuple[np.ndarray, GGMLQuantizationType]:
        return gguf.quantize(tensor.numpy(), kind).view(np.uint8), kind

    model = save_random_model(tmp_path / "model", architecture, **SHAPE)
    expected = load_file(model / "model.safetensors")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, architecture, encode=encode))
    for tensor_name, original in expected.items():
        found = checkpoint.tensor(tensor_name)
        if original.dim() == 1:
            assert torch.equal(found, original)
            continue
        if tolerance is None:
            largest = original.unflatten(1, (-1, 32)).abs().amax(dim=2, keepdim=True)
            limit = (largest / 127 * 0.57).expand(-1, -1, 32).flatten(1)  # the scale is a float16: 127 / 2048 more
        else:
            limit = original.abs() * tolerance + 2**-25
        assert ((found - original).abs() <= limit).all()
        assert not torch.equal(found, original)


TEXT = "It's helloWorld 12345\n\n  don't  ÜN–ünïcode 🙂 <|end|> e\u0301"


@pytest.fixture(scope="module")
def byte_level(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def words(backend: Tokenizer, text: str) -> list[str]:
    return [text[slice(*place)] for _, place in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (["llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "smaug-bpe"], ["aB", "'s", " ", "123", "45"]),
        (["qwen2", "deepseek-r1-qwen", "kormo", "megrez"], ["aB", "'s", " ", "1", "2", "3", "4", "5"]),
        (["smollm", "starcoder", "refact", "codeshell", "minerva-7b"], ["aB", "'s", " ", "1", "2", "3", "4", "5"]),
        (["gpt-2", "mellum", "a.x-4.0"], ["aB", "'s", " 12345"]),
        (["tekken"], ["a", "B", "'s", " ", "1", "2", "3", "4", "5"]),
    ],
)
def test_names_of_splits(model: Path, byte_level: Tokenizer, tmp_path: Path, splits: list[str], expected: Any) -> None:
    """One file a split: names that llama.cpp takes for the same split are the same."""
    for split in splits:
        add = write_tokenizer(byte_level, "gpt2", split, bos=0)
        backend = open_checkpoint(write_gguf(tmp_path / f"{split}.gguf", model, "llama", add=add)).tokenizer().backend
        assert words(backend, "aB's 12345") == expected
        ids = backend.encode(TEXT, add_special_tokens=False).ids
        assert backend.decode(ids, skip_special_tokens=False) in (TEXT, TEXT.replace("e\u0301", "\u00e9"))


def write_tokenizer(backend: Tokenizer, kind: str, split: str | None = None, **ids: int) -> Callable[[Any], None]:
    return lambda writer: add_tokenizer(writer, backend, kind, split, **ids)


def test_an_unknown_split_is_refused(model: Path, byte_level: Tokenizer, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", model, "llama", add=write_tokenizer(byte_level, "gpt2", "viking"))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.ggml\.pre = 'viking': must be one of llama-bpe, .*pass --tokenizer"
    ):
        open_checkpoint(path).tokenizer()


# Vocabularies of SentencePiece


def arrays(pieces: dict[str, float]) -> dict[str, Any]:
    """A vocabulary of pieces with their scores, behind special tokens and bytes."""
    tokens = [*SPECIAL, *BYTES, *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    return {TOKENS: tokens, TYPES: types, SCORES: [0.0] * 259 + list(pieces.values())}


def joined(text: str, pieces: dict[str, float]) -> list[str]:
    """SentencePiece's own rule: join the neighbours whose joint piece has the best score, and of equal ones the leftmost."""
    parts = list(text)
    while True:
        found = [(-pieces[both], at) for at in range(len(parts) - 1) if (both := parts[at] + parts[at + 1]) in pieces]
        if not found:
            return [byte for part in parts for byte in ([part] if part in pieces else spelt(part))]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def spelt(part: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in part.encode()]


RUNS = {
    SPACE * length: -1e9 for length in (2, 3, 4, 6, 8)
}  # as in Mistral's vocabulary, which has one score for all of them
WORDS = ["ab", "ba", "abc", "bca", f"{SPACE}a", f"{SPACE}ab", "ca", "aa", "aab", f"{SPACE}aa", "cc", "ccc", f"b{SPACE}"]


@given(text=st.text(st.sampled_from("abc dé灯\n"), max_size=24), order=st.permutations(WORDS), prefix=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_are_joined_as_sentencepiece_joins_them(text: str, order: list[str], prefix: bool) -> None:
    pieces = {piece: -float(rank) for rank, piece in enumerate(order)} | RUNS
    pieces |= {letter: -100.0 - number for number, letter in enumerate(("a", "b", "c", SPACE))}
    stated = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = load_tokenizer(stated, arrays(pieces))
    marked = (SPACE * bool(prefix and text) + text).replace(" ", SPACE)
    assert tokenizer.backend.encode(text).tokens == ["<s>", *joined(marked, pieces)]
    assert tokenizer.backend.decode(tokenizer.backend.encode(text).ids) == text


def test_a_gguf_file_encodes_as_the_models_tokenizer_json(model: Path, tmp_path: Path) -> None:
    backend = sentencepiece_backend()
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    add = write_tokenizer(backend, "llama", "default", bos=1, unknown=0)
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, "llama", add=add)).tokenizer()
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "<s>", "unk_token": "<unk>"}
    for text in ("France is Paris.", " the lamp", "a\n  b", "灯", "</s>x<think> y", "(Paris), 1931"):
        assert found.backend.encode(text).ids == backend.encode(text).ids
        assert found.backend.decode(found.backend.encode(text).ids) == backend.decode(backend.encode(text).ids)


def test_what_a_vocabulary_does_not_say_is_refused() -> None:
    pieces = {"a": -1.0, "b": -2.0, "ab": -3.0, "ba": -4.0}
    stated = {"tokenizer.ggml.model": "llama"}
    for change, message in (
        (
            {"ba": -3.0},
            r"scores = \['ab', 'ba'\]: must be another score for each piece, but 2 have that of another one",
        ),
        ({"<s>": 0.0}, r"tokens = 'tokens that are equal': must be each token once"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(stated, arrays(pieces | change))
    for more, message in (
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces = True: must be absent or false"),
        ({"tokenizer.ggml.bos_token_id": 999}, r"bos_token_id = 999: must be in \[0, 263\)"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model = 't5': must be one of 'gpt2', 'llama'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(stated | more, arrays(pieces))
    for name in (TOKENS, SCORES):
        with pytest.raises(ConfigError, match=f"{name} = "):
            load_tokenizer(stated, {key: value for key, value in arrays(pieces).items() if key != name})
    assert set(arrays(pieces)) < set(ARRAYS)


# The file


def test_nested_arrays_are_refused(tmp_path: Path) -> None:
    """However deep: reading them by recursion would end in an error of Python's."""
    key = b"tokenizer.ggml.tokens"
    nested = struct.pack("<IQ", 9, 1) * 20_000 + struct.pack("<IQ", 4, 0)
    field = struct.pack("<Q", len(key)) + key + struct.pack("<I", 9) + nested
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)
    with pytest.raises(ConfigError, match=r"cannot read .*m\.gguf: it has an array of arrays"):
        _ = open_checkpoint(tmp_path / "m.gguf").config

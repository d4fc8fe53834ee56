"""Tokenizers of directories: texts are encoded as tokenizer.json says, whatever transformers' class for the model would do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint_files import edit_json, run_build, save_tensorrt_llm, write_gguf
from tests.support.random_models import save_random_model, save_tokenizer
from tests.support.sentencepiece import save_sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvseek.builder import build
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.tokenizer import load_tokenizer_directory
from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError
from kvseek.core.manifest import verify
from kvseek.engine.tokenizer import TOKENIZER_FOLDER
from kvseek.engine.tokenizer import Tokenizer as EngineTokenizer

# Splits (digits, contractions, spaces, line ends), normal forms, added tokens, other scripts.
TEXTS = [
    "It's 1931, DON'T  stop\n\n\t(a+b)",
    " France is Paris ",
    "e\u0301 \u00e9 \ufb01 ½ 灯台 🚢",
    "<|end|>x</s> <s>y <|begin|>",
    "",
]


def save_split(directory: Path) -> None:
    """Byte-level, but with lower case and a split that no class of transformers has."""
    save_tokenizer(directory)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    words = pre_tokenizers.Split(Regex(r"\d|[^\d\s]+| ?\s"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.save(str(directory / "tokenizer.json"))


def save_unigram(directory: Path) -> None:
    pieces = [("<unk>", 0.0), ("\u2581", -1.0), *((letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["<unk>"])
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>"}))


def saved(directory: Path, engine: Path) -> EngineTokenizer:
    """The tokenizer of an engine that is built from a directory."""
    config = {"architectures": ["LlamaForCausalLM"]}
    edit_json(directory / "config.json", **({} if (directory / "config.json").exists() else config))
    engine.mkdir()
    open_checkpoint(directory).tokenizer().save(engine / TOKENIZER_FOLDER)
    return EngineTokenizer(engine)


@pytest.mark.parametrize("save", [save_tokenizer, save_split, save_sentencepiece, save_unigram])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", None])
def test_texts_are_encoded_as_the_file_says(tmp_path: Path, save: Callable[[Path], None], kind: str | None) -> None:
    model = tmp_path / "model"
    save(model)
    edit_json(model / "tokenizer_config.json", tokenizer_class=kind, add_prefix_space=False, add_bos_token=True)
    edit_json(model / "config.json", model_type="qwen2" if kind == "Qwen2Tokenizer" else "llama", architectures=["x"])
    own, stated = saved(model, tmp_path / "engine"), Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in TEXTS:
        for special in (True, False):
            ids = stated.encode(text, add_special_tokens=special).ids
            assert own.encode(text, add_special_tokens=special) == ids
        assert own.decode(ids) == stated.decode(ids)


@pytest.mark.parametrize("limit", ["truncation", "padding"])
def test_no_text_is_cut_or_filled_up(tmp_path: Path, limit: str) -> None:
    save_tokenizer(tmp_path / "model")
    backend = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    expected = backend.encode("two ships").ids
    if limit == "truncation":
        backend.enable_truncation(2)
    else:
        backend.enable_padding(length=50)
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    assert saved(tmp_path / "model", tmp_path / "engine").encode("two ships") == expected


def test_tokens_that_only_the_other_files_state(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tokenizer(model)
    size = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    token = {str(size): {"content": "<|call|>", **flags}}
    edit_json(model / "tokenizer_config.json", added_tokens_decoder=token, eos_token="<|call|>")
    own = saved(model, tmp_path / "engine")
    assert own.encode("<|call|>") == [size]
    assert own.decode([size]) == ""
    edit_json(model / "tokenizer_config.json", added_tokens_decoder={"5": {"content": "<|call|>", **flags}})
    with pytest.raises(ConfigError, match=r"gives '<\|call\|>' the id 5, tokenizer\.json"):
        open_checkpoint(model).tokenizer()


def test_templates(tmp_path: Path) -> None:
    """One in tokenizer_config.json, or several by name, of which the one called default writes chats."""
    for number, templates in enumerate(
        ["{{ bos_token }}{{ messages[0].content }}", [{"name": "default", "template": "{{ messages[0].content }}"}]]
    ):
        model = tmp_path / f"model{number}"
        save_tokenizer(model)
        (model / "chat_template.jinja").unlink()
        edit_json(model / "tokenizer_config.json", chat_template=templates)
        text = saved(model, tmp_path / f"engine{number}").apply_chat_template([{"role": "user", "content": "hi"}])
        assert text == ("<|begin|>hi", "hi")[number]


@pytest.mark.parametrize("template", [5, "a\ud800", {"default": 5}])
def test_templates_that_are_no_text(tmp_path: Path, template: Any) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    edit_json(tmp_path / "config.json", architectures=["x"])
    edit_json(tmp_path / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ConfigError, match=r"cannot load the tokenizer \(.*chat_template"):
        open_checkpoint(tmp_path).tokenizer()


def test_other_files_do_not_do(tmp_path: Path) -> None:
    """A vocabulary alone does not say how text is split: transformers would take the split of the kind of model."""
    save_tokenizer(tmp_path)
    edit_json(tmp_path / "config.json", model_type="qwen2")
    stated = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(stated["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(merge) for merge in stated["merges"]))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"it has no tokenizer\.json, and other files do not say how text is split"):
        open_checkpoint(tmp_path).tokenizer()


def test_a_built_engine_encodes_as_the_file_says(model: Path, tmp_path: Path) -> None:
    """A model of Qwen's class with a split and normalisation of its own."""
    save_split(tmp_path / "own")
    edit_json(tmp_path / "own" / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    assert run_build(model, tmp_path / "engine", "--no-check", "--tokenizer", str(tmp_path / "own")) == 0
    own, stated = EngineTokenizer(tmp_path / "engine"), Tokenizer.from_file(str(tmp_path / "own" / "tokenizer.json"))
    assert [own.encode(text) for text in TEXTS] == [stated.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize(("named", "ends"), [("<|pad|>", (1, 2)), ("<|end|>", (1,)), (None, (1,))])
def test_the_tokenizers_eos_token_ends_texts_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str | None, ends: tuple[int, ...]
) -> None:
    """Fine-tunes often state the end of a chat's answer there alone, beside a configuration of the model that they began with."""
    for path in (*model.glob("*token*"), *model.glob("*.jinja")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edit_json(tmp_path / "tokenizer_config.json", eos_token=named)
    output = tmp_path / "engine"
    flags = ["--method", "full", "--kernels", "reference", "--no-check", "--tokenizer", str(tmp_path)]
    assert build.main(["--model", str(model), "--output_dir", str(output), *flags]) == 0
    assert read_config(output).model.eos_token_ids == ends
    said = "end tokens: [1] of the model's configurations, and 2 (<|pad|>), the tokenizer's eos_token"
    assert (said in " ".join(capsys.readouterr().err.split())) is (len(ends) == 2)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", {"version": 5}),
        ("tokenizer.json", {"added_tokens": [1]}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}),
    ],
)
def test_tokenizers_that_transformers_cannot_load(file: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Code of the publisher's is not run, and not asked about at the terminal."""
    save_tokenizer(tmp_path)
    edit_json(tmp_path / file, **change)
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer_directory(tmp_path, "")


# `--tokenizer`: a tokenizer that does not lie with the model


@pytest.fixture
def tokenizer(model: Path, tmp_path: Path) -> Path:
    """A directory with the model's tokenizer and end ids, and nothing else."""
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for path in model.glob("*token*"):
        shutil.copy(path, directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    return directory


def without_tokenizer(directory: Path) -> Path:
    for path in directory.glob("*token*"):
        path.unlink()
    return directory


@pytest.mark.parametrize("kind", ["hugging_face", "tensorrt_llm", "gguf"])
def test_checkpoints_without_a_tokenizer(
    kind: str, model: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    if kind == "hugging_face":
        path = without_tokenizer(Path(shutil.copytree(model, tmp_path / "model")))
    elif kind == "tensorrt_llm":
        path = without_tokenizer(save_tensorrt_llm(tmp_path / "model", model, tp=2))
    else:
        write_gguf(path, model, "llama")
    output = tmp_path / "engine"
    assert run_build(path, output) == 1
    message = capsys.readouterr().err
    assert kind == "gguf" or "cannot load the tokenizer" in message
    assert "pass --tokenizer DIR" in message
    assert not list(tmp_path.glob("*engine*")), "nothing is left"
    assert run_build(path, output, "--tokenizer", str(tokenizer)) == 0
    verify(output)
    loaded = EngineTokenizer(output)
    assert loaded.decode(loaded.encode("a ship, 1931")) == "a ship, 1931"
    # Only a TensorRT-LLM checkpoint says nothing about end ids itself.
    assert read_config(output).model.eos_token_ids == ((7, 1) if kind == "tensorrt_llm" else (1,))


def test_the_tokenizer_is_part_of_the_fingerprint(model: Path, tokenizer: Path, tmp_path: Path) -> None:
    output, flags = tmp_path / "engine", ("--tokenizer", str(tokenizer))

    def built(*flags: str) -> bool:
        before = output.stat().st_ino if output.exists() else None
        assert run_build(model, output, *flags) == 0
        return output.stat().st_ino != before

    assert built()
    assert built(*flags)
    assert not built(*flags)
    os.utime(tokenizer / "tokenizer.json", ns=(1, 1))
    assert built(*flags)
    assert built()


def test_wrong_tokenizers(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = save_random_model(tmp_path / "small", "qwen2", vocab_size=300)
    (tmp_path / "empty").mkdir()
    for directory, message in (
        (tokenizer, "must be < vocab_size = 300 of the model; name the directory of this model's tokenizer"),
        (tmp_path / "nowhere", "nowhere': must be a directory; name a directory with the model's tokenizer.json"),
        (tmp_path / "empty", "empty: cannot load the tokenizer"),
    ):
        assert run_build(small, tmp_path / "engine", "--tokenizer", str(directory)) == 1
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*engine*"))

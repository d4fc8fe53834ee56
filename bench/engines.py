"""Engine directories of a model's shape without a checkpoint: each rank makes its part of random weights when it loads.

With a vocabulary they can be served as any other: what is asked and answered is text.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvseek.bench.variants import Variant
from kvseek.builder.build import main as build
from kvseek.builder.build import write_codebooks, write_kernels
from kvseek.core.config import EngineConfig, read_config, write_config
from kvseek.core.cuda import KERNELS_FOLDER
from kvseek.core.errors import ConfigError, KvseekError
from kvseek.core.manifest import MANIFEST_FILE, read_manifest, write_manifest
from kvseek.core.model_config import ModelConfig
from kvseek.engine.chat_template import SETTINGS_FILE, TEMPLATE_FILE
from kvseek.engine.engine import Engine
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.weights import write_random
from kvseek.engine.tokenizer import TOKENIZER_FILE, TOKENIZER_FOLDER

END = "<|end|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}" + END + "{% endfor %}"


def write_random_engine(directory: Path, config: EngineConfig, seed: int) -> None:
    """Write an engine directory that `load_decoder` loads. Without manifest and tokenizer nobody can serve it.

    On a GPU its kernels are those for the current one.
    """
    directory.mkdir()
    write_config(config, directory)
    write_codebooks(directory, config)
    write_own_kernels(directory, config)
    write_random(directory, seed)


def write_own_kernels(directory: Path, config: EngineConfig) -> None:
    """Write an engine's kernels for this machine, on a GPU for the current one."""
    archs = []
    if config.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        archs = [10 * major + minor]
    write_kernels(directory, config, archs, lambda _: None)


def served_config(
    arguments: argparse.Namespace, variant: Variant, model: ModelConfig, batch: int, prompt: int, tokens: int
) -> EngineConfig:
    """The configuration of an engine that keeps nothing of a prompt for the next; raises ConfigError.

    Its requests have at most `tokens` tokens, `prompt` of them to be read, and `batch` run at a time. Rows have
    --row_memory, in GPU memory if there is a GPU, unless the method's own fields of the cache say otherwise. Other flags
    that are read: --layers, --device, --dtype.
    """
    cache = variant.cache
    if arguments.layers is not None:
        model = model.first_layers(arguments.layers)
    if not cache.bounds:
        on_device = arguments.device == "cuda" and "offload" not in variant.cache_fields
        offload = "never" if on_device else cache.offload
        memory = {f"kv_cache_{'device' if offload == 'never' else 'host'}_memory_bytes": arguments.row_memory}
        cache = dataclasses.replace(cache, offload=offload, **memory)
    config = EngineConfig(
        model,
        variant.method,
        variant.fields,
        cache=cache,
        dtype=arguments.dtype,
        device=arguments.device,
        **variant.engine,
        max_batch_size=batch,
        max_input_len=prompt,
        max_seq_len=tokens,
    )
    return without_reuse(config)


def write_served_engine(directory: Path, config: EngineConfig, seed: int, name: str, text: str) -> None:
    """Write an engine directory with random weights that can be served; `text` is what its vocabulary is trained on."""
    write_random_engine(directory, config, seed)
    folder = directory / TOKENIZER_FOLDER
    folder.mkdir()
    (folder / TOKENIZER_FILE).write_text(make_vocabulary(text, config.model.vocab_size), encoding="utf-8")
    (folder / SETTINGS_FILE).write_text(json.dumps({"eos_token": END}), encoding="utf-8")
    (folder / TEMPLATE_FILE).write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_manifest(directory, name, f"random-{seed}")


def make_vocabulary(text: str, size: int) -> str:
    """Train a byte-level vocabulary of exactly `size` tokens on a text; returns tokenizer.json.

    A text has fewer words than a large vocabulary has tokens. The rest are pairs of its words, which text never becomes, because
    it is divided into words first, but which random weights draw: so what they answer is text, but for single bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    document = json.loads(tokenizer.to_str())
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    words = sorted(word for word in vocabulary if word.startswith("\u0120") and len(word) > 2)  # "\u0120" is a space
    pairs = ((first, second) for first, second in itertools.product(words, words) if first + second not in vocabulary)
    for first, second in itertools.islice(pairs, size - len(vocabulary)):
        vocabulary[first + second] = len(vocabulary)
        merges.append([first, second])
    if len(vocabulary) != size:
        raise ConfigError(f"--text: its words make {len(vocabulary)} tokens: must be {size}; give a longer text")
    return json.dumps(document)


def build_variant(
    arguments: argparse.Namespace, variant: Variant, directory: Path, longest: int, batch: int = 1, tp_size: int = 1
) -> None:
    """Build an engine for requests of up to `longest` tokens; raises KvseekError.

    `arguments` are a command's flags --model, --device and --dtype.
    """
    flags = [*variant.flags(), "--output_dir", str(directory), "--dtype", arguments.dtype, "--quiet"]
    flags += ["--device", arguments.device]
    if arguments.device == "cuda":
        flags += ["--cuda_archs", "{}{}".format(*torch.cuda.get_device_capability())]
    sizes = {"max_seq_len": longest, "max_input_len": longest, "max_batch_size": batch, "tp_size": tp_size}
    flags += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    if build(["--model", str(arguments.model), *flags]) != 0:
        raise KvseekError(f"--methods: the build of {variant.label!r} failed; its message stands above")


def variant_engines(
    arguments: argparse.Namespace, listed: Sequence[Sequence[Variant]], directory: Path, longest: int, batch: int
) -> Iterator[tuple[str, Path]]:
    """Build engines one after another in `directory`, which the next one replaces; yields their labels with the directory.

    `listed`: of each list one is built, whose weights serve the method's other settings in it too. See build_variant.
    """
    for variants in filter(None, listed):
        build_variant(arguments, variants[0], directory, longest, batch)
        built, manifest = read_config(directory), read_manifest(directory)
        for number, one in enumerate(variants):
            if number:
                config = dataclasses.replace(built, method_config=dataclasses.asdict(one.settings))
                write_config(config, directory)
                if config.device == "cuda":  # whose kernels some methods compile for a budget
                    shutil.rmtree(directory / KERNELS_FOLDER)
                    write_own_kernels(directory, config)
                (directory / MANIFEST_FILE).unlink()
                write_manifest(directory, manifest.source_model, manifest.fingerprint)
            yield one.label, directory


@contextlib.contextmanager
def random_engine(config: EngineConfig, seed: int, threads: int) -> Iterator[Engine]:
    """Load an engine of random weights with all of its ranks, and end them at the end; raises as Engine.load.

    Parameters
    ----------
    threads : int
        CPU threads of all ranks together.
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="kvseek-bench-") as folder:
        directory = Path(folder) / "engine"
        write_random_engine(directory, config, seed)
        try:
            with contextlib.closing(load_decoder(directory, config)) as decoder:  # which ends the ranks
                engine = bare_engine(config, decoder)
                with contextlib.closing(engine):
                    yield engine
            del engine, decoder
        finally:
            torch.set_num_threads(threads)


def bare_engine(config: EngineConfig, decoder: Decoder) -> Engine:
    """An engine without a tokenizer: its requests are token ids."""
    tokenizer: Any = SimpleNamespace(file=None)
    return Engine(config, decoder, tokenizer)


def free_memory() -> None:
    """Give back the memory of an engine that nothing refers to any more, so that the next one finds it."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def without_reuse(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Change a configuration, and let the engine keep nothing of a prompt, which would take memory; `cache` has fields of it."""
    cache = dataclasses.replace(config.cache, reuse=False, **changes.pop("cache", {}))
    return dataclasses.replace(config, cache=cache, **changes)

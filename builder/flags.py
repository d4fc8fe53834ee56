"""The builder's flags. Those of the cache, the methods and TensorRT are made from their config classes."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvseek.builder.compile.cuda import ARCHITECTURES
from kvseek.core.command_line import Parser, memory_size, optional_size
from kvseek.core.config import CHOICES, WEIGHT_GROUPS, BlockSparseConfig, CacheConfig, EngineConfig, TensorRtConfig
from kvseek.plugins.registry import METHODS, PAPER, PEERS, get_method

LIMITS = {
    "max_batch_size": "most requests that are decoded together",
    "max_input_len": "most tokens of a prompt (default: max_seq_len)",
    "max_seq_len": "most tokens of a prompt and its answer (default: what the model allows, at most 131072)",
    "prefill_chunk_tokens": "prompt tokens that one unit of prefill processes; not with --tensorrt.form engine",
    "tp_size": "processes that each compute a part of every layer, each on a GPU of its own",
}
CHOICE_SUMMARIES = {
    "dtype": "of weights and cache; float16 on cuda only (default: float32)",
    "device": "what the engine runs on (default: cpu, with --plan cuda)",
    "kernels": "compiled, or PyTorch (on the CPU) (default: native)",
    "weight_only_precision": "of the layers' matrices: 8 or 4 bits, or --dtype (default: the checkpoint's own, else none)",
    "runtime": "what computes all but attention (default: torch)",
    "prefill_attention": "what prompts attend to: all tokens before, or chosen blocks of them (default: dense)",
    "prefill_precision": "fp8 reads prompts in FP8: attention, and products with fp8 weights (default: none)",
}
CALIBRATE_TOKENS = 2048  # of a text; also the window, unless max_seq_len is less
USAGE = """
  kvseek build --model MODEL --method METHOD --output_dir DIR [OPTION ...]
  kvseek build --plan --model MODEL --method METHOD --gpu_memory SIZE --host_memory SIZE [OPTION ...]
  kvseek build --plan --device cpu --model MODEL --method METHOD --host_memory SIZE [OPTION ...]
  kvseek build --inspect DIR [--json]
  kvseek build --verify DIR
  kvseek build --check --output_dir DIR [--model MODEL]"""


class FlagParser(Parser):
    """The parser of `kvseek build`. Its namespace holds only what was given.

    Parameters
    ----------
    words : sequence of str
        Those of the command line: a competing system that --method names, or a flag of its own, has its flags, too.
    """

    def __init__(self, words: Sequence[str] = ()) -> None:
        super().__init__(
            prog="kvseek build",
            usage=USAGE,
            argument_default=argparse.SUPPRESS,
            description="Turn a Llama, Mistral or Qwen checkpoint into an engine, plan the memory of one, or look at one.",
        )
        self._add_model()
        self._add_limits()
        own = [
            f"{key} {value} of {name}"
            for name in METHODS
            for key, value in get_method(name).traits().cache_defaults.items()
        ]
        note = f"; other defaults: {', '.join(own)}" if own else ""
        self._add_fields("cache", CacheConfig, "cache", f"four-region cache, sizes in tokens{note}")
        for method in (*METHODS, *_named_peers(words)):
            fields = json.dumps(get_method(method).paper)[1:-1].replace('"', "")
            about = f"--preset {PAPER}: {fields}" if fields else ""
            self._add_fields(method, get_method(method).config_class, f"--method {method}", about)
        about = "plans of TensorRT instead of weights; needs --device cuda, and the module to build with"
        self._add_fields("tensorrt", TensorRtConfig, "--runtime tensorrt", about)
        about = "prompts that attend to chosen blocks (docs/sparse_prompts.md), sizes in tokens"
        self._add_fields("block_sparse", BlockSparseConfig, "--prefill_attention block_sparse", about)
        self._add_calibrate()
        self._add_plan()
        self._add_directories()

    def _add_model(self) -> None:
        add = self.add_argument_group("what to build").add_argument
        kinds = "Hugging Face directory with safetensors, TensorRT-LLM checkpoint directory, or a .gguf file"
        add("--model", type=Path, help=kinds)
        add(
            "--tokenizer", type=Path, metavar="DIR", help="directory of the tokenizer (default: it lies with the model)"
        )
        images = "of a checkpoint that also reads images, build the text part; all else is left out"
        add("--text_only", action="store_true", help=images)
        add(
            "--output_dir",
            type=Path,
            help="engine directory to write, laid out like trtllm-build's; an old engine stays to the end; not with --plan",
        )
        about = f"what runs inside the attention operator; to compare with: {', '.join(PEERS)}, which have their --help"
        add("--method", choices=[*METHODS, *PEERS], metavar="|".join(METHODS), help=about)
        having = ", ".join(name for name in METHODS if get_method(name).paper)
        about = f"the settings of the method's paper instead of the defaults ({having}); further flags override it"
        add("--preset", choices=[PAPER], help=about)
        for name, summary in CHOICE_SUMMARIES.items():
            add(f"--{name}", choices=CHOICES[name], help=summary)
        group = "inputs that share the scales of int4 (default: the checkpoint's own, else the largest that divides the inputs)"
        add("--weight_group", type=int, choices=WEIGHT_GROUPS, help=group)
        head = "with int8 or int4 of --weight_only_precision: a head of int8 weights; in a tied model a copy of the embedding"
        add("--quantize_lm_head", action="store_true", help=head)
        archs = f"compute capabilities that GPU kernels are compiled for (default: {','.join(map(str, ARCHITECTURES))})"
        add("--cuda_archs", type=architectures, metavar="80,90,...", help=archs)
        add("--force", action="store_true", help="build even if the engine directory is up to date")
        add("--quiet", action="store_true", help="print errors only")

    def _add_limits(self) -> None:
        add = self.add_argument_group("limits").add_argument
        defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
        for name, summary in LIMITS.items():
            stated = summary if "default" in summary else f"{summary} (default: {defaults[name]})"
            add(f"--{name}", type=int, metavar="N", help=stated)

    def _add_calibrate(self) -> None:
        about = (
            "perplexity of a text with the weights in --dtype, as they are stored, and rounded to int8 and int4, whose errors "
            "count by the text's activations; computed "
            "on a GPU if PyTorch sees one, else on the CPU, printed, and kept for --inspect"
        )
        add = self.add_argument_group("calibrate", about).add_argument
        add("--calibrate", type=Path, metavar="TEXT", help="UTF-8 text file, best of the kind that will be served")
        most = f"tokens to read from its start; all, if it has fewer (default: {CALIBRATE_TOKENS})"
        add("--calibrate_tokens", type=int, metavar="N", help=most)
        window = f"tokens that see each other (default: {CALIBRATE_TOKENS}, or max_seq_len if that is less)"
        add("--calibrate_window", type=int, metavar="N", help=window)

    def _add_plan(self) -> None:
        about = "print what an engine, or each of its ranks, would take and hold; needs neither GPU nor weights, writes nothing"
        add = self.add_argument_group("plan", about).add_argument
        add("--plan", action="store_true", help="plan instead of building")
        device = (
            "device memory that the engine, or each rank, may use: 80GiB, 80GB, 512MiB or bytes; not with --device cpu"
        )
        add("--gpu_memory", type=memory_size, metavar="SIZE", help=device)
        host = "host memory for the rows that go there, with --device cpu for everything; of all ranks together"
        add("--host_memory", type=memory_size, metavar="SIZE", help=host)
        add("--json", action="store_true", help="with --plan or --inspect: print JSON, sizes in bytes")

    def _add_directories(self) -> None:
        add = self.add_argument_group("inspect, verify and check").add_argument
        add("--inspect", type=Path, metavar="DIR", help="print what an engine directory holds, without its weights")
        checks = "check size and SHA-256 of every file of an engine directory; status 1 if one is damaged, missing or foreign"
        add("--verify", type=Path, metavar="DIR", help=checks)
        compares = (
            "compare the engine's logits and greedy tokens with transformers' of the same checkpoint; status 1 if they differ by "
            "more than rounding; of a build, or without --method of the engine in --output_dir (default: builds of models whose "
            "weights take less than 1 GB)"
        )
        add("--check", action=argparse.BooleanOptionalAction, help=compares)

    def _add_fields(self, prefix: str, config_class: type[Any], title: str, description: str) -> None:
        """Add a group with one flag for each field of a config class."""
        hints, texts = typing.get_type_hints(config_class), field_texts(config_class)
        fields = dataclasses.fields(config_class)
        group = self.add_argument_group(title, description if fields else "no options of its own")
        for field in fields:
            kind, metavar = _value_type(hints[field.name])
            if field.name.endswith("_bytes"):
                kind, metavar = optional_size, "SIZE"
            text = f"{texts.get(field.name, '')} (default: {json.dumps(_default(field))})".strip().replace("%", "%%")
            group.add_argument(f"--{prefix}.{field.name}", type=kind, metavar=metavar, help=text)


def _default(field: dataclasses.Field[Any]) -> Any:
    """Default of a field as JSON values; "required" where there is none."""
    if field.default_factory is not dataclasses.MISSING:
        value: Any = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return "required"
    return _plain(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _value_type(hint: Any) -> tuple[Callable[[str], Any], str]:
    """How the text of a flag becomes a value, and what the help calls it."""
    known: dict[Any, tuple[Callable[[str], Any], str]] = {
        str: (str, "TEXT"),
        int: (int, "N"),
        float: (float, "X"),
        bool: (boolean, "true|false"),
    }
    return known.get(hint, (json_value, "JSON"))


def architectures(text: str) -> tuple[int, ...]:
    """Parse compute capabilities, 10 × major + minor, with commas between them; ascending, each once."""
    return tuple(sorted({int(number) for number in text.split(",")}))


def boolean(text: str) -> bool:
    """Parse true or false."""
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _named_peers(words: Sequence[str]) -> list[str]:
    """Competing systems that a command line names: as --method NAME, --method=NAME or --NAME.FIELD."""
    methods = {after for flag, after in itertools.pairwise(words) if flag == "--method"}
    methods |= {word.removeprefix("--method=") for word in words if word.startswith("--method=")}
    methods |= {word[2:].partition(".")[0] for word in words if word.startswith("--") and "." in word}
    return [name for name in PEERS if name in methods]


def json_value(text: str) -> Any:
    """Parse JSON: what structured and optional fields take."""
    return json.loads(text)


def field_texts(config_class: type) -> dict[str, str]:
    """Read the text of each attribute in the NumPy-style docstrings of a class and its bases, on one line: it is written once."""
    texts: dict[str, list[str]] = {}
    current: list[str] = []
    for one in reversed(config_class.__mro__):
        for line in _section(inspect.cleandoc(vars(one).get("__doc__") or "").splitlines()):
            if line and not line[0].isspace():  # "name : type", or "name, other : type"
                current = []
                texts |= {name.strip(): current for name in line.partition(" : ")[0].split(",")}
            elif line:
                current.append(line.strip())
    return {name: " ".join(parts) for name, parts in texts.items()}


def _section(lines: list[str]) -> list[str]:
    """Lines of the Attributes section, without its heading."""
    headings = [i for i, line in enumerate(lines[1:]) if line and not line.strip("-") and lines[i]]
    starts = [i for i in headings if lines[i] == "Attributes"]
    if not starts:
        return []
    stop = next((i for i in headings if i > starts[0]), len(lines))
    return lines[starts[0] + 2 : stop]

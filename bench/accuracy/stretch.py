"""Stretch a Llama model's positions by continued training on long texts, and write a checkpoint that `kvseek build` takes.

    python bench/accuracy/stretch.py pack --model MODEL --texts FOLDER --held_out FOLDER --output texts.xz
    torchrun --nproc_per_node 4 bench/accuracy/stretch.py train --model MODEL --data texts.xz --output_dir stretched --seconds 240

README.md, "stretch.py", has the recipe. A step is a batch of equally long sequences on each GPU: windows of texts, whose tokens
are all learnt, or contexts of the tasks of text_tasks.py with their answers, which alone are learnt.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kvseek.bench.accuracy.text_tasks import TASKS, TextSuite
from kvseek.bench.output import numbers
from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.command_line import tells_errors
from kvseek.core.errors import require
from kvseek.engine.tokenizer import TOKENIZER_FOLDER, Tokenizer

Ids = NDArray[np.uint16]
FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 3, "lp": 1, "pb": 1}
]  # of numbers of two bytes
FIRST_CONTEXT = 1_000_000  # of the tasks: those of lower numbers are asked by `kvseek evaluate tasks`
WINDOW = 32  # tokens that a held-out text and a text to learn may not have in common,
COMMON = 0.02  # but for this share of the held-out text's windows: licences and other phrases that all have
LEARNT_TASKS = 0.3  # of the sequences
SHARES = (0.25, 0.25, 0.1)  # of the steps, at the shorter lengths from the shortest on; the longest has what is left
MEASURED = 4096  # last tokens of a held-out text's window whose perplexity is measured
CHUNK = 8192  # tokens whose logits are in memory at a time
WARMUP = 0.04  # of the training
IGNORED = -100  # label of a token that is not learnt
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)  # whose outputs are kept for the backward pass; what lies between is computed again


def suite_of(checkpoint: Checkpoint, haystack: str, folder: Path) -> TextSuite:
    """The tasks in the model's own chat template, if it has one."""
    tokenizer = checkpoint.tokenizer()
    tokenizer.save(folder / TOKENIZER_FOLDER)
    settings = {"chat": tokenizer.chat_template is not None, "depths": 5}
    return TextSuite(Tokenizer(folder), haystack, settings)


def learnt_tasks(
    suite: TextSuite, tasks: Sequence[str], length: int, tokens: int, end: int
) -> tuple[Ids, NDArray[np.int32]]:
    """Contexts of all tasks with their answers, [n, length], filled up with `end`; and where answers begin and end, [n, 2]."""
    count = max(1, tokens // (length * len(tasks)))
    ids, answers = list[Ids](), list[tuple[int, int]]()
    for task in tasks:
        for one in suite.conversations(task, length, count, FIRST_CONTEXT):
            (question,) = one.questions
            prompt = [*one.context, *question.ids]
            whole = [*prompt, *question.gold, end]
            ids.append(np.array(whole + [end] * (length - len(whole)), dtype=np.uint16))
            answers.append((len(prompt), len(whole)))
    return np.stack(ids), np.array(answers, dtype=np.int32)


def windows(ids: Ids) -> NDArray[np.uint64]:
    """A hash of every WINDOW neighbouring tokens."""
    count = max(0, len(ids) - WINDOW + 1)
    found = np.zeros(count, dtype=np.uint64)
    for place in range(WINDOW):
        found = found * np.uint64(0x9E3779B97F4A7C15) + ids[place : place + count].astype(np.uint64) + np.uint64(1)
    return found


def check_apart(texts: Mapping[str, Ids], held: Mapping[str, Ids]) -> None:
    """Raise ConfigError if a held-out text, or much of it, is among those that are learnt."""
    learnt = np.unique(np.concatenate([windows(ids) for ids in texts.values()]))
    for name, ids in held.items():
        share = float(np.isin(windows(ids), learnt).mean())
        limit = f"<= {COMMON}, the share of its {WINDOW} neighbouring tokens that --texts has, too"
        require(
            share <= COMMON, f"--held_out: {name}", round(share, 4), limit, "take the text out of one of the folders"
        )


def pack(arguments: argparse.Namespace) -> None:
    """Write the tokens of texts and tasks into one compressed file."""
    source, lengths = open_checkpoint(arguments.model), numbers("lengths", arguments.lengths, 256)
    require(
        source.config.vocab_size <= 1 << 16, "--model: vocab_size", source.config.vocab_size, "<= 65,536", "another"
    )
    backend = source.tokenizer().backend
    arrays, read = dict[str, NDArray[Any]](), list[str]()
    for kind, folder in (("text", arguments.texts), ("held", arguments.held_out)):
        for path in sorted(folder.glob("*.txt")):
            text = path.read_text(encoding="utf-8")
            ids = np.array(backend.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
            arrays[f"{kind}:{path.stem}"] = ids
            read += [text] if kind == "text" else []
            print(f"{kind} {path.stem}: {len(ids):,} tokens", flush=True)
    data = Data.of(arrays)
    require(bool(data.texts), "--texts", str(arguments.texts), "a folder with *.txt", "name another")
    check_apart(data.texts, data.held)
    with tempfile.TemporaryDirectory() as folder:
        suite = suite_of(source, "\n\n".join(read), Path(folder))
        chosen = TASKS if arguments.tasks == "all" else arguments.tasks.split(",")
        for length in lengths:
            made = learnt_tasks(suite, chosen, length, arguments.task_tokens, source.config.eos_token_ids[0])
            arrays[f"tasks:{length}"], arrays[f"answers:{length}"] = made
            print(f"tasks of {length:,} tokens: {len(made[0])}", flush=True)
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    arguments.output.write_bytes(lzma.compress(stored.getvalue(), filters=FILTERS))
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes")


@dataclass(frozen=True)
class Data:
    """What `pack` wrote.

    Attributes
    ----------
    texts, held : dict of str to uint16 [tokens]
        Those to learn, and those held out.
    tasks : dict of int to (uint16 [n, length], int32 [n, 2])
        By length: contexts of tasks with their answers, and where the answers begin and end.
    """

    texts: dict[str, Ids]
    held: dict[str, Ids]
    tasks: dict[int, tuple[Ids, NDArray[np.int32]]]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Data:
        """Sort arrays by the kinds in their names."""
        kinds: dict[str, dict[str, NDArray[Any]]] = {"text": {}, "held": {}, "tasks": {}, "answers": {}}
        for key in arrays:
            kind, _, name = key.partition(":")
            kinds[kind][name] = arrays[key]
        tasks = {int(name): (ids, kinds["answers"][name]) for name, ids in kinds["tasks"].items()}
        return cls(kinds["text"], kinds["held"], tasks)

    @classmethod
    def read(cls, path: Path) -> Data:
        """Read the file."""
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
            return cls.of(arrays)

    def batch(self, length: int, tokens: int, draws: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Sequences and their labels, each int64 [tokens // length, length]: all of tasks or all of texts."""
        count = max(1, tokens // length)
        if length in self.tasks and draws.random() < LEARNT_TASKS:
            ids, answers = self.tasks[length]
            chosen = draws.integers(len(ids), size=count)
            given = torch.from_numpy(ids[chosen].astype(np.int64))
            places, (begins, ends) = torch.arange(length), torch.from_numpy(answers[chosen]).T[..., None]
            return given, given.masked_fill((places < begins) | (places >= ends), IGNORED)
        long = [ids for ids in self.texts.values() if len(ids) >= length]
        sizes = np.array([len(ids) for ids in long], dtype=np.float64)
        chosen = draws.choice(len(long), size=count, p=sizes / sizes.sum())
        parts = [long[one][at : at + length] for one in chosen for at in [draws.integers(len(long[one]) - length + 1)]]
        given = torch.from_numpy(np.stack(parts).astype(np.int64))
        return given, given


def load_model(source: Checkpoint, rope_theta: float, positions: int) -> Any:
    """The checkpoint as transformers' Llama in float32, with another base of its RoPE and more positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own = source.config
    plain = own.architecture == "llama" and own.rope_scaling is None and not (own.qkv_bias or own.output_bias)
    require(plain, "--model", own.architecture, "a Llama without biases and rope_scaling", "choose another")
    config = LlamaConfig(
        **{name: getattr(own, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
        **{
            name: getattr(own, name) for name in ("rms_norm_eps", "tie_word_embeddings", "bos_token_id", "pad_token_id")
        },
        num_hidden_layers=own.num_layers,
        num_attention_heads=own.num_heads,
        num_key_value_heads=own.num_kv_heads,
        eos_token_id=list(own.eos_token_ids),
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    tied = {"lm_head.weight"} if own.tie_word_embeddings else set[str]()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name not in tied:
                parameter.copy_(source.tensor(name))
    return model


def set_rope(model: Any, rope_theta: float) -> None:
    """Give the model the frequencies of a base, in float32 whatever the type of its weights."""
    size = model.config.head_dim
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=model.device) / size
    model.model.rotary_emb.inv_freq = rope_theta**-steps


def losses(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Loss of each token of `ids` [sequences, tokens] that has a label, float32 [n]; a chunk's logits at a time."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    kept = wanted != IGNORED
    hidden, wanted = hidden[kept], wanted[kept]

    def chunk(part: Tensor, gold: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(part).float(), gold, reduction="none")

    parts = zip(torch.split(hidden, CHUNK), torch.split(wanted, CHUNK), strict=True)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


class Ranks:
    """The processes that torchrun has started, one a GPU, or this one alone."""

    def __init__(self, device: str) -> None:
        self.count, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        if self.count > 1:
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo", device_id=self.device if device == "cuda" else None
            )

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count
        return values


class Optimizer:
    """AdamW on float32 copies of a model's parameters, with the mean of all ranks' gradients."""

    def __init__(self, model: Any, ranks: Ranks, rate: float) -> None:
        self.own, self.ranks, self.rate = list(model.parameters()), ranks, rate
        self.copies = [one.detach().float().clone() for one in self.own]
        self.gradients = torch.zeros(sum(one.numel() for one in self.own), device=ranks.device)
        parts = torch.split(self.gradients, [one.numel() for one in self.own])
        self.parts = [part.view_as(one) for part, one in zip(parts, self.own, strict=True)]
        for copied, part in zip(self.copies, self.parts, strict=True):
            copied.grad = part
        self.adam = torch.optim.AdamW(self.copies, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)

    @torch.no_grad()
    def step(self, done: float) -> None:
        """Use the gradients of all ranks; `done` is the share of the training that is over, by which the rate falls to 0."""
        for own, part in zip(self.own, self.parts, strict=True):
            part.copy_(own.grad)
            own.grad = None
        self.ranks.mean(self.gradients)
        self.gradients *= torch.clamp(1 / self.gradients.norm(), max=1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.rate * min(1.0, (done + 1e-3) / WARMUP) * (1 + math.cos(math.pi * min(1.0, done))) / 2
        self.adam.step()
        for own, copied in zip(self.own, self.copies, strict=True):
            own.copy_(copied)


@torch.no_grad()
def perplexities(model: Any, data: Data, lengths: Sequence[int], ranks: Ranks) -> dict[str, dict[str, float]]:
    """Perplexity of the same last tokens of each held-out text behind contexts of each length, the texts shared by the ranks."""
    model.eval()
    end = max(lengths)
    last = min(MEASURED, min(lengths) // 2)
    texts = {name: ids for name, ids in data.held.items() if len(ids) >= end}
    table = torch.zeros(len(texts), len(lengths), dtype=torch.float64, device=ranks.device)
    for row, ids in enumerate(texts.values()):
        if row % ranks.count == ranks.rank:
            for column, length in enumerate(lengths):
                given = torch.from_numpy(ids[end - length : end].astype(np.int64)).to(ranks.device)[None]
                labels = given.clone()
                labels[:, :-last] = IGNORED
                table[row, column] = losses(model, given, labels).double().mean()
    found = (ranks.mean(table) * ranks.count).exp().tolist()
    model.train()
    return {name: dict(zip(map(str, lengths), row, strict=True)) for name, row in zip(texts, found, strict=True)}


@contextlib.contextmanager
def fastest_attention(model: Any, tokens: int, ranks: Ranks) -> Iterator[str]:
    """Use the attention kernel of PyTorch's that takes the least time for a forward and backward pass; yields its name."""
    if ranks.device.type != "cuda":
        yield "cpu"
        return
    config, times = model.config, torch.zeros(2, device=ranks.device)
    kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    shapes = [(1, count, tokens, config.head_dim) for count in heads]
    q, k, v = (torch.randn(one, device=ranks.device, dtype=model.dtype, requires_grad=True) for one in shapes)
    for number, kind in enumerate(kinds):
        try:
            for _ in range(2):  # the first one compiles
                torch.cuda.synchronize()
                start = time.monotonic()
                with sdpa_kernel(kind):
                    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                    torch.autograd.backward(out.sum())
                torch.cuda.synchronize()
                times[number] = time.monotonic() - start
        except RuntimeError as error:  # this GPU or PyTorch has no such kernel
            print(f"{kind.name}: {error}", file=sys.stderr)
            times[number] = math.inf
    chosen = kinds[int(ranks.mean(times).argmin())]
    with sdpa_kernel(chosen):
        yield f"{chosen.name}, of {dict(zip((kind.name for kind in kinds), times.tolist(), strict=True))} s"


def train(arguments: argparse.Namespace) -> None:
    """Measure, train for the time that is given, measure again, and write the model."""
    require(not arguments.output_dir.exists(), "--output_dir", str(arguments.output_dir), "new", "name another")
    ranks, source, data = Ranks(arguments.device), open_checkpoint(arguments.model), Data.read(arguments.data)
    lengths, measured = (sorted(numbers(name, getattr(arguments, name), 256)) for name in ("lengths", "measured"))
    longest = lengths[-1]
    require(
        measured[-1] <= longest, "--measured", measured[-1], f"<= {longest}, the longest of --lengths", "change one"
    )
    has = max(map(len, data.texts.values()))
    require(has >= longest, "--lengths", longest, f"<= {has}, the tokens of the longest text", "give longer texts")
    model = load_model(source, arguments.rope_theta, longest)
    model.to(ranks.device, torch.bfloat16 if arguments.device == "cuda" else torch.float32)
    contexts = partial(create_selective_checkpoint_contexts, list(ATTENTION))
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, **settings)

    def log(**figures: Any) -> None:
        if ranks.rank == 0:
            line = json.dumps(figures)
            with arguments.output_dir.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(line, flush=True)

    with fastest_attention(model, longest, ranks) as attention:
        log(attention=attention, ranks=ranks.count)
        for name, theta in (("own RoPE", source.config.rope_theta), ("new RoPE", arguments.rope_theta)):
            set_rope(model, theta)
            log(perplexity=f"before, {name}", of=perplexities(model, data, measured, ranks))
        _steps(arguments, model, data, lengths, ranks, log)
        log(perplexity="after", of=perplexities(model, data, measured, ranks))
    if ranks.rank == 0:
        source.tokenizer().save(arguments.output_dir)
        model.to(torch.bfloat16).save_pretrained(arguments.output_dir)
    if ranks.count > 1:
        dist.destroy_process_group()


def _steps(
    arguments: argparse.Namespace, model: Any, data: Data, lengths: Sequence[int], ranks: Ranks, log: Any
) -> None:
    """Train until the time or the steps are over."""
    optimizer = Optimizer(model, ranks, arguments.learning_rate)
    shares = [*SHARES[len(SHARES) + 1 - len(lengths) :]]
    shares.append(1 - sum(shares))
    start, seen, done, step = time.monotonic(), 0, 0.0, 0
    while done < 1:
        length = int(np.random.default_rng([arguments.seed, step]).choice(lengths, p=shares))
        ids, labels = data.batch(length, lengths[-1], np.random.default_rng([arguments.seed, step, ranks.rank]))
        loss = losses(model, ids.to(ranks.device), labels.to(ranks.device)).mean()
        torch.autograd.backward(loss)
        optimizer.step(done)
        step, seen = step + 1, seen + ids.numel() * ranks.count
        spent = time.monotonic() - start
        over = torch.tensor([max(spent / arguments.seconds, step / arguments.steps)], device=ranks.device)
        done = ranks.mean(over).item()
        if step % arguments.log_every == 0 or done >= 1:
            mean = ranks.mean(loss.detach().clone()).item()
            log(
                step=step,
                length=length,
                loss=round(mean, 4),
                seconds=round(spent, 1),
                tokens=seen,
                rate=int(seen / spent),
            )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts: Any = parser.add_subparsers(dest="part", required=True)
    packing = parts.add_parser("pack", help=str(pack.__doc__))
    training = parts.add_parser("train", help=str(train.__doc__))
    for add in (packing.add_argument, training.add_argument):
        add("--model", type=Path, required=True, help="Hugging Face directory or GGUF file of a Llama")
        add(
            "--lengths",
            default="2048,8192,32768,65536",
            help="of the sequences; the model gets the longest as its positions",
        )
    add = packing.add_argument
    add("--texts", type=Path, required=True, help="folder of *.txt that are learnt")
    add(
        "--held_out",
        type=Path,
        required=True,
        help="folder of *.txt that are measured, and may not be among the others",
    )
    add("--tasks", default="all", help="comma list of those of `kvseek evaluate tasks`")
    add(
        "--task_tokens",
        type=int,
        default=2_500_000,
        help="of the tasks at each length; at least one context of each task",
    )
    add("--output", type=Path, required=True, help="the file to write")
    add = training.add_argument
    add("--data", type=Path, required=True, help="the file of `pack`")
    add(
        "--output_dir",
        type=Path,
        required=True,
        help="of the model; what is logged stands beside it in OUTPUT_DIR.jsonl",
    )
    add("--measured", default="8192,16384,32768,65536", help="lengths behind which perplexity is measured")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--rope_theta", type=float, default=3e6, help="base of the rotary embedding")
    add("--learning_rate", type=float, default=5e-4, help="the largest")
    add("--seconds", type=float, default=240, help="of training, without loading and measuring")
    add("--steps", type=float, default=math.inf, help="end after so many, if the time is not over before")
    add("--log_every", type=int, default=10, help="steps")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    arguments = parse(argv)
    {"pack": pack, "train": train}[arguments.part](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())

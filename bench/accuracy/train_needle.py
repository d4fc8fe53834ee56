"""Train a tiny Qwen3 model on the needle tasks, and write a checkpoint that `kvseek build` takes.

    python bench/accuracy/train_needle.py --output_dir needle --device cuda --seconds 540

Ended by --seconds or by force, the same command goes on where it was. README.md, "A needle model of your own", has the recipe.

A sequence is a context and many questions about it with their right answers. They are drawn differently from the tasks' contexts:
how many facts there are, of which forms, and how far apart they stand varies from sequence to sequence. So a model that knows the
tasks has not seen their layouts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kvseek.bench.accuracy.needle_tasks import vocabulary
from kvseek.bench.accuracy.needle_tasks.facts import IS, THE, Fact, FactSource, Ids, ask, write_context
from kvseek.bench.accuracy.needle_tasks.tasks import TASKS, make_dialogues
from kvseek.bench.accuracy.needle_tasks.vocabulary import BOS
from kvseek.builder.checking import quiet
from kvseek.core.errors import ConfigError, KvseekError, require

ROPE_THETA = 1e8
CHECKED_CONTEXTS = 4  # a task
WARMUP = 500  # steps, at most a tenth of all
LAST_SHARE = 0.1  # of the learning rate, at the last step
POSITIONS = 131_072  # of the model, and where jumps may reach
SHORTEST = 128  # tokens of a sequence

FORMS = ((0.45, (1.0, 0.0, 0.0)), (0.15, (0.2, 0.8, 0.0)), (0.2, (0.2, 0.0, 0.8)), (0.2, (0.5, 0.25, 0.25)))
# share of the sequences, and in these the shares of facts with one value, with four, and of chains
FULL_SHARE = 0.3  # of the sequences have as many facts as fit; the others down to one in some hundred tokens
MOST_ASKED = 3072  # tokens of questions and answers
LONGEST = 40  # tokens of a fact
FOURS = 12  # one question for four values to so many facts


@dataclass(frozen=True)
class Example:
    """A sequence of a batch; all arrays are [tokens].

    Attributes
    ----------
    ids : int32
    positions : int32
        Rising, from 0 on; with jumps where sentences begin, so that a short sequence shows distances of a long one.
    answers : bool
        Whether the token is one of an answer, and so to be predicted.
    """

    ids: Ids
    positions: Ids
    answers: NDArray[np.bool_]


def make_sequence(seed: list[int], tokens: int, *, bare: float, jumps: float, positions: int) -> Example:
    """One sequence, the same for the same arguments.

    Parameters
    ----------
    seed : list of int
        Of numpy's generator: three numbers, where contexts of an evaluation have four.
    tokens : int
        At least 128.
    bare : float
        Share of the questions for one value that are the fact's own first words again, without a question around them.
    jumps : float
        Share of the sequences whose positions jump, up to `positions` in all.
    """
    numbers = np.random.default_rng(seed)
    choices = random.Random(int(numbers.integers(1 << 60)))
    room = int(min(0.45 * tokens * choices.uniform(0.5, 1.15), MOST_ASKED * choices.uniform(0.4, 1)))
    facts = _facts(choices, tokens - 1 - room)
    asked: list[int] = []
    marks: list[bool] = []
    begins: list[int] = []
    for about in _asked_about(facts, choices):
        _, question, gold = ask(about)
        if about[0].form == "value" and len(about) == 1 and choices.random() < bare:
            question = [*THE, *about[0].names, *IS]
        if len(asked) + len(question) + len(gold) <= room:
            begins.append(len(asked))
            asked += question + gold
            marks += [False] * len(question) + [True] * len(gold)
    context = write_context(facts, tokens - 1 - len(asked), numbers)
    written = len(context.ids)
    ids = np.concatenate([[BOS], context.ids, np.array(asked, dtype=np.int32)]).astype(np.int32)
    answers = np.concatenate([np.zeros(1 + written, dtype=bool), np.array(marks, dtype=bool)])
    starts = 1 + np.concatenate([context.starts, written + np.array(begins, dtype=np.int64)])
    reach = positions if choices.random() < jumps else tokens
    return Example(ids, _positions(tokens, reach, starts, choices, numbers), answers)


def _facts(choices: random.Random, room: int) -> list[Fact]:
    """Facts that fit into `room` tokens, of forms and a density that are drawn first."""
    shares = choices.choices([shares for _, shares in FORMS], [share for share, _ in FORMS])[0]
    density = 1.0 if choices.random() < FULL_SHARE else 2 ** -choices.uniform(0.3, 1 + math.log2(max(room, 128) / 64))
    wanted = max(LONGEST, int(room * density))
    source = FactSource(choices)
    facts: list[Fact] = []
    used = 0
    while used < wanted and used + LONGEST <= room:
        (form,) = choices.choices((source.single, source.several, source.chain), shares)
        facts.append(form() if form != source.chain or source.variables_left >= 4 else source.single())
        used += facts[-1].tokens
    return facts


def _asked_about(facts: list[Fact], choices: random.Random) -> list[list[Fact]]:
    """Every fact once, in any order, and now and then four of one value."""
    singles = [fact for fact in facts if fact.form == "value"]
    turns = [[fact] for fact in choices.sample(facts, len(facts))]
    if len(singles) >= 4:
        for _ in range(sum(choices.random() < 0.5 for _ in range(len(singles) // FOURS + 1))):
            turns.insert(choices.randrange(min(len(turns), 16)), choices.sample(singles, 4))
    return turns


def _positions(
    tokens: int, reach: int, starts: NDArray[np.int64], choices: random.Random, numbers: np.random.Generator
) -> Ids:
    """Positions with jumps at some of the starts of sentences, of `reach` - `tokens` at most, as often small as large."""
    steps = np.ones(tokens, dtype=np.int64)
    steps[0] = 0
    if reach > tokens:
        total = tokens * (reach / tokens) ** choices.random() - tokens
        chosen = numbers.choice(starts, min(len(starts), int(2 ** choices.uniform(0, 6))), replace=False)
        parts = numbers.exponential(size=len(chosen))
        steps[chosen] += (parts / parts.sum() * total).astype(np.int64)
    return np.cumsum(steps).astype(np.int32)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: hidden, MLP, layers, query heads, KV heads, head size."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int


SHAPES = {
    "needle": Shape(384, 1024, 5, 6, 2, 128),  # 10.8 million parameters, 21.7 MB in bfloat16
    "small": Shape(192, 384, 4, 4, 2, 64),  # 2.0 million, 4.0 MB
    "tiny": Shape(64, 128, 2, 2, 1, 32),  # 0.2 million: to see the script run
}


def make_model(shape: Shape, positions: int) -> Any:
    """A Qwen3 model with random weights, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary.SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=vocabulary.BOS,
        eos_token_id=vocabulary.EOS,
        pad_token_id=vocabulary.PAD,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def answer_logits(model: Any, ids: Tensor, positions: Tensor | None, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] of the tokens that `answers` marks in ids [sequences, tokens], and these tokens [n].

    The mask is given as none, which is causal attention: from positions that jump transformers would conclude that several
    texts are packed into a sequence, and hide each from the next.
    """
    causal = {"full_attention": None}
    hidden = model.model(ids, attention_mask=causal, position_ids=positions, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, :-1][answers[:, 1:]]), ids[:, 1:][answers[:, 1:]]


@torch.inference_mode()
def check(model: Any, tokens: int, device: torch.device) -> dict[str, float]:
    """Share of the answers that the model draws token by token, by task, in contexts that training does not draw."""
    found = {}
    for task in TASKS:
        right: list[bool] = []
        for dialogue in make_dialogues(task, max(tokens, 1024), CHECKED_CONTEXTS):
            ids, answers, lengths = list(dialogue.context), [False] * len(dialogue.context), []
            for _, question, gold in dialogue.rounds:
                ids += question + gold
                answers += [False] * len(question) + [True] * len(gold)
                lengths.append(len(gold))
            given, marks = torch.tensor([ids], device=device), torch.tensor([answers], device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits, gold_ids = answer_logits(model, given, None, marks)
            same = torch.split(logits.argmax(dim=-1) == gold_ids, lengths)
            right += [bool(part.all()) for part in same]
        found[task] = sum(right) / len(right)
    return found


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes
    ----------
    tokens, sequences : int
        Of a sequence, and sequences of a step.
    steps : int
        Of this stage.
    bare : float
        Share of questions that only repeat how a fact begins; see `make_sequence`.
    """

    tokens: int
    sequences: int
    steps: int
    bare: float = 0.0


RECIPE = (
    Stage(256, 256, 3000, bare=0.5),
    Stage(1024, 64, 4000, bare=0.1),
    Stage(4096, 16, 3000),
    Stage(16384, 4, 2000),
    Stage(65536, 1, 200),
    Stage(131_072, 1, 100),
)


class Batches(Dataset[dict[str, Tensor]]):
    """The batch of every step, made from seed and step alone: a training that goes on sees what it would have seen."""

    def __init__(self, seed: int, stages: Sequence[Stage], jumps: float, positions: int) -> None:
        self.stages = [stage for stage in stages for _ in range(stage.steps)]
        self.seed, self.jumps, self.positions = seed, jumps, positions

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        """Tensors [sequences, tokens]: ids and positions int64, answers bool."""
        stage = self.stages[step]
        settings: dict[str, Any] = {"bare": stage.bare, "jumps": self.jumps, "positions": self.positions}
        made = [make_sequence([self.seed, step, number], stage.tokens, **settings) for number in range(stage.sequences)]
        parts = {name: torch.stack([torch.from_numpy(getattr(one, name)) for one in made]) for name in asdict(made[0])}
        return {name: part if part.dtype == torch.bool else part.long() for name, part in parts.items()}


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], rate: float) -> Tensor:
    """One step of the optimizer; the mean loss of the batch's answer tokens, in nats."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(batch["ids"].device.type, torch.bfloat16, enabled=batch["ids"].is_cuda):
        logits, gold = answer_logits(model, batch["ids"], batch["positions"], batch["answers"])
    loss = torch.nn.functional.cross_entropy(logits.float(), gold, reduction="sum") / max(1, len(gold))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def learning_rate(step: int, steps: int, most: float) -> float:
    """Linear warm-up, then half a cosine down to LAST_SHARE of the largest."""
    warmup = min(WARMUP, steps // 10)
    if step < warmup:
        return most * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return most * (LAST_SHARE + (1 - LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2)


class Training:
    """A model, its optimizer and the number of steps done; on disk in `folder`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder: Path = arguments.output_dir
        self.device = torch.device(arguments.device)
        stages = tuple(arguments.stage or RECIPE)
        for name in ("log_every", "check_every"):
            require(getattr(arguments, name) >= 1, f"--{name}", getattr(arguments, name), ">= 1", "leave it out")
        longest = max(stage.tokens for stage in stages)
        limit = f">= {longest}, the tokens of the longest stage"
        require(arguments.positions >= longest, "--positions", arguments.positions, limit, "leave it out")
        self.settings = {
            name: getattr(arguments, name) for name in ("shape", "jumps", "seed", "positions", "learning_rate")
        }
        self.batches = Batches(arguments.seed, stages, arguments.jumps, arguments.positions)
        torch.manual_seed(arguments.seed)
        self.model = make_model(SHAPES[arguments.shape], arguments.positions).to(self.device)
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=(0.9, 0.98))
        self.step = 0
        self._resume()

    @property
    def state_file(self) -> Path:
        """Weights and optimizer in float32, from which a training goes on."""
        return self.folder / "state.pt"

    def _resume(self) -> None:
        if not self.state_file.exists():
            return
        state = torch.load(self.state_file, map_location=self.device, weights_only=True)
        done = state["step"]
        if state["settings"] != self.settings or state["batches"] != self._batches_of(done):
            raise ConfigError(
                f"--output_dir = {str(self.folder)!r}: was begun with other flags, {state['settings']}, or other stages "
                f"before step {done}: must be the same to go on; repeat them, or name another folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = done

    def _batches_of(self, steps: int) -> list[list[float]]:
        """What the batches of the first steps are made of: they decide whether a training can go on."""
        sizes = ((stage.tokens, stage.sequences, stage.bare) for stage in self.batches.stages[:steps])
        return [[*of_stage, len(list(same))] for of_stage, same in itertools.groupby(sizes)]

    def save(self) -> None:
        """Write the state, and model/ with the checkpoint in bfloat16 and the tokenizer."""
        from transformers import Qwen3ForCausalLM

        self.folder.mkdir(parents=True, exist_ok=True)
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        begun = {"settings": self.settings, "step": self.step, "batches": self._batches_of(self.step)}
        state = {**begun, "model": model, "optimizer": optimizer}
        part = self.state_file.with_name("state.pt.part")
        torch.save(state, part)
        os.replace(part, self.state_file)
        copy = Qwen3ForCausalLM(self.model.config).to(torch.bfloat16)
        copy.load_state_dict(model)
        with quiet():
            copy.save_pretrained(self.folder / "model")
        vocabulary.save_tokenizer(self.folder / "model", self.settings["positions"])

    def log(self, **figures: Any) -> None:
        """Add a line to log.jsonl and print it."""
        line = json.dumps({"step": self.step, **figures})
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def run(self, arguments: argparse.Namespace) -> bool:
        """Train until the end, or until the time is over; whether it is the end."""
        start, seen, steps = time.monotonic(), 0, len(self.batches)
        self.folder.mkdir(parents=True, exist_ok=True)
        left = range(self.step, steps)
        loader = DataLoader(self.batches, batch_size=None, sampler=left, num_workers=arguments.workers)
        for batch in loader:
            moved = {name: tensor.to(self.device) for name, tensor in batch.items()}
            stage = self.batches.stages[self.step]
            loss = train_step(
                self.model, self.optimizer, moved, learning_rate(self.step, steps, arguments.learning_rate)
            )
            self.step, seen = self.step + 1, seen + moved["ids"].numel()
            spent = time.monotonic() - start
            last = self.step == steps
            if self.step % arguments.log_every == 0 or last:
                figures = {
                    "tokens": stage.tokens,
                    "loss": round(loss.item(), 4),
                    "tokens_per_second": int(seen / spent),
                }
                self.log(**figures)
            if self.step % arguments.check_every == 0 or last:
                self.log(checked=max(stage.tokens, 1024), exact=check(self.model, stage.tokens, self.device))
                self.save()
            if spent > arguments.seconds and not last:
                self.save()
                return False
        return True


def stage_of(text: str) -> Stage:
    """A stage as it is written on the command line, TOKENS:SEQUENCES:STEPS or with :BARE behind it."""
    tokens, sequences, steps, *bare = text.split(":")
    stage = Stage(int(tokens), int(sequences), int(steps), *map(float, bare))
    if stage.tokens < SHORTEST or min(stage.sequences, stage.steps) < 1 or not 0 <= stage.bare <= 1:
        raise ValueError(text)
    return stage


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "--output_dir",
        type=Path,
        required=True,
        help="for model/, state.pt and log.jsonl; one that is there is gone on with",
    )
    add("--shape", choices=SHAPES, default="needle", help="sizes of the model")
    add("--device", default="cpu", help="cpu or cuda")
    add(
        "--stage",
        type=stage_of,
        action="append",
        help="TOKENS:SEQUENCES:STEPS[:BARE]; again for more; the recipe if left out",
    )
    add("--learning_rate", type=float, default=1e-3, help="the largest")
    add("--jumps", type=float, default=0.5, help="share of the sequences whose positions jump")
    add("--positions", type=int, default=POSITIONS, help="of the model, and where jumps may reach")
    add("--seconds", type=float, default=float("inf"), help="end after that time; run again to go on")
    add("--workers", type=int, default=0, help="processes that make batches; 0 makes them between the steps")
    add("--log_every", type=int, default=50, help="steps")
    add(
        "--check_every",
        type=int,
        default=500,
        help="steps between two measurements of accuracy, after which all is saved",
    )
    add("--seed", type=int, default=0, help="of weights and batches")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry: 0 if the training has ended, 3 if its time has before."""
    arguments = parse(argv)
    try:
        ended = Training(arguments).run(arguments)
    except (KvseekError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("the end" if ended else "run again to go on", file=sys.stderr)
    return 0 if ended else 3


if __name__ == "__main__":
    sys.exit(main())

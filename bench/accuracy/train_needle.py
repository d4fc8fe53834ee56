"""Train a tiny Qwen3 model on the needle tasks, and write a checkpoint that `kvseek build` takes.

    python bench/accuracy/train_needle.py --output_dir needle --device cuda --minutes 22 --seconds 540

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
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kvseek.bench.accuracy.needle_tasks import vocabulary, wide
from kvseek.bench.accuracy.needle_tasks.facts import IS, THE, Fact, FactSource, Ids, ask, write_context
from kvseek.bench.accuracy.needle_tasks.tasks import TASKS, make_dialogues
from kvseek.bench.accuracy.needle_tasks.vocabulary import BOS
from kvseek.builder.checking import quiet
from kvseek.core.command_line import tells_errors
from kvseek.core.errors import ConfigError, require

ROPE_THETA = 1e8
CHECKED_CONTEXTS, EVALUATED_CONTEXTS = 4, 24  # a task; at the end
WARMUP = 500  # steps, at most a tenth of all
LAST_SHARE = 0.1  # of the learning rate, at the last step
POSITIONS = 131_072  # of the model, and where jumps may reach
SHORTEST = 128  # tokens of a sequence
MIXED, HALVINGS = 4096, (0, 0, 0, 1, 2, 3)  # from so many tokens on, steps have sequences halved so many times
MEASURED = 12  # steps of each stage, to see how many fit into --minutes
FILLED = 0.9  # of --minutes; the rest is for checks
FILE_SIZE = "12MB"  # of weights

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
    weights : float32
        Of their losses: a long answer weighs more than a short one, but not as many times as it is longer.
    """

    ids: Ids
    positions: Ids
    answers: NDArray[np.bool_]
    weights: NDArray[np.float32]


def make_sequence(
    seed: list[int], tokens: int, *, bare: float, jumps: float, positions: int, wide_share: float = 0.0
) -> Example:
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
    wide_share : float
        Share of the sequences that ask wide questions.
    """
    numbers = np.random.default_rng(seed)
    choices = random.Random(int(numbers.integers(1 << 60)))
    if choices.random() < wide_share:
        facts = _wide_facts(choices, int((tokens - 1) * choices.uniform(0.4, 1)))
        room = tokens - 1 - sum(fact.tokens for fact in facts)
        turns = [[fact] for fact in choices.sample(facts, len(facts))]
    else:
        room = int(min(0.45 * tokens * choices.uniform(0.5, 1.15), MOST_ASKED * choices.uniform(0.4, 1)))
        facts = _facts(choices, tokens - 1 - room)
        turns = _asked_about(facts, choices)
    asked: list[int] = []
    weights: list[float] = []
    begins: list[int] = []
    for about in turns:
        _, question, gold = ask(about)
        if about[0].form == "value" and len(about) == 1 and choices.random() < bare:
            question = [*THE, *about[0].names, *IS]
        if len(asked) + len(question) + len(gold) <= room:
            begins.append(len(asked))
            asked += question + gold
            weights += [0.0] * len(question) + [len(gold) ** -0.5] * len(gold)
    context = write_context(facts, tokens - 1 - len(asked), numbers)
    written = len(context.ids)
    ids = np.concatenate([[BOS], context.ids, np.array(asked, dtype=np.int32)]).astype(np.int32)
    weighed = np.concatenate([np.zeros(1 + written), weights]).astype(np.float32)
    starts = 1 + np.concatenate([context.starts, written + np.array(begins, dtype=np.int64)])
    reach = positions if choices.random() < jumps else tokens
    return Example(ids, _positions(tokens, reach, starts, choices, numbers), weighed > 0, weighed)


def _wide_facts(choices: random.Random, room: int) -> list[Fact]:
    """Facts of one form of wide.py, or of all, which fit into `room` tokens with their questions and answers.

    Sizes are drawn as often small as large. Of records and long chains a context has one, as their questions name none.
    """
    source = FactSource(choices)
    forms = list(WIDE_FORMS)
    forms = forms if choices.random() < 0.3 else choices.choices(forms, list(WIDE_FORMS.values()))
    facts: list[Fact] = []
    while forms and room > LONGEST and source.variables_left >= 2 and source.words_taken < MOST_WORDS:
        form = choices.choice(forms)
        if form in ("records", "long_chain"):
            forms.remove(form)
        fact = _wide_fact(form, source, choices, room)
        _, question, gold = ask([fact])
        if (used := fact.tokens + len(question) + len(gold)) > room:
            break
        facts.append(fact)
        room -= used
    return facts


MOST_WORDS = 200  # of lists, counts and tables of a context, before the last
WIDE_FORMS = {"records": 2, "passage": 2, "count": 4, "lists": 3, "long_chain": 2}  # and how often a context is of one


def _wide_fact(form: str, source: FactSource, choices: random.Random, room: int) -> Fact:
    """A fact that is likely to fit into `room` tokens with its question and answer."""

    def size(least: int, most: int) -> int:
        return max(least, min(most, int(least * (most / least) ** choices.uniform(0, 1.1)))) if most > least else least

    if form == "records":
        return wide.records(source, choices, size(1, min(wide.MOST_RECORDS, (room - 8) // 15)))
    if form == "passage":
        return wide.passage(source, choices, size(4, min(wide.LONGEST_PASSAGE, (room - 12) // 2)))
    if form == "count":
        return wide.count(source, choices, choices.randint(1, max(1, min(wide.MOST_COUNTED, (room - 18) // 6))))
    if form == "lists":
        length = choices.randint(2, max(2, min(wide.LONGEST_LIST, (room - 20) // 4)))
        return wide.lists(source, choices, length, choices.randint(0, length))
    words = choices.randint(2, max(2, min(wide.TABLE_WORDS, (room - 40) // 12)))
    lines = (room - 6 * words - 10) // wide.LINE
    return wide.long_chain(source, choices, words, max(2, min(wide.MOST_LINES, lines)))


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
def check(model: Any, tokens: int, device: torch.device, contexts: int = CHECKED_CONTEXTS) -> dict[str, list[float]]:
    """Shares of the answers, and of their tokens, that the model draws token by token, by task, in contexts new to training."""
    found = {}
    for task in TASKS:
        right: list[bool] = []
        places: list[float] = []
        for dialogue in make_dialogues(task, max(tokens, 1024), contexts):
            ids, answers, lengths = list(dialogue.context), [False] * len(dialogue.context), []
            for _, question, gold in dialogue.rounds:
                ids += question + gold
                answers += [False] * len(question) + [True] * len(gold)
                lengths.append(len(gold))
            given, marks = torch.tensor([ids], device=device), torch.tensor([answers], device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits, gold_ids = answer_logits(model, given, None, marks)
            same = torch.split((logits.argmax(dim=-1) == gold_ids).cpu(), lengths)
            right += [bool(part.all()) for part in same]
            places += [float(part.float().mean()) for part in same]
        found[task] = [round(sum(shares) / len(shares), 4) for shares in (right, places)]
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

    def __init__(
        self, seed: int, stages: Sequence[Stage], jumps: float, positions: int, wide_share: float = 0.0
    ) -> None:
        self.stages = [stage for stage in stages for _ in range(stage.steps)]
        self.seed = seed
        self.settings: dict[str, Any] = {"jumps": jumps, "positions": positions, "wide_share": wide_share}

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        """Tensors [sequences, tokens]: ids and positions int64, answers bool, weights float32.

        Of a stage of long sequences some steps have more and shorter ones, so that nothing is forgotten.
        """
        stage = self.stages[step]
        halvings = random.Random(step).choice(HALVINGS) if stage.tokens >= MIXED else 0
        made = [
            make_sequence([self.seed, step, number], stage.tokens >> halvings, bare=stage.bare, **self.settings)
            for number in range(stage.sequences << halvings)
        ]
        parts = {name: torch.stack([torch.from_numpy(getattr(one, name)) for one in made]) for name in asdict(made[0])}
        return {name: part.long() if part.dtype == torch.int32 else part for name, part in parts.items()}


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], rate: float) -> Tensor:
    """One step of the optimizer; the weighted mean loss of the batch's answer tokens, in nats."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(batch["ids"].device.type, torch.bfloat16, enabled=batch["ids"].is_cuda):
        logits, gold = answer_logits(model, batch["ids"], batch["positions"], batch["answers"])
    weights = batch["weights"][:, 1:][batch["answers"][:, 1:]]
    losses = torch.nn.functional.cross_entropy(logits.float(), gold, reduction="none")
    loss = (losses * weights).sum() / weights.sum().clamp_min(1e-9)
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
        require(0 <= arguments.wide <= 1, "--wide", arguments.wide, "0 to 1", "leave it out")
        require(arguments.positions >= longest, "--positions", arguments.positions, limit, "leave it out")
        self.settings = {
            name: getattr(arguments, name) for name in ("shape", "jumps", "seed", "positions", "learning_rate")
        }
        self.settings["wide_share"] = arguments.wide
        if arguments.minutes:  # the steps of these stages are then the state's
            self.settings["stages"] = [list(astuple(stage)) for stage in stages]
        torch.manual_seed(arguments.seed)
        self.model = make_model(SHAPES[arguments.shape], arguments.positions).to(self.device)
        if arguments.init:
            self._begin_with(arguments.init)
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=(0.9, 0.98), fused=fused)
        self.step, self.seconds = 0, 0.0
        state = self._read()
        if arguments.minutes and state is None:
            stages = self._fitted(stages, 60 * arguments.minutes)
        elif arguments.minutes and state is not None:
            stages = tuple(Stage(*each) for each in state["stages"])
        self.stages = stages
        self.batches = self._batches(stages)
        if state is not None:
            self._go_on(state)

    @property
    def state_file(self) -> Path:
        """Weights and optimizer in float32, from which a training goes on."""
        return self.folder / "state.pt"

    def _batches(self, stages: Sequence[Stage]) -> Batches:
        settings = self.settings
        return Batches(settings["seed"], stages, settings["jumps"], settings["positions"], settings["wide_share"])

    def _begin_with(self, folder: Path) -> None:
        """Take the weights of a checkpoint."""
        from transformers import Qwen3ForCausalLM

        weights = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        own = self.model.state_dict()
        wrong = [name for name in own if name not in weights or weights[name].shape != own[name].shape]
        if wrong:
            raise ConfigError(
                f"--init = {str(folder)!r}: {wrong[0]} has other sizes: must be those of --shape; name that"
            )
        self.model.load_state_dict(weights)

    def _fitted(self, stages: Sequence[Stage], seconds: float) -> tuple[Stage, ...]:
        """The stages with as many steps in proportion as take `seconds` in all, by a measurement of each."""
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        wanted = 0.0
        for stage in stages:
            batches = self._batches([replace(stage, steps=MEASURED)])
            made = [{name: part.to(self.device) for name, part in batches[step].items()} for step in range(MEASURED)]
            for batch in (*made[:2], *made):
                if batch is made[2]:  # the first ones choose kernels
                    start = time.monotonic()
                train_step(self.model, self.optimizer, batch, 0.0).item()
            step_seconds = (time.monotonic() - start) / (MEASURED - 2)
            wanted += stage.steps * step_seconds
            self.log(measured=stage.tokens, seconds_per_step=round(step_seconds, 4))
        self.model.load_state_dict(weights)
        self.optimizer.state.clear()
        return tuple(replace(stage, steps=max(1, int(stage.steps * FILLED * seconds / wanted))) for stage in stages)

    def _read(self) -> dict[str, Any] | None:
        if not self.state_file.exists():
            return None
        state: dict[str, Any] = torch.load(self.state_file, map_location=self.device, weights_only=True)
        return state

    def _go_on(self, state: dict[str, Any]) -> None:
        done = state["step"]
        if state["settings"] != self.settings or state["batches"] != self._batches_of(done):
            raise ConfigError(
                f"--output_dir = {str(self.folder)!r}: was begun with other flags, {state['settings']}, or other stages "
                f"before step {done}: must be the same to go on; repeat them, or name another folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = done, state["seconds"]

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
        begun |= {"seconds": self.seconds, "stages": [list(astuple(stage)) for stage in self.stages]}
        state = {**begun, "model": model, "optimizer": optimizer}
        part = self.state_file.with_name("state.pt.part")
        torch.save(state, part)
        os.replace(part, self.state_file)
        copy = Qwen3ForCausalLM(self.model.config).to(torch.bfloat16)
        copy.load_state_dict(model)
        with quiet():
            copy.save_pretrained(self.folder / "model", max_shard_size=FILE_SIZE)
        vocabulary.save_tokenizer(self.folder / "model", self.settings["positions"])

    def log(self, **figures: Any) -> None:
        """Add a line to log.jsonl and print it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"step": self.step, **figures})
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def run(self, arguments: argparse.Namespace) -> bool:
        """Train until the end, or until the time is over; whether it is the end."""
        start, seen, steps, before = time.monotonic(), 0, len(self.batches), self.seconds
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
            self.seconds = before + spent
            last = self.step == steps or (arguments.minutes is not None and self.seconds > 60 * arguments.minutes)
            if self.step % arguments.log_every == 0 or last:
                figures = {
                    "of": steps,
                    "tokens": stage.tokens,
                    "loss": round(loss.item(), 4),
                    "tokens_per_second": int(seen / spent),
                }
                self.log(**figures)
            if self.step % arguments.check_every == 0 or last:
                self.log(checked=max(stage.tokens, 1024), exact_and_tokens=check(self.model, stage.tokens, self.device))
                self.save()
            if last:
                break
            if spent > arguments.seconds and not last:
                self.save()
                return False
        for tokens in arguments.evaluate:
            found = check(self.model, tokens, self.device, EVALUATED_CONTEXTS)
            self.log(evaluated=max(tokens, 1024), contexts=EVALUATED_CONTEXTS, exact_and_tokens=found)
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
    add("--wide", type=float, default=0.6, help="share of the sequences that ask wide questions")
    add("--init", type=Path, help="checkpoint of the same shape to begin with")
    add("--minutes", type=float, help="of the whole training, whose stages get as many steps as fit")
    add("--seconds", type=float, default=float("inf"), help="end after that time; run again to go on")
    add("--evaluate", type=int, nargs="*", default=[], help="lengths at which the trained model is measured")
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


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry: 0 if the training has ended, 3 if its time has before."""
    arguments = parse(argv)
    ended = Training(arguments).run(arguments)
    print("the end" if ended else "run again to go on", file=sys.stderr)
    return 0 if ended else 3


if __name__ == "__main__":
    sys.exit(main())

"""What the soak test sends: which request, by which way, what becomes of it, and what it gets when it is alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from tests.server.soak.calls import CLIENT_ROUTES, OPENAI_ROUTE, ROUTES

from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.engine.tokenizer import Tokenizer

WORDS = "the harbour master wrote the log while one ship of three lay at the quay in nineteen hundred".split()  # noqa: SIM905
LONGEST_ANSWER = 240


@dataclass(frozen=True)
class Case:
    """A request to one of the two models, and its answer.

    `tokens` are those that it gets alone; `texts[n]` is the text after n of them, all that a stream may have shown by then.
    """

    number: int
    model: str
    prompt: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingConfig
    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = field(default=(), repr=False)

    def fields(self) -> dict[str, Any]:
        """Inputs of the model by name; seeds and the like only where the request samples."""
        params, is_text = self.sampling, self.model == "tensorrt_llm_bls"
        own: dict[str, Any] = {"end_id": -1, "exclude_input_in_output": True}
        if is_text:
            own |= {"text_input": self.prompt, "max_tokens": self.max_tokens, "return_num_output_tokens": True}
        else:
            own |= {"input_ids": list(self.prompt_ids), "request_output_len": self.max_tokens}
        if params.temperature:
            prefix = "" if is_text else "runtime_"
            own |= {"temperature": params.temperature, f"{prefix}top_k": params.top_k, f"{prefix}top_p": 1.0}
            own["seed"] = params.seed
        return own


def make_cases(engine_dir: Path, count: int, seed: int) -> list[Case]:
    """Make cases of both models with prompts from one token to near the longest."""
    engine, random = Engine.load(engine_dir, 1), Random(seed)
    drawn = [_draw(number, engine, random) for number in range(count)]
    answers = [engine.generate([Request(case.prompt_ids, case.max_tokens, case.sampling)])[0] for case in drawn]
    return [_answered(case, tokens, engine.tokenizer) for case, tokens in zip(drawn, answers, strict=True)]


def texts_of(tokenizer: Tokenizer, tokens: Sequence[int], prompt_ids: Sequence[int]) -> tuple[str, ...]:
    """The text of a stream after 0, 1, ... tokens; the last is the whole answer's."""
    stream, texts = tokenizer.stream(prompt_ids=prompt_ids), [""]
    for token in tokens:
        texts.append(texts[-1] + stream.push(token))
    texts[-1] += stream.finish()
    return tuple(texts)


def _answered(case: Case, tokens: Sequence[int], tokenizer: Tokenizer) -> Case:
    return replace(
        case, tokens=tuple(tokens), texts=texts_of(tokenizer, tokens, case.prompt_ids) if case.prompt else ()
    )


def _draw(number: int, engine: Engine, random: Random) -> Case:
    longest = engine.config.max_input_len - 4
    length = random.choice((1, 2, random.randint(3, 60), random.randint(60, 800), random.randint(800, longest)))
    length = min(length, longest)
    room = engine.config.max_seq_len - length
    max_tokens = min(
        room, random.choice((1, random.randint(2, 12), random.randint(12, 60), random.randint(60, LONGEST_ANSWER)))
    )
    sampling = SamplingConfig()
    if random.random() < 0.3:
        sampling = SamplingConfig(temperature=0.8, top_k=random.choice((0, 5, 50)), seed=random.randrange(2**63))
    if random.random() < 0.4:
        ids = tuple(random.randrange(3, engine.config.model.vocab_size) for _ in range(length))
        return Case(number, "tensorrt_llm", "", ids, max_tokens, sampling)
    prompt = _text(length, engine.tokenizer, random)
    return Case(number, "tensorrt_llm_bls", prompt, tuple(engine.tokenizer.encode(prompt)), max_tokens, sampling)


def _text(tokens: int, tokenizer: Tokenizer, random: Random) -> str:
    """A text of at most `tokens` tokens, at least one."""
    if tokens == 1:
        return random.choice("abcdefgh")
    words = " ".join(random.choice(WORDS) for _ in range(tokens))
    ids = tokenizer.encode(words)[:tokens]
    text = tokenizer.decode(ids)
    while len(tokenizer.encode(text)) > tokens:  # words cut in two may be spelt with other tokens
        text = text[:-1]
    return text or "a"


GOOD_TOKENS: dict[str, Any] = {"input_ids": [5, 6, 7], "request_output_len": 4, "end_id": -1}
GOOD_TEXT: dict[str, Any] = {"text_input": "the log", "max_tokens": 4, "end_id": -1, "return_num_output_tokens": True}
# Model, fields besides the good ones, what the refusal names. Fit for every route.
MALFORMED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("tensorrt_llm_bls", {"text_input": ""}, "text_input"),
    ("tensorrt_llm_bls", {"max_tokens": 0}, "max_tokens"),
    ("tensorrt_llm_bls", {"max_tokens": 10**6}, "max_tokens"),
    ("tensorrt_llm_bls", {"temperature": -1.0}, "temperature"),
    ("tensorrt_llm_bls", {"top_p": 1.5}, "top_p"),
    ("tensorrt_llm_bls", {"top_k": -2}, "top_k"),
    ("tensorrt_llm_bls", {"end_id": 10**6}, "end_id"),
    ("tensorrt_llm_bls", {"beam_width": 4}, "beam_width"),
    ("tensorrt_llm_bls", {"priority": 256}, "priority"),
    ("tensorrt_llm_bls", {"timeout": -0.5}, "timeout"),
    ("tensorrt_llm_bls", {"temprature": 1.0}, "temprature"),
    ("tensorrt_llm_bls", {"text_input": "the log " * 5000}, "text_input|input_lengths"),
    ("tensorrt_llm_bls", {"text_input": ["one", "two"]}, "text_input"),
    ("tensorrt_llm", {"input_ids": [5, 999999]}, "input_ids"),
    ("tensorrt_llm", {"input_ids": [7] * 2601}, "input_ids|input_lengths"),
    ("tensorrt_llm", {"input_lengths": 9}, "input_lengths"),
    ("tensorrt_llm", {"request_output_len": -4}, "request_output_len"),
    ("tensorrt_llm", {"repetition_penalty": 0.0}, "repetition_penalty"),
    ("tensorrt_llm", {"runtime_top_p": -0.5}, "top_p"),
)


class Fate(StrEnum):
    """What the client does with its request."""

    READ = "read"  # to the end
    CANCEL = "cancel"
    KILL = "kill"  # the client is a process that is killed
    EXPIRE = "expire"  # a time limit that may pass at any moment
    MALFORMED = "malformed"


@dataclass(frozen=True)
class Job:
    """One request of the soak test.

    `after` is for CANCEL and KILL the number of tokens that the client waits for; a CANCEL after 0 waits `pause` seconds.
    """

    number: int
    fate: Fate
    route: str
    model: str
    fields: dict[str, Any]
    case: Case | None = None
    after: int = 0
    pause: float = 0.0
    names: str = ""  # of MALFORMED: what the refusal must name


def make_jobs(cases: Sequence[Case], count: int, seed: int) -> list[Job]:
    """20 % cancelled, 10 % of clients killed, 5 % malformed, 3 % with a short time limit, the rest read to the end."""
    random = Random(seed)
    numbers = list(range(count))
    random.shuffle(numbers)
    fates = [Fate.READ] * count
    shares = ((Fate.CANCEL, 0.20), (Fate.KILL, 0.10), (Fate.MALFORMED, 0.05), (Fate.EXPIRE, 0.03))
    for fate, share in shares:
        for number in [numbers.pop() for _ in range(round(share * count))]:
            fates[number] = fate
    return [_job(number, fate, cases, random) for number, fate in enumerate(fates)]


def _job(number: int, fate: Fate, cases: Sequence[Case], random: Random) -> Job:
    if fate is Fate.MALFORMED:
        model, wrong, names = random.choice(MALFORMED)
        fields = {**(GOOD_TEXT if model == "tensorrt_llm_bls" else GOOD_TOKENS), **wrong}
        return Job(number, fate, random.choice(ROUTES), model, fields, names=names)
    case = random.choice(cases)
    route = random.choice(ROUTES)
    fields, after, pause = case.fields(), 0, 0.0
    if random.random() < 0.3:
        fields["priority"] = random.randint(0, 255)
    if random.random() < 0.2:
        fields["timeout"] = 600.0
    if fate is Fate.EXPIRE:
        fields["timeout"] = random.choice((0.01, 0.1, 0.5))
    if fate in (Fate.CANCEL, Fate.KILL):
        route = random.choice(("grpc", "http_stream", *((OPENAI_ROUTE,) if case.prompt else ())))
        after = random.randint(fate is Fate.KILL, case.max_tokens)
    if fate is Fate.CANCEL and random.random() < 0.3:
        after, pause = 0, random.choice((0.0, 0.02, 0.3))
        route = random.choice(ROUTES)
    if fate is Fate.READ and case.prompt:
        clients = () if {"priority", "timeout"} & fields.keys() else CLIENT_ROUTES
        route = random.choice((*ROUTES, OPENAI_ROUTE, *clients))
    return Job(number, fate, route, case.model, fields, case, after, pause)

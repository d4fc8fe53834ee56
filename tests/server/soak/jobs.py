"""What the soak test sends: which request, by which way, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from tests.server.soak.calls import CLIENT_ROUTES, OPENAI_ROUTE, ROUTES
from tests.server.soak.cases import Case

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

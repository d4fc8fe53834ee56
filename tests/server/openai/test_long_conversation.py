"""A conversation that grows over many turns, is edited in the middle, and forks: what each turn reads, and what it answers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.conftest import BuildEngine
from tests.support.waiting import SECONDS

from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.launch import RunningServer

pytestmark = pytest.mark.server

TURNS = 24
WINDOW = ("--cache.sink", "4", "--cache.local", "32", "--cache.update", "32")
Messages = list[dict[str, Any]]
FRESH = itertools.count()  # salts of which the server knows nothing


@pytest.fixture(scope="module")
def directory(hermes: Path, build_engine: BuildEngine) -> Path:
    return build_engine(hermes, "full", "--max_batch_size", "2", "--max_seq_len", "8000", *WINDOW)


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Talk:
    """A conversation with a model that is made to write its answers, asked as chats or as responses.

    Attributes
    ----------
    messages : list
        What was said so far.
    read : list of list of int
        What the server has read and generated for each request of the conversation and of its forks.
    """

    def __init__(self, server: RunningServer, tokenizer: Tokenizer, door: str, salt: str) -> None:
        self.url, self.tokenizer, self.door, self.salt = server.openai_url, tokenizer, door, salt
        self.model = requests.get(f"{self.url}/models", timeout=SECONDS).json()["data"][0]["id"]
        self.messages, self.read, self.previous = Messages(), list[list[int]](), None

    def fork(self) -> Talk:
        """Another conversation that begins like this one."""
        other = object.__new__(Talk)
        other.__dict__ |= self.__dict__ | {"messages": list(self.messages)}
        return other

    def post(self, path: str, **body: Any) -> Any:
        reply = requests.post(f"{self.url}/{path}", json={"model": self.model} | body, timeout=SECONDS)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def prompt(self) -> list[int]:
        tokens: list[int] = self.post("../tokenize", messages=self.messages)["tokens"]
        return tokens

    def turn(self, question: str, answer: str) -> tuple[int, int, int]:
        """Say something and be answered; returns tokens of the prompt, those that were not read, and that need not be."""
        self.messages.append({"role": "user", "content": question})
        prompt, written = self.prompt(), self.tokenizer.encode(answer, False)
        known = max((common(prompt, each) for each in self.read), default=0)
        fields = {"forced_tokens": [*written, 1], "temperature": 0, "cache_salt": self.salt}
        if self.door == "chat":
            reply = self.post("chat/completions", messages=self.messages, **fields)
            said, usage = reply["choices"][0]["message"]["content"], reply["usage"]
            counts = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        else:
            given: Any = {"input": self.messages} if self.previous is None else {"previous_response_id": self.previous}
            reply = self.post("responses", **{"input": self.messages[-1:]} | given, **fields)
            self.previous = reply["id"]
            said, usage = reply["output"][0]["content"][0]["text"], reply["usage"]
            counts = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        assert (said, counts[0]) == (answer, len(prompt))
        self.messages.append({"role": "assistant", "content": said})
        self.read.append([*prompt, *written])
        return *counts, known

    def answers_as_a_fresh_server(self) -> bool:
        """Whether the next tokens are the same where nothing is known of the conversation."""
        ask: Messages = [*self.messages, {"role": "user", "content": "So?"}]
        free: dict[str, Any] = {
            "messages": ask,
            "temperature": 0,
            "max_tokens": 12,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        salts = self.salt, f"fresh {next(FRESH)}"
        here, fresh = (self.post("chat/completions", **free, cache_salt=salt) for salt in salts)
        assert here["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        self.read.append([*here["prompt_token_ids"], *here["choices"][0]["token_ids"]])
        return bool(here["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"])


def said(turn: int, word: str = "light") -> tuple[str, str]:
    return f"Entry {turn}: is the {word} lit? " + "The harbour log says so. " * (turn % 4), f"It is {turn}."


@pytest.mark.parametrize("door", ["chat", "responses"])
def test_each_turn_reads_only_what_is_new(server: RunningServer, tokenizer: Tokenizer, door: str) -> None:
    talk = Talk(server, tokenizer, door, door)
    talk.messages.append({"role": "system", "content": "You keep the log of the harbour. " * 4})
    forks = {}
    for number in range(TURNS):
        prompt, cached, known = talk.turn(*said(number))
        assert cached == known, "all that was said before"
        if number % 8 == 7:
            forks[number] = talk.fork()
            assert talk.answers_as_a_fresh_server()
    assert prompt > 1500
    for number, fork in forks.items():  # both ways go on from what they have in common
        for other in (fork.fork(), fork):
            _, cached, known = other.turn(*said(number, "bell" if other is fork else "flag"))
            assert cached == known > 300
        assert fork.answers_as_a_fresh_server()


def test_an_edit_of_history_is_read_from_where_it_is(server: RunningServer, tokenizer: Tokenizer) -> None:
    talk = Talk(server, tokenizer, "chat", "edited")
    talk.messages.append({"role": "system", "content": "You keep a log that is edited. " * 4})
    for number in range(TURNS):
        talk.turn(*said(number))
    edited = talk.fork()
    edited.messages[TURNS] = {"role": "assistant", "content": "It was dark then."}
    prompt, cached, known = edited.turn(*said(TURNS))
    assert cached == known
    assert prompt / 4 < cached < prompt * 3 / 4
    assert edited.answers_as_a_fresh_server()
    for each in (talk, edited):  # neither has lost what it had
        _, cached, known = each.turn(*said(TURNS + 1))
        assert cached == known > prompt * 9 / 10
        assert each.answers_as_a_fresh_server()

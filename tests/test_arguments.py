"""Arguments of kvseek.LLM and kvseek.SamplingParams: what cannot be served is refused by its name, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek import LLM, ConfigError, RequestError, SamplingParams

PROMPT = list(range(3, 93))
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    return build_engine(random_model("qwen3"), "full")


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory) as llm:
        yield llm


def test_parameters_are_refused_by_name() -> None:
    with pytest.raises(
        RequestError, match=r"^n = 2: SamplingParams has no such parameter, .* it has temperature, top_k"
    ):
        SamplingParams(n=2)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"top_p = 1\.5: must be in"):
        SamplingParams(top_p=1.5)
    assert SamplingParams(stop="a", stop_token_ids=[1]) == SamplingParams(stop=("a",), stop_token_ids=(1,))


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([PROMPT, []], GREEDY, r"prompts\[1\]: prompt = '0 tokens': must be at least one token"),
        ([PROMPT, [5, 4000]], GREEDY, r"prompts\[1\]: prompt = 4000: must be in \[0, 384\)"),
        ([[5.5]], GREEDY, r"prompt = \[5.5\]: must be a text or a sequence of token ids"),
        ("log", SamplingParams(max_tokens=5000), r"^max_tokens = 5000: must be <= max_seq_len = 1024"),
        ("log", SamplingParams(max_tokens=0), r"^max_tokens = 0: must be >= 1"),
        (["log", "log"], [GREEDY], "sampling_params has 1 entries: must be one for all prompts, or 2"),
        ("log", {"max_tokens": 5}, r"sampling_params = .*: must be a kvseek.SamplingParams"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    before = llm.engine.step_report.number
    for stream in (False, True):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, params, stream=stream)
    assert llm.engine.step_report.number == before


NO_PROMPTS = [
    None,
    5,
    b"abc",
    bytearray(b"abc"),
    {"a": 1},
    {4, 5},
    [b"ab"],
    [None],
    [True],
    [[1, "a"]],
    "\ud83d",
    object(),
]
NO_TALKS = [None, "hi", b"hi", ["hi"], [["hi"]], {"role": "user"}, [{"role": "user"}], [{"role": 5, "content": "x"}]]
TALK = [{"role": "user", "content": "log"}]
NO_OPTIONS: dict[str, list[Any]] = {
    "sampling_params": [5, {"max_tokens": 5}, [5]],
    "stream": ["no", 1],
    "priority": [1.5, "1", True],
    "timeout": ["1", float("nan")],
    "session": [5, b"x", "\ud800"],
    "cache_salt": [5, b"x"],
    "prefix": ["x"],
    "add_generation_prompt": ["no"],
    "continue_final_message": ["no"],
    "chat_template_kwargs": [5, {"messages": []}],
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(("prompt|prompts", lambda llm, value=value: llm.generate(value)) for value in NO_PROMPTS),
        *(("beginning", lambda llm, value=value: llm.prefix(value)) for value in NO_PROMPTS),
        *((r"messages[\w.\[\]]*", lambda llm, value=value: llm.chat(value)) for value in NO_TALKS),
        *(
            (name, lambda llm, name=name, value=value: llm.chat(TALK, **{name: value}))
            for name, values in NO_OPTIONS.items()
            for value in values
        ),
        *(("session_id", lambda llm, value=value: llm.end_session(value)) for value in (5, "", b"x")),
        ("cache_salt", lambda llm: llm.prefix("log", cache_salt=5)),
        ("template: there is no such option", lambda llm: llm.generate("log", template={})),
        ("messages", lambda llm: llm.chat([{"role": "user", "content": "a\ud83d"}])),
    ],
)
def test_every_argument_is_checked_by_its_name(llm: LLM, name: str, call: Callable[[LLM], Any]) -> None:
    before = llm.engine.step_report.number
    with pytest.raises(RequestError, match=rf"^({name})\b"):
        call(llm)
    assert llm.engine.step_report.number == before


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [2.5, "5", True]),
        ("top_k", [1.5, -2]),
        ("ignore_eos", ["no", 1, None]),
        ("stop", [5, b"x", ["a", 5], ["\ud83d"], ["a"] * 65, "a" * 1025]),
        ("bad_words", [5, {"a": 1}]),
        ("stop_token_ids", [5, "5", b"x", [2.5], [True]]),
        ("forced_tokens", [5, "5", b"x", [2.5], [True]]),
        ("logit_bias", [5, {"a": 1}, {1: "a"}, [(1, 2)]]),
        ("guide", ["json"]),
        ("min_p", [-0.1, 1.1, "x"]),
    ],
)
def test_parameters_of_another_type_are_refused(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=rf"^{name}\b"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("threads", [0, "2", True]),
        ("max_num_tokens", [0, None]),
        ("disk_bytes", [-1, "x"]),
        ("speculation", ["eagle", 5]),
        ("num_speculative_tokens", [0, "x", 3]),
        ("quiet", ["no"]),
        ("cache_dir", [5]),
        ("disk_dir", [b"x"]),
        ("tokenizer", [5]),
        ("model", [None, b"x"]),
    ],
)
def test_options_of_an_llm_are_checked_before_anything_is_built(directory: Path, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name} = "):
            LLM(**{"model": directory, name: value})

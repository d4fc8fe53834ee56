"""Bodies of OpenAI's requests: what they ask of the engine, and how what cannot be served is refused by name."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.server.openai.test_prompts import with_template
from tokenizers import processors

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.openai.answers import AnswerForms
from kvseek.server.openai.bodies import (
    CHAT_FORMAT,
    CHAT_NEUTRAL,
    COMPLETION_FORMAT,
    COMPLETION_NEUTRAL,
    WITHOUT_EFFECT,
)
from kvseek.server.openai.choices import Choice, make_choices
from kvseek.server.openai.fields import FieldError, openai_error
from kvseek.server.openai.prompts import message_texts, read_messages
from kvseek.server.requests.keys import Tenant

HELLO = [{"role": "user", "content": "the light was lit"}]


def formed(json_schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": json_schema}


FORMAT = formed({"name": "port", "schema": {"enum": ["é", 1]}, "strict": True, "description": "a port"})


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    limits = ("--max_batch_size", "2", "--max_seq_len", "200", "--max_input_len", "120")
    return build_engine(random_model("llama"), "full", *limits)


class Reader:
    """Makes the choices of a body, as the door does."""

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self.tokenizer, self.config = tokenizer, config

    def chat(self, messages: Any = HELLO, **fields: Any) -> list[Choice]:
        body = CHAT_FORMAT.read(json.dumps({"messages": messages, **fields}).encode())
        return make_choices(body, Tenant(), self.tokenizer, self.config, AnswerForms(self.tokenizer))[0]

    def complete(self, prompt: Any = "the harbour", **fields: Any) -> list[Choice]:
        body = COMPLETION_FORMAT.read(json.dumps({"prompt": prompt, **fields}).encode())
        return make_choices(body, Tenant(), self.tokenizer, self.config, AnswerForms(self.tokenizer))[0]


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer, config: EngineConfig) -> Reader:
    return Reader(tokenizer, config)


def refused(error: Exception) -> tuple[str | None, str]:
    """Field and message of an error, as a client gets them."""
    status, data = openai_error(error)
    body = json.loads(data)
    assert status == 400
    return body["error"]["param"], body["error"]["message"]


def test_defaults_are_openais(reader: Reader) -> None:
    (chat,), (completion,) = reader.chat(), reader.complete()
    prompt = len(chat.request.prompt_ids)
    assert chat.request.max_tokens == 200 - prompt, "what is left of max_seq_len"
    assert (chat.request.max_tokens_by_default, reader.chat(max_tokens=5)[0].request.max_tokens_by_default) == (
        True,
        False,
    )
    assert completion.request.max_tokens == 16
    for request in (chat.request, completion.request):
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
        assert request.end_ids == (1,), "the model's own"
        assert (request.priority, request.timeout_seconds) == (128, None)
        assert not sampling.logit_bias
        assert sampling.logprobs is None
    assert chat.request.sampling.seed != reader.chat()[0].request.sampling.seed, "without a seed, draws differ"


def test_every_field_reaches_the_engine(reader: Reader) -> None:
    fields = {
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "min_tokens": 3,
        "seed": 11,
        "logit_bias": {"5": -100, "6": 1.5},
        "stop_token_ids": [9],
        "bad_words": ["harbour"],
        "forced_tokens": [9, 5],
        "priority": 7,
        "timeout": 12.5,
        "logprobs": True,
        "top_logprobs": 4,
        "min_p": 0.25,
    }
    (choice,) = reader.chat(**fields)
    request, sampling = choice.request, choice.request.sampling
    assert (request.max_tokens, request.priority, request.timeout_seconds) == (7, 7, 12.5)
    assert request.end_ids == (1, 9)
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "top_k",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        assert getattr(sampling, name) == fields[name]
    assert (sampling.min_tokens, sampling.seed, sampling.logprobs) == (3, 11, 4)
    assert sampling.logit_bias == ((5, -100), (6, 1.5))
    assert sampling.forced_tokens == (9, 5)
    assert sampling.bad_words == reader.tokenizer.spellings("harbour")
    assert sampling.prompt_ignore_length == len(request.prompt_ids), "penalties are about the output alone"


def test_cache_control_of_proxies_changes_nothing(reader: Reader) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": HELLO[0]["content"]} | mark
    for fields in ({"messages": [HELLO[0] | mark]}, {"messages": [{"role": "user", "content": [part]}]}, mark):
        assert reader.chat(**fields)[0].request.prompt_ids == reader.chat()[0].request.prompt_ids


def test_ignore_eos_leaves_the_clients_own_ends(reader: Reader) -> None:
    assert reader.chat(ignore_eos=True)[0].request.end_ids == ()
    assert reader.chat(ignore_eos=True, stop_token_ids=[5])[0].request.end_ids == (5,)


def test_choices_have_seeds_of_their_own_and_follow_their_prompts(reader: Reader) -> None:
    choices = reader.complete([[4, 5], [6]], n=3, seed=2**64 - 2, max_tokens=2)
    assert [choice.request.prompt_ids for choice in choices] == [(4, 5)] * 3 + [(6,)] * 3
    assert [choice.request.sampling.seed for choice in choices] == [2**64 - 2, 2**64 - 1, 0] * 2
    assert reader.complete(seed=-1)[0].request.sampling.seed == 2**64 - 1, "OpenAI's seeds have a sign"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("one ship", ["one ship"]), (["one ship", "two"], ["one ship", "two"]), ([' ["[ship'], [' ["[ship'])],
)
def test_prompts_that_are_texts(reader: Reader, prompt: Any, texts: list[str]) -> None:
    expected = [tuple(reader.tokenizer.encode(text)) for text in texts]
    assert [choice.request.prompt_ids for choice in reader.complete(prompt)] == expected


def test_max_tokens_of_a_chat_has_two_names(reader: Reader) -> None:
    assert reader.chat(max_tokens=5)[0].request.max_tokens == 5
    assert reader.chat(max_tokens=5, max_completion_tokens=5)[0].request.max_tokens == 5
    with pytest.raises(FieldError, match="max_completion_tokens = 5: must be max_tokens = 6"):
        reader.chat(max_tokens=6, max_completion_tokens=5)


def test_what_changes_nothing_is_no_fault(reader: Reader) -> None:
    for ask in (reader.chat, reader.complete):
        (plain,) = ask(seed=5)
        for fields in ({"stop": ""}, {"stop": ["", ""]}, {"bad_words": [""]}, {"top_k": -1}, {"min_p": 0}):
            (choice,) = ask(seed=5, **fields)
            assert choice.request == plain.request
        assert ask(top_p=0)[0].request.sampling.greedy


SHOWING = (  # a template that shows what it gets
    "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}begin{% endif %}{{ tone }}"
)


def test_how_a_conversation_is_written(directory: Path, tmp_path: Path, config: EngineConfig) -> None:
    tokenizer = with_template(directory, tmp_path, SHOWING)
    begins = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer._tokenizer.post_processor = begins
    reader = Reader(tokenizer, config)

    def written(messages: Any = HELLO, **fields: Any) -> str:
        return tokenizer.decode(reader.chat(messages, **fields)[0].request.prompt_ids)

    def expected(text: str) -> str:
        return tokenizer.decode(tokenizer.encode(text, False))

    assert written() == expected("user  the light was lit;begin")
    assert written([HELLO[0] | {"name": "Ada"}]) == expected("user Ada the light was lit;begin")
    assert written(add_generation_prompt=False) == expected("user  the light was lit;")
    assert written(continue_final_message=True) == expected("user  the light was lit")
    assert written(continue_final_message=True, add_generation_prompt=False) == written(continue_final_message=True)
    assert written(chat_template_kwargs={"tone": "dry"}) == expected("user  the light was lit;begindry")
    assert written(chat_template_kwargs={}) == written(chat_template_kwargs=None) == written()
    assert reader.chat()[0].request.prompt_ids[0] != 0
    assert reader.chat(add_special_tokens=True)[0].request.prompt_ids[0] == 0
    assert reader.complete()[0].request.prompt_ids[0] == 0
    assert reader.complete(add_special_tokens=False)[0].request.prompt_ids[0] != 0
    faults: list[tuple[dict[str, Any], str, str]] = [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "at most one of them may be true",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "kvseek sets itself"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "Expected `object`"),
        ({"chat_template_kwargs": {"tone": "x" * 20_000}}, "chat_template_kwargs", "must be <= 16384"),
        ({"add_generation_prompt": 1}, "add_generation_prompt", "Expected `bool"),
    ]
    for fields, param, message in faults:
        with pytest.raises(FieldError, match=message) as caught:
            reader.chat(**fields)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_completion_tokens": 1000}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "lit " * 111}]}, "messages"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_refusal_names_a_field_that_the_client_has_sent(reader: Reader, fields: dict[str, Any], param: str) -> None:
    small = Reader(reader.tokenizer, replace(reader.config, max_seq_len=120, max_input_len=120))
    with pytest.raises(RequestError) as caught:
        small.chat(**({"messages": HELLO} | fields))
    name, message = refused(caught.value)
    assert name == param
    assert message.startswith(param)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (json.dumps({"stop": "half \ud83d"}).encode(), "stop", r"stop: \\ud83d at byte 15 of the body is half of"),
        (json.dumps({"stop": "\ude00", "user": "a"}).encode(), "stop", r"stop: \\ude00 at byte"),
        (json.dumps({"stop": "\U0001f600 \\ud83d"}).encode()[:-1], "stop", "it ends at byte 31, before it is complete"),
        (b'{"stop": "a", "prompt": "the \\"seed\\": ', "prompt", "it ends at byte 39"),
        (b'{"prompt": "cut off', "prompt", r"\(in or after the field prompt\): it ends at byte 19"),
        (b'{"prompt": "a", "seed": NaN}', "seed", r"\(in or after the field seed\): JSON is malformed"),
        (b'{"prompt": "half \xf0\x9f"}', "", "UTF-8"),
    ],
)
def test_the_cause_of_what_is_no_json_is_told(reader: Reader, body: bytes, param: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        COMPLETION_FORMAT.read(body).prompts(reader.tokenizer, reader.config, AnswerForms(reader.tokenizer))
    assert caught.value.param in (param, "prompt")


@pytest.mark.parametrize("neutral", [CHAT_NEUTRAL, COMPLETION_NEUTRAL])
def test_unsupported_fields_are_accepted_where_they_change_nothing(reader: Reader, neutral: Any) -> None:
    ask = reader.chat if neutral is CHAT_NEUTRAL else reader.complete
    for name, values in neutral.items():
        for value in (*values, None):
            assert ask(**{name: value}), name
        for value in ({"type": "other", "x": [1]}, "something", 7):
            with pytest.raises(FieldError, match=rf"^{name} = .*kvseek does not support it, leave it out") as caught:
                ask(**{name: value})
            assert caught.value.param == name


def test_fields_without_effect_are_accepted(reader: Reader) -> None:
    assert reader.chat(**{name: {"any": ["thing"]} for name in WITHOUT_EFFECT}, parallel_tool_calls=True)
    assert reader.complete(**dict.fromkeys(WITHOUT_EFFECT, "anything"))


SHARED_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"foo": 1}, "foo", "there is no such field"),
    ({"max_token": 1}, "max_token", "check the spelling"),
    ({"temperature": -1}, "temperature", "must be finite and >= 0"),
    ({"temperature": "hot"}, "temperature", "got `str`"),
    ({"top_p": -0.1}, "top_p", r"must be in \[0, 1\]"),
    ({"min_p": 1.1}, "min_p", r"must be in \[0, 1\]"),
    ({"top_k": -2}, "top_k", "must be in"),
    ({"top_k": 10**30}, "top_k", "must be in"),
    ({"n": 129}, "n", r"must be in \[1, 128\]"),
    ({"n": 0}, "n", r"must be in \[1, 128\]"),
    ({"n": True}, "n", "got `bool`"),
    ({"max_tokens": 0}, "max_tokens", "must be >= 1"),
    ({"max_tokens": 10_000}, "max_tokens", "max_seq_len = 200; ask for fewer"),
    ({"presence_penalty": 2.1}, "presence_penalty", r"must be in \[-2, 2\]"),
    ({"frequency_penalty": -3}, "frequency_penalty", r"must be in \[-2, 2\]"),
    ({"repetition_penalty": 0}, "repetition_penalty", r"must be in \[0.01"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids, written as strings"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids, written as strings"),
    ({"logit_bias": {"384": 1}}, "logit_bias", r"must be in \[0, 384\)"),
    ({"logit_bias": {"3": 101}}, "logit_bias", "must be in"),
    ({"logit_bias": [1]}, "logit_bias", "got `array`"),
    ({"return_selected_rows": {"layers": [1 << 20]}}, "return_selected_rows", r"must be in \[0, "),
    ({"return_selected_rows": {"heads": [1]}}, "return_selected_rows", "there is no such field"),
    ({"forced_tokens": [384]}, "forced_tokens", r"must be in \[0, 384\)"),
    ({"forced_tokens": [5] * 20, "max_tokens": 9}, "forced_tokens", "must be <= 9, the most tokens to generate"),
    ({"stop": ["a"] * 65}, "stop", "must be <= 64"),
    ({"stop": "a" * 1025}, "stop", "1025 bytes: must be <= 1024"),
    ({"stop": [1]}, r"stop", r"stop\[0\]: Expected `str`"),
    ({"stop_token_ids": [384]}, "stop_token_ids", r"must be in \[0, 384\)"),
    ({"stop_token_ids": list(range(2000))}, "stop_token_ids", "must be <= 1024 ids"),
    ({"bad_words": ["x" * 2000]}, "bad_words", "2000 bytes: must be <= 1024"),
    ({"min_tokens": -1}, "min_tokens", "must be in"),
    ({"priority": 256}, "priority", r"must be in \[0, 255\]"),
    ({"timeout": 0}, "timeout", "must be > 0"),
    ({"seed": 2**70}, "seed", "must be in"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "absent unless stream is true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", r"stream_options.x: there is no such field"),
    ({"stream": "yes"}, "stream", "got `str`"),
    ({"user": 1, "tools_": []}, "tools_", "there is no such field"),
    ({"session_id": ""}, "session_id", "session_id has 0 characters: must be 1 to 256"),
    ({"session_id": "a" * 257}, "session_id", "session_id has 257 characters"),
    ({"session_id": 5}, "session_id", "session_id = 5: "),
    ({"session_id": "a", "retention_priority": 101}, "retention_priority", "retention_priority = 101: must be in"),
    ({"session_id": "a", "retention_seconds": 0}, "retention_seconds", "retention_seconds = 0.0: must be > 0"),
    ({"retention_seconds": 5}, "retention_seconds", "retention_seconds = 5.0: is for requests of a session"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt has 0 characters: must be 1 to 256"),
    ({"cache_salt": "a" * 257}, "cache_salt", "cache_salt has 257 characters"),
]


@pytest.mark.parametrize(("fields", "param", "message"), SHARED_FAULTS)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_faults_of_both_endpoints_are_named(
    reader: Reader, endpoint: str, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        getattr(reader, endpoint)(**fields)
    name, text = refused(caught.value)
    assert name == param
    assert text.startswith(param)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": None}, "messages", "at least one message"),
        ({"messages": "hello"}, "messages", "got `str`"),
        ({"messages": [{"content": "x"}]}, "messages", "missing required field `role`"),
        ({"messages": [{"role": "user"}]}, "messages", r"messages\[0\].content is missing"),
        ({"messages": [{"role": "ipython", "content": "x"}]}, "messages[0].role", "system, user, assistant or tool"),
        (
            {"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "call_1"}]},
            "messages[1].tool_call_id",
            "'call_1': must be the id of a call in tool_calls of an earlier message",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id", "leave it"),
        ({"messages": [*HELLO, {"role": "user", "content": "x", "name": 5}]}, "messages", r"messages\[1\].name: Exp"),
        (
            {"messages": [{"role": "user", "content": "x", "foo": 1}]},
            "messages",
            r"messages\[0\].foo: there is no such",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages",
            r"messages\[0\]: Object missing required field `id`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0].type",
            "'image_url': must be \"text\"; kvseek reads text alone",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", r"\[0\].text is missing"),
        ({"messages": [{"role": "user", "content": "7 x8 " * 100}]}, "messages", "max_input_len = 120"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages", "bytes of text"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", r"must be in \[0, 20\]"),
        ({"logprobs": 3}, "logprobs", "got `int`"),
        ({"tools": [{"type": "function"}]}, "tools", "missing required field `function`"),
        ({"response_format": {"type": "xml"}}, "response_format", "Invalid enum value 'xml'"),
        ({"response_format": "text"}, "response_format", "Expected `object`, got `str`"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "there if type is json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
            "only then",
        ),
        (
            {"response_format": FORMAT | {"shape": 1}},
            "response_format",
            "response_format.shape: there is no such field",
        ),
        ({"response_format": formed({"name": "a"})}, "response_format.json_schema.schema", "must be an object"),
        ({"response_format": formed({"schema": {}})}, "response_format", "missing required field `name`"),
        (
            {"response_format": formed({"name": "a", "schema": []})},
            "response_format.json_schema.schema",
            "must be an object",
        ),
        (
            {"response_format": formed({"name": "a", "schema": {"enum": ["a" * 70_000]}})},
            "response_format.json_schema.schema",
            "<= 65536",
        ),
        ({"prompt": "x"}, "prompt", "there is no such field"),
    ],
)
def test_faults_of_chats_are_named(reader: Reader, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        reader.chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": ""}, "prompt = '': must be at least one character"),
        ({"prompt": []}, "at least one token"),
        ({"prompt": [[]]}, "at least one token"),
        ({"prompt": ["one", 2]}, r"prompt\[1\]: Expected `str`, got `int`"),
        ({"prompt": [1, "two"]}, r"prompt\[1\]: Expected `int`, got `str`"),
        ({"prompt": [1.5]}, r"prompt\[0\]: Expected `int`"),
        ({"prompt": {"text": "x"}}, "prompt = an object"),
        ({"prompt": [384]}, r"prompt = 384: must be token ids in \[0, 384\)"),
        ({"prompt": [-1]}, "prompt = -1"),
        ({"prompt": [5] * 121}, "prompt has 121 tokens: must be <= max_input_len = 120"),
        ({"prompt": [[]] * 200}, "'200 lists': must be <= 128 lists"),
        ({"prompt": ["x"] * 129}, "prompt = 'more': must be <= 128 texts"),
        ({"prompt": [1] * (2**21 + 1)}, "'2097153 token ids': must be <= 2097152"),
        ({"prompt": "7 x8 " * 100}, "max_input_len = 120"),
        ({"prompt": [[5]] * 100, "n": 2}, "n = '200 choices': must be <= 128"),
        ({"best_of": 2}, "best_of = 2: must be n = 1"),
        ({"echo": 1}, "echo = 1: Expected `bool"),
        ({"echo": True, "max_tokens": -1}, "max_tokens = -1: must be >= 0"),
        (
            {"prompt": [[5] * 120] * 128, "echo": True, "logprobs": 20},
            "logprobs = '322,560 log probabilities': must be <= 262,144",
        ),
        ({"suffix": "x"}, 'suffix = "x": must be "" or null'),
        ({"logprobs": 21}, r"must be in \[0, 20\]"),
        ({"logprobs": True}, "got `bool`"),
        ({"messages": HELLO}, "messages: there is no such field"),
    ],
)
def test_faults_of_completions_are_named(reader: Reader, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        reader.complete(**fields)


def test_response_formats_reach_the_engine(reader: Reader) -> None:
    for given, kind, text in (
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, "json_schema", {"type": "object"}),
        (FORMAT, "json_schema", {"enum": ["é", 1]}),
    ):
        for choice in (*reader.chat(response_format=given, n=2), *reader.complete(response_format=given)):
            guide = choice.request.sampling.guide
            assert (guide and guide.type) == kind
            assert guide is None or json.loads(guide.guide) == text
    with pytest.raises(RequestError) as caught:
        reader.chat(response_format=FORMAT, ignore_eos=True)
    param, message = refused(caught.value)
    assert (param, message[:45]) == ("response_format", "response_format: needs a token that ends the ")


def test_echo_asks_the_engine_for_log_probabilities_of_the_prompt(reader: Reader) -> None:
    (plain,) = reader.complete(echo=True, max_tokens=3)
    assert (plain.request.max_tokens, plain.request.sampling.prompt_logprobs) == (3, None)
    (scored,) = reader.complete(echo=True, max_tokens=3, logprobs=2)
    assert (scored.request.sampling.logprobs, scored.request.sampling.prompt_logprobs) == (2, 2)
    (alone,) = reader.complete([5] * 120, echo=True, max_tokens=0)
    assert (alone.request.max_tokens, alone.request.sampling.prompt_logprobs) == (0, 0)
    (full,) = reader.complete(echo=True, logprobs=0)
    assert full.request.max_tokens == 16
    (off,) = reader.complete(echo=False, logprobs=0)
    assert off.request.sampling.prompt_logprobs is None


def test_the_bytes_of_a_prompt_that_is_given_back_are_shared_by_its_choices(reader: Reader) -> None:
    """Its text, and a number for each token where these say where the tokens stand in it."""
    text = "the harbour " * 20
    ids = reader.complete(text, max_tokens=4)[0].request.prompt_ids
    held = {
        n: [one.held_bytes for one in reader.complete(text, n=n, max_tokens=4, return_selected_rows={})] for n in (1, 4)
    }
    assert held[1][0] >= len(text) + 8 * len(ids)
    assert held[4] == [held[1][0] // 4] * 4
    (plain,), (echoed,) = reader.complete(text, max_tokens=4), reader.complete(text, max_tokens=4, echo=True)
    assert plain.held_bytes == 0
    assert len(text) <= echoed.held_bytes < held[1][0]


def test_echo_with_logprobs_of_a_tensorrt_engine_is_refused(reader: Reader) -> None:
    plans = Reader(reader.tokenizer, replace(reader.config, runtime="tensorrt", device="cuda"))
    assert plans.complete(echo=True)
    for fields in ({"logprobs": 1}, {"max_tokens": 0}):
        with pytest.raises(FieldError, match="echo = True: must be false, or without logprobs"):
            plans.complete(echo=True, **fields)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"7",
        b'{"prompt": NaN}',
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"\xff": 1}',
    ],
)
@pytest.mark.parametrize("form", [CHAT_FORMAT, COMPLETION_FORMAT])
def test_what_is_no_object_of_fields_is_refused(form: Any, body: bytes) -> None:
    with pytest.raises(FieldError):
        form.read(body)


def test_text_that_is_no_utf8_is_refused_with_its_field() -> None:
    with pytest.raises(FieldError, match="UTF-8") as caught:
        read_messages(CHAT_FORMAT.read(b'{"messages": [{"role": "user", "content": "\xff"}]}').messages)
    assert caught.value.param in ("messages", "")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}] * 5000,
        [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}],
    ],
)
def test_conversations_of_too_many_parts_are_refused_before_they_are_built(messages: list[dict[str, Any]]) -> None:
    raw = msgspec.Raw(json.dumps(messages).encode())
    tracemalloc.start()
    try:
        with pytest.raises(FieldError, match="messages = 'more': must be <= 16384 names and texts"):
            read_messages(raw)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_texts_may_contain_any_number_of_quotes() -> None:
    text = '\\"{' * 40_000
    (message,) = read_messages(msgspec.Raw(json.dumps([{"role": "user", "content": text, "tool_calls": []}]).encode()))
    assert message.content == text
    with pytest.raises(FieldError, match="tool_calls = 'set': must be null for the role user"):
        message_texts(read_messages(msgspec.Raw(b'[{"role": "user", "content": "a", "tool_calls": [1, 1]}]')))


def test_a_large_field_that_is_no_prompt_is_refused() -> None:
    with pytest.raises(FieldError, match=r"logit_bias has \d+ bytes of JSON"):
        CHAT_FORMAT.read(json.dumps({"logit_bias": {str(i): 1 for i in range(200_000)}}).encode())

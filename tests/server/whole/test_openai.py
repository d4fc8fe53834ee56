"""A real server and OpenAI's own Python client: chats, completions, streams, errors, clients that leave."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import torch
from openai import OpenAI
from tests.support.metrics import metric
from tests.support.waiting import SECONDS, wait_for

from kvseek.client import chat
from kvseek.core.manifest import read_manifest
from kvseek.core.request import Request, SamplingConfig
from kvseek.core.selected_rows import RowReport
from kvseek.engine.engine import Engine
from kvseek.server.launch import RunningServer

pytestmark = pytest.mark.server

TALK: Any = [
    {"role": "system", "content": "Keep the log."},
    {"role": "user", "content": [{"type": "text", "text": "one ship"}]},
    {"role": "assistant", "content": "two ships"},
    {"role": "user", "content": "the light was lit at dusk " * 8},
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
LONG: dict[str, Any] = GREEDY | {"max_tokens": 700}


def templated(engine: Engine, talk: Any) -> tuple[int, ...]:
    texts = [m | {"content": m["content"] if isinstance(m["content"], str) else m["content"][0]["text"]} for m in talk]
    return tuple(engine.tokenizer.encode(engine.tokenizer.apply_chat_template(texts), add_special_tokens=False))


def cached(usage: Any) -> int:
    """Tokens of the prompt that were not read."""
    return int(usage.prompt_tokens_details.cached_tokens)


def post(server: RunningServer, path: str, body: Any, **options: Any) -> requests.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return requests.post(f"{server.openai_url}/{path}", data=data, timeout=SECONDS, **options)


def test_the_model_is_listed(client: OpenAI, server: RunningServer, directory: Path, model: str) -> None:
    assert model == read_manifest(directory).source_model
    card = client.models.retrieve(model)
    assert (card.id, card.object) == (model, "model")
    assert card.model_dump()["max_model_len"] == 20_000
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.models.retrieve("other")


def test_a_chat_is_the_engines_answer_to_the_templated_tokens(client: OpenAI, model: str, engine: Engine) -> None:
    prompt = templated(engine, TALK)
    (expected,) = engine.generate([Request(prompt, 12)])
    body = {"ignore_eos": True, "cache_salt": "nobody else's"}
    reply = client.chat.completions.create(model=model, messages=TALK, **(GREEDY | {"extra_body": body}))
    (choice,) = reply.choices
    assert choice.message.content == engine.tokenizer.decode(expected)
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "length", None)
    assert reply.usage is not None
    counts = reply.usage
    assert (counts.prompt_tokens, counts.completion_tokens, counts.total_tokens) == (len(prompt), 12, len(prompt) + 12)
    assert counts.prompt_tokens_details.cached_tokens == 0
    assert reply.system_fingerprint is not None
    assert reply.model == model


def test_a_streamed_chat(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=TALK, **GREEDY)
    events = list(
        client.chat.completions.create(
            model=model, messages=TALK, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].choices == []
    assert (told := events[-1].usage) is not None
    assert told.total_tokens == whole.usage.total_tokens
    assert cached(told) == told.prompt_tokens - 1, "the server has just read the same prompt"
    assert events[-2].choices[0].finish_reason == "length"
    assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == whole.choices[0].message.content
    assert len({event.id for event in events}) == 1
    assert all(event.usage is None for event in events[:-1])


def test_a_stream_tells_which_rows_its_steps_selected(server: RunningServer, model: str, engine: Engine) -> None:
    """Those that an engine in this process selects, to the row."""
    text, asked = "the light was lit at dusk and the ship came in " * 50, {"block": 1, "layers": [1]}
    ids = tuple(engine.tokenizer.encode(text))
    sampling = SamplingConfig(return_selected_rows=RowReport(1, (1,)))
    engine.submit(Request(ids, 4, sampling))
    expected = []
    while engine.has_work:
        expected += [output.selected_rows for output in engine.step() if output.token_id is not None]
    body = {"model": model, "prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    events = post(server, "completions", body | {"return_selected_rows": asked}).text.split("\n\n")
    choices = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
    told = [report for choice in choices for report in choice["selected_rows"]]
    assert [report is None for report in told] == [True, False, False, False]
    for report, rows in zip(told[1:], expected[1:], strict=True):
        assert (report["region"], report["cached_tokens"]) == ([rows.start, rows.stop], rows.cached_tokens)
        assert (report["blocks"], report["counts"]) == rows.lists()
        assert report["blocks"][0] is not None, "the step selects"
    prompt = choices[0]["prompt"]
    assert (prompt["text"], len(prompt["offsets"])) == (text, len(ids))
    refused = post(server, "completions", body | {"return_selected_rows": {"layers": [99]}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_selected_rows"


def test_a_salt_keeps_what_was_read_apart(client: OpenAI, model: str) -> None:
    """A prompt that was read for another salt is read again, and only once for both choices."""
    found = []
    for salt in ("a", "b", "a"):
        body = {"ignore_eos": True, "cache_salt": salt}
        reply = client.chat.completions.create(model=model, messages=TALK, n=2, **(GREEDY | {"extra_body": body}))
        found.append(reply.usage.prompt_tokens - cached(reply.usage))
    assert found == [found[0], found[0], 1]
    assert found[0] > 1
    with pytest.raises(openai.BadRequestError, match="cache_salt has 300 characters: must be 1 to 256"):
        client.chat.completions.create(model=model, messages=TALK, extra_body={"cache_salt": "a" * 300})


def test_a_stream_ends_with_done(server: RunningServer, model: str) -> None:
    body = {"model": model, "prompt": [5, 6], "max_tokens": 3, "stream": True}
    with post(server, "completions", body, stream=True) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == b"data: [DONE]"
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    assert events[-1]["choices"][0]["finish_reason"] is not None
    assert all("usage" not in event for event in events)


def test_completions_of_texts_and_of_token_ids_are_alike(client: OpenAI, model: str, engine: Engine) -> None:
    texts = ["the harbour", "one ship, two"]
    ids = [engine.tokenizer.encode(text) for text in texts]
    expected = [engine.tokenizer.decode(tokens) for tokens in engine.generate([Request(tuple(i), 12) for i in ids])]
    several = client.completions.create(model=model, prompt=texts, **GREEDY)
    assert [(c.index, c.text) for c in several.choices] == list(enumerate(expected))
    assert several.usage.prompt_tokens == sum(map(len, ids))
    assert [c.text for c in client.completions.create(model=model, prompt=ids, **GREEDY).choices] == expected
    for prompt in (texts[0], ids[0]):
        assert client.completions.create(model=model, prompt=prompt, **GREEDY).choices[0].text == expected[0]


def test_choices_differ_and_can_be_repeated(client: OpenAI, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": TALK, "n": 4, "seed": 7, "max_tokens": 12}
    first = [choice.message.content for choice in client.chat.completions.create(**ask).choices]
    assert len(set(first)) == 4
    assert [choice.message.content for choice in client.chat.completions.create(**ask).choices] == first
    texts = dict.fromkeys(range(4), "")
    for event in client.chat.completions.create(stream=True, **ask):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == first


def test_log_probabilities(client: OpenAI, model: str, engine: Engine) -> None:
    reply = client.chat.completions.create(model=model, messages=TALK, logprobs=True, top_logprobs=3, **GREEDY)
    told = reply.choices[0].logprobs
    assert len(told.content) == 12
    assert all(each.logprob == each.top_logprobs[0].logprob for each in told.content), "greedy: the likeliest"
    assert all(len(each.top_logprobs) == 3 for each in told.content)
    streamed = client.chat.completions.create(
        model=model, messages=TALK, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    events = [e.choices[0].logprobs.content for e in streamed if e.choices[0].logprobs is not None]
    assert [each for content in events if content for each in content] == told.content
    completion = client.completions.create(model=model, prompt="one ship", logprobs=2, **GREEDY).choices[0].logprobs
    assert len(completion.tokens) == 12
    ids = engine.generate([Request(tuple(engine.tokenizer.encode("one ship")), 12)])[0]
    asked: dict[str, Any] = GREEDY | {"temperature": 2, "extra_body": {"ignore_eos": True, "forced_tokens": ids}}
    forced = client.completions.create(model=model, prompt="one ship", logprobs=2, **asked).choices[0].logprobs
    assert forced == completion


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def prompt_logprobs(judge: Any, ids: list[int]) -> torch.Tensor:
    """What transformers says of each token but the first: [tokens - 1, vocabulary]."""
    with torch.inference_mode():
        values: torch.Tensor = judge(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=1)
    return values


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_echo_with_log_probabilities_of_the_prompt(
    client: OpenAI, model: str, engine: Engine, judge: Any, tokens: int
) -> None:
    texts = ["the harbour master wrote the log", "one ship, two ships " * 20]
    ids = [engine.tokenizer.encode(text) for text in texts]
    asked: dict[str, Any] = {"model": model, "logprobs": 2, "echo": True, **GREEDY, "max_tokens": tokens}
    reply = client.completions.create(prompt=texts, **asked)
    for choice, text, prompt in zip(reply.choices, texts, ids, strict=True):
        generated = engine.generate([Request(tuple(prompt), tokens)])[0] if tokens else []
        assert choice.text == text + engine.tokenizer.decode(generated)
        assert choice.finish_reason == "length"
        told = choice.logprobs
        assert told.token_logprobs is not None
        assert len(told.tokens) == len(told.text_offset) == len(told.top_logprobs) == len(prompt) + tokens
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None), "nothing precedes the first token"
        values = prompt_logprobs(judge, prompt)
        expected = values.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert told.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=2e-4)
        best = values.max(dim=1).values.tolist()
        assert [max(top.values()) for top in told.top_logprobs[1 : len(prompt)]] == pytest.approx(best, abs=2e-4)
        spelt = list(zip(told.text_offset, told.tokens, strict=True))[: len(prompt)]
        assert "".join(token for _, token in spelt) == text
        assert all(text[at:].startswith(token) for at, token in spelt)
        assert told.text_offset[len(prompt) : len(prompt) + 1] == [len(text)][:tokens]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (sum(map(len, ids)), 2 * tokens)
    events = list(client.completions.create(prompt=texts[0], stream=True, **asked))
    assert "".join(event.choices[0].text for event in events) == reply.choices[0].text
    streamed = [n for e in events if (one := e.choices[0].logprobs) for n in one.token_logprobs or ()]
    assert streamed[1:] == pytest.approx((reply.choices[0].logprobs.token_logprobs or [])[1:], abs=2e-4)


def test_echo_of_token_ids_and_its_end_token(client: OpenAI, model: str, engine: Engine) -> None:
    prompt = engine.tokenizer.encode("the light was lit")
    (drawn,) = engine.generate([Request(tuple(prompt), 1)])
    asked: dict[str, Any] = {"model": model, "prompt": prompt, "echo": True, "max_tokens": 1, "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == "the light was lit" + engine.tokenizer.decode(drawn)
    ended = client.completions.create(logprobs=0, extra_body={"stop_token_ids": drawn}, **asked).choices[0]
    assert (ended.text, ended.finish_reason) == ("the light was lit", "stop")
    assert len(ended.logprobs.tokens or ()) == len(prompt) + 1, "lm_eval cuts off the last one"
    with pytest.raises(openai.BadRequestError, match="max_tokens = 0: must be >= 1"):
        client.completions.create(model=model, prompt=prompt, max_tokens=0)


def test_the_clients_errors(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature = -1") as bad:
        client.chat.completions.create(model=model, messages=TALK, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="max_input_len = 1000") as long:
        client.completions.create(model=model, prompt=[5] * 1100)
    assert long.value.code == "context_length_exceeded"
    assert "this model's maximum context length is" in str(long.value), "words that LiteLLM looks for"
    with pytest.raises(openai.NotFoundError, match=f"there is {model}") as other:
        client.chat.completions.create(model="gpt-4", messages=TALK)
    assert (other.value.code, other.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="the model's chat template knows no tools"):
        client.chat.completions.create(
            model=model, messages=TALK, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_a_full_queue_is_429(client: OpenAI, server: RunningServer, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "prompt": [[5, 6]] * 60, **LONG}
    with pytest.raises(openai.RateLimitError, match="queue") as caught:
        client.completions.create(**ask)
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["Retry-After"] == "1"
    wait_for(lambda: metric(server.metrics_url, "kvseek:num_requests_running") == 0, "the other choices are cancelled")


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_all_its_choices(server: RunningServer, model: str, streams: bool) -> None:
    body = json.dumps(
        {"model": model, "prompt": [5, 6], "n": 3, "stream": streams, "ignore_eos": True, "max_tokens": 1100}
    )
    tokens = metric(server.metrics_url, "kvseek:generation_tokens_total")
    with socket.create_connection(("127.0.0.1", server.ports.openai), SECONDS) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body.encode())
        wait_for(lambda: metric(server.metrics_url, "kvseek:num_requests_running") == 3, "three requests run")
    wait_for(lambda: metric(server.metrics_url, "kvseek:num_requests_running") == 0, "none runs any more")
    assert metric(server.metrics_url, "kvseek:generation_tokens_total") - tokens < 3 * 1100


def test_the_id_of_a_request_comes_back(server: RunningServer) -> None:
    url = f"{server.openai_url}/models"
    assert requests.get(url, headers={"X-Request-Id": "my id"}, timeout=SECONDS).headers["X-Request-Id"] == "my id"
    ids = {requests.get(url, timeout=SECONDS).headers["X-Request-Id"] for _ in range(3)}
    assert len(ids) == 3


def test_the_chat_command_sends_the_whole_conversation(
    server: RunningServer, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    flags = ["--openai_url", server.openai_url, "--max_tokens", "5", "--conversation", str(file), "--json"]
    assert chat.main([*flags, "--prompt", "one ship", "--system", "Keep the log."]) == 0
    first = json.loads(capsys.readouterr().out)
    talk = json.loads(file.read_text())
    assert [message["role"] for message in talk] == ["system", "user", "assistant"]
    assert talk[-1]["content"] == first["text"]
    assert chat.main([*flags, "--prompt", "two ships"]) == 0
    second = json.loads(capsys.readouterr().out)
    talk.append({"role": "user", "content": "two ships"})
    prompt = templated(engine, talk)
    (expected,) = engine.generate([Request(prompt, 5, end_ids=(1,))])
    assert (second["prompt_tokens"], second["text"]) == (len(prompt), engine.tokenizer.decode(expected))

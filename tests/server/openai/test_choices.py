"""Pieces of a choice, and the JSON that they become."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvseek.core.errors import CodedError, ErrorCode
from kvseek.core.request import FinishReason, LogProbs, Request, SamplingConfig, StepOutput
from kvseek.core.selected_rows import RowReport, SelectedRows
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.openai.choices import LOWEST, Choice, Echo, Reply, usage

TEXT = "the harbour ⚓ lit at dusk"


def choice(tokenizer: Tokenizer, *stop: str, streaming: bool = True, logprobs: int | None = None) -> Choice:
    request = Request((5,), 50, SamplingConfig(logprobs=logprobs))
    return Choice(request, tokenizer, stop, streaming)


def outputs(ids: list[int], reason: FinishReason | None = None, logprobs: int | None = None) -> list[StepOutput]:
    steps = []
    for number, token in enumerate(ids):
        last = reason if number == len(ids) - 1 and reason is not FinishReason.END_ID else None
        told = None if logprobs is None else LogProbs(-0.5 * number, ((token, -0.5 * number), (7, -9.0))[:logprobs])
        steps.append(StepOutput(1, token, last, logprobs=told))
    return [*steps, StepOutput(1, None, reason)] if reason is FinishReason.END_ID else steps


def pieces(one: Choice, steps: list[StepOutput]) -> list[dict[str, Any]]:
    return [piece for step in steps for piece in one.push([step])]


@pytest.mark.parametrize(
    ("reason", "name"),
    [(FinishReason.LENGTH, "length"), (FinishReason.END_ID, "stop"), (FinishReason.TIMEOUT, "length")],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_pieces_are_the_text(tokenizer: Tokenizer, reason: FinishReason, name: str, streaming: bool) -> None:
    ids = tokenizer.encode(TEXT)
    found = pieces(choice(tokenizer, streaming=streaming), outputs(ids, reason))
    assert "".join(piece["text"] for piece in found) == TEXT
    assert [piece["finish_reason"] for piece in found[:-1]] == [None] * (len(found) - 1)
    assert (found[-1]["finish_reason"], found[-1]["count"]) == (name, len(ids))
    assert (len(found) == 1) is not streaming


@settings(max_examples=60)
@given(
    cuts=st.sets(st.integers(1, 30)),
    stop=st.sampled_from(["", "bour ⚓ l", "dusk", "zz"]),
    reason=st.sampled_from([FinishReason.LENGTH, FinishReason.END_ID, FinishReason.SHUTDOWN]),
    logprobs=st.sampled_from([None, 1]),
)
def test_outputs_that_come_together_make_one_piece_of_the_same_text(
    tokenizer: Tokenizer, cuts: set[int], stop: str, reason: FinishReason, logprobs: int | None
) -> None:
    """However outputs are grouped, text, tokens, their log probabilities, counts and ends are those of one after the other."""

    def told(groups: list[list[StepOutput]]) -> tuple[str, list[Any], int, str | None, bool]:
        one, found, broken = choice(tokenizer, *filter(None, [stop]), logprobs=logprobs), list[dict[str, Any]](), False
        for group in groups:
            before = len(found)
            try:
                for piece in one.push(group):
                    found.append(piece)
            except CodedError:
                broken = True
            assert len(found) - before <= 1
        tokens = [token for piece in found for token in piece["tokens"]]
        return "".join(p["text"] for p in found), tokens, found[-1]["count"], found[-1]["finish_reason"], broken

    steps = outputs(tokenizer.encode(TEXT), reason, logprobs)
    borders = [0, *sorted(cut for cut in cuts if cut < len(steps)), len(steps)]
    groups = [steps[first:last] for first, last in itertools.pairwise(borders)]
    if reason is not FinishReason.SHUTDOWN or stop:
        assert told(groups) == told([[step] for step in steps])
    else:  # the last token, which comes with the end here, is given out or not
        text, _, _, end, broken = told(groups)
        assert TEXT.startswith(text)
        assert (end, broken) == (None, True)


def test_a_stop_text_ends_the_choice_although_the_engine_goes_on(tokenizer: Tokenizer) -> None:
    one = choice(tokenizer, "bour ⚓ l")
    found = pieces(one, outputs(tokenizer.encode(TEXT)))
    assert "".join(piece["text"] for piece in found) == "the har"
    assert found[-1]["finish_reason"] == "stop"
    assert one.ended
    assert not list(one.push([StepOutput(1, 5)])), "tokens drawn before the cancellation arrived"


@pytest.mark.parametrize("reason", [FinishReason.SHUTDOWN, FinishReason.CANCELLED])
def test_an_answer_that_the_server_broke_off_is_an_error(tokenizer: Tokenizer, reason: FinishReason) -> None:
    with pytest.raises(CodedError, match="shutting down") as caught:
        pieces(choice(tokenizer), outputs([5], reason))
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_progress_in_reading_the_prompt_makes_no_piece(tokenizer: Tokenizer) -> None:
    assert not list(choice(tokenizer).push([StepOutput(1, prefill_progress=0.5)]))


def test_log_probabilities_of_a_chat(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    found = pieces(choice(tokenizer, logprobs=2), outputs(ids, FinishReason.LENGTH, 2))
    reply = Reply(True, "m", "fp", tokenizer, True, False)
    events = [json.loads(event) for piece in found for event in reply.pieces(0, piece)]
    told = [each for event in events if (log := event["choices"][0]["logprobs"]) for each in log["content"]]
    assert b"".join(bytes(each["bytes"]) for each in told).decode() == TEXT, "bytes of all tokens are the text"
    assert [each["logprob"] for each in told] == [-0.5 * number for number in range(len(ids))]
    assert all(len(each["top_logprobs"]) == 2 for each in told)
    assert [each["token"] for each in told if not each["token"].startswith("bytes:")]
    assert "bytes:\\xe2" in {each["token"][:10] for each in told}, "a part of the anchor has no text of its own"


def test_log_probabilities_of_a_completion(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    (piece,) = pieces(choice(tokenizer, logprobs=1, streaming=False), outputs(ids, FinishReason.LENGTH, 1))
    whole = Reply(False, "m", "fp", tokenizer, True, False).whole([piece], usage(1, len(ids), 0))
    told = json.loads(whole)["choices"][0]["logprobs"]
    assert {len(values) for values in told.values()} == {len(ids)}
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        assert token.startswith("bytes:") or TEXT[offset:].startswith(token)
    assert told["top_logprobs"][0] == {told["tokens"][0]: 0}


def echoing(tokenizer: Tokenizer) -> tuple[Choice, list[int]]:
    ids = tokenizer.encode("one ship")
    request = Request(tuple(ids), 1, SamplingConfig(logprobs=0, prompt_logprobs=0))
    return Choice(request, tokenizer, (), False, Echo("one ship", tokenizer.offsets(ids))), ids


def test_an_echo_tells_the_prompts_log_probabilities_first(tokenizer: Tokenizer) -> None:
    one, ids = echoing(tokenizer)
    read = [StepOutput(1, prompt_logprobs=(LogProbs(-1.0 * place),)) for place in range(1, len(ids))]
    (piece,) = pieces(one, [*read, StepOutput(1, None, FinishReason.END_ID, logprobs=LogProbs(-9.0), end_id=1)])
    assert (piece["text"], piece["count"], piece["finish_reason"]) == ("one ship", 0, "stop")
    whole = Reply(False, "m", "fp", tokenizer, True, False).whole([piece], usage(1, 0, 0))
    told = json.loads(whole)["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [None, *(-1.0 * place for place in range(1, len(ids))), -9.0]
    assert "".join(told["tokens"]) == "one ship<|end|>"
    assert told["text_offset"][-1] == len("one ship")


def test_an_echo_whose_time_passes_before_the_prompt_is_read_fails(tokenizer: Tokenizer) -> None:
    one, _ = echoing(tokenizer)
    with pytest.raises(CodedError, match="timeout: passed before the prompt was read") as caught:
        pieces(one, [StepOutput(1, None, FinishReason.TIMEOUT)])
    assert caught.value.code is ErrorCode.TIMEOUT


def test_the_tokens_own_log_probability_is_among_the_likeliest(tokenizer: Tokenizer) -> None:
    step = StepOutput(1, 5, FinishReason.LENGTH, logprobs=LogProbs(float("-inf"), ((6, -1.0),)))
    (piece,) = pieces(choice(tokenizer, logprobs=1), [step])
    (event,) = Reply(False, "m", "fp", tokenizer, True, False).pieces(0, piece)
    (top,) = json.loads(event)["choices"][0]["logprobs"]["top_logprobs"]
    assert sorted(top.values()) == [LOWEST, -1.0], "JSON has no infinity"


@pytest.mark.parametrize("chat", [True, False])
def test_selected_rows_come_with_their_tokens(tokenizer: Tokenizer, chat: bool) -> None:
    """Also with a token that has no text yet; the first event says what positions stand for."""
    numbers = (np.array(each, np.int32).tobytes() for each in ([1, 3], [0, 0, 2], [5, 1, 16]))
    rows = SelectedRows(9, 7.5, 4, 40, 16, (0, 3), (0, 1), (3,), *numbers)
    request = Request((5,), 50, SamplingConfig(return_selected_rows=RowReport()))
    one, ids = Choice(request, tokenizer, [], True, prompt=Echo("the", [0])), tokenizer.encode("⚓ lit")
    steps = [StepOutput(1, token, selected_rows=rows if number else None) for number, token in enumerate(ids)]
    reply = Reply(chat, "m", "fp", tokenizer, False, False)
    events = [json.loads(event) for piece in pieces(one, steps) for event in reply.pieces(0, piece)]
    told = [report for event in events for report in event["choices"][0]["selected_rows"]]
    assert told == [None] + (len(ids) - 1) * [
        {
            "cached_tokens": 9,
            "attended_tokens": 7.5,
            "region": [4, 40],
            "block": 16,
            "layers": [0, 3],
            "kv_heads": [0, 1],
            "blocks": [[[0], [0, 2]], None],
            "counts": [[[5], [1, 16]], None],
        }
    ]
    assert [event["choices"][0].get("prompt") for event in events] == [{"text": "the", "offsets": [0]}] + (
        len(events) - 1
    ) * [None]


def test_events_of_a_chat_are_openais(tokenizer: Tokenizer) -> None:
    reply = Reply(True, "m", "fp", tokenizer, False, True)
    begin = list(map(json.loads, reply.begin(2)))
    assert [event["choices"][0]["delta"] for event in begin] == [{"role": "assistant", "content": ""}] * 2
    piece = {
        "text": "x",
        "parts": [("content", "x")],
        "tokens": [],
        "rows": [],
        "prompt": None,
        "finish_reason": "stop",
    }
    text, finish = map(json.loads, reply.pieces(1, piece))
    assert text["choices"] == [{"index": 1, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None}]
    assert finish["choices"] == [{"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    counts, done = reply.end(usage(3, 4, 2))
    assert done == b"[DONE]"
    end = json.loads(counts)
    assert end["choices"] == []
    assert end["usage"]["total_tokens"] == 7
    assert end["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert [event["usage"] for event in (*begin, text, finish)] == [None] * 4, "as OpenAI, if usage was asked for"
    assert "usage" not in json.loads(Reply(True, "m", "fp", tokenizer, False, False).begin(1)[0])
    assert {event["id"] for event in (*begin, text, finish, end)} == {reply.id}

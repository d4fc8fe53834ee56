"""kvseek.LLM: what it generates beside the bare engine, its pieces, its errors, and what it leaves behind."""

from __future__ import annotations

import _thread
import gc
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import BuildEngine
from tests.support.random_models import SPECIAL_TOKENS, save_random_model
from tests.support.waiting import wait_for
from transformers import PreTrainedTokenizerFast

import kvseek
from kvseek import (
    LLM,
    GenerationError,
    Guide,
    GuideType,
    KvseekError,
    OutputPiece,
    RequestError,
    RequestOutput,
    SamplingParams,
    Session,
)
from kvseek.core.errors import UnavailableError
from kvseek.core.request import Request
from kvseek.engine.draws.sampling import Drawn, Sampler
from kvseek.engine.engine import Engine

PROMPTS = [[i * 13 % 101 + 3 for i in range(number, number + 90)] for number in range(6)]
SPARSE = ["--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=800, ignore_eos=True)
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, build_engine: BuildEngine) -> Path:
    """An engine whose tokenizer begins every text with a special token."""
    model = save_random_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    begin_texts(model)
    return build_engine(model, "pariskv", *SPARSE, "--pariskv.top_k", "20")


def begin_texts(model: Path) -> None:
    from tokenizers import processors

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    begin = SPECIAL_TOKENS[0]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, 0)]
    )
    tokenizer.save_pretrained(model)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    """What the engine alone draws for PROMPTS."""
    return Engine.load(directory).generate([Request(tuple(ids), GREEDY.max_tokens) for ids in PROMPTS])


def without_times(output: RequestOutput | None) -> dict[str, Any]:
    """All but how long it took, and how much of the prompt another request had read."""
    told = {name: value for name, value in vars(output).items() if not name.endswith("_seconds")}
    del told["reused_tokens"]
    return told


# What is generated


def test_outputs_are_the_engines(llm: LLM, expected: list[list[int]]) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [list(output.token_ids) for output in outputs] == expected
    assert [output.index for output in outputs] == list(range(6))
    assert [list(output.prompt_token_ids) for output in outputs] == PROMPTS
    assert [output.text for output in outputs] == [llm.tokenizer.decode(ids) for ids in expected]
    for output in outputs:
        assert (output.prompt, output.finish_reason, output.error) == (None, "length", "")
        assert output.cached_tokens == pytest.approx(90 + 12)  # the mean of 91 to 113
        assert 0 < output.attended_tokens < 60
        assert output.attended_share == output.attended_tokens / output.cached_tokens
        assert 0 < output.ttft_seconds < TIMEOUT
        assert output.queue_seconds < output.ttft_seconds
        assert 0 < output.tpot_seconds < TIMEOUT


def test_prompts_run_as_a_batch(llm: LLM) -> None:
    widths: list[int] = []
    llm.engine.on_step = lambda report: widths.append(report.decode_batch)
    llm.generate(PROMPTS, GREEDY)
    llm.engine.on_step = None
    assert max(widths) == llm.config.max_batch_size


def test_an_llm_that_speculates_gives_the_same(directory: Path, expected: list[list[int]]) -> None:
    with LLM(directory, speculation="ngram", num_speculative_tokens=4) as speculating:
        for options in ({}, {"speculate": False}):
            outputs = speculating.generate(PROMPTS, GREEDY, **options)
            assert [list(output.token_ids) for output in outputs] == expected
        with pytest.raises(RequestError, match="speculate = 'no'"):
            speculating.generate(PROMPTS[0], GREEDY, speculate="no")


def test_forms_of_prompts(llm: LLM, expected: list[list[int]]) -> None:
    text = "the harbour master"
    ids = llm.tokenizer.encode(text)
    assert ids[0] == 0
    assert llm.generate([], GREEDY) == []
    for prompts in (PROMPTS[0], tuple(PROMPTS[0]), np.array(PROMPTS[0]), np.array([PROMPTS[0]]), [PROMPTS[0]]):
        (output,) = llm.generate(prompts, GREEDY)
        assert list(output.token_ids) == expected[0]
    (alone,) = llm.generate(text, GREEDY)
    both = llm.generate([text, ids], GREEDY)
    assert [output.prompt for output in both] == [text, None]
    for output in both:
        assert list(output.prompt_token_ids) == ids
        assert (output.token_ids, output.text) == (alone.token_ids, alone.text)


def test_a_parameter_set_for_each_prompt(llm: LLM, expected: list[list[int]]) -> None:
    params = [SamplingParams(max_tokens=2 + number, ignore_eos=True) for number in range(6)]
    outputs = llm.generate(PROMPTS, params)
    assert [list(output.token_ids) for output in outputs] == [ids[: 2 + n] for n, ids in enumerate(expected)]
    drawn = [SamplingParams(max_tokens=8, temperature=1.5, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    first, other, again = (output.token_ids for output in llm.generate([PROMPTS[0]] * 3, drawn))
    assert first == again != other


def test_log_probabilities_and_what_changes_logits(llm: LLM) -> None:
    (plain,) = llm.generate([PROMPTS[0]], GREEDY)
    assert plain.logprobs is None
    (told,) = llm.generate([PROMPTS[0]], replace(GREEDY, logprobs=2))
    assert told.token_ids == plain.token_ids
    assert [one.top[0] for one in told.logprobs] == [
        (i, one.token) for i, one in zip(told.token_ids, told.logprobs, strict=True)
    ]
    assert all(len(one.top) == 2 and one.token <= 0 for one in told.logprobs)
    assert told.prompt_logprobs is None
    scored, alone = llm.generate(
        [PROMPTS[0]] * 2, [replace(GREEDY, prompt_logprobs=1), SamplingParams(prompt_logprobs=1, max_tokens=0)]
    )
    assert scored.token_ids == plain.token_ids
    assert [one is None for one in scored.prompt_logprobs] == [i == 0 for i in range(len(scored.prompt_token_ids))]
    assert all(one is None or one.token <= one.top[0][1] for one in scored.prompt_logprobs)
    assert (alone.token_ids, alone.finish_reason, len(alone.prompt_logprobs or ())) == (
        (),
        "length",
        len(scored.prompt_logprobs),
    )
    first = plain.token_ids[0]
    (biased,) = llm.generate([PROMPTS[0]], replace(GREEDY, logit_bias={first: -100.0}))
    assert first not in biased.token_ids
    (forced,) = llm.generate([PROMPTS[0]], replace(GREEDY, logit_bias={7: 100.0}))
    assert set(forced.token_ids) == {7}
    (varied,) = llm.generate(
        [PROMPTS[0]], replace(GREEDY, logit_bias={7: 100.0}, frequency_penalty=100.0, max_tokens=4)
    )
    assert varied.token_ids.count(7) < 4
    text = next(word for word in plain.text.split() if word)
    (without,) = llm.generate([PROMPTS[0]], replace(GREEDY, bad_words=text))
    for spelling in llm.tokenizer.spellings(text):
        assert all(without.token_ids[at : at + len(spelling)] != spelling for at in range(len(without.token_ids)))


def test_pieces_add_up_to_the_outputs(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    pieces: list[list[OutputPiece]] = [[] for _ in PROMPTS]
    for piece in llm.generate(PROMPTS, GREEDY, stream=True):
        pieces[piece.index].append(piece)
    for own, output in zip(pieces, outputs, strict=True):
        assert "".join(piece.text for piece in own) == output.text
        assert [token for piece in own for token in piece.token_ids] == list(output.token_ids)
        assert [piece.finish_reason for piece in own] == [None] * 23 + ["length"]
        assert [piece.output for piece in own[:-1]] == [None] * 23
        assert without_times(own[-1].output) == without_times(output)


def test_a_conversation_is_written_by_the_template(llm: LLM) -> None:
    """Without a second special token at the beginning: the template has written it."""
    conversation = [{"role": "user", "content": "who wrote the log"}]
    text = llm.tokenizer.apply_chat_template(conversation)
    (output,) = llm.chat(conversation, GREEDY)
    assert output.prompt == text
    assert list(output.prompt_token_ids) == llm.tokenizer.encode(text, add_special_tokens=False)
    assert output.prompt_token_ids[:2].count(0) == 1
    longer = [*conversation, {"role": "assistant", "content": "he did"}, {"role": "user", "content": "when"}]
    several = llm.chat([conversation, longer], GREEDY)
    assert without_times(several[0]) == without_times(output)
    assert "he did" in str(several[1].prompt)
    streamed = [piece.text for piece in llm.chat(conversation, GREEDY, stream=True)]
    assert "".join(streamed) == output.text


# What ends a request


def test_a_stop_text_ends_the_output(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[0]], LONG)
    word = whole.text[20:23]
    for stop in (word, [word, "not in it at all"]):
        params = SamplingParams(max_tokens=800, ignore_eos=True, stop=stop)
        (output,) = llm.generate([PROMPTS[0]], params)
        assert output.finish_reason == "stop_word"
        assert output.text == whole.text[: whole.text.index(word)]
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    wait_for(lambda: llm.engine.running == 0)  # the engine does not go on to the 800th token


def test_tokens_that_end_the_output(llm: LLM, expected: list[list[int]]) -> None:
    ids = expected[0]
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=[ids[9], ids[12]])
    (output,) = llm.generate([PROMPTS[0]], params)
    assert output.finish_reason == "end_id"
    assert list(output.token_ids) == ids[: min(ids.index(ids[9]), ids.index(ids[12]))]


def test_the_models_own_end_tokens(directory: Path, llm: LLM) -> None:
    (end,) = llm.config.model.eos_token_ids
    bent = SamplingParams(max_tokens=800, temperature=3.0, seed=4)  # so flat that the end token is drawn some time
    free = SamplingParams(max_tokens=800, temperature=3.0, seed=4, ignore_eos=True)
    ended, went_on = (llm.generate(PROMPTS[0], params)[0] for params in (bent, free))
    assert (ended.finish_reason, went_on.finish_reason) == ("end_id", "length")
    at = went_on.token_ids.index(end)
    assert ended.token_ids == went_on.token_ids[:at]


def test_without_max_tokens_an_output_goes_on_as_long_as_there_is_room(llm: LLM) -> None:
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.token_ids) == llm.config.max_seq_len - len(PROMPTS[0])
    assert output.finish_reason == "length"


# Errors


def test_numbers_of_numpy_are_numbers_and_empty_words_none(llm: LLM, expected: list[list[int]]) -> None:
    params = SamplingParams(
        max_tokens=np.int64(24),  # type: ignore[arg-type]
        temperature=np.float32(0),  # type: ignore[arg-type]
        top_k=-1,
        stop=["", ""],
        bad_words="",
        stop_token_ids=None,
        logit_bias={np.int32(5): np.float32(0)},  # type: ignore[dict-item]
        ignore_eos=True,
    )
    assert (params.stop, params.bad_words) == ((), ())
    assert list(llm.generate(np.array(PROMPTS[0]), params)[0].token_ids) == expected[0]
    for greedy in ({"top_p": 0}, {"min_p": 1}):
        drawn = SamplingParams(max_tokens=24, temperature=2.0, ignore_eos=True, **greedy)  # type: ignore[arg-type]
        assert list(llm.generate([PROMPTS[0]], drawn)[0].token_ids) == expected[0]


FORK = """
import os, sys
from kvseek import LLM, KvseekError, SamplingParams

llm = LLM(sys.argv[1])
pieces = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=500, ignore_eos=True), stream=True)
next(pieces)
child = os.fork()
if child == 0:
    calls = [
        lambda: llm.generate([[5, 6]]),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.prefix("a"),
        lambda: llm.end_session("a"),
        lambda: [*pieces],  # behind those that came before the fork
    ]
    for call in calls:
        try:
            call()
        except KvseekError as error:
            print(error, flush=True)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(sum(len(piece.token_ids) for piece in pieces))
"""


def test_a_fork_of_the_process_is_told_that_it_has_no_engine(directory: Path) -> None:
    run = subprocess.run([sys.executable, "-c", FORK, directory], capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert len(lines) == 6, run.stderr
    assert all("this process is a fork" in line and "spawn" in line for line in lines[:5])
    assert lines[5] == "499", "the parent's own requests go on"


def test_a_guide_is_followed_or_refused(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, guide=Guide(GuideType.REGEX, "(yes|no), [0-9]{2}"))
    outputs = llm.generate(PROMPTS, [replace(params, seed=seed) for seed in range(len(PROMPTS))])
    assert all(re.fullmatch("(yes|no), [0-9]{2}", output.text) for output in outputs)
    refused = replace(params, guide=Guide(GuideType.REGEX, "("))
    with pytest.raises(GenerationError, match=r"prompts\[1\]: guide: cannot be followed") as caught:
        llm.generate(PROMPTS[:2], [params, refused])
    assert re.fullmatch("(yes|no), [0-9]{2}", caught.value.outputs[0].text)


def test_priority_and_timeout_are_the_engines(llm: LLM) -> None:
    with pytest.raises(RequestError, match="priority = 300"):
        llm.generate("log", GREEDY, priority=300)
    with pytest.raises(RequestError, match="timeout = 0"):
        llm.chat([{"role": "user", "content": "log"}], GREEDY, timeout=0)
    with pytest.raises(GenerationError, match=r"1 of 1 requests failed.*timeout = 1e-06 s"):
        llm.generate("log", GREEDY, timeout=1e-6)


def test_a_request_that_fails_takes_no_other_with_it(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Sampler.take
    drawn: list[int] = []

    def fail(self: Sampler, found: Drawn | int) -> int:
        if self.greedy:
            return take(self, found)
        if len(drawn) == 3:
            raise RuntimeError("not a number")
        drawn.append(take(self, found))
        return drawn[-1]

    monkeypatch.setattr(Sampler, "take", fail)
    params = [GREEDY, SamplingParams(max_tokens=24, temperature=1.0, logprobs=0, ignore_eos=True), GREEDY]
    with pytest.raises(
        GenerationError, match=r"^1 of 3 requests failed, the first is prompts\[1\]: .*not a number"
    ) as raised:
        llm.generate(PROMPTS[:3], params)
    good, bad, other = raised.value.outputs
    assert [list(good.token_ids), list(other.token_ids)] == [expected[0], expected[2]]
    assert list(bad.token_ids) == drawn
    assert (bad.finish_reason, bad.text) == ("error", llm.tokenizer.decode(drawn[:3]))
    assert "not a number" in bad.error
    assert not good.error

    drawn.clear()
    streamed: list[int] = []
    with pytest.raises(GenerationError):
        streamed.extend(  # what came before the error is kept
            token
            for piece in llm.generate(PROMPTS[:3], params, stream=True)
            if piece.index == 2
            for token in piece.token_ids
        )
    assert streamed == expected[2]


# Threads, and what is left behind


def test_threads_share_an_llm(llm: LLM, expected: list[list[int]]) -> None:
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = list(llm.generate([PROMPTS[number]], GREEDY)[0].token_ids)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert [found[number] for number in range(6)] == expected


def test_leaving_a_stream_cancels_its_requests(llm: LLM) -> None:
    for piece in llm.generate(PROMPTS, LONG, stream=True):
        assert piece.output is None
        break
    wait_for(lambda: llm.engine.running == llm.engine.waiting == 0)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """The collector does not run: Python swallows an exception that a signal raises inside a garbage object's `__del__`."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_keyboard_interrupt_cancels_the_requests(llm: LLM, no_garbage: None) -> None:
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 50, LONG)
    timer.join()
    wait_for(lambda: llm.engine.running == llm.engine.waiting == 0)
    assert len(llm.generate(PROMPTS[0], GREEDY)[0].token_ids) == 24


def test_close_ends_threads_and_requests(directory: Path) -> None:
    before = threading.enumerate()
    llm = LLM(directory)
    pieces = llm.generate(PROMPTS, LONG, stream=True)
    next(pieces)
    llm.close()
    llm.close()
    assert threading.enumerate() == before
    with pytest.raises(
        GenerationError, match=r"6 of 6 requests failed.* the LLM was closed before the request had ended"
    ):
        list(pieces)
    with pytest.raises(UnavailableError, match="the LLM is closed"):
        llm.generate("log")


def test_an_llm_that_is_dropped_is_closed(directory: Path) -> None:
    before = threading.enumerate()
    llm = LLM(directory)
    assert len(threading.enumerate()) > len(before)
    del llm
    gc.collect()
    assert threading.enumerate() == before


# Sessions, salts and prefixes


STORY = [i * i % 97 + 3 for i in range(600)]
ONE = SamplingParams(max_tokens=1)


def test_a_session_is_held_and_ended(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "the light was lit at dusk " * 20}]
    found = [llm.chat(conversation, ONE, session=own, cache_salt="py") for own in ("talk", Session("talk", 90))]
    assert [output.reused_tokens > 100 for (output,) in found] == [False, True]
    usage = llm.engine.cache_usage
    assert (usage.sessions, usage.pinned_extents) == (1, 1)
    assert llm.end_session("talk") is None
    ended = llm.end_session("talk", cache_salt="py")
    assert (ended.freed_extents, ended.freed_tokens > 100) == (1, True)
    assert llm.chat(conversation, ONE, cache_salt="py")[0].reused_tokens == 0


def test_salts_keep_prompts_apart(llm: LLM) -> None:
    found = [llm.generate(STORY, ONE, cache_salt=salt)[0].reused_tokens for salt in ("one", "two", "one")]
    assert found == [0, 0, len(STORY) - 1]


def test_a_text_is_read_once_for_many_questions(llm: LLM) -> None:
    document = "the harbour light was lit at dusk. " * 20
    with llm.prefix(document, cache_salt="docs") as prefix:
        outputs = llm.generate(["who lit it?", "when?"], GREEDY, prefix=prefix)
        usage = llm.engine.cache_usage
        assert usage.sessions == 1
        assert usage.pinned_extents >= 1
    assert prefix.token_ids == tuple(llm.tokenizer.encode(document))
    assert [output.prompt for output in outputs] == [document + "who lit it?", document + "when?"]
    assert [output.reused_tokens >= len(prefix.token_ids) for output in outputs] == [True, True]
    for output in outputs:
        assert output.prompt_token_ids[: len(prefix.token_ids)] == prefix.token_ids
        (alone,) = llm.generate(output.prompt_token_ids, GREEDY, cache_salt="alone")
        assert output.token_ids == alone.token_ids
    wait_for(lambda: llm.engine.cache_usage.sessions == 0)
    assert llm.generate(document, ONE, cache_salt="docs")[0].reused_tokens == 0, "its end has freed all"
    with pytest.raises(RequestError, match="prefix: is closed; make another one"):
        llm.generate("why?", GREEDY, prefix=prefix)
    prefix.close()


def test_messages_are_read_once_for_many_conversations(llm: LLM) -> None:
    beginning = [{"role": "system", "content": "the light was lit at dusk " * 20}]
    questions = [[{"role": "user", "content": content}] for content in ("who?", "when was it?")]
    with llm.prefix(beginning) as prefix:
        pieces = list(llm.chat(questions, GREEDY, prefix=prefix, stream=True))
        outputs = sorted(
            (piece.output for piece in pieces if piece.output is not None), key=lambda output: output.index
        )
    for output, question in zip(outputs, questions, strict=True):
        assert output.prompt == llm.tokenizer.apply_chat_template([*beginning, *question])
        assert output.reused_tokens >= len(prefix.token_ids) - 1 > 100, "a space may belong to what follows"


def test_token_ids_are_a_prefix_too(llm: LLM) -> None:
    with llm.prefix(STORY) as prefix:
        for more in ([], [5, 6]):
            (output,) = llm.generate([more], ONE, prefix=prefix)
            assert list(output.prompt_token_ids) == STORY + more
            assert output.prompt is None
            assert output.reused_tokens >= len(STORY) - 1


def test_a_prefix_that_is_dropped_is_closed(llm: LLM) -> None:
    prefix = llm.prefix(STORY, cache_salt="dropped")
    assert llm.engine.cache_usage.sessions == 1
    del prefix
    gc.collect()
    wait_for(lambda: llm.engine.cache_usage.sessions == 0)


def test_a_conversation_with_a_prefix_has_a_session_of_its_own(llm: LLM) -> None:
    with llm.prefix(STORY, cache_salt="own") as prefix:
        llm.generate([[5, 6]], ONE, prefix=prefix, session="talk")
    assert llm.generate([STORY], ONE, cache_salt="own")[0].reused_tokens == len(STORY) - 1
    assert llm.end_session("talk", cache_salt="own") is not None


def test_prefixes_and_sessions_that_do_not_fit_are_refused(llm: LLM, directory: Path) -> None:
    message = [{"role": "user", "content": "who?"}]
    with llm.prefix("the light was lit", cache_salt="a") as text, llm.prefix(message) as messages:
        refusals: list[tuple[str, Callable[[], Any]]] = [
            ("prefix: has no messages, as it was made of a text", lambda: llm.chat(message, prefix=text)),
            ("prefix: was made of messages; give it to chat", lambda: llm.generate("who?", prefix=messages)),
            ("cache_salt = 'b': must be 'a', that of", lambda: llm.generate("who?", prefix=text, cache_salt="b")),
            ("session: is that of one conversation, there are 2", lambda: llm.generate(["a", "b"], session="s")),
            ("session has 0 characters", lambda: llm.generate("a", session="")),
            ("beginning = '0 tokens': must be at least one", lambda: llm.prefix([])),
        ]
        for match, call in refusals:
            with pytest.raises(RequestError, match=match):
                call()
        with LLM(directory) as other, pytest.raises(RequestError, match="prefix: was read by another LLM"):
            other.generate("who?", prefix=text)
    with pytest.raises(UnavailableError, match="is closed"):
        other.end_session("a")


# The package's names


@pytest.mark.parametrize(
    "modules",
    [
        "kvseek.core.request, kvseek.core.config",
        "kvseek.server.serve, kvseek.server.serve_openai, kvseek.server.triton.model, kvseek.server.supervisor",
    ],
)
def test_doors_and_supervisors_start_without_pytorch(modules: str) -> None:
    """It takes seconds and hundreds of megabytes, of each process."""
    program = (
        f"import sys, {modules}\n"
        "from kvseek import RequestError, __version__\n"
        "assert 'LLM' in dir(kvseek)\n"
        "print(__version__, sorted({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown == f"{kvseek.__version__} []\n"


def test_public_names() -> None:
    assert all(hasattr(kvseek, name) for name in kvseek.__all__)
    assert issubclass(GenerationError, KvseekError)
    with pytest.raises(AttributeError, match="module 'kvseek' has no attribute 'LMM'; it has LLM, AsyncLLM"):
        _ = kvseek.LMM

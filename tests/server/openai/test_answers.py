"""Answers that think and call functions: what is read of them, however they are cut, and the guides that they follow."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.tool_models import CALLS, OPENED, SWITCHED, template, tool_tokenizer, written_call, written_calls

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.engine.schedule.guides import GuideMatcher, Guides
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.openai.answers import AnswerForm, AnswerForms, Thinking, answer_guide
from kvseek.server.openai.bodies import CHAT_FORMAT
from kvseek.server.openai.choices import Choice, Reply, usage
from kvseek.server.openai.fields import FieldError
from kvseek.server.openai.prompts import message_texts, read_messages
from kvseek.server.openai.tool_formats import TOOL_FORMATS, Function, Tags

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["text"],
}
FUNCTIONS = (Function("note", SCHEMA), Function("lights.out", {"type": "object", "properties": {}}))
UNTAGGED = ("llama3_json", "pythonic")
Made = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def made(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The tokenizer of a model with this form of calls."""
    known: dict[str, Tokenizer] = {}

    def make(form: str) -> Tokenizer:
        if form not in known:
            known[form] = tool_tokenizer(directory, tmp_path_factory.mktemp("engine"), template(form))
        return known[form]

    return make


def form_of(tokenizer: Tokenizer, form: str, opened: bool | None = None, several: bool = True) -> AnswerForm:
    forms = AnswerForms(tokenizer, form)
    thinking = None if opened is None else forms.thinking_of("<think>" if opened else "")
    return forms.form(thinking, FUNCTIONS, several)


Told = tuple[str, str, list[tuple[str, str]], str | None]  # thinking, text, calls, why it ended


def stream_of(tokenizer: Tokenizer, form: AnswerForm, ids: list[int], cuts: set[int], reason: FinishReason) -> Told:
    """What a client makes of a stream whose tokens come in groups."""
    choice = Choice(Request((5,), 999), tokenizer, (), True, form=form)
    reply = Reply(True, "m", "f", tokenizer, False, False, form)
    thinking, text, end = "", "", None
    calls: list[list[str]] = []
    steps = [*(StepOutput(1, token) for token in ids), StepOutput(1, None, reason)]
    borders = [0, *sorted(cut for cut in cuts if 0 < cut < len(steps)), len(steps)]
    for first, last in itertools.pairwise(borders):
        for piece in choice.push(steps[first:last]):
            for event in map(json.loads, reply.pieces(0, piece)):
                delta = event["choices"][0]["delta"]
                end = event["choices"][0]["finish_reason"] or end
                assert delta.get("reasoning") == delta.get("reasoning_content")
                thinking, text = thinking + delta.get("reasoning", ""), text + delta.get("content", "")
                for call in delta.get("tool_calls", ()):
                    if call["index"] == len(calls):
                        assert call["type"] == "function"
                        assert call["function"]["arguments"] == ""
                        calls.append([call["id"], call["function"]["name"], ""])
                    else:
                        assert set(call) == {"index", "function"}
                        assert call["index"] == len(calls) - 1
                        calls[-1][2] += call["function"]["arguments"]
    assert len({call[0] for call in calls}) == len(calls)
    return thinking, text, [(name, arguments) for _, name, arguments in calls], end


def whole_of(tokenizer: Tokenizer, form: AnswerForm, ids: list[int], reason: FinishReason) -> Told:
    choice = Choice(Request((5,), 999), tokenizer, (), False, form=form)
    reply = Reply(True, "m", "f", tokenizer, False, False, form)
    (piece,) = choice.push([*(StepOutput(1, token) for token in ids), StepOutput(1, None, reason)])
    own = json.loads(reply.whole([piece], usage(1, 1, 0)))["choices"][0]
    message = own["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert message["content"] is not None or calls or "reasoning" in message
    return message.get("reasoning", ""), message["content"] or "", calls, own["finish_reason"]


words = st.text(
    st.one_of(st.sampled_from("\"\\{}[]()<>/=,;:'\n\t é⚓𝄞"), st.characters(exclude_categories=("Cs",))), max_size=12
) | st.sampled_from(
    ["</tool_call", "</parameter>", "\n</parameter>\n<param", '{"name": "nobody"}', "<tool-call>", "'''", "[1]"]
)
values = st.fixed_dictionaries(
    {"text": words}, optional={"count": st.integers(), "flag": st.booleans(), "list": st.lists(words, max_size=3)}
).map(lambda found: {name: found[name] for name in SCHEMA["properties"] if name in found})  # in the schema's order
called = st.lists(
    st.tuples(st.just("note"), values) | st.tuples(st.just("lights.out"), st.just({})), min_size=1, max_size=3
)


@pytest.mark.parametrize("form", CALLS)
@settings(max_examples=100)
@given(calls=called, cuts=st.sets(st.integers(1, 400)), stop=st.none() | st.integers(0, 400), opened=st.booleans())
def test_a_stream_is_the_whole_answer_wherever_it_is_cut(
    made: Made, form: str, calls: list[tuple[str, dict[str, Any]]], cuts: set[int], stop: int | None, opened: bool
) -> None:
    """2,000 answers with up to three calls each: none malformed, cut off at any token or not."""
    tokenizer = made(form)
    texts = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    own = [written_call(form, name, text) for (name, _), text in zip(calls, texts, strict=True)]
    lead = "" if form in UNTAGGED else "Yes.\n"
    ids = tokenizer.encode(f"{'' if opened else '<think>'}\nwell…\n</think>\n\n{lead}{written_calls(form, own)}", False)
    shape = form_of(tokenizer, form, opened)
    cut_off = stop is not None and stop < len(ids)
    reason = FinishReason.LENGTH if cut_off else FinishReason.END_ID
    told = stream_of(tokenizer, shape, ids[:stop], cuts, reason)
    assert told == whole_of(tokenizer, shape, ids[:stop], reason)
    thinking, text, found, end = told
    if not cut_off:
        assert (thinking, text, end) == ("well…", lead.strip(), "tool_calls")
        assert [(name, json.loads(arguments)) for name, arguments in found] == [(n, a) for n, a in calls]
    else:
        assert end == "length"
        assert [name for name, _ in found] == [name for name, _ in calls][: len(found)]
        assert all(json.loads(arguments) == calls[place][1] for place, (_, arguments) in enumerate(found[:-1]))


@pytest.mark.parametrize("form", CALLS)
@settings(max_examples=200)
@given(text=words | st.lists(words, max_size=4).map("".join), cuts=st.sets(st.integers(1, 100)))
def test_what_is_no_call_is_text(made: Made, form: str, text: str, cuts: set[int]) -> None:
    tokenizer = made(form)
    ids = tokenizer.encode(text, False)
    shape = form_of(tokenizer, form)
    told = stream_of(tokenizer, shape, ids, cuts, FinishReason.END_ID)
    assert told == whole_of(tokenizer, shape, ids, FinishReason.END_ID)
    assert told == ("", tokenizer.decode(ids), [], "stop")


def spelt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text, none of them one of a tag."""
    return [token for character in text for token in tokenizer.encode(character, False)]


def test_a_tag_that_the_model_spells_is_text(made: Made) -> None:
    tokenizer, text = made("hermes"), 'Write <tool_call>{"name": "note", "arguments": {"text": "x"}}</tool_call> so.'
    ids = spelt(tokenizer, text)
    assert stream_of(tokenizer, form_of(tokenizer, "hermes"), ids, {9}, FinishReason.END_ID)[:3] == ("", text, [])


def test_a_closing_tag_in_a_text_is_part_of_it(made: Made) -> None:
    """A model quotes a tag within an argument: the token is its text there."""
    tokenizer = made("hermes")
    ids = tokenizer.encode('<tool_call>{"name": "note", "arguments": {"text": "a </tool_call> b"}}</tool_call>', False)
    _, _, calls, _ = stream_of(tokenizer, form_of(tokenizer, "hermes"), ids, set(), FinishReason.END_ID)
    assert calls == [("note", '{"text": "a </tool_call> b"}')]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
        ("hermes", "<tool_call>later</tool_call>", None, []),
        ("hermes", '<tool_call>{"arguments": {"text": "x"}, "name": "note"}</tool_call>', "", [("note", '{"text": "x"}')]),
        ("hermes", '<tool_call>{"name": "note", "arguments": "{\\"text\\": 1}"}</tool_call>', "", [("note", '{"text": 1}')]),
        ("hermes", '<tool_call>{"name": "lights.out"}</tool_call>', "", [("lights.out", "{}")]),
        ("hermes", '<tool_call>{"name": "lights.out", "arguments": null}</tool_call>', "", [("lights.out", "{}")]),
        ("hermes", '<tool_call>{"name": "note", "arguments": {"text": [1</tool_call>', "", [("note", '{"text": [1')]),
        ("hermes", '<tool_call>{"name": "lights.out"}</tool_call> Done.', " Done.", [("lights.out", "{}")]),
        ("llama3_json", '{"name": "note", "parameters": {"text": "x"}}', "", [("note", '{"text": "x"}')]),
        ("llama3_json", '{"name": "Bob", "age": 3}', None, []),
        ("llama3_json", '{"age": 3, "name": "note"}', None, []),
        ("llama3_json", 'So: {"name": "note", "parameters": {}}', None, []),
        ("pythonic", "[1] says so", None, []),
        ("pythonic", "[note(text='it\\'s', list=['a', \"b\"], flag=True)]", "",
         [("note", '{"text": "it\'s", "list": ["a", "b"], "flag": true}')]),
        ("pythonic", "[note(text=there)]", "", [("note", '{"text": "there"}')]),
        ("mistral", "[TOOL_CALLS]lights.out{}", "", [("lights.out", "{}")]),
        ("qwen3_coder", "<tool_call><function=other></function></tool_call>", None, []),
        ("qwen3_coder", "<tool_call><function=note><parameter=count>many</parameter></function></tool_call>", "",
         [("note", '{"count": "many"}')]),
        ("qwen3_coder", "<tool_call><function=note><parameter=text>\n</parameter>\n<parameter=flag>\nTrue</parameter></function>",
         "", [("note", '{"text": "", "flag": true}')]),
        # Half of a surrogate pair, and numbers that JSON does not have.
        ("hermes", '<tool_call>{"name": "note", "arguments": "{\\"text\\": \\"\\udc02\\"}"}</tool_call>', "",
         [("note", '{"text": "\\udc02"}')]),
        ("pythonic", "[note(text='\\ud800', list=[NaN], count=NaN)]", "",
         [("note", '{"text": "\\ud800", "list": "[NaN]", "count": "NaN"}')]),
        ("pythonic", "[note(text={'a': 1e999})]", "", [("note", '{"text": "{\'a\': 1e999}"}')]),
        ("hermes", '<tool_call>{"name": "note", "arguments": {"text": "a"}, "arguments": {}}</tool_call>', "",
         [("note", '{"text": "a"}')]),
        ("qwen3_coder", "<tool_call><function=note><parameter=a b>x</parameter></function></tool_call>", "",
         [("note", '{"a b": "x"}')]),
    ],
)  # fmt: skip
def test_what_models_write_besides(made: Made, form: str, text: str, content: str | None, calls: list[Any]) -> None:
    """None: the answer is text, and nothing of it is left out."""
    tokenizer = made(form)
    ids = tokenizer.encode(text, False)
    told = stream_of(tokenizer, form_of(tokenizer, form), ids, {3, 5, 20}, FinishReason.END_ID)
    assert told[1:3] == (text if content is None else content, calls)
    assert told == whole_of(tokenizer, form_of(tokenizer, form), ids, FinishReason.END_ID)


@pytest.mark.parametrize(("stop", "text"), [("</think>", "hm"), ("m</think>\n", "h"), ("tool_call>", "hm")])
def test_a_tag_ends_an_answer_as_any_text(made: Made, stop: str, text: str) -> None:
    tokenizer = made("hermes")
    choice = Choice(Request((5,), 99), tokenizer, (stop,), False, form=form_of(tokenizer, "hermes", True))
    ids = tokenizer.encode("hm</think>\n" + ("tool_call>" if stop == "tool_call>" else "Yes."), False)
    pieces = [piece for token in ids for piece in choice.push([StepOutput(1, token)])]
    assert [piece["finish_reason"] for piece in pieces] == ["stop"]
    assert pieces[0]["parts"] == [("reasoning", text)]


@pytest.mark.parametrize(("stop", "reason"), [("</tool_call>", "tool_calls"), ("inside", "stop")])
def test_a_stop_text_within_a_call(made: Made, stop: str, reason: str) -> None:
    tokenizer = made("hermes")
    choice = Choice(Request((5,), 99), tokenizer, (stop,), False, form=form_of(tokenizer, "hermes"))
    ids = tokenizer.encode(written_call("hermes", "note", '{"text": "it is inside"}'), False)
    (piece,) = choice.push([StepOutput(1, token) for token in ids])
    assert piece["finish_reason"] == reason


def test_a_template_that_writes_one_call_at_a_time(made: Made, directory: Path, tmp_path: Path) -> None:
    """As Llama 3's: an answer of two calls could not be sent back."""
    source = template("llama3_json") + "{# This model only supports single tool-calls at once! #}"
    tokenizer = tool_tokenizer(directory, tmp_path / "engine", source)
    assert not form_of(tokenizer, "auto").several
    assert form_of(made("llama3_json"), "auto").several


def test_tools_that_the_template_does_not_write_are_refused(directory: Path, config: Any, tmp_path: Path) -> None:
    source = template("hermes").replace("if tools", "if xml_tools")
    tokenizer = tool_tokenizer(directory, tmp_path / "engine", source)
    tool = {"type": "function", "function": {"name": "note"}}
    body = CHAT_FORMAT.read(json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [tool]}).encode())
    with pytest.raises(
        FieldError, match="tools = 'note': must be left out: the model's chat template writes nothing of it"
    ):
        body.prompts(tokenizer, config, AnswerForms(tokenizer))


def test_arguments_that_nest_deeply_are_refused(made: Made, config: Any) -> None:
    """By the template, whose depth is Python's."""
    function = {"name": "note", "arguments": '{"text": ' + "[" * 900 + "]" * 900 + "}"}
    call = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
    body = CHAT_FORMAT.read(json.dumps({"messages": [{"role": "user", "content": "x"}, call]}).encode())
    with pytest.raises(FieldError, match="cannot be written by the model's chat template"):
        body.prompts(made("hermes"), config, AnswerForms(made("hermes")))


def test_thinking_that_was_cut_off_can_be_sent_back() -> None:
    raw = json.dumps([{"role": "assistant", "content": None, "reasoning": "hm"}]).encode()
    (message,) = message_texts(read_messages(msgspec.Raw(raw)))
    assert message == {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic"])
def test_references_of_arguments_are_to_the_whole_schema(
    made: Made, guides_of: Callable[[str], Guides], form: str
) -> None:
    point = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/n"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {"a": point, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
        "$defs": {"n": {"type": "integer"}},
    }
    tokenizer = made(form)
    forms = AnswerForms(tokenizer, form)
    shape = forms.form(None, (Function("f", schema, True),))
    guide = answer_guide(shape, forms.tags(TOOL_FORMATS[form]), True, (1,))
    assert guide is not None
    for value, right in ((1, True), ("1", False)):
        text = written_call(form, "f", json.dumps({"a": {"x": 1}, "b": {"x": value}})).replace("'x'", '"x"')
        ids = tokenizer.encode(written_calls(form, [text.replace("'1'", '"1"')]), False)
        assert followed(guides_of(form).matcher(guide), ids)[1] is right


@pytest.mark.parametrize("pattern", [r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+$", r"^(a|b)\1$"])
def test_patterns_that_the_library_does_not_know(made: Made, guides_of: Callable[[str], Guides], pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": pattern}},
        "required": ["pattern"],
    }
    tokenizer = made("hermes")
    forms = AnswerForms(tokenizer, "hermes")
    tags = forms.tags(TOOL_FORMATS["hermes"])
    ids = tokenizer.encode(written_call("hermes", "f", '{"pattern": "x"}'), False)
    for strict in (False, True):
        guide = answer_guide(forms.form(None, (Function("f", schema, strict),)), tags, True, (1,))
        assert guide is not None
        if strict:
            with pytest.raises(RequestError, match="not supported"):
                guides_of("hermes").matcher(guide)
        else:
            assert followed(guides_of("hermes").matcher(guide), ids) == (len(ids), True)


def test_one_call_at_most(made: Made) -> None:
    tokenizer = made("hermes")
    text = written_calls("hermes", [written_call("hermes", "note", '{"text": "a"}')] * 2)
    shape = form_of(tokenizer, "hermes", several=False)
    told = stream_of(tokenizer, shape, tokenizer.encode(text, False), set(), FinishReason.END_ID)
    assert told == ("", "", [("note", '{"text": "a"}')], "tool_calls")


@pytest.mark.parametrize(
    ("opened", "text", "thinking", "content", "count"),
    [
        (True, "\nhm\n\nhm\n</think>\n\nYes\n", "hm\n\nhm", "Yes\n", None),
        (True, "hm", "hm", "", None),
        (False, "<think>\n\n</think>\n\nYes", "", "Yes", None),
        (False, "<think>hm</think>Yes <think> no", "hm", "Yes <think> no", None),
        (False, "Yes </think>", "", "Yes </think>", 0),
    ],
)
def test_thinking_stands_apart(
    made: Made, opened: bool, text: str, thinking: str, content: str, count: int | None
) -> None:
    tokenizer = made("hermes")
    forms, ids = AnswerForms(tokenizer), tokenizer.encode(text, False)
    shape = forms.form(forms.thinking_of("<think>\n" if opened else "assistant:"))
    for cuts in (set[int](), set(range(1, 50))):
        assert stream_of(tokenizer, shape, ids, cuts, FinishReason.END_ID) == (thinking, content, [], "stop")
    assert shape.thinking is not None
    inside = ids[0 if opened else 1 :]
    expected = inside.index(shape.thinking.closing) if shape.thinking.closing in inside else len(inside)
    assert shape.thinking.count(ids) == (expected if count is None else count)


def test_forms_are_those_of_the_template(made: Made, directory: Path, tmp_path: Path) -> None:
    for name in CALLS:
        found = AnswerForms(made(name))
        assert (found.tools, found.thinking is not None) == (TOOL_FORMATS[name], True)
        assert AnswerForms(made(name), "none", "none").form(found.thinking_of("")).tools is None
        assert AnswerForms(made(name), "auto", "none").thinking is None
    plain = AnswerForms(Tokenizer(directory))
    assert (plain.tools, plain.thinking) == (None, None), "neither tools nor tags"
    assert AnswerForms(made("hermes")).thinking_of("x<think>\n\n</think>\n\n") is None, (
        "the template has switched it off"
    )
    going_on = [
        AnswerForms(made("hermes")).thinking_of(end, None, True) for end in ("<think> hm", "<think>hm</think> Y", "Y")
    ]
    assert [thinking and thinking.opened for thinking in going_on] == [True, None, None]
    assert AnswerForms(made("hermes"), "auto", "deepseek_r1").thinking_of("assistant:").opened  # type: ignore[union-attr]
    assert len(form_of(made("mistral"), "mistral").call_id()) == 9
    assert (SWITCHED, OPENED) != ("", "")


def test_an_effort_is_a_budget_where_the_template_knows_none(
    made: Made, directory: Path, config: EngineConfig, tmp_path: Path
) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "%b"%b}'

    def budget(tokenizer: Tokenizer, effort: bytes, more: bytes = b"") -> tuple[bool, int | None]:
        (prompt,) = CHAT_FORMAT.read(body % (effort, more)).prompts(tokenizer, config, AnswerForms(tokenizer))
        thinking, guided = prompt.form.thinking, prompt.guide is not None
        assert guided == (thinking is not None and thinking.budget is not None)
        return thinking is not None, None if thinking is None else thinking.budget

    switched = made("hermes")
    opens = tool_tokenizer(directory, tmp_path / "opens", template("hermes", OPENED))
    for effort, most in ((b"minimal", 128), (b"low", 1024), (b"medium", 4096), (b"high", None), (b"max", None)):
        assert budget(switched, effort) == budget(opens, effort) == (True, most)
    assert budget(switched, b"low", b', "thinking_token_budget": 7') == (True, 7)
    assert budget(switched, b"low", b', "chat_template_kwargs": {"enable_thinking": false}') == (False, None)
    assert budget(switched, b"none") == (False, None), "switched off by the template"
    assert budget(opens, b"none") == (True, 0)
    knows = tool_tokenizer(directory, tmp_path / "knows", template("hermes", "{{ reasoning_effort }}"))
    assert budget(knows, b"low") == (True, None)
    plain = Tokenizer(directory)
    assert budget(plain, b"none") == (False, None), "it never thinks"
    with pytest.raises(FieldError, match=r'reasoning_effort = .low.: must be "none" or null for a model'):
        budget(plain, b"low")


def followed(matcher: GuideMatcher, ids: list[int]) -> tuple[int, bool]:
    """How many of these tokens a guide allows one after the other, and whether the text may end there."""
    for place, token in enumerate(ids):
        bits = matcher.allowed()
        if not bits[token // 32] >> token % 32 & 1:
            return place, False
        matcher.accept(token)
    return len(ids), matcher.complete


@pytest.fixture(scope="module")
def guides_of(made: Made, config: Any) -> Callable[[str], Guides]:
    known: dict[str, Guides] = {}
    return lambda form: known.setdefault(form, Guides(made(form), config))


@pytest.mark.parametrize("form", CALLS)
@settings(max_examples=30)
@given(calls=called, may=st.booleans(), opened=st.none() | st.booleans())
def test_guides_take_every_right_call_and_no_wrong_one(
    made: Made,
    guides_of: Callable[[str], Guides],
    form: str,
    calls: list[tuple[str, dict[str, Any]]],
    may: bool,
    opened: bool | None,
) -> None:
    tokenizer, guides = made(form), guides_of(form)
    shape, tags = form_of(tokenizer, form, opened), AnswerForms(tokenizer).tags(TOOL_FORMATS[form])
    assume(
        "\x7f" not in repr(calls) and "\\x7f" not in repr(calls)
    )  # which the library takes in JSON as an escape alone
    if form == "qwen3_coder":  # whose guide ends a text at the first tag
        assume(not any("\n</parameter>" in arguments.get("text", "") for _, arguments in calls))
    if form == "pythonic":  # the guide has JSON's texts, and arguments in the schema's order
        calls = [(name, {key: value for key, value in arguments.items() if key == "text"}) for name, arguments in calls]
    own = [written_call(form, name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    if form == "pythonic":
        own = [
            f"{name}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in a.items())})"
            for name, a in calls
        ]
    thought = {None: "", True: "hm <tool_call>\n</think>\n\n", False: "<think>hm</think>\n\n"}[opened]
    lead = "Yes.\n" if may and form not in UNTAGGED else ""
    guide = answer_guide(shape, tags, not may, (1,))
    assert guide is not None
    ids = tokenizer.encode(thought + lead + written_calls(form, own, tagged=may), False)
    assert followed(guides.matcher(guide), ids) == (len(ids), True)
    wrong = written_call(form, "note", '{"text": 5}' if form != "qwen3_coder" else '{"text": "", "count": "x"}')
    ids = tokenizer.encode(thought + written_calls(form, [wrong]), False)
    assert followed(guides.matcher(guide), ids)[0] < len(ids), "a value of another type"
    ids = tokenizer.encode(thought + "Yes.", False)
    assert followed(guides.matcher(guide), ids)[1] is may, "an answer that has to call"


def test_a_guide_counts_the_tokens_of_thinking(made: Made, guides_of: Callable[[str], Guides]) -> None:
    tokenizer = made("hermes")
    forms, inside = AnswerForms(tokenizer), spelt(tokenizer, "hm hm hm")
    opening, closing = map(tokenizer.added_token, ("<think>", "</think>"))
    assert opening is not None
    assert closing is not None
    for opened in (True, False):
        shape = forms.form(Thinking(opening, closing, opened, 4))
        guide = answer_guide(shape, Tags(), False, (1,))
        assert guide is not None
        begin = [] if opened else [opening]
        ids = [*begin, *inside[:4], closing, *spelt(tokenizer, "Yes"), opening]
        assert followed(guides_of("hermes").matcher(guide), ids) == (len(ids), True)
        assert followed(guides_of("hermes").matcher(guide), [*begin, *inside])[0] == len(begin) + 4

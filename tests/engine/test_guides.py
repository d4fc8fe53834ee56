"""Guides: drawn texts follow them, end tokens come exactly when they are complete, and hostile ones stay cheap."""

import contextlib
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import OneRequest, allowed_tokens
from tests.support.random_models import VOCABULARY, save_tokenizer
from tests.support.sentencepiece import save_sentencepiece
from transformers import AutoTokenizer

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, SamplingError, UnavailableError
from kvseek.core.guide import MAX_BYTES, MAX_DEPTH, MAX_REFERENCES, MAX_TEXT_CHARACTERS, Guide, GuideType
from kvseek.core.model_config import ModelConfig
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.draws.reference import TorchDraws
from kvseek.engine.schedule.guides import GuideMatcher, Guides
from kvseek.engine.tokenizer import TOKENIZER_FOLDER, Tokenizer

END, PAD = 1, 2
SCHEMA = {
    "type": "object",
    "properties": {
        "ship": {"enum": ["Lady Trelawny", "Œdipus", 'the "Ark"']},
        "year": {"type": "integer", "minimum": 1700, "maximum": 1931},
        "cargo": {"type": "array", "items": {"enum": ["tea", None, 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["ship", "year", "cargo"],
    "additionalProperties": False,
}
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("engine")
    (directory / TOKENIZER_FOLDER).mkdir()
    save_tokenizer(directory / TOKENIZER_FOLDER)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def guide_config() -> EngineConfig:
    model = ModelConfig("llama", VOCABULARY, 64, 128, 2, 2, 1, 32, 1e-5, 1e4, 512, eos_token_ids=(END,))
    return EngineConfig(model, "full", max_input_len=100, max_seq_len=500)


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer, guide_config: EngineConfig) -> Guides:
    return Guides(tokenizer, guide_config)


def schema(value: object) -> Guide:
    return Guide(GuideType.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def generate(
    guides: Guides,
    params: SamplingConfig,
    ends: tuple[int, ...] = (END,),
    most: int = 400,
    vocabulary: int = VOCABULARY,
) -> list[int]:
    """Draw tokens from random logits until one of `ends` comes, which is the last of the returned ones."""
    assert params.guide is not None
    one = OneRequest(TorchDraws(), params, vocabulary, (5,), ends)
    one.sampler.follow(guides.matcher(params.guide))
    generator = torch.Generator().manual_seed(params.seed)
    drawn: list[int] = []
    while len(drawn) < most and (not drawn or drawn[-1] not in ends):
        drawn.append(one.sample(torch.randn(vocabulary, generator=generator) * 3))
    return drawn


def follows(value: object) -> bool:
    """Judge a value by SCHEMA, without the library under test."""
    assert isinstance(value, dict)
    enums = SCHEMA["properties"]["ship"]["enum"], SCHEMA["properties"]["cargo"]["items"]["enum"]  # type: ignore[index]
    return (
        list(value) == ["ship", "year", "cargo"]
        and value["ship"] in enums[0]
        and type(value["year"]) is int
        and 1700 <= value["year"] <= 1931
        and 1 <= len(value["cargo"]) <= 3
        and all(item in enums[1] for item in value["cargo"])
    )


@given(seeds, st.sampled_from([0.0, 1.0, 3.0]))
@settings(max_examples=40, deadline=None)
def test_a_drawn_text_follows_its_schema_to_the_end_token(guides, tokenizer, seed, temperature):
    drawn = generate(guides, SamplingConfig(temperature=temperature, seed=seed, guide=schema(SCHEMA)))
    assert drawn[-1] == END
    assert follows(json.loads(tokenizer.decode(drawn[:-1], skip_special_tokens=False)))


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_expressions_and_grammars_are_followed(guides, tokenizer, seed):
    for guide, pattern in (
        (Guide(GuideType.REGEX, "(yes|no), [0-9]{2,4}[a-f]"), "(yes|no), [0-9]{2,4}[a-f]"),
        (Guide(GuideType.EBNF_GRAMMAR, 'root ::= ship (" and " ship)?\nship ::= "one" | "two" [0-9]'), None),
    ):
        text = tokenizer.decode(generate(guides, SamplingConfig(temperature=2.0, seed=seed, guide=guide))[:-1])
        assert re.fullmatch(pattern or r"(one|two[0-9])( and (one|two[0-9]))?", text)


def test_json_is_any_value(guides, tokenizer):
    matcher = guides.matcher(Guide(GuideType.JSON))
    for token in tokenizer.encode('{"a": [1, {"b": null}]}', add_special_tokens=False):
        assert not matcher.complete
        assert allowed_tokens(matcher)[token]
        matcher.accept(token)
    assert matcher.complete
    assert matcher.finished


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_the_mask_is_the_librarys_own_acceptance(guides, seed):
    """A token is allowed exactly when a fresh matcher takes it behind the text so far.

    But where only one text can follow, the library asks for the tokens that it has commonly.
    """
    guide, generator = schema(SCHEMA), torch.Generator().manual_seed(seed)
    matcher, drawn = guides.matcher(guide), []
    for _ in range(8):
        allowed = allowed_tokens(matcher)
        chosen = allowed.nonzero()[:, 0]
        for token in {*chosen[:3].tolist(), *torch.randint(3, VOCABULARY, (5,), generator=generator).tolist()}:
            fresh = guides.matcher(guide)._matcher
            assert fresh.consume_tokens(drawn)
            valid = bool(fresh.validate_tokens([token]))
            assert valid == bool(allowed[token]) or (valid and len(chosen) == 1)
        drawn.append(int(chosen[torch.randint(len(chosen), (), generator=generator)]))
        matcher.accept(drawn[-1])


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece"])
def test_vocabularies_of_both_kinds(request, tmp_path, name):
    """Byte-level as SmolLM2's, and as SentencePiece writes it: with a mark for spaces and bytes as <0xE2>."""
    directory = tmp_path / TOKENIZER_FOLDER
    if name == "smollm2":
        file = request.getfixturevalue("smollm2_gguf")
        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(directory)
    else:
        save_sentencepiece(directory)
    tokenizer = Tokenizer(tmp_path)
    size = len(tokenizer._tokenizer.get_vocab())
    model = ModelConfig("llama", size, 64, 128, 2, 2, 1, 32, 1e-5, 1e4, 512, eos_token_ids=(2,))
    guides = Guides(tokenizer, EngineConfig(model, "full", max_input_len=100, max_seq_len=500))
    for seed in range(5):
        params = SamplingConfig(temperature=1.0, seed=seed, guide=schema(SCHEMA))
        drawn = generate(guides, params, ends=(2,), vocabulary=size)
        assert drawn[-1] == 2
        assert follows(json.loads(tokenizer.decode(drawn[:-1], skip_special_tokens=False)))


def test_white_space_ends(guides, tokenizer):
    """A model that prefers white space wherever it may stand still comes to the end."""
    space = SamplingConfig(
        guide=schema(SCHEMA), logit_bias=tuple((i, 100.0) for i in range(3, 314) if not tokenizer.decode([i]).strip())
    )
    assert generate(guides, space)[-1] == END


def test_end_tokens_come_exactly_when_the_text_is_complete(guides):
    guide = Guide(GuideType.REGEX, "a{2,3}")
    wants_end = SamplingConfig(guide=guide, logit_bias=((END, 100.0), (PAD, 100.0)))
    assert len(generate(guides, wants_end)) == 3, "not before two letters, and then at once"
    assert generate(guides, wants_end, ends=(PAD,))[-1] == PAD, "the request's own end token, not the model's"
    late = replace(wants_end, min_tokens=3)
    assert len(generate(guides, late)) == 4, "min_tokens holds while another token may follow"
    assert len(generate(guides, replace(late, min_tokens=9))) == 4, "and no longer"


def test_bad_words_that_leave_nothing_are_an_error(guides, tokenizer):
    letter = tuple(tokenizer.encode("a", add_special_tokens=False))
    with pytest.raises(SamplingError, match=r"^bad_words, guided_decoding_guide: leave no token to draw"):
        generate(guides, SamplingConfig(guide=Guide(GuideType.REGEX, "a"), bad_words=(letter,)))


def test_a_guide_needs_an_end_token(guide_config):
    request = Request((5,), 4, SamplingConfig(guide=Guide(GuideType.JSON)))
    with pytest.raises(RequestError, match="guided_decoding_guide_type: needs a token that ends the output"):
        request.validate(guide_config)
    replace(request, end_ids=(END,)).validate(guide_config)


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"type": "string", "not": {"const": "a"}}), 'Unimplemented keys: \\["not"\\]'),
        (schema({"not": {}, "x-guidance": {"lenient": True}}), 'Unimplemented keys: \\["not"\\]'),
        (schema({"$ref": "http://localhost/schema"}), "not present in a registry"),
        (schema({"$ref": "#"}), "NoExtension"),
        (Guide(GuideType.REGEX, "(a"), "regex parse error"),
        (Guide(GuideType.REGEX, "^(?=a)b$"), "look-around"),
        (Guide(GuideType.EBNF_GRAMMAR, 'root ::= "yes'), "Unexpected end of input"),
        (Guide(GuideType.EBNF_GRAMMAR, "root ::= missing"), "missing"),
    ],
    ids=lambda value: value.guide[:20] if isinstance(value, Guide) else None,
)
def test_what_is_no_guide_is_refused(guides, guide, message):
    with pytest.raises(RequestError, match=f"(?s)guided_decoding_guide: cannot be followed: .*{message}") as caught:
        guides.matcher(guide)
    assert len(str(caught.value)) < 500


def test_guides_are_limited():
    for kind, size in MAX_BYTES.items():
        Guide(kind, "a" * size)
        with pytest.raises(RequestError, match=f"guided_decoding_guide has {size + 1} bytes: must be <= {size}"):
            Guide(kind, "a" * (size + 1))
    with pytest.raises(
        RequestError, match="guided_decoding_guide_type = 'xml': must be one of json, json_schema, regex, ebnf"
    ):
        Guide("xml", "a")  # type: ignore[arg-type]
    for text, message in (
        ("{", r"not a JSON schema \(.*\); send JSON"),
        (nested(MAX_DEPTH), f"has 65 levels of nesting: must be <= {MAX_DEPTH}"),
        (
            json.dumps({"$defs": [{"$ref": "#"}] * (MAX_REFERENCES + 1)}),
            f"has 129 references: must be <= {MAX_REFERENCES}",
        ),
        (json.dumps({"pattern": "a" * 2049}), f"has 2049 characters in one text: must be <= {MAX_TEXT_CHARACTERS}"),
    ):
        with pytest.raises(RequestError, match=f"guided_decoding_guide:? {message}"):
            Guide(GuideType.JSON_SCHEMA, text)
    for kind, text in ((GuideType.JSON, "{}"), (GuideType.REGEX, "")):
        with pytest.raises(RequestError, match=r"guided_decoding_guide = '.*': must be"):
            Guide(kind, text)


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + '{"type":"null"}' + "}" * depth


def raw(value: object) -> tuple[GuideType, str]:
    """A schema that is not a Guide yet: some are refused before they are one."""
    return GuideType.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value)


HOSTILE = {
    "deep": raw(nested(2000)),
    "brackets": raw("[" * 60_000),
    "long string": raw({"type": "string", "minLength": 10**7, "maxLength": 2 * 10**7}),
    "many items": raw({"type": "array", "items": {"type": "integer"}, "minItems": 10**5, "maxItems": 10**6}),
    "many properties": raw({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
    "large enum": raw({"enum": [f"value {i}" for i in range(3000)]}),
    "multiple": raw({"type": "integer", "multipleOf": 999_999_937}),
    "many unions": raw(
        {
            "anyOf": [
                {"type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(i)}} for i in range(40)
            ]
        }
    ),
    "product": raw(
        {"allOf": [{"anyOf": [{"type": "object", "properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(30)]}
    ),
    "references": raw(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
            | {"d40": {"type": "null"}},
        }
    ),
    "chain of references": raw(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(126)}
            | {"d126": {"type": "null"}},
        }
    ),
    "long pattern": raw({"type": "string", "pattern": "a?" * 1000}),
    "long expression": (GuideType.REGEX, "a?" * 1000),
    "long classes": (GuideType.REGEX, "(?i)" + r"\pL" * 600),
    "repetition": (GuideType.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    "long repetition": (GuideType.REGEX, "b?a{2000000000}"),
    "subsets": (GuideType.REGEX, "(?s:.)*a(?s:.){20}"),
    "unicode": (GuideType.REGEX, r"(\w{1,50}[^\p{L}]){1,100}"),
    "groups": (GuideType.REGEX, "(" * 30_000 + "a" + ")" * 30_000),
    "ambiguous": (GuideType.EBNF_GRAMMAR, 'root ::= root root | "a" | ""'),
    "nested groups": (GuideType.EBNF_GRAMMAR, "root ::= " + "(" * 4000 + '"a"' + ")" * 4000),
    "itself": (GuideType.EBNF_GRAMMAR, "root ::= root"),
    "doubling": (
        GuideType.EBNF_GRAMMAR,
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(100)) + '\nr100 ::= "b"',
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_guides_cost_little(guides: Guides, name: str) -> None:
    """Whoever has to compile a guide, and all requests that share its steps, wait for as long as LIMITS say and not longer."""
    before, began = resident_bytes(), time.process_time()
    matcher: GuideMatcher | None = None
    with contextlib.suppress(RequestError):  # the error's text: test_what_is_no_guide_is_refused
        matcher = guides.matcher(Guide(*HOSTILE[name]))
    assert time.process_time() - began < 10, "seconds of processor time to compile"
    generator, longest = torch.Generator().manual_seed(7), 0.0
    with contextlib.suppress(SamplingError):
        for _ in range(60 if matcher is not None else 0):
            assert matcher is not None
            began = time.process_time()
            allowed = allowed_tokens(matcher).nonzero()[:, 0]
            if not len(allowed):
                break
            matcher.accept(int(allowed[torch.randint(len(allowed), (), generator=generator)]))
            longest = max(longest, time.process_time() - began)
    assert longest < 2, "seconds of processor time for a token, for which all other requests wait"
    assert resident_bytes() - before < 200 << 20


def test_a_guide_that_ends_its_trial_is_refused_alone(guides: Guides) -> None:
    digits = Guide(GuideType.REGEX, "[0-9]{3}")
    guides.matcher(digits)
    message = (
        "guided_decoding_guide: cannot be followed: compiling it takes more than 5 s of processor time or 2 GiB of"
    )
    with pytest.raises(RequestError, match=message):
        guides.matcher(schema({"type": "integer", "multipleOf": 2**31}))
    guides.matcher(Guide(GuideType.REGEX, "[0-9]{4}"))
    process = guides._trial._process
    process.kill()
    process.wait()
    guides.matcher(Guide(GuideType.REGEX, "[0-9]{5}"))


def test_a_guide_that_is_kept_begins_anew(guides: Guides) -> None:
    """An agent sends the same tools with each turn: compiled once, and no request has the state of another."""
    digits = Guide(GuideType.REGEX, "[0-9]{6}")
    first = guides.matcher(digits)
    process = guides._trial._process
    process.kill()
    process.wait()
    begin = first.allowed()
    first.accept(next(token for token in range(32 * len(begin)) if begin[token // 32] >> token % 32 & 1))
    assert (guides.matcher(digits).allowed() == begin).all()
    assert guides._trial._process.poll() is not None, "nothing was tried again"


def test_without_a_process_for_the_trial_guides_are_unavailable(tokenizer, guide_config, monkeypatch):
    monkeypatch.setattr("kvseek.engine.schedule.guide_compiler.sys.executable", "/bin/false")
    with pytest.raises(
        UnavailableError, match="the process that tries guides has ended with status 1; the server's log"
    ):
        Guides(tokenizer, guide_config).matcher(Guide(GuideType.JSON))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_without_the_library_a_guide_is_refused_by_name(tokenizer, guide_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as Python marks what cannot be imported
    with pytest.raises(RequestError, match=re.escape("pip install 'kvseek[guided]'")):
        Guides(tokenizer, guide_config).matcher(Guide(GuideType.JSON))


def test_a_tokenizer_of_another_library_is_refused_by_name(tmp_path, guide_config):
    with pytest.raises(RequestError, match=r"guided_decoding_guide: the engine has no tokenizer\.json"):
        Guides(Tokenizer(tmp_path), guide_config).matcher(Guide(GuideType.JSON))

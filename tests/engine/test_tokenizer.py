"""Tokenizer and text streaming: with a byte-level tokenizer made here, with needle's and with SmolLM2's."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.sentencepiece import save_sentencepiece
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvseek.core.errors import EngineDirectoryError, RequestError
from kvseek.engine import kept_encodings
from kvseek.engine.kept_encodings import MOST_TEXTS, KeptEncodings
from kvseek.engine.tokenizer import LONGEST_RUN, TextStream, Tokenizer

TEXT = "The lamp was lit at dusk. Größe, naïve, 灯台の光, маяк, 🚢🧭. The end of the log, the end of the year."
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def save_tiny_tokenizer(engine_dir: Path, chat_template: str | None = None) -> None:
    """A byte-level BPE tokenizer: 256 bytes, some merges, special tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.add_tokens([AddedToken("<plain>", special=False), AddedToken("<s>s>", normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(engine_dir / "tokenizer")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("engine")
    save_tiny_tokenizer(directory, TEMPLATE)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf, tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("smollm2")
    fast = AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)
    fast.save_pretrained(directory / "tokenizer")
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def needle(needle_folder, tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("needle")
    (directory / "tokenizer").symlink_to(needle_folder / "model")
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("sentencepiece")
    save_sentencepiece(directory / "tokenizer")
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("words")
    places = {word: place for place, word in enumerate(["<unk>", "France", "is", "Paris", "the", "lamp"])}
    backend = Backend(models.WordLevel(places, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(directory / "tokenizer")
    return Tokenizer(directory)


@pytest.fixture(params=["tiny", "sentencepiece", "words"])
def each(request) -> Tokenizer:
    """Byte-level, of the kind of Llama 2's, and words joined by spaces for want of a decoder."""
    return request.getfixturevalue(request.param)


def stream_all(
    tokenizer: Tokenizer,
    ids: list[int],
    stop_words: tuple[str, ...] = (),
    prompt_ids: tuple[int, ...] = (),
    at_once: int = 1,
) -> tuple[str, TextStream]:
    stream = tokenizer.stream(stop_words, prompt_ids)
    groups = (ids[start : start + at_once] for start in range(0, len(ids), at_once))
    return "".join([*(stream.push(*group) for group in groups), stream.finish()]), stream


def cut_at_first_complete(text: str, stop_words: tuple[str, ...]) -> str:
    """Text before the stop word that is complete first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [word for word in stop_words if text[:end].endswith(word)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def test_special_tokens(tiny):
    start, end = tiny.encode("<s></s>")
    ids = [start, *tiny.encode("a"), end, *tiny.encode("b"), start]
    assert tiny.decode(ids) == "ab"
    assert tiny.decode(ids, skip_special_tokens=False) == "<s>a</s>b<s>"
    assert stream_all(tiny, ids)[0] == "ab"


PIECES = st.sampled_from(
    ["</s>", "<s>", "s>", "<plain>", "<", "/s>", " ", "\n", "The lamp", " was lit", "é", "\u0301", "🚢", "x" * 200]
)


@given(texts=st.lists(st.lists(PIECES, max_size=12), min_size=2, max_size=6), data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_conversations_have_the_tokens_of_whole_texts(each, texts, data):
    """Texts that grow, fork and are edited, cut anywhere by what follows; salts apart."""
    tokenizer, said = each, [""]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_encodings, "SHORTEST", 1)
        for pieces in texts:
            before = data.draw(st.sampled_from(said))
            said.append(before[: data.draw(st.integers(0, len(before)))] + "".join(pieces))
            salt = data.draw(st.sampled_from([None, "a"]))
            most = data.draw(st.sampled_from([3, 10_000]))  # longer ones are not kept
            expected = tokenizer.encode(said[-1], add_special_tokens=False)
            assert tokenizer.encode_conversation(said[-1], salt, most) == expected


def test_a_turn_is_tokenised_by_itself():
    """Behind the end of what came before, unless somebody else's requests tokenised that, or it was long ago."""
    texts = list[str]()

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [1 if piece == "</s>" else 2 for piece in re.split("(</s>)", text) if piece]

    kept = KeptEncodings(encode, {"</s>": 1})
    turns = [f"{TEXT * 300}</s>", f"When?</s>{TEXT}", f"</s>{TEXT}"]
    for count, number in ((1, 2), (2, 5), (3, 7)):
        assert len(kept.encode("".join(turns[:count]), "own", 99)) == number
    assert texts == [turns[0], turns[1], TEXT + turns[2]]
    whole = "".join(turns)
    kept.encode(whole, "other", 99)
    assert texts[-1] == whole
    for number in range(MOST_TEXTS):
        kept.encode(f"{number}{TEXT * 300}</s>", "other", 1)
        kept.encode(f"{whole}{number}</s>", "own", 8)
    kept.encode(f"{whole}!", "own", 99)
    assert texts[-1] == f"{TEXT}!", "texts of too many tokens have pushed nothing out"
    for number in range(MOST_TEXTS):
        kept.encode(f"{number}{TEXT * 300}</s>", "own", 99)
    assert kept.encode(whole, "own", 99) == kept.encode(whole, "other", 99)
    assert texts[-2:] == [whole, whole]


def test_other_threads_go_on_while_a_long_text_is_tokenised(tiny):
    """Streams of the same process would stand still for as long as a prompt of 128K tokens takes."""
    turns, began = 0, threading.Event()

    def tokenise() -> int:
        began.set()
        return len(tiny.encode(TEXT * 2_000))

    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(tokenise)
        began.wait()
        while not tokens.done():
            time.sleep(0.001)
            turns += 1
    assert tokens.result() > 50_000
    assert turns > 10, "at most a few if the text takes Python's global lock"


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_stream_equals_decode_for_any_bytes(tiny, data):
    """Bytes as tokens: invalid, incomplete and complete characters in any order, runs longer than LONGEST_RUN."""
    pieces = st.sampled_from(
        [b"\xff", b"\x80", b"\xf0\x9f", b"\xe2\x82", b"\xf0\x9f\x9a\xa2", b"\xe2\x82\xac", b"\xc3"]
    )
    text = b"".join(data.draw(st.lists(st.one_of(pieces, st.binary(max_size=3)), max_size=40)))
    ids = [byte_token(tiny, byte) for byte in text]
    assert tiny.decode(ids) == text.decode("utf-8", errors="replace")
    assert stream_all(tiny, ids, at_once=data.draw(st.integers(1, 20)))[0] == tiny.decode(ids)


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    table = dict(zip(pre_tokenizers_bytes(), range(256), strict=True))
    (name,) = (char for char, value in table.items() if value == byte)
    return tokenizer._tokenizer.token_to_id(name)


def pre_tokenizers_bytes() -> list[str]:
    """The characters by which byte-level vocabularies write bytes 0 to 255."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    printable = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
    names = {char.encode("latin-1")[0]: char for char in printable}
    spare = (chr(256 + i) for i in range(256))
    table = [names[i] if i in names else next(spare) for i in range(256)]
    assert sorted(table) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert splitter.pre_tokenize_str(" ")[0][0] == table[32]
    return table


@pytest.mark.parametrize("prompt", ["France is", "France is ", " France", "(", "", "灯台", "one ship\n", "</s>"])
@pytest.mark.parametrize("answer", ["Paris", " Paris", "灯", ", the lamp", ""])
def test_the_answer_continues_the_text_of_the_prompt(each, prompt, answer):
    """As it would if both were one text: with the space before the first word, which decoding leaves out at the beginning."""
    prompt_ids = each.encode(prompt)
    ids = each.encode(answer, add_special_tokens=False)
    assert each.decode(prompt_ids) + stream_all(each, ids, (), prompt_ids)[0] == each.decode(prompt_ids + ids)


@pytest.mark.parametrize("name", ["tiny", "sentencepiece"])
@pytest.mark.parametrize("text", ["Paris", " Paris", "\nParis", "灯 Paris", ""])
def test_a_text_behind_another_begins_with_no_further_space(request, name, text):
    tokenizer = request.getfixturevalue(name)
    assert tokenizer.decode([*tokenizer.encode("France is"), *tokenizer.encode_inside(text)]) == "France is" + text


@given(text=st.text(st.sampled_from("aé灯🚢 \n.") | st.characters(codec="utf-8"), max_size=30), data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_may_be_cut_anywhere(each, text, data):
    """Also inside of a character: what of it is in the prompt is no text yet, and the answer begins with the whole of it."""
    ids = each.encode("the lamp is " + text)
    cut = data.draw(st.integers(0, len(ids)))
    assert each.decode_complete(ids[:cut])[0] + stream_all(each, ids[cut:], (), ids[:cut])[0] == each.decode(ids)


@given(prompt=st.lists(st.integers(0, 331), max_size=40), ids=st.lists(st.integers(0, 331), max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_answer_continues_any_tokens(tiny, prompt, ids):
    assert tiny.decode_complete(prompt)[0] + stream_all(tiny, ids, (), prompt)[0] == tiny.decode(prompt + ids)


def test_parts_are_certain(tiny):
    """What push returns is a beginning of the final text, whatever follows, and no character is held for long."""
    ids = tiny.encode(TEXT)
    stream, out = tiny.stream(), ""
    for count, token in enumerate(ids, 1):
        out += stream.push(token)
        assert TEXT.startswith(out)
        assert len(tiny.decode(ids[:count]).rstrip("\ufffd")) == len(out)


def test_no_token_costs_more_than_the_first_ones(tiny, monkeypatch):
    """The number of tokens decoded a push stays bounded: in text, in endless invalid bytes, in special tokens."""
    decoded = []
    decode = Tokenizer.decode

    def counting(self, ids, skip_special_tokens=True):
        decoded.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    (start,) = tiny.encode("<s>")
    lead = byte_token(tiny, 0xF0)
    for ids in (tiny.encode(TEXT) * 10, [byte_token(tiny, 0x80)] * 400, [lead] * 400, [start] * 400):
        decoded.clear()
        stream_all(tiny, ids)
        assert max(decoded, default=0) <= 3 * LONGEST_RUN
        assert sum(decoded) <= len(ids) * 4 * LONGEST_RUN


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "c", "é", "🚢"]), max_size=25),
    st.lists(st.text("abcé🚢", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_stop_words_cut_where_one_is_complete_first(tiny, pieces, stop_words):
    ids = [token for piece in pieces for token in tiny.encode(piece)]
    text, stream = stream_all(tiny, ids, tuple(stop_words))
    assert text == cut_at_first_complete("".join(pieces), tuple(stop_words))
    assert stream.stopped == any(word in "".join(pieces) for word in stop_words)


def test_stop_word_is_held_back_and_released(tiny):
    stream = tiny.stream(("END",))
    assert [stream.push(t) for c in "xENyEND!" for t in tiny.encode(c)] == ["x", "", "", "ENy", "", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""
    stream = tiny.stream(("END",))
    assert [stream.push(t) for c in "EN" for t in tiny.encode(c)] == ["", ""]
    assert stream.finish() == "EN"
    assert not stream.stopped


def test_empty_stop_word_is_refused(tiny):
    with pytest.raises(RequestError, match="stop_words = ''"):
        tiny.stream(("a", ""))


def test_chat_template(tiny, tmp_path):
    messages = [{"role": "user", "content": "When?"}]
    assert tiny.apply_chat_template(messages) == "<|user|>When?<|assistant|>"
    for bad, name in (({"content": "When?"}, "role"), ({"role": "user", "content": ["When?"]}, "content")):
        with pytest.raises(RequestError, match=rf"messages\[1\]\.{name} = .*: must be a text"):
            tiny.apply_chat_template([*messages, bad])
    save_tiny_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(tmp_path).apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0] + 1 }}",
        "{{ 1 // (messages | length - 1) }}",
        "{{ 'x'.index('y') }}",
        "{{ strftime_now(5) }}",
        "{% macro more() %}{{ more() }}{% endmacro %}{{ more() }}",
        "{{ 'x' * (10 ** 18) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{% if %}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal_that_names_it(tmp_path, template):
    save_tiny_tokenizer(tmp_path, template)
    with pytest.raises(RequestError, match=r"^messages: cannot be written by the model's chat template \(\w+"):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "When?"}])


@pytest.mark.parametrize(
    "loops",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
    ],
)
def test_a_template_that_computes_for_long_is_ended_and_nothing_else_is(tmp_path, loops):
    save_tiny_tokenizer(
        tmp_path, "{{ messages[0].content }}{% if messages[0].content == 'loop' %}" + loops + "{% endif %}"
    )
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "When?"}]) == "When?"
    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(tokenizer.apply_chat_template, [{"role": "user", "content": "loop"}])
        while not looping.done():
            assert tokenizer.apply_chat_template([{"role": "user", "content": "When?"}]) == "When?"
            assert tokenizer.encode("When?")
            time.sleep(0.05)
        with pytest.raises(
            RequestError, match=r"^messages: the model's chat template has not written them within 1 s of"
        ):
            looping.result()
        assert pool.submit(sum, range(10**6)).result(), "the thread goes on"


def test_what_a_template_is_given(tmp_path):
    save_tiny_tokenizer(
        tmp_path,
        "{% for m in messages %}[{{ m.name }}:{{ m.content }}]{% endfor %}{{ tone }}{% if add_generation_prompt %}>{% endif %}",
    )
    tokenizer, talk = Tokenizer(tmp_path), [{"role": "user", "content": "When?", "name": "Ada"}]
    assert tokenizer.apply_chat_template(talk) == "[Ada:When?]>"
    assert tokenizer.apply_chat_template(talk, add_generation_prompt=False) == "[Ada:When?]"
    assert tokenizer.apply_chat_template(talk, continue_final_message=True) == "[Ada:When?"
    assert tokenizer.apply_chat_template(talk, chat_template_kwargs={"tone": "!"}) == "[Ada:When?]!>"
    for name in ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "eos_token", "self"):
        with pytest.raises(RequestError, match=f"^chat_template_kwargs.{name}: is a variable that kvseek sets"):
            tokenizer.apply_chat_template(talk, chat_template_kwargs={name: "x"})
    with pytest.raises(RequestError, match=r"^continue_final_message, add_generation_prompt: at most one"):
        tokenizer.apply_chat_template(talk, continue_final_message=True, add_generation_prompt=True)


def test_bad_text_and_missing_folder(tiny, tmp_path):
    with pytest.raises(RequestError, match="text_input: character 1 is half of a surrogate pair"):
        tiny.encode("a\udc80")
    with pytest.raises(EngineDirectoryError, match="no tokenizer; build it again"):
        Tokenizer(tmp_path).encode("a")


@pytest.mark.model
@given(st.lists(st.integers(0, 49151), max_size=60))
@settings(max_examples=200, deadline=None)
def test_smollm2_stream_equals_decode(smollm2, ids):
    assert stream_all(smollm2, ids)[0] == smollm2.decode(ids)


@pytest.mark.model
def test_smollm2_text_and_template(smollm2):
    assert smollm2.decode(smollm2.encode(TEXT)) == TEXT
    assert stream_all(smollm2, smollm2.encode(TEXT))[0] == TEXT
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "When?"}])
    assert prompt.endswith("<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n")


@given(text=st.text(max_size=40))
@settings(max_examples=50)
def test_bytes_of_tokens_are_the_text(tiny, text):
    ids = tiny.encode(text, add_special_tokens=False)
    plain = [i for i in ids if not tiny.is_special(i)]  # the text may spell one
    assert plain != ids or b"".join(map(tiny.token_bytes, ids)).decode() == text


@given(text=st.text(max_size=40))
@settings(max_examples=50)
def test_offsets_are_the_lengths_of_the_text_before(tiny, text):
    ids = [0, *tiny.encode(text), 1]
    data = [b"" if tiny.is_special(token) else tiny.token_bytes(token) for token in ids]
    before = [b"".join(data[:place]).decode("utf-8", "ignore") for place in range(len(ids))]
    assert tiny.offsets(ids) == [len(one) for one in before]
    assert all(tiny.decode(ids).startswith(one) for one in before)


def test_offsets_of_bytes_that_are_no_text(tiny):
    broken = [byte_token(tiny, 0xE2), byte_token(tiny, 0x41), byte_token(tiny, 0xFF)]
    text = tiny.decode(broken)
    assert tiny.offsets([]) == []
    assert tiny.offsets(broken)[0] == 0
    assert all(0 <= offset <= len(text) for offset in tiny.offsets(broken))


def test_bytes_of_added_and_of_missing_tokens(tiny):
    (plain,) = tiny.encode("<plain>", add_special_tokens=False)
    assert tiny.token_bytes(plain) == b"<plain>"
    assert tiny.token_bytes(100_000) == b"", "a model's vocabulary may be larger than its tokenizer's"


@pytest.mark.parametrize("strip", [0, 1])
def test_bytes_and_offsets_of_a_sentencepiece_vocabulary(tmp_path, strip):
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581sea", "sea"]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", strip, 0)]
    backend.decoder = decoders.Sequence(steps)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "tokenizer")
    tokenizer, places = Tokenizer(tmp_path), {piece: i for i, piece in enumerate(pieces)}
    ids = [places[piece] for piece in ("\u2581sea", "<0xE2>", "<0x9A>", "<0x93>", "\u2581", "sea")]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " sea⚓ sea"
    assert tokenizer.decode(ids) == " sea⚓ sea"[strip:]
    assert tokenizer.offsets(ids) == [0, *(place - strip for place in (4, 4, 4, 5, 6))]


def test_offsets_where_decoding_is_more_than_joining(needle):
    ids = [40, 41, 42]
    text, words = needle.decode(ids), [needle.decode([token]) for token in ids]
    assert text == " ".join(words)
    assert needle.offsets(ids) == [0, len(words[0]), len(words[0]) + 1 + len(words[1])]

"""Converts text to token ids and back, and makes text that grows as tokens arrive."""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvseek.core.errors import EngineDirectoryError, RequestError, check_unicode

from .chat_template import TEMPLATE_FILE, ChatTemplate
from .kept_encodings import KeptEncodings

TOKENIZER_FOLDER = "tokenizer"  # inside an engine directory
TOKENIZER_FILE = "tokenizer.json"  # in the folder, as the library tokenizers writes it
REPLACEMENT = "\ufffd"  # decoding puts this in place of bytes that are no UTF-8
SPACE = "\u2581"  # how SentencePiece writes a space
LONGEST_RUN = 16  # tokens without complete text after which TextStream looks for a place to cut
PROMPT_CONTEXT = 8  # tokens of the prompt with which the first ones of an answer are decoded


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for: printable ones themselves, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_characters()


class Tokenizer:
    """The tokenizer of an engine directory; may be shared by threads.

    Text is tokenised by the library tokenizers as tokenizer.json says. transformers' class for a kind of model would put parts of
    its own in place of the file's, so transformers only writes conversations down. Both are imported, and the files are read,
    when first needed: an engine fed with token ids never pays for it.
    """

    def __init__(self, engine_dir: Path) -> None:
        self._directory = engine_dir / TOKENIZER_FOLDER
        self._lock, self._template_lock = threading.Lock(), threading.Lock()
        self._loaded: Any = None
        self._special_ids: frozenset[int] = frozenset()
        self._byte_level = False  # whether the vocabulary spells bytes as characters, as GPT-2's does
        self._joins_bytes = False  # whether a text is the bytes of its tokens, and nothing is changed at their borders
        self._longest = 0  # longest_token_bytes; 0: not counted yet
        self._added: dict[int, str] = {}  # tokens added to the vocabulary, which are written as they are
        self._bytes: dict[int, bytes] = {}  # of the tokens that `token_bytes` was asked for
        self._texts: dict[int, bytes] = {}  # of those that `text_bytes` was asked for
        self._template: ChatTemplate | None = None
        self._kept: KeptEncodings | None = None  # None: a part of a text could have other tokens than within it

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text as token ids; `add_special_tokens` adds the tokens with which the model expects a text to begin.

        Text from `apply_chat_template` already has these tokens. Raises RequestError on lone surrogates.
        """
        check_unicode("text_input", text)
        # A batch of one: `encode` would hold Python's global lock, and with it every stream of the process, for the whole text.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_conversation(self, text: str, salt: str | None, max_tokens: int) -> list[int]:
        """Encode a text from `apply_chat_template`; see KeptEncodings.encode. Raises RequestError as `encode`."""
        check_unicode("text_input", text)
        if self._tokenizer and self._kept:
            return self._kept.encode(text, salt, max_tokens)
        return self.encode(text, add_special_tokens=False)

    def encode_inside(self, text: str) -> list[int]:
        """Encode a text as it stands behind another one, of which it begins a line.

        Tokenizers of the kind of Llama 2's put a space before what they encode, which belongs at the beginning of a whole text
        only. Where a line end is no token of its own before the text, it is encoded by itself.
        """
        ids = self.encode("\n" + text, add_special_tokens=False)
        for count in (1, 2):  # with the space
            if b"".join(map(self.token_bytes, ids[:count])).lstrip(b" ") == b"\n":
                return ids[count:]
        return self.encode(text, add_special_tokens=False)

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Encode a word as it stands inside a text: behind a space, and behind anything else.

        Most vocabularies spell the two differently. There are more spellings of a word: these are the two that a model uses by
        itself. A token that is only the space before the word is not among its tokens.
        """
        bare = word.lstrip(" ")
        found = (self._spelling(text, len(word) - len(bare)) for text in (word, " " + bare))
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def _spelling(self, text: str, spaces: int) -> tuple[int, ...]:
        """Encode a text as it stands inside of another, without tokens that are a space alone before its last `spaces` spaces."""
        ids = self.encode_inside(text)
        pieces = [self.token_bytes(token) for token in ids]
        lead, start = len(whole := b"".join(pieces)) - len(whole.lstrip(b" ")), 0
        while start < len(ids) - 1 and pieces[start] == b" " and lead > spaces:
            start, lead = start + 1, lead - 1
        return tuple(ids[start:])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_complete(self, ids: Sequence[int]) -> tuple[str, int]:
        """Decode token ids without the character, if any, that is not complete at their end; also count the tokens before it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in self.last_with_text(ids):
            decoder.decode(self.text_bytes(token))
        pending, stop = len(decoder.getstate()[0]), len(ids)
        while pending > 0:
            stop -= 1
            pending -= len(self.text_bytes(ids[stop]))
        if pending == 0:
            return self.decode(ids[:stop]), stop
        return self.decode(ids[: stop + 1]).removesuffix(REPLACEMENT), stop  # a token that begins with complete text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Write a conversation as text by the model's chat template.

        Parameters
        ----------
        messages : sequence of mappings
            With "role" and "content", and whatever else the template reads.
        add_generation_prompt : bool, optional
            Whether the text goes on to where the model's answer begins; None: yes, unless `continue_final_message`.
        continue_final_message : bool
            Whether the text ends within the last message, so that the model goes on with it.
        chat_template_kwargs : mapping, optional
            Further variables of the template.
        tools : sequence of mappings
            Functions that the model may call, as in OpenAI's API.

        Raises
        ------
        RequestError
            The model has no chat template, the template fails on the messages, takes more than TEMPLATE_SECONDS or leaves out
            what one says, or the arguments exclude each other.
        """
        template = self._chat_template()
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message, add_generation_prompt: at most one of them may be true; set the other to false"
            )
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        how: dict[str, Any] = {"add_generation_prompt": begins, "continue_final_message": continue_final_message}
        return template.render(messages, how | ({"tools": list(tools)} if tools else {}), chat_template_kwargs or {})

    def _chat_template(self) -> ChatTemplate:
        with self._template_lock:  # one of its own: texts are encoded meanwhile
            if self._template is None:
                self._template = ChatTemplate(self._directory)
            return self._template

    @property
    def template_source(self) -> str:
        """The chat template as it is written, in Jinja; empty if the model has none."""
        path = self._directory / TEMPLATE_FILE
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def added_token(self, text: str) -> int | None:
        """Return the token of exactly this text that was added to the vocabulary; None: there is none."""
        token: int | None = self._tokenizer.token_to_id(text)
        return token if token in self._added else None

    def stream(
        self, stop_words: Sequence[str] = (), prompt_ids: Sequence[int] = (), marks: Mapping[int, str] | None = None
    ) -> TextStream:
        """Start the text of one output, which continues the prompt's; see TextStream."""
        return TextStream(self, stop_words, prompt_ids, marks)

    def last_with_text(self, ids: Sequence[int]) -> list[int]:
        """Return the last tokens that have text, PROMPT_CONTEXT or some more, so that the first one begins with a character."""
        found: list[int] = []
        for token in reversed(ids):
            data = self.text_bytes(token)
            if data:
                found.append(token)
            if len(found) >= PROMPT_CONTEXT and data and data[0] & 0xC0 != 0x80:
                break
        return found[::-1]

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out."""
        return bool(self._tokenizer) and token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for. They may be a part of a character: only all tokens together are UTF-8."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._token_bytes(token_id)
        return found

    def offsets(self, ids: Sequence[int]) -> list[int]:
        """Return the length of the decoded text before each token, without characters that are not complete there."""
        decoder, lengths, text = codecs.getincrementaldecoder("utf-8")("replace"), list[int](), self.decode(ids)
        for token in ids:
            lengths.append(len(decoder.decode(self.text_bytes(token))))
        surplus = sum(lengths) + len(decoder.decode(b"", True)) - len(text)
        first = next((place for place, length in enumerate(lengths) if length), 0)
        if surplus == 1 and lengths[first]:
            lengths[first] -= 1  # the space that some tokenizers put before a text, and leave out of it
        elif surplus:  # a decoder that does more than join bytes
            stream = self.stream()
            lengths = [len(stream.push(token)) for token in ids]
        return list(accumulate(lengths, initial=0))[:-1]

    def text_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text: those of `token_bytes`, but none for a token that `decode` leaves out."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = b"" if self.is_special(token_id) else self.token_bytes(token_id)
        return found

    def begun_bytes(self, prompt_ids: Sequence[int]) -> bytes | None:
        """Return the bytes at a prompt's end that begin a character; None unless bytes are all that a text is made of.

        So they are with vocabularies of the kind of GPT-2's, Llama 3's and Qwen's. These bytes and those of the next tokens,
        decoded, give what `decode` gives, in less time.
        """
        if not (self._tokenizer and self._joins_bytes):
            return None
        data = b"".join(map(self.text_bytes, self.last_with_text(prompt_ids)))
        return data[codecs.utf_8_decode(data, "replace")[1] :]

    def _token_bytes(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""  # a model's vocabulary may be larger than its tokenizer's
        if token_id in self._added or (self._joins_bytes and not BYTES.keys() >= set(piece)):
            return piece.encode()
        if self._byte_level and all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    @property
    def file(self) -> Path:
        """The tokenizer as the library tokenizers writes it."""
        return self._directory / TOKENIZER_FILE

    @property
    def longest_token_bytes(self) -> int:
        """Most bytes of UTF-8 that one token stands for.

        This is an upper bound: byte-level vocabularies spell some single bytes as characters of two bytes.
        """
        if self._longest == 0:
            self._longest = max(len(token.encode("utf-8", "replace")) for token in self._tokenizer.get_vocab())
        return self._longest

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:  # for every token, which should not take the lock
            with self._lock:
                if self._loaded is None:
                    self._load()
        return self._loaded

    def _load(self) -> None:
        import tokenizers

        if not self.file.is_file():
            raise EngineDirectoryError(f"{self.file} is missing: the engine has no tokenizer; build it again")
        loaded = tokenizers.Tokenizer.from_file(str(self.file))
        loaded.no_padding()
        loaded.no_truncation()
        decoder = json.loads(loaded.to_str())["decoder"]
        self._byte_level = '"ByteLevel"' in json.dumps(decoder)
        added = loaded.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        # The decoder reads characters of an added token as bytes, too, unless one of them stands for none.
        self._joins_bytes = (decoder or {}).get("type") == "ByteLevel" and all(
            token.special or token.content.isascii() or not BYTES.keys() >= set(token.content)
            for token in added.values()
        )
        self._special_ids = frozenset(number for number, token in added.items() if token.special)
        first = {number: token for number, token in added.items() if not token.normalized}
        if self._joins_bytes and not any(each.lstrip or each.rstrip or each.single_word for each in first.values()):
            encode = partial(self.encode, add_special_tokens=False)
            self._kept = KeptEncodings(encode, {token.content: number for number, token in first.items()})
        self._loaded = loaded


class TextStream:
    """Text of one output while its tokens arrive.

    `push` returns only text that later tokens cannot change: it holds back bytes of an incomplete UTF-8 character and
    text that could be the beginning of a stop word. `Tokenizer.decode_complete` of the prompt and all returned texts together
    equal `Tokenizer.decode` of the tokens of both, or, if `stopped`, the part of that text before the stop word that was complete
    first, `stop_word`.

    The cost of a token does not grow with the output: a token is decoded together with the few before it, not with all.

    `marks` are characters that stand in the text for these tokens. Half a surrogate pair is one that no other token can be.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_words: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        marks: Mapping[int, str] | None = None,
    ) -> None:
        if not all(stop_words):
            raise RequestError("stop_words = '': must be non-empty; leave empty stop words out")
        self.stopped, self.stop_word = False, ""
        self._tokenizer, self._marks = tokenizer, marks or {}
        for token, mark in self._marks.items():
            text = tokenizer.decode([token])
            if text:
                stop_words = [*stop_words, *(word.replace(text, mark) for word in stop_words if text in word)]
        self._stop_words = tuple(stop_words)
        self._held = ""  # text that could begin a stop word
        self._begun = tokenizer.begun_bytes(prompt_ids)
        if self._begun is not None:
            return
        # `_context` tokens, which decoders need (many leave out the space at the beginning of a text), then those not given out.
        self._ids = tokenizer.last_with_text(prompt_ids) if prompt_ids else []
        self._context_text, self._context = tokenizer.decode_complete(self._ids) if self._ids else ("", 0)

    def push(self, *token_ids: int) -> str:
        """Add tokens; returns the text that is certain now and was not returned before."""
        if not self._marks.keys().isdisjoint(token_ids):
            return "".join(self._push_mark(token) if token in self._marks else self.push(token) for token in token_ids)
        if self._begun is not None:
            data = self._begun + b"".join(map(self._tokenizer.text_bytes, token_ids))
            text, complete = codecs.utf_8_decode(data, "replace")
            self._begun = data[complete:]
            return "" if self.stopped else self._pass_on(text)
        new = [token for token in token_ids if not self._tokenizer.is_special(token)]
        if self.stopped or not new:
            return ""
        runs = (len(self._ids) - self._context) // LONGEST_RUN
        self._ids += new
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(REPLACEMENT):
            return self._pass_on(self._take(len(self._ids), text))
        longer = (len(self._ids) - self._context) // LONGEST_RUN > runs
        return self._pass_on(self._cut_run(text)) if longer else ""

    def finish(self) -> str:
        """End the output; returns the rest of the text."""
        if self.stopped:
            return ""
        text = self._pass_on(self._rest())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _push_mark(self, token: int) -> str:
        return "" if self.stopped else self._pass_on(self._rest() + self._marks[token])

    def _rest(self) -> str:
        """Give out what is held back of a character that has not become complete."""
        if self._begun is not None:
            data, self._begun = self._begun, b""
            return data.decode("utf-8", "replace")
        return self._take(len(self._ids), self._tokenizer.decode(self._ids))

    def _take(self, stop: int, text: str) -> str:
        """Give out the tokens before `stop`, which become the next context; together with the old context they read `text`."""
        new = text[len(self._context_text) :]
        if new:
            del self._ids[: self._context]
            self._context = stop - self._context
            self._context_text = self._tokenizer.decode(self._ids[: self._context])
        return new

    def _cut_run(self, text: str) -> str:
        """Give out the certain part of a long run of tokens whose bytes end in an incomplete character.

        A character has at most four bytes, so one of the last four borders between tokens is not inside a character. At
        that border the two sides decode to the same text alone as together.
        """
        for stop in range(len(self._ids) - 1, max(self._context, len(self._ids) - 5), -1):
            left = self._tokenizer.decode(self._ids[:stop])
            if left + self._tokenizer.decode(self._ids[stop:]) == text:
                return self._take(stop, left)
        return ""

    def _pass_on(self, text: str) -> str:
        """Add certain text to the held text, stop at a stop word, hold text that could begin one, and return the rest."""
        if not self._stop_words:
            return text
        self._held += text
        found = [(at + len(word), at, word) for word in self._stop_words if (at := self._held.find(word)) >= 0]
        if found:
            _, at, self.stop_word = min(found)
            self.stopped = True
            text, self._held = self._held[:at], ""
            return text
        keep = self._possible_beginning()
        split = len(self._held) - keep
        text, self._held = self._held[:split], self._held[split:]
        return text

    def _possible_beginning(self) -> int:
        """Return the length of the longest end of the held text with which a stop word begins."""
        longest = min(len(self._held), max((len(word) - 1 for word in self._stop_words), default=0))
        for length in range(longest, 0, -1):
            if any(word.startswith(self._held[-length:]) for word in self._stop_words):
                return length
        return 0

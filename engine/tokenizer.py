"""Converts text to token ids and back, and makes text that grows as tokens arrive."""

from __future__ import annotations

import codecs
import inspect
import json
import re
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvseek.core.errors import EngineDirectoryError, RequestError
from kvseek.core.fields import check_unicode

TOKENIZER_FOLDER = "tokenizer"  # inside an engine directory, as transformers' save_pretrained writes it
REPLACEMENT = "\ufffd"  # decoding puts this in place of bytes that are no UTF-8
SPACE = "\u2581"  # how SentencePiece writes a space
MAX_REASON = 300  # characters of a template's own error in ours
LONGEST_RUN = 16  # tokens without complete text after which TextStream looks for a place to cut


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for: printable ones themselves, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_characters()


class Tokenizer:
    """The tokenizer of an engine directory; may be shared by threads.

    transformers is imported and the files are read when first needed: an engine fed with token ids never pays for it.
    """

    def __init__(self, engine_dir: Path) -> None:
        self._directory = engine_dir / TOKENIZER_FOLDER
        self._lock = threading.Lock()
        self._loaded: Any = None
        self._special_ids: frozenset[int] = frozenset()
        self._byte_level = False  # whether the vocabulary spells bytes as characters, as GPT-2's does
        self._longest = 0  # longest_token_bytes; 0: not counted yet
        self._added: frozenset[int] = frozenset()  # tokens added to the vocabulary, which are written as they are
        self._bytes: dict[int, bytes] = {}  # of the tokens that `token_bytes` was asked for

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text as token ids; `add_special_tokens` adds the tokens with which the model expects a text to begin.

        Text from `apply_chat_template` already has these tokens. Raises RequestError on lone surrogates.
        """
        check_unicode("text_input", text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Encode a word as it stands alone and behind a space, which most vocabularies spell differently.

        There are more spellings of a word: these are the two that a model uses by itself.
        """
        found = (tuple(self.encode(text, add_special_tokens=False)) for text in (word, " " + word.lstrip(" ")))
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
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

        Raises
        ------
        RequestError
            The model has no chat template, the template fails on the messages, or the arguments exclude each other.
        """
        extra = dict(chat_template_kwargs or {})
        for name in extra:
            if name in self._template_names:
                raise RequestError(
                    f"chat_template_kwargs.{name}: is a variable that kvseek sets itself; choose another name, or leave it out"
                )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message, add_generation_prompt: at most one of them may be true; set the other to false"
            )
        if not self._tokenizer.chat_template:
            raise RequestError(
                "apply_chat_template: this model's tokenizer has no chat template; send the text as it is"
            )
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=begins,
                continue_final_message=continue_final_message,
                **extra,
            )
        except Exception as error:  # a template is a program, which may raise anything
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
            raise RequestError(
                f"messages: cannot be written by the model's chat template ({reason}); change them, or send the text as it is"
            ) from None
        return text

    @property
    def _template_names(self) -> frozenset[str]:
        """Variables of chat templates, and parameters of transformers' function, that are no client's to set."""
        parameters = inspect.signature(type(self._tokenizer).apply_chat_template).parameters
        return frozenset(("messages", "conversations", *parameters, *self._tokenizer.special_tokens_map))

    def stream(self, stop_words: Sequence[str] = ()) -> TextStream:
        """Start the text of one output; see TextStream."""
        return TextStream(self, stop_words)

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
            lengths.append(0 if self.is_special(token) else len(decoder.decode(self.token_bytes(token))))
        surplus = sum(lengths) + len(decoder.decode(b"", True)) - len(text)
        first = next((place for place, length in enumerate(lengths) if length), 0)
        if surplus == 1 and lengths[first]:
            lengths[first] -= 1  # the space that some tokenizers put before a text, and leave out of it
        elif surplus:  # a decoder that does more than join bytes
            stream = self.stream()
            lengths = [len(stream.push(token)) for token in ids]
        return list(accumulate(lengths, initial=0))[:-1]

    def _token_bytes(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""  # a model's vocabulary may be larger than its tokenizer's
        if token_id in self._added:
            return piece.encode()
        if self._byte_level and all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    @property
    def file(self) -> Path:
        """The tokenizer as the library tokenizers writes it; other kinds of tokenizers have no such file."""
        return self._directory / "tokenizer.json"

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
        with self._lock:
            if self._loaded is None:
                self._load()
            return self._loaded

    def _load(self) -> None:
        if not self._directory.is_dir():
            raise EngineDirectoryError(f"{self._directory} is missing: the engine has no tokenizer; build it again")
        self._loaded = self._class().from_pretrained(str(self._directory), local_files_only=True)
        backend = getattr(self._loaded, "backend_tokenizer", None)
        self._byte_level = backend is not None and '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])
        self._added = frozenset(self._loaded.added_tokens_decoder)
        special = (number for number, token in self._loaded.added_tokens_decoder.items() if token.special)
        # Tokenizers differ in which special tokens they leave out of text, so each token is tried.
        self._special_ids = frozenset(i for i in special if not self._loaded.decode([i], skip_special_tokens=True))

    def _class(self) -> Any:
        """Find the class that save_pretrained has named. AutoTokenizer would find the same class, but imports torch first.

        A process that only tokenises does not need torch, whose import takes seconds and 200 MB.
        """
        import transformers

        path = self._directory / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        named = getattr(transformers, settings.get("tokenizer_class") or "", None)
        return transformers.AutoTokenizer if named is None or "auto_map" in settings else named


class TextStream:
    """Text of one output while its tokens arrive.

    `push` returns only text that later tokens cannot change: it holds back bytes of an incomplete UTF-8 character and
    text that could be the beginning of a stop word. All returned texts together equal `Tokenizer.decode` of all tokens, or,
    if `stopped`, the part of that text before the stop word that was complete first, `stop_word`.

    The cost of a token does not grow with the output: a token is decoded together with the few before it, not with all.
    """

    def __init__(self, tokenizer: Tokenizer, stop_words: Sequence[str] = ()) -> None:
        if not all(stop_words):
            raise RequestError("stop_words = '': must be non-empty; leave empty stop words out")
        self.stopped, self.stop_word = False, ""
        self._tokenizer = tokenizer
        self._stop_words = tuple(stop_words)
        self._ids: list[int] = []  # context (decoders need the tokens before a token), then tokens not given out yet
        self._context = 0  # number of context tokens at the start of _ids
        self._context_text = ""
        self._held = ""  # text that could begin a stop word

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is certain now and was not returned before."""
        if self.stopped or self._tokenizer.is_special(token_id):
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(REPLACEMENT):
            return self._pass_on(self._take(len(self._ids), text))
        pending = len(self._ids) - self._context
        return self._pass_on(self._cut_run(text)) if pending % LONGEST_RUN == 0 else ""

    def finish(self) -> str:
        """End the output; returns the rest of the text."""
        if self.stopped:
            return ""
        text = self._pass_on(self._take(len(self._ids), self._tokenizer.decode(self._ids)))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

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

"""The common part of the synchronous and the asynchronous API: the engine in its thread, and requests from prompts."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import takewhile
from pathlib import Path
from typing import Any, TypedDict

from kvseek.core.config import EngineConfig
from kvseek.core.errors import (
    CapacityError,
    ConfigError,
    EngineDirectoryError,
    RequestError,
    UnavailableError,
    renamed,
    typed,
)
from kvseek.core.request import DEFAULT_PRIORITY, MAX_SALT, MAX_SESSION_ID, EndedSession, Request, Session, check_text
from kvseek.engine.engine import MAX_NUM_TOKENS, Engine
from kvseek.engine.loading.prefixes import DiskSettings
from kvseek.engine.service import EngineService
from kvseek.engine.speculation import Speculation, read_speculation
from kvseek.engine.tokenizer import Tokenizer

from .arguments import (
    NAMES,
    PREFIX_NAMES,
    Message,
    Positive,
    Prompt,
    check_conversation,
    check_path,
    plain,
    token_ids,
)
from .engine_cache import EngineSource, engine_source
from .generation import Generation
from .prefix import Prefix
from .sampling_params import SamplingParams

PathLike = str | os.PathLike[str]


class RequestOptions(TypedDict, total=False):
    """What `generate`, `chat` and `score` take besides; see LLM.generate."""

    priority: int
    timeout: float | None
    session: str | Session | None
    cache_salt: str | None
    prefix: Prefix | None
    speculate: bool


class BaseLLM:
    """A model that is loaded into this process; see LLM for the parameters and errors.

    Attributes
    ----------
    engine_dir : Path
        The engine directory that was given, or the engine directory in the cache.
    """

    def __init__(
        self,
        model: PathLike,
        *,
        method: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_seq_len: int | None = None,
        max_batch_size: int | None = None,
        tokenizer: PathLike | None = None,
        cache_dir: PathLike | None = None,
        threads: int | None = None,
        max_num_tokens: int = MAX_NUM_TOKENS,
        disk_dir: PathLike | None = None,
        disk_bytes: int | None = None,
        speculation: str | None = None,
        num_speculative_tokens: int | None = None,
        quiet: bool = False,
        **build_options: Any,
    ) -> None:
        named = {
            "method": method,
            "device": device,
            "dtype": dtype,
            "max_seq_len": max_seq_len,
            "max_batch_size": max_batch_size,
            "tokenizer": tokenizer,
        }
        options = {name: value for name, value in named.items() if value is not None} | build_options
        for name, path in {
            "model": model,
            "tokenizer": tokenizer,
            "cache_dir": cache_dir,
            "disk_dir": disk_dir,
        }.items():
            if path is not None or name == "model":
                check_path(name, path)
        numbers = {"threads": threads, "disk_bytes": disk_bytes, "num_speculative_tokens": num_speculative_tokens}
        for name, value in numbers.items():
            typed(name, value, Positive | None, ConfigError)
        typed("max_num_tokens", max_num_tokens, Positive, ConfigError)
        typed("quiet", quiet, bool, ConfigError)
        disk = DiskSettings(None if disk_dir is None else Path(disk_dir).expanduser(), disk_bytes)
        drafts = read_speculation(typed("speculation", speculation, str | None, ConfigError), num_speculative_tokens)
        source = engine_source(model, options, cache_dir, quiet)
        self.engine_dir = source.directory
        self._service = _load(source, threads, max_num_tokens, disk, drafts)
        # Also ends the engine's thread if the object is dropped, or if the program ends without `close`, before PyTorch ends.
        self._finalizer = weakref.finalize(self, self._service.close)

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine: model, method, cache and limits."""
        return self._service.engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the engine; may be used from any thread."""
        return self._service.engine.tokenizer

    @property
    def engine(self) -> Engine:
        """The engine itself, for measurements. It has a thread of its own; docstrings tell which methods others may call."""
        return self._service.engine

    def _close(self) -> None:
        """End all requests, and the engine's thread. May be called again."""
        self._finalizer()

    def _end_session(self, session_id: str, cache_salt: str | None) -> Future[EndedSession | None]:
        self._check_open()
        check_text("session_id", session_id, MAX_SESSION_ID)
        if cache_salt is not None:
            check_text("cache_salt", cache_salt, MAX_SALT)
        return self._service.ask(lambda engine: engine.end_session(session_id, cache_salt))

    def _check_open(self) -> None:
        self._service.check_process()  # before anything else takes a lock, which a fork may have taken along
        if not self._finalizer.alive:
            raise UnavailableError("the LLM is closed: no further requests; make another one")

    def _generation(
        self,
        index: int,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams,
        options: RequestOptions,
        names: Mapping[str, str] = NAMES,
        template: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Make a request that the engine can serve, without submitting it.

        `names` are the caller's for what the engine's errors name. `template`: the prompt is a conversation, which the chat
        template writes with these arguments.

        Raises RequestError or CapacityError if the engine can never serve the request, UnavailableError if the LLM is closed.
        """
        self._check_open()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params = {params!r:.80}: must be a kvseek.SamplingParams; make one")
        known = RequestOptions.__annotations__
        if unknown := [name for name in options if name not in known]:
            raise RequestError(f"{unknown[0]}: there is no such option; leave it out, or use one of {', '.join(known)}")
        session, prefix, cache_salt = options.get("session"), options.get("prefix"), options.get("cache_salt")
        if not (session is None or isinstance(session, str | Session)):
            raise RequestError(f"session = {session!r:.80}: must be a session's id or a kvseek.Session; make one")
        if not (prefix is None or isinstance(prefix, Prefix)):
            raise RequestError(f"prefix = {prefix!r:.80}: must be what LLM.prefix returns; make one")
        try:
            own_session = Session(session) if isinstance(session, str) else session
            if prefix is not None:
                prefix.check(self._service, cache_salt)
                own_session, cache_salt = own_session or prefix.session, prefix.cache_salt
            text, ids = (
                self._tokens(prompt, prefix) if template is None else self._chat_tokens(prompt, template, prefix)
            )
            bad_words = tuple(
                spelling for word in params.bad_words or () for spelling in self.tokenizer.spellings(word)
            )
            ends = () if params.ignore_eos else self.config.model.eos_token_ids
            request = Request(
                prompt_ids=tuple(ids),
                max_tokens=self.config.max_seq_len - len(ids) if params.max_tokens is None else params.max_tokens,
                sampling=params.for_engine(bad_words, len(ids)),
                end_ids=(*ends, *(params.stop_token_ids or ())),
                priority=plain(options.get("priority", DEFAULT_PRIORITY)),
                timeout_seconds=plain(options.get("timeout")),
                cache_salt=cache_salt,
                session=own_session,
                max_tokens_by_default=params.max_tokens is None,
                speculate=options.get("speculate", True),
            )
            sequence = self.engine.prepare(request)
        except (RequestError, CapacityError) as error:
            raise type(error)(renamed(str(error), names)) from None
        return Generation(index, text, sequence, self.tokenizer, params.stop or (), names)

    def _tokens(self, prompt: Any, prefix: Prefix | None) -> tuple[str | None, list[int]]:
        """Return a prompt's text, None if it is token ids, and its tokens."""
        text = prompt if isinstance(prompt, str) else None
        if text is None:
            ids = token_ids("prompt", prompt)
        else:
            ids = self.tokenizer.encode(text) if prefix is None else self.tokenizer.encode_inside(text)
        return (text, ids) if prefix is None else prefix.prompt(text, ids)

    def _chat_tokens(
        self, messages: Any, template: Mapping[str, Any], prefix: Prefix | None
    ) -> tuple[str | None, list[int]]:
        """Return a conversation's text and its tokens. The template writes special tokens itself, and those of the prefix."""
        conversation = messages if prefix is None else prefix.conversation(messages)
        text = self.tokenizer.apply_chat_template(conversation, **template)
        return text, self.tokenizer.encode(text, False)

    def _prefix(self, beginning: Prompt | Sequence[Message], cache_salt: str | None) -> tuple[Prefix, Generation]:
        """Make a prefix, and the request that reads it, without submitting that; raises as `_generation`."""
        self._check_open()
        try:
            return self._make_prefix(beginning, cache_salt)
        except (RequestError, CapacityError) as error:
            raise type(error)(renamed(str(error), PREFIX_NAMES)) from None

    def _make_prefix(self, beginning: Prompt | Sequence[Message], cache_salt: str | None) -> tuple[Prefix, Generation]:
        if cache_salt is not None:
            check_text("cache_salt", cache_salt, MAX_SALT)
        if isinstance(beginning, str):
            prefix = Prefix(self._service, self.tokenizer.encode(beginning, True), beginning, None, cache_salt)
        elif isinstance(beginning, Sequence) and beginning and isinstance(beginning[0], Mapping):
            messages: Sequence[Any] = check_conversation(beginning)
            probes = [[*messages, {"role": "user", "content": content}] for content in ("a", "Z")]
            one, other = (self.tokenizer.encode(self.tokenizer.apply_chat_template(probe), False) for probe in probes)
            ids = [first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
            prefix = Prefix(self._service, ids, None, messages, cache_salt)
        else:
            prefix = Prefix(self._service, token_ids("prompt", beginning), None, None, cache_salt)
        params = SamplingParams(max_tokens=1)  # a request generates something; nobody reads it
        kept: RequestOptions = {"session": prefix.session, "cache_salt": cache_salt}
        return prefix, self._generation(0, prefix.token_ids, params, kept)

    def _generations(
        self,
        prompts: Sequence[Prompt] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
        names: Mapping[str, str] = NAMES,
        template: Mapping[str, Any] | None = None,
    ) -> list[Generation]:
        """Make a `_generation` for every prompt; if there are several, an error names the prompt at fault."""
        each = _one_each(params, len(prompts))
        if options.get("session") is not None and len(prompts) > 1:
            raise RequestError(
                f"session: is that of one conversation, there are {len(prompts)} prompts; call for each of them"
            )
        generations = []
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                generations.append(self._generation(index, prompt, own, options, names, template))
            except (RequestError, CapacityError) as error:
                if len(prompts) == 1:
                    raise
                where = "prompts" if template is None else "messages"
                raise type(error)(f"{where}[{index}]: {error}; no prompt has been started") from None
        return generations


def _load(
    source: EngineSource, threads: int | None, max_num_tokens: int, disk: DiskSettings, drafts: Speculation | None
) -> EngineService:
    """Load the engine; a damaged entry of the cache is built again first."""
    try:
        return EngineService.load(source.directory, threads, None, max_num_tokens, disk, speculation=drafts)
    except EngineDirectoryError as error:
        if source.options is None:
            raise
        if not source.options.quiet:
            print(f"{error}; building it again", file=sys.stderr)
    source.build()
    return EngineService.load(source.directory, threads, None, max_num_tokens, disk, speculation=drafts)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    """Return sampling parameters for each prompt; raises RequestError if their number is not that of the prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise RequestError(f"sampling_params = {params!r:.80}: must be a kvseek.SamplingParams; make one")
    if len(params) != count:
        raise RequestError(
            f"sampling_params has {len(params)} entries: must be one for all prompts, or {count}, one for each; leave some out"
        )
    return params


def template_arguments(
    add_generation_prompt: bool | None, continue_final_message: bool, chat_template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments that Tokenizer.apply_chat_template has besides messages; raises RequestError."""
    return {
        "add_generation_prompt": typed("add_generation_prompt", add_generation_prompt, bool | None),
        "continue_final_message": typed("continue_final_message", continue_final_message, bool),
        "chat_template_kwargs": typed("chat_template_kwargs", chat_template_kwargs, dict[str, Any] | None),
    }

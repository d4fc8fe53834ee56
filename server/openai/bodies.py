"""The bodies of POST /v1/chat/completions and /v1/completions: their fields, and the engine's parameters that they stand for."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from kvseek.core.config import EngineConfig
from kvseek.core.guide import MAX_GUIDE_BYTES, Guide, GuideType
from kvseek.core.request import (
    MAX_LOGPROBS,
    MAX_SALT,
    MAX_SEED,
    SamplingConfig,
    Session,
    check_text,
    check_words,
    read_session,
)
from kvseek.core.selected_rows import RowReport
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.http.content import first_character
from kvseek.server.requests.translation import Encode

from .answers import AnswerForm, AnswerForms, answer_guide, can_guide
from .fields import ABSENT, BodyFormat, FieldError, decode, is_absent, require
from .prompts import TOOL, chat_text, check_length, count_strings, encode, message_texts, read_messages, text_ids
from .tool_formats import Tags
from .tools import Tools, read_tools


class Prompt(NamedTuple):
    """A prompt's token ids, and what its answers are.

    `echo` is the text with which they begin; None: they begin with what is generated. `form` says what they consist of, and
    `guide` what they follow.
    """

    ids: list[int]
    echo: str | None = None
    form: AnswerForm = AnswerForm()
    guide: Guide | None = None


# Of all prompts of a request together: each is a request of the engine, and takes a place in its queue
MAX_CHOICES = 128
MAX_ALTERED = 2.0  # of presence and frequency penalty, as OpenAI
MAX_STOP_IDS = 1024
# Fields that never change an answer here: who asks, how OpenAI bills, stores and caches.
WITHOUT_EFFECT = ("user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
# Fields that kvseek does not support, with the values at which they have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream has besides its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers on encrypted lines


class RowFields(msgspec.Struct, forbid_unknown_fields=True):
    """Which selected rows are reported; see RowReport."""

    block: int | None = None
    layers: list[int] | None = None
    kv_heads: list[int] | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields of all endpoints that generate; None stands for the default of the field."""

    model: str | None = None
    stream: bool | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's names for what OpenAI does not have, and kvseek's own.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    forced_tokens: list[int] | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    retention_priority: int | None = None
    retention_seconds: float | None = None
    speculate: bool | None = None


class Parameters(CommonFields, kw_only=True):
    """Fields of OpenAI's older endpoints besides."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    response_format: msgspec.Raw = ABSENT
    return_selected_rows: bool | RowFields | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raise FieldError on what only this port limits; the engine checks the rest."""
        require(
            1 <= self.choices <= MAX_CHOICES, "n", self.n, f"in [1, {MAX_CHOICES}]", "send further requests for more"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value, limit = getattr(self, name) or 0.0, f"in [-{MAX_ALTERED:g}, {MAX_ALTERED:g}]"
            require(abs(value) <= MAX_ALTERED, name, value, limit, "0 is no penalty")
        if self.stream_options is not None:
            require(bool(self.stream), "stream_options", "an object", "absent unless stream is true", "leave it out")
            padded = bool(self.stream_options.include_obfuscation)
            require(not padded, "stream_options.include_obfuscation", padded, "false", "kvseek does not pad streams")
        seed = self.seed or 0
        require(-(2**63) <= seed <= MAX_SEED, "seed", seed, f"in [-2^63, {MAX_SEED}]", "any such number will do")
        ids = len(self.stop_token_ids or ())
        require(ids <= MAX_STOP_IDS, "stop_token_ids", f"{ids} ids", f"<= {MAX_STOP_IDS} ids", "send fewer")
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt, MAX_SALT)

    def stop_words(self) -> tuple[str, ...]:
        """Return the texts that end an answer; empty ones end none. Raises RequestError."""
        return check_words("stop", (self.stop,) if isinstance(self.stop, str) else self.stop or ())

    def end_ids(self, config: EngineConfig) -> tuple[int, ...]:
        """Return the tokens that end an answer: the model's own unless `ignore_eos`, and `stop_token_ids`."""
        own = () if self.ignore_eos else config.model.eos_token_ids
        return tuple(dict.fromkeys((*own, *(self.stop_token_ids or ()))))

    def sampling(self, tokenizer: Tokenizer, logprobs: int | None) -> SamplingConfig:
        """Make the engine's parameters of the first choice. Without `seed` every request draws anew, as with OpenAI."""
        given: dict[str, Any] = {
            name: value
            for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
            if (value := getattr(self, name)) is not None
        }
        seed = secrets.randbits(63) if self.seed is None else self.seed & MAX_SEED  # OpenAI's seeds have a sign
        return SamplingConfig(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k in (None, -1) else self.top_k,  # vLLM's -1 keeps all tokens, as 0 does
            seed=seed,
            bad_words=self._bad_words(tokenizer),
            logit_bias=self._biases(),
            logprobs=logprobs,
            forced_tokens=tuple(self.forced_tokens or ()),
            return_selected_rows=self._row_report(),
            **given,
        )

    def _row_report(self) -> RowReport | None:
        asked = self.return_selected_rows
        if isinstance(asked, RowFields):
            return RowReport(asked.block, tuple(asked.layers or ()), tuple(asked.kv_heads or ()))
        return RowReport() if asked else None

    @property
    def session(self) -> Session | None:
        """The conversation that the request continues; raises RequestError."""
        return read_session(self.session_id, self.retention_priority, self.retention_seconds)

    def _bad_words(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
        words = check_words("bad_words", self.bad_words or ())
        return tuple(spelling for word in words for spelling in tokenizer.spellings(word))

    def _biases(self) -> tuple[tuple[int, float], ...]:
        biases = self.logit_bias or {}
        for token in biases:
            number = token.isascii() and token.isdigit() and len(token) <= 10
            require(number, "logit_bias", token, "token ids, written as strings", "the model's tokenizer tells them")
        return tuple((int(token), bias) for token, bias in biases.items())


def check_logprobs(name: str, count: int) -> int:
    """Return a number of likeliest tokens; raises FieldError that names the field."""
    require(0 <= count <= MAX_LOGPROBS, name, count, f"in [0, {MAX_LOGPROBS}]", "ask for fewer")
    return count


UNWRITTEN = "serve a model whose template knows tools"
MAX_BUDGET = 1 << 20  # tokens of thinking
# Most of them that an effort stands for where the template knows none. As with OpenAI and Anthropic, "high" has no limit.
EFFORTS = {"none": 0, "minimal": 128, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None}
MAX_TEMPLATE_BYTES = 1 << 14  # of JSON, of the template's variables: a value takes up to 60 times as much memory
_variables = msgspec.json.Decoder(dict[str, Any])


class ChatBody(Parameters, kw_only=True):
    """Fields of a chat completion that have an effect."""

    prompt_field: ClassVar[str] = "messages"
    messages: msgspec.Raw = ABSENT
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None

    def prompts(
        self, tokenizer: Tokenizer, config: EngineConfig, forms: AnswerForms, conversation: Encode | None = None
    ) -> list[Prompt]:
        """Tokenise the conversation: one prompt, which the answer never repeats. `conversation` may do it instead."""
        tools, text_guide = read_tools(self.tools, self.tool_choice), read_guide(self.response_format)
        messages = message_texts(read_messages(self.messages))
        self._check_tools(tools, messages, forms)
        effort, most = self._effort(forms)
        budget = self._budget(forms)
        budget = most if budget is None else budget
        template = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": bool(self.continue_final_message),
            "chat_template_kwargs": self._variables() | effort,
            "tools": tools.written,
        }
        text = chat_text(messages, tokenizer, config, template)
        for function in (tool["function"]["name"] for tool in tools.written):
            require(
                function in text,
                "tools",
                function,
                "left out: the model's chat template writes nothing of it",
                UNWRITTEN,
            )
        tokenise: Encode = partial(tokenizer.encode, add_special_tokens=bool(self.add_special_tokens))
        if conversation is not None and not self.add_special_tokens:
            tokenise = conversation
        ids = encode("messages", text, tokenise, config.max_input_len)
        thinking = forms.thinking_of(text, budget, bool(self.continue_final_message))
        several = self.parallel_tool_calls is not False and tools.named is None
        form = forms.form(thinking, tools.callable, several)
        ends, tags = self.end_ids(config), Tags() if form.tools is None else forms.tags(form.tools)
        may_call = form.tools is not None and not tools.must
        if may_call and text_guide is None and budget is None and not (ends and can_guide()):
            return [Prompt(ids, None, form)]  # calls are read all the same
        return [Prompt(ids, None, form, answer_guide(form, tags, tools.must, ends, text_guide))]

    def _check_tools(self, tools: Tools, messages: Sequence[Mapping[str, Any]], forms: AnswerForms) -> None:
        """Refuse what the model's template does not write, or whose answers could not be read."""
        if forms.tools is not None:
            return
        remedy = "serve a model whose template knows them, or name its format by kvseek serve --tool_parser"
        limit = "left out: the model's chat template knows no tools, or writes their calls in a format that kvseek does not know"
        require(not tools.written, "tools", f"{len(tools.written)} tools", limit, remedy)
        number = next((n for n, each in enumerate(messages) if each["role"] == TOOL or "tool_calls" in each), None)
        require(number is None, "messages", f"calls of tools in messages[{number}]", limit, remedy)

    def _effort(self, forms: AnswerForms) -> tuple[dict[str, Any], int | None]:
        """Return the template's variable of `reasoning_effort`, else most tokens of thinking; raises FieldError."""
        effort, name = self.reasoning_effort, "reasoning_effort"
        if effort is None:
            return {}, None
        if name in forms.template:
            return {name: effort}, None
        if effort == "none" and "enable_thinking" in forms.template:
            return {"enable_thinking": False}, None
        require(effort in EFFORTS, name, effort, ", ".join(EFFORTS), "leave it out for the model's own")
        thinks = forms.thinking is not None
        limit = '"none" or null for a model that does not think, or with --reasoning_parser none'
        require(thinks or effort == "none", name, effort, limit, "leave it out")
        return {}, EFFORTS[effort] if thinks else None

    def _budget(self, forms: AnswerForms) -> int | None:
        """Return the most tokens of thinking that the client has named; raises FieldError."""
        budget, name = self.thinking_token_budget, "thinking_token_budget"
        if budget is not None:
            require(0 <= budget <= MAX_BUDGET, name, budget, f"in [0, {MAX_BUDGET}]", "leave it out for no limit")
            limit = "null for a model that does not think, or with --reasoning_parser none"
            require(forms.thinking is not None, name, budget, limit, "leave it out")
        return budget

    def _variables(self) -> dict[str, Any]:
        raw, name = self.chat_template_kwargs, "chat_template_kwargs"
        if is_absent(raw):
            return {}
        size = memoryview(raw).nbytes
        if size > MAX_TEMPLATE_BYTES:
            raise FieldError(name, f"{name} has {size} bytes of JSON: must be <= {MAX_TEMPLATE_BYTES}; send less")
        found: dict[str, Any] = decode(name, _variables, raw)
        return found

    @property
    def limit_field(self) -> str | None:
        """Name of the field that says how many tokens to generate at most; None: the client says nothing."""
        return next((name for name in ("max_completion_tokens", "max_tokens") if getattr(self, name) is not None), None)

    def limit(self, prompt_tokens: int, config: EngineConfig) -> int:
        """Return the most tokens to generate: what is left of max_seq_len, unless the client says."""
        name = self.limit_field
        if name is None:
            return config.max_seq_len - prompt_tokens
        value, older = int(getattr(self, name)), self.max_tokens
        same = older in (None, value)
        require(same, name, value, f"max_tokens = {older}, its older name", "send one of them")
        return value

    def top(self) -> int | None:
        """Return how many likeliest tokens to tell besides every token's own log probability; None: tell none."""
        if not self.logprobs:
            none = self.top_logprobs in (None, 0)
            require(none, "top_logprobs", self.top_logprobs, "absent unless logprobs is true", "set logprobs to true")
            return None
        return check_logprobs("top_logprobs", self.top_logprobs or 0)


CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "echo": (False,),
    "documents": ([],),
}
CHAT_FORMAT = BodyFormat(ChatBody, ("messages",), CHAT_NEUTRAL, (*WITHOUT_EFFECT, "cache_control"))


DEFAULT_TOKENS = 16  # OpenAI's
MAX_PROMPTS = MAX_CHOICES  # in one request
MAX_IDS = 1 << 21  # token ids of all prompts: an id takes up to 16 times as much memory as its JSON
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[int])
_many_ids = msgspec.json.Decoder(list[list[int]])


class CompletionBody(Parameters, kw_only=True):
    """Fields of a completion that have an effect."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: msgspec.Raw = ABSENT
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    def prompts(
        self, tokenizer: Tokenizer, config: EngineConfig, forms: AnswerForms, conversation: Encode | None = None
    ) -> list[Prompt]:
        """Return every prompt; texts are tokenised, and token ids decoded for an echo."""
        found, guide = read_prompts(self.prompt), read_guide(self.response_format)
        count = len(found)
        require(0 < count <= MAX_PROMPTS, "prompt", f"{count} prompts", f"1 to {MAX_PROMPTS} prompts", "send as many")
        vocabulary = config.model.vocab_size
        prompts = []
        for prompt in found:
            if isinstance(prompt, str):
                ids = text_ids(prompt, self.add_special_tokens is not False, tokenizer, config)
                prompts.append(Prompt(ids, prompt if self.echo else None, guide=guide))
                continue
            check_length("prompt", prompt, config.max_input_len)
            bad = next((token for token in prompt if not 0 <= token < vocabulary), None)
            require(bad is None, "prompt", bad, f"token ids in [0, {vocabulary})", "the model has no such token")
            prompts.append(Prompt(prompt, tokenizer.decode_complete(prompt)[0] if self.echo else None, guide=guide))
        return prompts

    @property
    def limit_field(self) -> str | None:
        """See ChatBody."""
        return None if self.max_tokens is None else "max_tokens"

    def limit(self, prompt_tokens: int, config: EngineConfig) -> int:
        """Return the most tokens to generate."""
        left = config.max_seq_len - prompt_tokens
        return min(DEFAULT_TOKENS, left) if self.max_tokens is None else self.max_tokens

    def top(self) -> int | None:
        """Return how many likeliest tokens to tell besides every token's own log probability; None: tell none."""
        same = self.best_of is None or self.best_of == self.choices
        require(same, "best_of", self.best_of, f"n = {self.choices}", "kvseek returns all answers that it makes")
        return None if self.logprobs is None else check_logprobs("logprobs", self.logprobs)


def read_prompts(raw: msgspec.Raw) -> list[str] | list[list[int]]:
    """Decode the prompts: a text, texts, token ids, or lists of token ids."""
    if is_absent(raw):
        raise FieldError("prompt", "prompt is missing: must be a text or token ids; add it")
    if first_character(raw) != "[":
        return [str(decode("prompt", _text, raw))]
    if re.match(rb'\[\s*"', memoryview(raw)):
        few = count_strings(raw, MAX_PROMPTS) <= MAX_PROMPTS
        require(few, "prompt", "more", f"<= {MAX_PROMPTS} texts", "send fewer")
        texts: list[str] = decode("prompt", _texts, raw)
        return texts
    lists = bytes(raw).count(b"[") - 1
    # Before they are built, as an empty list takes 20 times as much memory as its JSON.
    require(lists <= MAX_PROMPTS, "prompt", f"{lists} lists", f"<= {MAX_PROMPTS} lists of token ids", "send fewer")
    ids_at_most = bytes(raw).count(b",") + 1
    require(ids_at_most <= MAX_IDS, "prompt", f"{ids_at_most} token ids", f"<= {MAX_IDS}", "send several requests")
    if lists == 0:
        ids: list[int] = decode("prompt", _ids, raw)
        return [ids]
    many: list[list[int]] = decode("prompt", _many_ids, raw)
    return many


COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "suffix": ("",),
    "prompt_embeds": (),
}
Body = ChatBody | CompletionBody
COMPLETION_FORMAT = BodyFormat(CompletionBody, ("prompt",), COMPLETION_NEUTRAL, WITHOUT_EFFECT)


FORMAT = "response_format"
ANY_OBJECT = '{"type": "object"}'  # OpenAI's json_object


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A schema, with what OpenAI shows of it to the model, or has for its own use: without effect here."""

    name: str
    schema: msgspec.Raw = ABSENT
    description: str | None = None
    strict: bool | None = None  # the answer follows the schema in any case


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


_format = msgspec.json.Decoder(ResponseFormat)


def read_guide(raw: msgspec.Raw) -> Guide | None:
    """Read the guide that the field asks for, None for plain text; raises FieldError. Compiling it may still fail."""
    if is_absent(raw):
        return None
    size, limit = memoryview(raw).nbytes, f"<= {2 * MAX_GUIDE_BYTES} bytes of JSON"
    require(size <= 2 * MAX_GUIDE_BYTES, FORMAT, f"{size} bytes", limit, "send a smaller schema")
    wanted: ResponseFormat = decode(FORMAT, _format, raw)
    given = wanted.json_schema is not None
    fits = given == (wanted.type == "json_schema")
    place = f"{FORMAT}.json_schema"
    require(
        fits,
        place,
        "an object" if given else None,
        "there if type is json_schema, and only then",
        "correct one of them",
    )
    if wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return Guide(GuideType.JSON_SCHEMA, ANY_OBJECT)
    schema = bytes(wanted.json_schema.schema)
    require(
        schema[:1] == b"{", f"{place}.schema", schema[:40].decode("utf-8", "replace"), "an object", "send a JSON schema"
    )
    require(
        len(schema) <= MAX_GUIDE_BYTES, f"{place}.schema", f"{len(schema)} bytes", f"<= {MAX_GUIDE_BYTES}", "shorten it"
    )
    try:
        return Guide(GuideType.JSON_SCHEMA, schema.decode())
    except UnicodeDecodeError as error:
        raise FieldError(
            FORMAT, f"{place}.schema: not UTF-8 ({error.reason}); send the text encoded as UTF-8"
        ) from None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of vLLM's /tokenize: a text, or a conversation with what its template takes besides."""

    model: str | None = None
    prompt: str | None = None
    messages: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT

    def ids(self, tokenizer: Tokenizer, config: EngineConfig, forms: AnswerForms) -> list[int]:
        """Return the token ids; raises FieldError."""
        talk = not is_absent(self.messages)
        one = (self.prompt is None) is talk
        require(one, "prompt", self.prompt, "a text, or absent with messages", "send one of them")
        if self.prompt is not None:
            return text_ids(self.prompt, self.add_special_tokens is not False, tokenizer, config)
        names = ("messages", "tools", "add_special_tokens", "add_generation_prompt", "continue_final_message")
        chat = ChatBody(chat_template_kwargs=self.chat_template_kwargs, **{name: getattr(self, name) for name in names})
        return chat.prompts(tokenizer, config, forms)[0].ids


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of vLLM's /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None

    def text(self, tokenizer: Tokenizer, config: EngineConfig) -> str:
        """Return the text, special tokens included; raises FieldError."""
        ids, vocabulary = self.tokens, config.model.vocab_size
        if ids is None:
            raise FieldError("tokens", "tokens is missing: must be token ids; add them")
        require(len(ids) <= MAX_IDS, "tokens", f"{len(ids)} token ids", f"<= {MAX_IDS}", "send several requests")
        bad = next((token for token in ids if not 0 <= token < vocabulary), None)
        require(bad is None, "tokens", bad, f"token ids in [0, {vocabulary})", "the model has no such token")
        return tokenizer.decode(ids, skip_special_tokens=False)


TOKENIZE_FORMAT = BodyFormat(TokenizeBody, ("prompt", "messages"), {}, ())
DETOKENIZE_FORMAT = BodyFormat(DetokenizeBody, ("tokens",), {}, ())

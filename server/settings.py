"""Settings of `kvseek serve`, in one place, for the processes that it starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvseek.core.command_line import memory_size
from kvseek.core.config import MOST_DRAFTED, EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.request import MAX_TIMEOUT_SECONDS
from kvseek.engine.parallel.nodes import KEY_VARIABLE, Nodes
from kvseek.engine.speculation import METHODS, Speculation, read_speculation
from kvseek.plugins.registry import reports_rows

from .errors import ServerError
from .requests.keys import SHARE_ALL, SHARE_BY_KEY, Keys, read_keys
from .requests.models import INFLIGHT_BATCHER_LLM, LAYOUTS
from .requests.unread import LARGEST_AT_ONCE, LOGIT_BYTES, OTHER_UNREAD_BYTES, WRITE_SECONDS, UnreadAnswers

MAX_NAME_CHARACTERS = 256
ORIGIN = re.compile(r"\*|https?://[^\s/,?#@]+")
MIN_HANG_SECONDS = 5.0  # a busy machine may hold a process up for seconds
OTHER_CONNECTIONS = 256  # open ones beside those whose requests run or wait: idle, or asking for health
MAX_MAX_LOGITS = 1 << 28  # 1 GiB: a message of gRPC has at most twice as many bytes
AUTO, NONE = "auto", "none"  # of a parser: by the chat template; what it would find is text
# vLLM's names (server/openai/tool_formats.py, answers.py).
TOOL_PARSERS = (AUTO, NONE, "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral")
REASONING_PARSERS = (AUTO, NONE, "qwen3", "deepseek_r1")
Flags = Mapping[str, tuple[Callable[[str], Any], str]]  # name of a setting → its type, and the help of its flag


def _absolute(path: str) -> str:
    """Make a path independent of the folder that a process is started in."""
    return str(Path(path).expanduser().absolute())


def _yes(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text} is neither true nor false")
    return text == "true"


def _origins(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


ENGINE_FLAGS: Flags = {
    "layout": (str, f"which of TensorRT-LLM's model repositories clients find: {' or '.join(LAYOUTS)}"),
    "threads": (int, "CPU threads of the engine"),
    "max_queue_size": (int, "requests that may wait; further ones are refused"),
    "max_num_tokens": (int, "prompt tokens that one step of the engine reads at most"),
    "max_logits": (int, "logits (context and generation logits) that a request may ask for, 4 bytes each"),
    "default_timeout": (float, "seconds that a request may take if it does not say itself"),
    "hang_seconds": (float, "after so long without an answer a process is killed and started again"),
    "otlp_endpoint": (str, "OpenTelemetry collector (OTLP over HTTP) for a span of every request"),
    "speculation": (
        str,
        f"{', '.join(METHODS)}: steps verify drafts, of the text or the model's own; tokens are the same",
    ),
    "num_speculative_tokens": (int, f"tokens of a draft at most, 1 to {MOST_DRAFTED}"),
    "disk_dir": (_absolute, "directory in which beginnings of prompts outlive eviction and restarts"),
    "disk_bytes": (memory_size, "most bytes of them, such as 200GiB"),
}
KEY_FLAGS: Flags = {
    "api_key_file": (_absolute, "file of the API keys, one a line, that all ports ask for but for health and metrics"),
    "share_prefixes": (
        str,
        "which requests share what was read of prompts: those of one API key (key), or all",
    ),
}
OPENAI_FLAGS: Flags = {
    "served_model_name": (str, "name of the model at the OpenAI port instead of the checkpoint's"),
    "cors_origins": (
        _origins,
        "origins, with commas between, whose web pages may ask from a browser (CORS); * stands for all",
    ),
    "tool_parser": (str, f"how the model writes calls of tools: {', '.join(TOOL_PARSERS)}"),
    "reasoning_parser": (str, f"how the model writes its thinking: {', '.join(REASONING_PARSERS)}"),
    "ui": (_yes, "serve a page at / of the OpenAI port that shows what each step of an answer read"),
    **KEY_FLAGS,
}
SERVE_FLAGS: Flags = {
    **ENGINE_FLAGS,
    "drain_seconds": (float, "seconds that requests may go on after SIGTERM"),
    "restarts": (int, "how often in a row a process that has died is started again"),
    "nnodes": (int, "hosts that the engine's ranks are divided among"),
    "rdzv_endpoint": (str, "HOST:PORT of the host of rank 0, where the ranks of the others find it"),
    "ranks_key_file": (_absolute, f"file with the key that all hosts have, instead of the variable {KEY_VARIABLE}"),
    **OPENAI_FLAGS,
    "core_dumps": (_yes, "true lets processes that crash leave core dumps, which have prompts, answers and keys"),
}


@dataclass(frozen=True)
class ServeSettings:
    """Settings of one server. Each field is a flag of `kvseek serve` of the same name, and SERVE_FLAGS says what it means.

    None and () stand for none of what a field limits or names, of `threads` for torch's choice, of `num_speculative_tokens` for
    7, of `served_model_name` for the checkpoint's name in the engine's manifest, of `disk_bytes` for 16 GiB and of
    `ranks_key_file` for a key from the environment.

    Attributes
    ----------
    max_logits : int
        0 refuses all requests that ask for logits.
    restarts : int
        After so many in a row the server ends.
    hang_seconds : float
        A process's event loop answers, not what computes: of that, HUNG_SECONDS of engine/service.py is the limit.
    """

    layout: str = INFLIGHT_BATCHER_LLM.name
    threads: int | None = None
    max_queue_size: int = 256
    max_num_tokens: int = 8192
    max_logits: int = 1 << 26
    default_timeout: float | None = None
    drain_seconds: float = 20.0
    restarts: int = 5
    hang_seconds: float = 60.0
    otlp_endpoint: str | None = None
    speculation: str | None = None
    num_speculative_tokens: int | None = None
    disk_dir: str | None = None
    disk_bytes: int | None = None
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    ranks_key_file: str | None = None
    served_model_name: str | None = None
    cors_origins: tuple[str, ...] = ()
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    ui: bool = False
    api_key_file: str | None = None
    share_prefixes: str = SHARE_BY_KEY
    core_dumps: bool = False

    def __post_init__(self) -> None:
        known = f"one of {', '.join(LAYOUTS)}"
        _require(self.layout in LAYOUTS, "layout", self.layout, known, f"{INFLIGHT_BATCHER_LLM.name} is the default")
        _require(self.threads is None or self.threads >= 1, "threads", self.threads, ">= 1", "or leave it out")
        _require(self.max_queue_size >= 1, "max_queue_size", self.max_queue_size, ">= 1", "256 is the default")
        _require(self.max_num_tokens >= 1, "max_num_tokens", self.max_num_tokens, ">= 1", "8192 is the default")
        limit = f"in [0, {MAX_MAX_LOGITS}]"
        _require(
            0 <= self.max_logits <= MAX_MAX_LOGITS, "max_logits", self.max_logits, limit, "67108864 is the default"
        )
        seconds = self.default_timeout
        within = seconds is None or 0 < seconds <= MAX_TIMEOUT_SECONDS
        limit = f"> 0 and <= {MAX_TIMEOUT_SECONDS:.0f}, a week"
        _require(within, "default_timeout", seconds, limit, "leave it out for no limit")
        limit = f">= 0 and <= {MAX_TIMEOUT_SECONDS:.0f}, a week"
        _require(
            0 <= self.drain_seconds <= MAX_TIMEOUT_SECONDS,
            "drain_seconds",
            self.drain_seconds,
            limit,
            "20 is the default",
        )
        try:
            read_speculation(self.speculation, self.num_speculative_tokens)
        except ConfigError as error:
            raise ServerError(f"--{error}") from None
        most, within = self.disk_bytes, self.disk_bytes is None or self.disk_bytes > 0
        _require(within, "disk_bytes", most, "> 0", "leave it out for 16 GiB")
        alone = most is not None and self.disk_dir is None
        _require(not alone, "disk_bytes", most, "left out without --disk_dir", "give that too")
        _require(self.restarts >= 0, "restarts", self.restarts, ">= 0", "0 ends the server when a process dies")
        limit = f">= {MIN_HANG_SECONDS:g} and <= {MAX_TIMEOUT_SECONDS:.0f}, a week"
        within = MIN_HANG_SECONDS <= self.hang_seconds <= MAX_TIMEOUT_SECONDS
        _require(within, "hang_seconds", self.hang_seconds, limit, "60 is the default")
        endpoint = self.otlp_endpoint
        is_url = endpoint is None or endpoint.startswith(("http://", "https://"))
        _require(is_url, "otlp_endpoint", endpoint, "a URL of http or https", "such as http://127.0.0.1:4318")
        ways = f"{SHARE_BY_KEY} or {SHARE_ALL}"
        known_way = self.share_prefixes in (SHARE_BY_KEY, SHARE_ALL)
        _require(known_way, "share_prefixes", self.share_prefixes, ways, f"{SHARE_BY_KEY} is the default")
        name = self.served_model_name
        named = name is None or (0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable())
        limit = f"1 to {MAX_NAME_CHARACTERS} printable characters"
        _require(named, "served_model_name", name, limit, "leave it out for the checkpoint's name")
        for flag, known_parsers in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            value, limit = getattr(self, flag), f"one of {', '.join(known_parsers)}"
            _require(value in known_parsers, flag, value, limit, f"{AUTO}, by the chat template, is the default")
        for origin in self.cors_origins:
            limit = "* or an origin such as https://chat.example.org, without a path"
            _require(bool(ORIGIN.fullmatch(origin)), "cors_origins", origin, limit, "leave it out for none")

    @property
    def drafts(self) -> Speculation | None:
        """How the engine speculates; None: not at all."""
        return read_speculation(self.speculation, self.num_speculative_tokens)

    @property
    def nodes(self) -> Nodes:
        """The hosts of the engine's ranks; raises ConfigError."""
        return Nodes.of(
            self.nnodes, self.rdzv_endpoint, None if self.ranks_key_file is None else Path(self.ranks_key_file)
        )

    @property
    def keys(self) -> Keys:
        """The API keys of the server; raises ServerError if their file cannot be used."""
        keys = () if self.api_key_file is None else read_keys(Path(self.api_key_file))
        return Keys(keys, apart=self.share_prefixes == SHARE_BY_KEY)

    def check_page(self, config: EngineConfig) -> None:
        """Raise ServerError if the page is asked for and the engine cannot tell what it would show."""
        limit = "left out with --runtime tensorrt, --tp_size above 1, or --ctkvr.execution cpu on a GPU"
        remedy = "selected rows cannot be reported there; build another engine to see them"
        _require(not self.ui or reports_rows(config), "ui", self.ui, limit, remedy)

    def most_requests(self, config: EngineConfig) -> int:
        """Return how many requests may run or wait at a time."""
        return self.max_queue_size + config.max_batch_size

    def most_connections(self, config: EngineConfig) -> int:
        """Return how many connections a port may have open."""
        return self.most_requests(config) + OTHER_CONNECTIONS

    @property
    def most_unread_bytes(self) -> int:
        """Most bytes of answers that a frontend may leave unread, and that a frontend's clients may."""
        return OTHER_UNREAD_BYTES + LARGEST_AT_ONCE * LOGIT_BYTES * self.max_logits

    def unread_answers(self, config: EngineConfig) -> UnreadAnswers:
        """Make the room for the answers that a frontend's clients have not read."""
        return UnreadAnswers(self.most_unread_bytes, WRITE_SECONDS, self.max_logits, config.model.vocab_size)

    def to_json(self) -> str:
        """Write the settings as JSON, for the command line of another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServeSettings:
        """Read settings that `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"cors_origins": tuple(values["cors_origins"])})


def add_flags(parser: argparse.ArgumentParser, flags: Flags) -> None:
    """Add a flag for each of these settings, with its default."""
    default = ServeSettings()
    for name, (kind, text) in flags.items():
        value = getattr(default, name)
        shown = "none" if value in (None, ()) else f"{value:g}" if kind is float else value
        shown = str(value).lower() if isinstance(value, bool) else shown
        shown = {"threads": "torch's choice", "disk_bytes": "16GiB"}.get(name, shown)
        alone: dict[str, Any] = {"nargs": "?", "const": True} if kind is _yes else {}
        text += "; alone it means true" if alone else ""
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"{text} (default: {shown})", **alone)


def settings_of(arguments: argparse.Namespace, flags: Flags) -> ServeSettings:
    """Make settings of the flags that `add_flags` added; raises ServerError."""
    return ServeSettings(**{name: getattr(arguments, name) for name in flags})


def _require(condition: bool, name: str, value: object, limit: str, remedy: str) -> None:
    if not condition:
        raise ServerError(f"--{name} = {value!r}: must be {limit}; {remedy}")

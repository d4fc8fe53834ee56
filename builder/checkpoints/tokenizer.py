"""A checkpoint's tokenizer, as the library tokenizers has it, and how it is saved into an engine directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvseek.core.errors import ConfigError
from kvseek.engine.chat_template import SETTINGS_FILE, TEMPLATE_FILE
from kvseek.engine.tokenizer import TOKENIZER_FILE

from .files import read_object


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer, its special tokens by transformers' names ("bos_token", "eos_token", ...), and the model's chat template.

    Attributes
    ----------
    backend : tokenizers.Tokenizer
        What texts are encoded with.
    """

    backend: Any
    special_tokens: Mapping[str, str]
    chat_template: str | None = None

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token by its name; None if there is no such token."""
        token = self.special_tokens.get(name)
        number: int | None = None if token is None else self.backend.token_to_id(token)
        return number

    def save(self, folder: Path) -> None:
        """Write the files that kvseek.engine.tokenizer reads, which are also those of transformers' PreTrainedTokenizerFast."""
        folder.mkdir()
        self.backend.save(str(folder / TOKENIZER_FILE))
        # This class of transformers' takes tokenizer.json as it is.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / SETTINGS_FILE).write_text(json.dumps({**settings, **self.special_tokens}, indent=2), encoding="utf-8")
        if self.chat_template:
            (folder / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")


def load_tokenizer_directory(directory: Path, remedy: str) -> ModelTokenizer:
    """Load a directory's tokenizer: tokenizer.json as it is, with special tokens and chat template of the files beside it.

    transformers' class for the kind of model is not asked, because it puts parts of its own in place of the file's. Its general
    class reads the files beside tokenizer.json, of which there have been several forms.

    Raises
    ------
    ConfigError
        If there is no tokenizer.json, or one of the files cannot be read, names code of the publisher's or contradicts another.
        The message ends in `remedy`.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = directory / TOKENIZER_FILE
    if not file.is_file():
        raise ConfigError(
            f"{directory}: cannot load the tokenizer: it has no {TOKENIZER_FILE}, and other files do not say how text is split; "
            f"have transformers write one with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), or {remedy}"
        )
    try:
        settings = _settings(directory)
        named = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        templates = named.chat_template  # one, or several by their names
        template = templates.get("default") if isinstance(templates, dict) else templates
        _check_template(template)
        backend = Tokenizer.from_file(str(file))
        backend.no_padding()
        backend.no_truncation()
        _add_missing(backend, named.added_tokens_decoder, settings.get("added_tokens_decoder") or {})
    except Exception as error:  # of many types: tokenizers raises Exception itself
        raise ConfigError(f"{directory}: cannot load the tokenizer ({error}); {remedy}") from None
    names = {name: str(token) for name, token in named.special_tokens_map.items() if isinstance(token, str)}
    return ModelTokenizer(backend, names, template)


def _settings(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; raises ConfigError if it names the publisher's own code, which is not run."""
    import transformers

    path = directory / SETTINGS_FILE
    settings = read_object(path) if path.exists() else {}
    name = settings.get("tokenizer_class") or "PreTrainedTokenizerFast"
    if not isinstance(name, str):
        raise ConfigError(f"{path}: tokenizer_class = {name!r}: must be a name; correct it")
    if "auto_map" in settings and not hasattr(transformers, name):
        raise ConfigError(f"{path}: tokenizer_class = {name!r} is the publisher's own code, which is not run")
    return settings


def _check_template(template: Any) -> None:
    """Raise ConfigError unless a chat template is a text that can be written to a file, or None."""
    if not isinstance(template, str | None):
        raise ConfigError(f"chat_template = {template!r:.80}: must be a text; correct it")
    try:
        (template or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"chat_template: must be Unicode ({error.reason} at {error.start}); correct it") from None


def _add_missing(backend: Any, tokens: Mapping[int, Any], stated: Mapping[str, Any]) -> None:
    """Add the `tokens` that only the files beside tokenizer.json have; raises ConfigError unless ids are as `stated` there."""
    own = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, token in sorted(tokens.items()):
        if token.content not in own:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    for number, token in stated.items():
        if (found := backend.token_to_id(token["content"])) != int(number):
            raise ConfigError(f"{SETTINGS_FILE} gives {token['content']!r} the id {number}, {TOKENIZER_FILE} {found}")

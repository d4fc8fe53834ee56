"""Conversations as token ids: those that transformers makes with the model's own chat template."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from kvseek.core.config import EngineConfig, read_config
from kvseek.engine.chat_template import TEMPLATE_FILE
from kvseek.engine.tokenizer import TOKENIZER_FOLDER, Tokenizer
from kvseek.server.openai.fields import FieldError
from kvseek.server.openai.prompts import VALUES, Message, chat_text, count_strings, encode, message_texts

TALK = [
    {"role": "system", "content": "Keep the log."},
    {"role": "user", "content": "One ship?\n\n"},
    {"role": "assistant", "content": "Two ships in 1931. ⚓"},
    {"role": "user", "content": "  three <|end|> ships"},
]


def messages(talk: Any) -> list[dict[str, str]]:
    return message_texts(msgspec.convert(talk, list[Message]))


def chat_ids(talk: list[dict[str, str]], tokenizer: Tokenizer, config: EngineConfig) -> list[int]:
    """As chats are tokenised."""
    text = chat_text(talk, tokenizer, config)
    tokenise = partial(tokenizer.encode_conversation, salt=None, max_tokens=config.max_input_len)
    return encode("messages", text, tokenise, config.max_input_len)


def expected_ids(folder: Path, talk: Any) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / TOKENIZER_FOLDER)
    templated = tokenizer.apply_chat_template(talk, tokenize=True, add_generation_prompt=True, return_dict=False)
    return list(templated)


@pytest.mark.parametrize("length", range(1, len(TALK) + 1))
def test_ids_are_those_of_transformers(directory: Path, length: int) -> None:
    config, tokenizer = read_config(directory), Tokenizer(directory)
    talk = TALK[:length]
    assert chat_ids(messages(talk), tokenizer, config) == expected_ids(directory, talk)


def test_there_is_no_second_bos(directory: Path) -> None:
    """The template writes the token with which texts begin, and the tokenizer would write it again."""
    tokenizer = Tokenizer(directory)
    from tokenizers import processors

    processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer._tokenizer.post_processor = processor
    assert tokenizer.encode("x")[0] == 0, "texts begin with the token"
    ids = chat_ids(messages(TALK[:1]), tokenizer, read_config(directory))
    assert ids[0] == 0
    assert ids[1] != 0
    assert ids == expected_ids(directory, TALK[:1])


def test_parts_of_text_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "ship"}]
    assert messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one ship"}]


def test_a_developer_is_the_system() -> None:
    assert messages([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


def test_an_answer_can_be_sent_back_as_the_client_has_it() -> None:
    answer = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "audio": None,
        "annotations": [],
    }
    read = msgspec.json.decode(msgspec.json.encode([answer | {"function_call": None}]), type=list[Message])
    assert message_texts(read) == [{"role": "assistant", "content": "x"}]


def with_template(directory: Path, engine: Path, template: str | None) -> Tokenizer:
    """The tokenizer of an engine with another chat template, or without one."""
    shutil.copytree(directory / TOKENIZER_FOLDER, engine / TOKENIZER_FOLDER)
    path = engine / TOKENIZER_FOLDER / TEMPLATE_FILE
    if template is None:
        path.unlink()
    else:
        path.write_text(template)
    return Tokenizer(engine)


def test_a_model_without_a_template_says_so(directory: Path, tmp_path: Path) -> None:
    tokenizer = with_template(directory, tmp_path, None)
    with pytest.raises(FieldError, match="no chat template") as caught:
        chat_ids(messages(TALK), tokenizer, read_config(directory))
    assert caught.value.param == "messages"


def test_what_the_template_refuses_is_the_clients_fault(directory: Path, tmp_path: Path) -> None:
    tokenizer = with_template(directory, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        FieldError,
        match=r"^messages: cannot be written by the model's chat template \(TemplateError: roles must alternate\)",
    ):
        chat_ids(messages(TALK), tokenizer, read_config(directory))


EACH_PART = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",
        EACH_PART,
        "{{ m['content'][0]['text'] | trim }}",
        "{% if m.content is string %}{{ m.content }}{% else %}" + EACH_PART + "{% endif %}",
        "{% if m.role == 'user' %}" + EACH_PART + "{% else %}{{ m.content }}{% endif %}",
        "{% if m.role == 'system' %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}",
        "{{ ': ' + m.content[0].text }}",
    ],
)
def test_a_template_may_read_content_as_a_text_or_as_parts(directory: Path, tmp_path: Path, content: str) -> None:
    tokenizer = with_template(directory, tmp_path, "{% for m in messages %}<{{ m.role }}>" + content + "{% endfor %}")
    text = tokenizer.apply_chat_template(messages(TALK))
    assert all(message["content"].strip() in text for message in TALK)


@pytest.mark.parametrize("content", ["{{ m.text }}", "{{ m.content.text }}", "{{ m.content[0].value }}"])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_template_that_leaves_out_what_a_role_says_is_refused(
    directory: Path, tmp_path: Path, content: str, role: str
) -> None:
    own = f"{{% if m.role == '{role}' %}}{content}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    tokenizer = with_template(directory, tmp_path, "{% for m in messages %}" + own + "{% endfor %}")
    with pytest.raises(FieldError, match=f"template writes nothing of what the role '{role}' says"):
        chat_ids(messages(TALK), tokenizer, read_config(directory))
    others = [message for message in TALK if message["role"] != role]
    assert tokenizer.apply_chat_template(others) == "".join(message["content"] for message in others)


@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{{ messages[9].content[0] }}", "{% for %}"])
def test_what_goes_wrong_in_a_template_is_no_raw_error(directory: Path, tmp_path: Path, template: str) -> None:
    tokenizer = with_template(directory, tmp_path, template)
    with pytest.raises(FieldError, match="messages: cannot be written by the model's chat template"):
        chat_ids(messages(TALK), tokenizer, read_config(directory))


def test_the_limit_counts_all_messages(directory: Path) -> None:
    config: EngineConfig = read_config(directory)
    with pytest.raises(FieldError, match="max_input_len") as caught:
        chat_ids(messages([{"role": "user", "content": "one ship, "}] * 100), Tokenizer(directory), config)
    assert caught.value.code == "context_length_exceeded"


def test_strings_are_counted_in_little_memory() -> None:
    texts = ["", 'a "quoted" one, and \\', "\\", '\\"', "é,⚓\n", {"name": ["a", 1, None]}]
    raw = msgspec.Raw(json.dumps(texts).encode())
    assert (count_strings(raw, 99), count_strings(raw, 99, VALUES), count_strings(raw, 3)) == (7, 7 + 7, 4)
    long = msgspec.Raw(json.dumps("the \n light " * 20_000).encode())
    tracemalloc.start()
    try:
        assert count_strings(long, 99, VALUES) == 1
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()

"""A tiny tokenizer that has the tags of models that call tools and think, and templates of their kinds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers

from kvseek.engine.chat_template import TEMPLATE_FILE
from kvseek.engine.tokenizer import TOKENIZER_FILE, TOKENIZER_FOLDER, Tokenizer

WRITE = (
    "{% if tools %}<|begin|>tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|begin|>{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: OPEN{% endif %}"
)
NAMED = '{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}'
XML = (
    "<tool_call><function={{ call.function.name }}>{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>{{ value }}</parameter>{% endfor %}</function></tool_call>"
)
CALLS = {
    "hermes": "<tool_call>" + NAMED.replace("KEY", "arguments") + "</tool_call>",
    "qwen3_coder": XML,
    "llama3_json": "<|python_tag|>" + NAMED.replace("KEY", "parameters"),
    "mistral": "[TOOL_CALLS][" + NAMED.replace("KEY", "arguments") + "]",
    "pythonic": "[{{ call.function.name }}({% for key, value in call.function.arguments | items %}{{ key }}="
    "{{ value | tojson }}{% endfor %})]{# [func_name1(params_name1=params_value1)] #}",
}
NOTE_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["text", "count"],
    "additionalProperties": False,
}
ARGUMENTS = '{"text": "It is „lit“ \\"⚓\\"", "count": 2}'
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # tokens that are text, too, as Qwen's
SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]")  # which a decoded text leaves out
# What `enable_thinking` chooses, as Qwen3's template writes it; and a template that always begins the thinking itself.
SWITCHED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENED = "<think>\n"


def template(form: str, opening: str = SWITCHED) -> str:
    """A template whose calls have this form; `opening` is how its answers begin."""
    return WRITE.replace("CALL", CALLS[form]).replace("OPEN", opening)


def add_tags(folder: Path, source: str, special: tuple[str, ...] = SPECIAL) -> None:
    """Give a checkpoint's or an engine's tokenizer, in `folder`, the tags and another template."""
    file = folder / TOKENIZER_FILE
    found = tokenizers.Tokenizer.from_file(str(file))
    found.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    found.add_special_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in special])
    found.save(str(file))
    (folder / TEMPLATE_FILE).write_text(source)


def tool_tokenizer(engine: Path, folder: Path, source: str, special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """A copy of an engine's tokenizer, in a new engine folder, with the tags and a template."""
    shutil.copytree(engine / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER)
    add_tags(folder / TOKENIZER_FOLDER, source, special)
    return Tokenizer(folder)


def written_call(form: str, name: str, arguments: str) -> str:
    """A call as a model writes it, whose arguments are JSON."""
    values = json.loads(arguments)
    if form == "qwen3_coder":
        given = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n</parameter>\n"
            for key, value in values.items()
        )
        return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"
    if form == "pythonic":
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
    key = "parameters" if form == "llama3_json" else "arguments"
    own = f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'
    return f"<tool_call>\n{own}\n</tool_call>" if form == "hermes" else own


def written_calls(form: str, calls: list[str], tagged: bool = True) -> str:
    """Several calls as one answer."""
    if form == "pythonic":
        return f"[{', '.join(calls)}]"
    if form == "llama3_json":
        return ("<|python_tag|>" if tagged else "") + "; ".join(calls)
    return f"[TOOL_CALLS][{', '.join(calls)}]" if form == "mistral" else "\n".join(calls)


ANSWER = "<think>\nI look.\n</think>\n\nYes.\n" + written_call("hermes", "note", ARGUMENTS)

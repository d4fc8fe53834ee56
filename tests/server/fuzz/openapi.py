"""Prints an OpenAPI document of the OpenAI port, for schemathesis, which makes requests of it (docs/robustness.md).

    python -m tests.server.fuzz.openapi --model NAME > openapi.json

The document is made of the types that the port decodes requests with. The port itself has no page that describes it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from kvseek.server.openai.bodies import ChatBody, CompletionBody

MOST_TOKENS = 8  # of an answer, so that there are many requests a minute
PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "additionalProperties": False,
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]},
        "name": {"type": "string"},
    },
}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}}
PROMPT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, IDS, {"type": "array", "items": IDS}]
}
SESSION = [
    {
        "name": "session_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1, "maxLength": 300},
    },
    {"name": "cache_salt", "in": "query", "schema": {"type": "string"}},
]
# Ranges of numbers: most requests are served, and schemathesis tries what is beyond them too.
RANGES = {
    "n": (1, 8),
    "best_of": (1, 1),
    "temperature": (0, 4),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 300),
    "logprobs": (0, 20),
    "top_logprobs": (0, 20),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.5, 2),
    "min_tokens": (0, MOST_TOKENS),
    "seed": (0, 2**31),
    "priority": (0, 255),
    "timeout": (10, 1000),
    "retention_priority": (0, 100),
    "retention_seconds": (1, 1000),
    "max_completion_tokens": (1, MOST_TOKENS),
}


def document(model: str) -> dict[str, Any]:
    """Make the document; `model` is the model's name at the port."""
    (chat, completion), components = msgspec.json.schema_components(
        (_plain(ChatBody), _plain(CompletionBody)), ref_template="#/components/schemas/{name}"
    )
    bodies = {
        "/v1/chat/completions": (chat, "messages", {"type": "array", "items": MESSAGE}),
        "/v1/completions": (completion, "prompt", PROMPT),
    }
    paths: dict[str, Any] = {path: {"get": _operation()} for path in ("/health", "/metrics", "/v1/models")}
    paths["/v1/sessions/{session_id}"] = {"delete": _operation() | {"parameters": SESSION}}
    for path, (reference, prompt, kind) in bodies.items():
        schema = components[reference["$ref"].rpartition("/")[2]]
        known = {"model": {"const": model}, prompt: kind, "max_tokens": {"enum": list(range(MOST_TOKENS + 1))}}
        schema["properties"] |= known
        for name, (least, most) in RANGES.items():
            for choice in schema["properties"].get(name, {}).get("anyOf", ()):
                if choice["type"] in ("integer", "number"):
                    choice |= {"minimum": least, "maximum": most}
        schema["additionalProperties"] = False
        schema["required"] = ["model", prompt, "max_tokens"]
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": _operation() | {"requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvseek's OpenAI port", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _plain(body: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The fields of a body without those that are kept as JSON, of which the types say nothing."""
    fields = [(each.name, each.type, None) for each in msgspec.structs.fields(body) if each.type is not msgspec.Raw]
    return msgspec.defstruct(body.__name__, fields)


def _operation() -> dict[str, Any]:
    return {"responses": {"default": {"description": "an answer, or an error of docs/openai.md"}}}


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="Print an OpenAPI document of the OpenAI port.")
    parser.add_argument("--model", default="model", help="name of the model at the port")
    print(json.dumps(document(parser.parse_args().model), indent=1))


if __name__ == "__main__":
    main()

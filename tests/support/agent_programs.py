"""Programs of others, unchanged, ask a server; run by .cache/agents/bin/python (make test-agents), which has them.

    python agent_programs.py PROGRAM BASE_URL MODEL < answers

`answers` is JSON: a list of the token ids that the model is made to write at each turn (forced_tokens), all that is added to the
programs' requests. Prints what the program made of the answers, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any

import httpx

QUESTION = "Is the light lit?"


class Scripted:
    """Adds the next answer to each request."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers, self.bodies = answers, list[dict[str, Any]]()

    def edited(self, request: httpx.Request) -> httpx.Request:
        body = json.loads(request.content)
        self.bodies.append(body)
        content = json.dumps(body | {"forced_tokens": self.answers[len(self.bodies) - 1]}).encode()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
        return httpx.Request(
            request.method, request.url, headers=headers, content=content, extensions=request.extensions
        )


class Transport(httpx.HTTPTransport):
    def __init__(self, script: Scripted) -> None:
        super().__init__()
        self._script = script

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return super().handle_request(self._script.edited(request))


class AsyncTransport(httpx.AsyncHTTPTransport):
    def __init__(self, script: Scripted) -> None:
        super().__init__()
        self._script = script

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return await super().handle_async_request(self._script.edited(request))


def note(text: str, count: int = 1) -> str:
    """Write a note into the log."""
    return f"noted {count}: {text}"


def litellm(url: str, model: str, script: Scripted) -> Any:
    import litellm
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", http_client=httpx.Client(transport=Transport(script)))
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["text"],
    }
    tools = [{"type": "function", "function": {"name": "note", "description": "Write a note.", "parameters": schema}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    how: dict[str, Any] = {"model": f"openai/{model}", "client": client, "tools": tools, "max_tokens": 400}
    stream = list(litellm.completion(messages=messages, stream=True, **how))
    answer = litellm.stream_chunk_builder(stream, messages=messages)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    messages += [
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": note(**json.loads(call.function.arguments))},
    ]
    last = litellm.completion(messages=messages, **how).choices[0].message
    try:
        openai_client = openai.OpenAI(base_url=url, api_key="none")
        litellm.completion(**how | {"client": openai_client}, messages=[{"role": "user", "content": "lit " * 9000}])
    except litellm.ContextWindowExceededError:
        too_long = True
    return {
        "too_long": too_long,
        "said": message.content,
        "call": call.function.arguments,
        "end": answer.choices[0].finish_reason,
        "last": last.content,
    }


def langchain(url: str, model: str, script: Scripted) -> Any:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=url, api_key="none", model=model, max_tokens=400, http_client=httpx.Client(transport=Transport(script))
    )
    tools = [tool(note)]
    bound = chat.bind_tools(tools)
    messages: list[Any] = [HumanMessage(QUESTION)]
    message = None
    for chunk in bound.stream(messages):
        message = chunk if message is None else message + chunk
    (call,) = message.tool_calls
    messages += [message, tools[0].invoke(call)]
    last = bound.invoke(messages)
    return {
        "said": message.content,
        "call": json.dumps(call["args"]),
        "end": message.response_metadata["finish_reason"],
        "last": last.content,
    }


def pydantic_ai(url: str, model: str, script: Scripted, responses: bool = False) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(
        base_url=url, api_key="none", http_client=httpx.AsyncClient(transport=AsyncTransport(script))
    )
    kind = OpenAIResponsesModel if responses else OpenAIChatModel
    agent = Agent(kind(model, provider=provider), tools=[note], model_settings={"max_tokens": 400})

    async def run() -> Any:
        result = await agent.run(QUESTION)
        parts = [part for message in result.all_messages() for part in message.parts]
        (call,) = [part for part in parts if part.part_kind == "tool-call"]
        said = "".join(part.content for part in parts if part.part_kind == "text")
        thoughts = [part for part in parts if part.part_kind == "thinking"]
        thought = "".join(part.content or "".join(part.provider_details["raw_content"]) for part in thoughts)
        return {
            "said": said.removesuffix(result.output),
            "call": json.dumps(call.args_as_dict()),
            "thought": thought,
            "last": result.output,
        }

    return asyncio.run(run())


def anthropic(url: str, model: str, script: Scripted) -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["text"],
    }
    how: Any = {"model": model, "max_tokens": 400, "tools": [{"name": "note", "input_schema": schema}]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def body() -> dict[str, Any]:
        script.bodies.append({})
        return {"forced_tokens": script.answers[len(script.bodies) - 1]}

    with client.messages.stream(messages=messages, extra_body=body(), **how) as stream:
        answer = stream.get_final_message()
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": note(**call.input)}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=messages, extra_body=body(), **how)
    return {
        "said": "".join(block.text for block in answer.content if block.type == "text"),
        "thought": "".join(block.thinking for block in answer.content if block.type == "thinking"),
        "call": json.dumps(call.input),
        "end": {"tool_use": "tool_calls"}[answer.stop_reason],
        "last": last.content[0].text,
    }


PROGRAMS = {
    "litellm": litellm,
    "langchain": langchain,
    "pydantic_ai": pydantic_ai,
    "pydantic_ai_responses": partial(pydantic_ai, responses=True),
    "anthropic": anthropic,
}

if __name__ == "__main__":
    program, url, model = sys.argv[1:]
    script = Scripted(json.load(sys.stdin))
    print(json.dumps(PROGRAMS[program](url, model, script) | {"turns": len(script.bodies)}))

"""Programs of others, unchanged, ask a server; run by .cache/agents/bin/python (make test-agents), which has them.

    python agent_programs.py PROGRAM BASE_URL MODEL < answers

`answers` is JSON: a list of the token ids that the model is made to write at each turn (forced_tokens), all that is added to the
programs' requests. Prints what the program made of the answers, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
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
    return {
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


def pydantic_ai(url: str, model: str, script: Scripted) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(
        base_url=url, api_key="none", http_client=httpx.AsyncClient(transport=AsyncTransport(script))
    )
    agent = Agent(OpenAIChatModel(model, provider=provider), tools=[note], model_settings={"max_tokens": 400})

    async def run() -> Any:
        result = await agent.run(QUESTION)
        parts = [part for message in result.all_messages() for part in message.parts]
        (call,) = [part for part in parts if part.part_kind == "tool-call"]
        said = "".join(part.content for part in parts if part.part_kind == "text")
        thought = "".join(part.content for part in parts if part.part_kind == "thinking")
        return {
            "said": said.removesuffix(result.output),
            "call": json.dumps(call.args_as_dict()),
            "thought": thought,
            "last": result.output,
        }

    return asyncio.run(run())


PROGRAMS = {"litellm": litellm, "langchain": langchain, "pydantic_ai": pydantic_ai}

if __name__ == "__main__":
    program, url, model = sys.argv[1:]
    script = Scripted(json.load(sys.stdin))
    print(json.dumps(PROGRAMS[program](url, model, script) | {"turns": len(script.bodies)}))

"""Many chats without max_tokens at the OpenAI port, over a memory that holds few of the longest: all get their answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from tests.conftest import BuildEngine, RandomModel
from tests.support.door_processes import doors, engine_process
from tests.support.long_prompts import HEADS, SHAPE, WINDOW, load_changed
from tests.support.metrics import metric
from tests.support.waiting import SECONDS, wait_for

from kvseek.core.request import Request, SamplingConfig
from kvseek.server.settings import ServeSettings

pytestmark = pytest.mark.server

CLIENTS, EXTENTS = 32, 24
EXTENT_BYTES = 2 * 1024 * 2 * 32 * 4  # of two layers and one KV head of 32 channels, in float32
NAME = "harbour"
END, BIAS, LEAST = 1, 1.5, 120  # the end token, which is made likelier so that answers end, and tokens before it
WORDS = 166  # of the longest prompts, which are about as long as one extent: their answers need a second one


def talk(number: int) -> Any:
    words = WORDS if number % 2 else 3 + number
    return [{"role": "user", "content": f"{number}: " + "the light was lit at dusk " * words}]


def fields(number: int) -> dict[str, Any]:
    own = {"min_tokens": LEAST, "cache_salt": str(number)}
    return {"model": NAME, "messages": talk(number), "seed": number, "logit_bias": {END: BIAS}, "extra_body": own}


async def ask(client: AsyncOpenAI, number: int) -> tuple[str, str | None]:
    reply = await client.chat.completions.create(**fields(number))
    return reply.choices[0].message.content or "", reply.choices[0].finish_reason


async def ask_slowly(client: AsyncOpenAI, number: int, others: asyncio.Event) -> tuple[str, str | None]:
    """A stream of which nothing but the first piece is taken before the others have their answers."""
    text, reason = "", None
    async for event in await client.chat.completions.create(**fields(number), stream=True):
        text += event.choices[0].delta.content or ""
        reason = event.choices[0].finish_reason
        if text:
            await others.wait()
    return text, reason


async def ask_all(url: str) -> list[tuple[str, str | None]]:
    others = asyncio.Event()
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=6 * SECONDS) as client:
        slow = asyncio.create_task(ask_slowly(client, 0, others))
        found = await asyncio.gather(*(ask(client, number) for number in range(1, CLIENTS)))
        others.set()
        return [await slow, *found]


def test_chats_without_max_tokens_all_run(random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path) -> None:
    limits = ("--max_batch_size", str(CLIENTS), "--max_seq_len", "4096", "--prefill_chunk_tokens", "512")
    model, pool = random_model("llama", **SHAPE, **HEADS), str(EXTENTS * EXTENT_BYTES)
    directory = build_engine(model, "full", *WINDOW, *limits, "--cache.kv_cache_host_memory_bytes", pool)
    alone = load_changed(directory)
    assert alone._cache.extents_needed(4096) * CLIENTS > 3 * EXTENTS
    socket, settings = tmp_path / "engine.sock", ServeSettings(threads=1, served_model_name=NAME)
    with doors(directory, socket, settings) as door, engine_process(directory, socket, settings):
        port = f"127.0.0.1:{door.metrics_port}"
        wait_for(lambda: metric(port, "kvseek:num_requests_waiting") == 0 and "kvseek:num" in door.metrics())
        found = asyncio.run(ask_all(door.openai_url))
        counts = {name: metric(port, f"kvseek:{name}") for name in ("num_preemptions_total", "num_requests_running")}
    assert {reason for _, reason in found} <= {"stop", "length"}
    assert counts["num_preemptions_total"] > 0
    assert counts["num_requests_running"] == 0
    tokenizer = alone.tokenizer
    for number in range(0, CLIENTS, 7):
        prompt = tokenizer.encode(tokenizer.apply_chat_template(talk(number)), add_special_tokens=False)
        sampling = SamplingConfig(temperature=1.0, seed=number, logit_bias=((END, BIAS),), min_tokens=LEAST)
        (tokens,) = alone.generate([Request(tuple(prompt), 4096 - len(prompt), sampling, end_ids=(END,))])
        assert found[number][0] == tokenizer.decode(tokens), number

"""Many requests at once: 500 streams against a bounded queue, cancelling them all, refusals while the engine is busy."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import requests
import tritonclient.grpc as triton
from tests.server.soak.engine import build_soak_engine
from tests.support.live_server import LiveServer, live_server
from tests.support.server_streams import tokens
from tests.support.waiting import wait_for
from tritonclient.grpc import service_pb2

pytestmark = [pytest.mark.server, pytest.mark.slow]

SLOTS, QUEUE, STREAMS = 2, 256, 500
PROMPT = tuple(range(5, 25))
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
CHANNELS = 8
# At the engine's queue, or before that: as many may be on their way to it.
REFUSED = re.compile(rf"UNAVAILABLE: .* at most max_queue_size( = {QUEUE}| \+ max_batch_size = {QUEUE + SLOTS}) may")
SECONDS = 1.0  # to an answer while the queue is full, on a machine that tells its health at once when it is idle
SLOW_FACTOR, MOST_SECONDS = 50, 3.0  # and on one that does not: as many times what that takes, but never more


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("load")
    engine = build_soak_engine(folder, "full", extents=12, slots=SLOTS)
    with live_server(engine, folder / "server.log", "--max_queue_size", f"{QUEUE}") as server:
        yield server


def request_bytes(count: int) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="tensorrt_llm")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    values: dict[str, Any] = {"input_ids": list(PROMPT), "request_output_len": [count], "end_id": [-1]}
    for name, value in values.items():
        tensor = triton.InferInput(name, [1, len(value)], "INT32")
        tensor.set_data_from_numpy(np.array([value], dtype=np.int32))
        request.inputs.add(name=name, datatype="INT32", shape=[1, len(value)])
        request.raw_input_contents.append(tensor._get_content())
    data: bytes = request.SerializeToString()
    return data


async def one_stream(channel: Any, data: bytes) -> str:
    """How one request ends: its finish_reason or its error."""
    call = channel.stream_stream(STREAM)(iter([data]), timeout=240)
    ending = ""
    async for part in call:
        response = service_pb2.ModelStreamInferResponse.FromString(part)
        if response.error_message:
            return str(response.error_message)
        names = [output.name for output in response.infer_response.outputs]
        if "finish_reason" in names:
            raw = response.infer_response.raw_output_contents[names.index("finish_reason")]
            ending = raw[4:].decode()
    return ending


@asynccontextmanager
async def many_streams(server: LiveServer, count: int, length: int) -> AsyncIterator[list[asyncio.Task[str]]]:
    """`count` streams of `length` tokens that are opened at once; those that have not ended are cancelled at the end."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(server.grpc_url, options=options) for _ in range(CHANNELS)]
    data = request_bytes(length)
    streams = [asyncio.create_task(one_stream(channels[i % CHANNELS], data)) for i in range(count)]
    yield streams
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await asyncio.gather(*(channel.close() for channel in channels))


async def endings(server: LiveServer) -> Counter[str]:
    """How STREAMS short streams end."""
    async with many_streams(server, STREAMS, 8) as streams:
        ends = await asyncio.gather(*streams)
    return Counter("served" if end == "length" else "refused" if REFUSED.search(end) else end for end in ends)


async def answers_at_a_full_queue(server: LiveServer) -> dict[str, float]:
    """Seconds of each answer that is given without the engine, while STREAMS long streams run, wait or have been refused."""
    async with many_streams(server, STREAMS, 2900) as streams:
        full = "a full queue and as many refusals as there are further streams"
        await asyncio.to_thread(
            wait_for, lambda: sum(stream.done() for stream in streams) >= STREAMS - QUEUE - SLOTS, full
        )
        return await asyncio.to_thread(lambda: {**refusals(server), "health": health(server)})


def nothing_is_left(server: LiveServer) -> bool:
    return not server.metric("kvseek:num_requests_waiting") and not server.metric("kvseek:num_requests_running")


def refusals(server: LiveServer) -> dict[str, float]:
    """Seconds to the refusal of a request too many, and of one that is malformed, by both doors."""
    found = {}
    for route, door in (("grpc", "gRPC"), ("http_stream", "HTTP")):
        for count, why in ((4, "full queue"), (0, "malformed")):
            stream = tokens(server, route, PROMPT, count, priority=0).join()
            assert ("max_queue_size" if count else "request_output_len") in stream.error
            found[f"{door}, {why}"] = stream.ended_at - stream.began
    return found


def health(server: LiveServer) -> float:
    began = time.monotonic()
    assert requests.get(f"http://{server.http_url}/v2/health/live", timeout=20).status_code == 200
    assert requests.get(f"http://{server.http_url}/v2/health/ready", timeout=20).status_code == 200
    return time.monotonic() - began


def limit(server: LiveServer) -> float:
    """Seconds that an answer may take while the server is busy; ask for it when the server is idle."""
    return min(MOST_SECONDS, max(SECONDS, SLOW_FACTOR * health(server)))


def test_500_streams_are_served_or_refused_and_never_lost(server: LiveServer) -> None:
    kinds = asyncio.run(endings(server))
    assert set(kinds) <= {"served", "refused"}, kinds
    assert kinds["served"] >= QUEUE
    assert nothing_is_left(server)


def test_a_full_queue_refuses_at_once_and_is_empty_soon_after_its_clients_have_left(server: LiveServer) -> None:
    most = limit(server)
    took = asyncio.run(answers_at_a_full_queue(server))
    print("seconds to an answer while the queue is full:", {what: round(own, 3) for what, own in took.items()})
    assert max(took.values()) < most, took
    wait_for(lambda: nothing_is_left(server), "an engine with nothing to do", 15)


def test_a_queue_whose_clients_all_leave_is_empty_soon(server: LiveServer) -> None:
    streams = [tokens(server, ("grpc", "http_stream")[i % 2], PROMPT, 2500) for i in range(40)]
    wait_for(lambda: server.metric("kvseek:num_requests_waiting") >= 30, "most requests wait")
    for stream in streams:
        stream.leave()
    wait_for(lambda: nothing_is_left(server), "an engine with nothing to do", 15)
    assert tokens(server, "grpc", PROMPT, 8).join().count == 8


def test_the_health_of_a_server_with_a_full_batch_is_told_at_once(server: LiveServer) -> None:
    most = limit(server)
    streams = [tokens(server, "http_stream", PROMPT, 2500) for _ in range(SLOTS)]
    wait_for(lambda: all(stream.count for stream in streams), "first tokens")
    assert max(health(server) for _ in range(5)) < most
    refused = tokens(server, "http_stream", PROMPT, 0).join()
    assert refused.status == 400
    assert refused.ended_at - refused.began < most
    for stream in streams:
        stream.leave()

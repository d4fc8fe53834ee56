"""What serving costs over the bare engine, and how requests that run at once treat each other.

    python bench/speed/serving.py --engine_dir .cache/engines/smollm2-nested --threads 2

All parts use one engine directory, one machine and one run:

- time per output token of one request: the bare engine in this process, then a whole server over gRPC, over HTTP and by
  OpenAI's API, in turn;
- tokens a second with 1 and with more requests at once;
- time to first token of one two-token prompt, and of four at once;
- time per output token of a running stream while a long prompt is read, over that of the stream alone.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvseek.bench.machine import describe
from kvseek.bench.output import add_output_flags, at_least_one, command
from kvseek.client.chunk import Chunk
from kvseek.client.grpc_client import GrpcClient
from kvseek.client.http_client import HttpClient
from kvseek.client.openai_client import OpenAIClient
from kvseek.client.text_models import GenerateOptions
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server.launch import RunningServer, running_server
from kvseek.server.settings import ServeSettings

PROMPT = "The harbour master wrote:"
SHORT_PROMPT = "The sea"  # two tokens in most vocabularies
Ask = Callable[[str, GenerateOptions], Iterator[Chunk]]


def options(tokens: int) -> GenerateOptions:
    """An answer of exactly so many tokens."""
    return GenerateOptions(max_tokens=tokens, end_id=-1)


def engine_tpot(engine: Engine, tokens: int) -> float:
    """Median seconds from token to token of one request at the bare engine."""
    engine.submit(Request(tuple(engine.tokenizer.encode(PROMPT)), tokens))
    times = []
    while engine.has_work:
        if any(output.token_id is not None for output in engine.step()):
            times.append(time.perf_counter())
    return median_gap(times)


def token_times(ask: Ask, prompt: str, tokens: int) -> list[float]:
    """When each token of an answer arrived, in seconds of time.perf_counter."""
    return [time.perf_counter() for chunk in ask(prompt, options(tokens)) if chunk.num_output_tokens]


def median_gap(times: Sequence[float]) -> float:
    """Median seconds between neighbours."""
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def tokens_per_second(ask: Ask, requests: int, tokens: int) -> float:
    """Of all requests together, from the first's first token to the last's last."""
    with ThreadPoolExecutor(requests) as pool:
        times = list(pool.map(lambda number: token_times(ask, f"{PROMPT} {number}", tokens), range(requests)))
    return (sum(map(len, times)) - 1) / (max(map(max, times)) - min(map(min, times)))


def first_token_seconds(ask: Ask, requests: int) -> float:
    """Longest time to first token of short prompts that are sent at once."""
    barrier = threading.Barrier(requests)

    def one(_: int) -> float:
        barrier.wait()
        sent = time.perf_counter()
        return token_times(ask, SHORT_PROMPT, 2)[0] - sent

    with ThreadPoolExecutor(requests) as pool:
        return max(pool.map(one, range(requests)))


def mean_gap(times: Sequence[float]) -> float:
    """Mean seconds between neighbours: steps that read much and steps that read nothing take turns."""
    return (times[-1] - times[0]) / (len(times) - 1)


def beside_a_prompt(ask: Ask, text: str, tokens: int) -> dict[str, float]:
    """Seconds per token of a stream alone, and of the same stream while another request's prompt is read."""
    alone = mean_gap(token_times(ask, PROMPT, tokens))
    began, read = threading.Event(), list[float]()

    def read_prompt() -> None:
        began.wait()
        read.append(time.perf_counter())
        read.append(token_times(ask, text, 1)[0])

    reader = threading.Thread(target=read_prompt)
    reader.start()
    times = []
    for chunk in ask(PROMPT, options(100 * tokens)):
        if chunk.num_output_tokens:
            times.append(time.perf_counter())
            if len(times) == 5:
                began.set()
            if len(read) == 2 and len(times) > 10:
                break
    reader.join()
    beside = [at for at in times if read[0] <= at <= read[1]]
    longest = max(later - earlier for earlier, later in itertools.pairwise(beside))
    return {"alone": alone, "while a prompt is read": mean_gap(beside), "the longest of these": longest}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All parts."""
    engine = Engine.load(arguments.engine_dir, arguments.threads)
    text = engine.tokenizer.decode(engine.tokenizer.encode(arguments.text.read_text())[: arguments.prompt_tokens])
    engine_tpot(engine, 8)  # warm
    with running_server(arguments.engine_dir, settings=ServeSettings(threads=arguments.threads)) as server:
        asks = clients(server)
        gaps: dict[str, list[float]] = {name: [] for name in ("engine", *asks)}
        for _ in range(arguments.rounds):
            gaps["engine"].append(engine_tpot(engine, arguments.tokens))
            for name, ask in asks.items():
                gaps[name].append(median_gap(token_times(ask, PROMPT, arguments.tokens)))
        del engine
        grpc = asks["grpc"]
        rates = {str(n): tokens_per_second(grpc, n, arguments.tokens) for n in arguments.concurrency}
        firsts = {
            n: statistics.median(first_token_seconds(grpc, n) for _ in range(2 * arguments.rounds + 1)) for n in (1, 4)
        }
        stream = beside_a_prompt(grpc, text, arguments.tokens)
    tpot = {name: statistics.median(values) for name, values in gaps.items()}
    return {
        "benchmark": "serving",
        "machine": describe(),
        "engine": arguments.engine_dir.name,
        "threads": arguments.threads,
        "tpot_seconds": tpot,
        "over_engine_seconds": {name: tpot[name] - tpot["engine"] for name in asks},
        "tokens_per_second": rates,
        "first_token_seconds": {"one prompt": firsts[1], "the last of four": firsts[4]},
        "first_token_ratio": firsts[4] / firsts[1],
        "prompt_tokens": arguments.prompt_tokens,
        "stream_tpot_seconds": stream,
        "stream_tpot_ratio": stream["while a prompt is read"] / stream["alone"],
    }


def clients(server: RunningServer) -> dict[str, Ask]:
    """One way to ask for each protocol. The OpenAI port tells no count with a token, so a piece of text counts as one."""
    openai = OpenAIClient(server.openai_url)
    return {
        "grpc": GrpcClient(server.grpc_url).generate_stream,
        "http": HttpClient(server.http_url).generate_stream,
        "openai": lambda prompt, wanted: openai.chat_stream([{"role": "user", "content": prompt}], wanted),
    }


def print_table(document: dict[str, Any]) -> None:
    """The figures, a line each."""
    print(f"{document['machine']['cpu']}, {document['threads']} threads, {document['engine']}")
    for name, seconds in document["tpot_seconds"].items():
        over = document["over_engine_seconds"].get(name)
        print(f"TPOT {name:7} {seconds * 1e3:8.2f} ms" + ("" if over is None else f"   + {over * 1e3:.2f} ms"))
    first = next(iter(document["tokens_per_second"].values()))
    for requests, rate in document["tokens_per_second"].items():
        print(f"tokens/s with {requests:>3} requests {rate:8.1f}   x {rate / first:.2f}")
    for name, seconds in document["first_token_seconds"].items():
        print(f"TTFT {name:17} {seconds * 1e3:8.1f} ms")
    print(f"four short prompts at once: x {document['first_token_ratio']:.2f}")
    for name, seconds in document["stream_tpot_seconds"].items():
        print(f"TPOT of a stream {name:23} {seconds * 1e3:8.2f} ms")
    print(f"while {document['prompt_tokens']:,} tokens are read: x {document['stream_tpot_ratio']:.2f}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True, help="for at least as many requests as are measured")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the engine (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; medians are shown (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8], help="default: 1 2 4 8")
    parser.add_argument("--text", type=Path, default=Path("examples/harbour_log.txt"), help="the long prompt")
    parser.add_argument("--prompt_tokens", type=int, default=4000, help="of the long prompt (default: %(default)s)")
    add_output_flags(parser)
    arguments = parser.parse_args(argv)
    at_least_one(arguments, "tokens", "rounds")
    return arguments


main = command(parse, measure, print_table)


if __name__ == "__main__":
    raise SystemExit(main())

"""NVIDIA's own clients of TensorRT-LLM's Triton models, unchanged and as programs, against a real server.

They are not part of the repository; where their folder is absent, these tests are skipped.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from tests.conftest import ROOT
from tests.support.forks import ForkedProgram

from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.server.launch import RunningServer

CLIENTS = ROOT.parent / "shared/nvidia_clients"
TEXT_CLIENT, TOKEN_CLIENT = "end_to_end_grpc_client.py", "inflight_batcher_llm_client.py"
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not CLIENTS.is_dir(), reason=f"{CLIENTS} is absent: it is not part of the repository"),
]
PROMPT = "the quick brown fox jumps over the lazy dog"
SECONDS = 120


def run_program(server: RunningServer, client: str, *flags: str) -> tuple[int, str]:
    """Run a client to its end; returns its exit status and what it printed.

    Once, a client hung in gRPC's library after its interpreter had written all output: it gets a second try, as its server had
    nothing left to do.
    """
    for last in (False, True):
        with NamedTemporaryFile() as output:
            process = ForkedProgram(str(CLIENTS / client), ("-u", server.grpc_url, *flags), Path(output.name))
            try:
                return process.wait(SECONDS), Path(output.name).read_text()
            except subprocess.TimeoutExpired:
                process.kill()
                if last:
                    raise
    raise AssertionError


def run(server: RunningServer, client: str, *flags: str) -> str:
    """Output of a client; it must end with status 0."""
    status, output = run_program(server, client, *flags)
    assert status == 0, output
    assert "Received an error" not in output, output
    return output


def generated(engine: Engine, prompt: str = PROMPT, tokens: int = 10, **sampling: float) -> str:
    request = Request(
        tuple(engine.tokenizer.encode(prompt)),
        tokens,
        SamplingConfig(**sampling),
        engine.config.model.eos_token_ids,  # type: ignore[arg-type]
    )
    (ids,) = engine.generate([request])
    return engine.tokenizer.decode(ids)


def printed(output: str) -> str:
    """Output without the spaces and line ends that printing adds."""
    return re.sub(r"\s+", " ", output)


def test_text(server: RunningServer, engine: Engine) -> None:
    """Its default model is `ensemble`."""
    expected, flags = generated(engine), ("-p", PROMPT, "-o", "10")
    assert printed(PROMPT + expected) in printed(run(server, TEXT_CLIENT, *flags))
    bare = run(server, TEXT_CLIENT, *flags, "-S", "--exclude-input-in-output", "--model-name", "tensorrt_llm_bls")
    assert printed(expected) in printed(bare)


def test_batches_and_sequences(server: RunningServer, engine: Engine) -> None:
    prompts = [PROMPT, "a lazy dog"]
    output = run(server, TEXT_CLIENT, "-p", str(prompts).replace("'", '"'), "-o", "10", "--batch-inputs")
    for prompt in prompts:
        assert printed(prompt + generated(engine, prompt)) in printed(output)
    output = run(server, TEXT_CLIENT, "-p", PROMPT, "-o", "10", "-n", "3")
    assert all(f"0 [{number}]: {PROMPT}" in output for number in range(3))


@pytest.mark.parametrize(
    "flags",
    [
        (
            *("--return-log-probs", "--end-id", "2", "--pad-id", "0", "--request-id", "42", "--verbose"),
            *("--presence-penalty", "0.5", "--frequency-penalty", "0.5", "--repetition-penalty", "1.1"),
            *("--return-context-logits", "--return-generation-logits"),
        ),
        (
            *("--stop-words", " dog", "--bad-words", " fox", " cat", "--overwrite-output-text", "-S"),
            *("--embedding-bias-words", " fox", "--embedding-bias-weights", "2.5"),
        ),
    ],
    ids=["infer", "stream"],
)
def test_flags_of_the_text_client(server: RunningServer, flags: tuple[str, ...]) -> None:
    output = run(server, TEXT_CLIENT, "-p", "a lazy dog", "-o", "6", "--return-perf-metrics", *flags)
    if "--return-log-probs" in flags:
        assert "output_log_probs.shape: (1, 1, 6)" in output
        assert re.search(r"context_logits.shape: \(1, \d+, 384\)", output)
        assert "generation_logits.shape: (1, 1, 6, 384)" in output
    found = {name: int(value) for name, value in re.findall(r"(\w+_time_ns): (\d+)", output)}  # of the last response
    times = [found[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert 0 < times[0] <= times[1] < times[2] < times[3]
    assert re.findall(r"kv_cache_alloc_total_blocks: (\d+)", output)[-1] == "0", "the prompt fits into the window"


def test_guided_decoding(server: RunningServer) -> None:
    guide = ("--guided-decoding-guide-type", "json_schema", "--guided-decoding-guide", '{"enum": ["a ship", "a port"]}')
    output = run(server, TEXT_CLIENT, "-p", PROMPT, "-o", "20", "--exclude-input-in-output", *guide)
    assert '"a ship"' in output or '"a port"' in output


def test_an_unsupported_flag_is_refused_by_name(server: RunningServer) -> None:
    _, output = run_program(server, TEXT_CLIENT, "-p", PROMPT, "-b", "2")
    assert "beam_width = 2" in output
    assert "Received an error from server" in output


def token_flags(directory: Path, *flags: str) -> tuple[str, ...]:
    return ("--tokenizer-dir", str(directory / "tokenizer"), "--text", PROMPT, "--request-output-len", "10", *flags)


@pytest.mark.parametrize("flags", [(), ("-S",), ("--exclude-input-in-output", "--return-log-probs")], ids=str)
def test_tokens(server: RunningServer, directory: Path, engine: Engine, flags: tuple[str, ...]) -> None:
    output = run(server, TOKEN_CLIENT, *token_flags(directory, *flags))
    assert printed(f"Output beam 0: {generated(engine)}") in printed(output)
    if "--return-log-probs" in flags:
        assert "cum_log_probs: [[-" in output


@pytest.mark.parametrize(
    "flags",
    [
        (
            *("--num-return-sequences", "3", "--top-p", "0.9", "--top-k", "5", "--temperature", "0.7"),
            *("--return-perf-metrics", "--repetition-penalty", "1.2"),
            *("--presence-penalty", "0.2", "--frequency-penalty", "0.2"),
        ),
        ("--requested-outputs", "output_ids", "sequence_length"),
    ],
    ids=lambda flags: flags[0].removeprefix("--"),
)
def test_flags_of_the_token_client(server: RunningServer, directory: Path, flags: tuple[str, ...]) -> None:
    run(server, TOKEN_CLIENT, *token_flags(directory, *flags))


@pytest.mark.parametrize("how", [("-S",), ("--stop-via-request-cancel",)], ids=["stop of a stream", "cancel"])
def test_stopping(server: RunningServer, directory: Path, how: tuple[str, ...]) -> None:
    """The client itself fails if as many tokens come as it asked for."""
    flags = ("--request-output-len", "9000", "--stop-after-ms", "300", "--request-id", "7", "--end-id", "-1", *how)
    run(server, TOKEN_CLIENT, *token_flags(directory), *flags)

"""What all commands have in common: how flags may be written, what a near miss is answered with, sizes, completion."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import shtab

from kvseek.cli import completion
from kvseek.cli.main import COMMANDS, main
from kvseek.core.command_line import Parser, memory_size, optional_size, readable

SIZE = re.compile(r"--(.*_)?(bytes|memory)$")


def parsers() -> Iterator[tuple[str, Parser]]:
    for name, (module, _) in COMMANDS.items():
        code = importlib.import_module(module)
        for make in getattr(code, "PARSERS", (code.make_parser,)):
            yield name, make()


COMMAND_PARSERS = list(parsers())


def message_of(parser: Parser, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(words)
    return capsys.readouterr().err


def status(words: list[str]) -> object:
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(("name", "parser"), COMMAND_PARSERS)
def test_dashes_stand_for_underscores(name: str, parser: Parser) -> None:
    for flag in parser.flags:
        for written in (flag, f"--{flag[2:].replace('_', '-')}", f"--{flag[2:].replace('-', '_')}"):
            own = parser._spelled(written)
            assert own in parser.flags
            assert own.replace("-", "_") == flag.replace("-", "_")
            assert parser._spelled(f"{written}=a_b-c") == f"{own}=a_b-c", "values stay"


@pytest.mark.parametrize(("name", "parser"), COMMAND_PARSERS)
def test_a_near_miss_is_answered_with_what_was_meant(
    name: str, parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    """A letter too many, also where that leaves a required flag missing; what is near nothing refers to the help."""
    for flag in parser.flags:
        message = message_of(parser, [f"{flag}x", "1"], capsys)
        assert f"{flag}x" in message
        assert "; did you mean --" in message
    assert "did you mean" not in message_of(parser, ["--qqqqqqqqqq"], capsys)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["build", "--nested.topk", "3"], "did you mean --nested.top_k?"),
        (["build", "--top_k", "3"], "did you mean --clusterkv.top_k or --ctkvr.top_k or"),
        (["serve", "--engine_dr", "x"], "--engine_dr is unknown; did you mean --engine_dir?"),
        (["cache", "drop", "--older_then", "3", "--disk_dir", "x"], "did you mean --older_than?"),
        (["chat", "--max_token", "3"], "did you mean --max_tokens?"),
        (["chat", "hello"], "unrecognized arguments: hello; see kvseek chat --help"),
        (["sevre"], "unknown command 'sevre'; did you mean serve?"),
    ],
)
def test_examples(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(words) == 2
    assert hint in capsys.readouterr().err.splitlines()[-1]


def test_every_size_in_bytes_is_written_alike() -> None:
    found = []
    for _, parser in COMMAND_PARSERS:
        for action in parser._actions:
            if any(map(SIZE.match, action.option_strings)):
                found.append(action.option_strings[0])
                assert action.type in (memory_size, optional_size), action.option_strings
    assert {"--disk_bytes", "--gpu_memory", "--work_memory", "--cache.reuse_host_bytes"} <= set(found)


def test_sizes() -> None:
    sizes = {"8GiB": 8 << 30, "8gib": 8 << 30, "80GB": 80 * 10**9, "512MB": 512_000_000, "1.5kb": 1500, "7": 7}
    sizes |= {"1.5 TB": 1_500_000_000_000, "0.1GB": 100_000_000}  # decimal: no rounding of binary fractions
    assert {text: memory_size(text) for text in sizes} == sizes
    assert (optional_size("null"), optional_size("1KiB")) == (None, 1024)
    texts = {640: "640 B", 1536: "1.50 KiB", 80 << 30: "80.00 GiB", 5000 << 40: "5,000.00 TiB"}
    assert {size: readable(size) for size in texts} == texts


@pytest.mark.parametrize("shell", shtab.SUPPORTED_SHELLS)
def test_completion_knows_every_command_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name, parser in COMMAND_PARSERS:
        assert name in script
        missing = [flag for flag in parser.flags if flag not in script and flag.lstrip("-") not in script]
        assert missing == [], name


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_in_bash() -> None:
    script = shtab.complete(completion.whole_parser(), "bash")
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_kvseek kvseek "${!#}" ""; echo "${COMPREPLY[*]}"'

    def answers(*words: str) -> list[str]:
        ran = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}", "bash", "kvseek", *words], capture_output=True, text=True
        )
        return ran.stdout.split()

    assert answers("se") == ["serve"]
    assert answers("serve", "--http") == ["--http_port"]
    assert answers("build", "--nested.t") == ["--nested.top_k"]
    assert answers("cache", "l") == ["list"]

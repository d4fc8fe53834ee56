"""A competing system is found by its name, and costs nothing to whoever does not name it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvseek.builder.flags import FlagParser
from kvseek.builder.options import parse
from kvseek.plugins.registry import METHODS, PEERS, get_method

WITHOUT = """
import sys
from kvseek.builder.options import parse
from kvseek.engine.engine import Engine
options = parse(["--model", "m", "--output_dir", "o", "--method", "full"])
print([name for name in sys.modules if name.startswith("kvseek.plugins.peers.") and not name.endswith(".base")])
"""


def test_nothing_of_them_is_imported_by_builds_and_engines_of_other_methods() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_flags_are_those_of_the_one_that_is_named() -> None:
    named, other = (FlagParser(["--method", name]).format_help() for name in ("quest", "full"))
    assert "--quest.page N" in named
    assert "--snapkv.window" not in named
    assert "--quest.page" not in other
    assert all(peer in other for peer in PEERS), "they are listed"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method=quest", "--quest.pages", "8"], "unrecognized arguments: --quest.pages"),
        (["--method", "nested", "--quest.page", "8"], "--quest.page belongs to --method quest"),
        (["--method", "quest", "--snapkv.window", "8"], "--snapkv.window belongs to --method snapkv"),
    ],
)
def test_a_flag_of_one_that_is_not_built_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ["--model", "m", "--output_dir", "o", "--tokenizer", "quest"]
    parse([*build, "--method=quest", "--quest.page", "8"])
    with pytest.raises(SystemExit):
        parse([*build, *flags])
    assert message in capsys.readouterr().err


def test_those_that_evict_say_so() -> None:
    assert {name for name in METHODS | PEERS if get_method(name).evicts} == {"h2o", "snapkv", "streamingllm"}

"""`kvseek build --help`: sections, and a text, a default and, where the docstring has it, a source for every field."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

import pytest

from kvseek.builder import build
from kvseek.builder.flags import FlagParser, field_texts
from kvseek.core.config import CacheConfig, TensorRtConfig
from kvseek.plugins.registry import METHODS, get_method


@dataclass
class Example:
    """What it is.

    Parameters
    ----------
    other : int
        Of no interest.

    Attributes
    ----------
    one, two : int
        Both of them: 100 %,
        on two lines.

        And a paragraph.
    three : str

    Raises
    ------
    ValueError
        Never.
    """


class Bare:
    """No sections here: only words, and one : that."""


class Silent:
    pass


def test_texts_come_from_the_attributes_section() -> None:
    both = "Both of them: 100 %, on two lines. And a paragraph."
    assert field_texts(Example) == {"one": both, "two": both, "three": ""}
    assert field_texts(Bare) == field_texts(Silent) == {}


@pytest.mark.parametrize("name", ["cache", "tensorrt", *METHODS])
def test_every_field_has_a_text(name: str) -> None:
    own = {"cache": CacheConfig, "tensorrt": TensorRtConfig}
    config_class = own.get(name) or get_method(name).config_class
    fields, texts = [f.name for f in dataclasses.fields(config_class)], field_texts(config_class)
    assert list(texts) == fields, "in the order of the fields"
    assert all(len(text.split()) > 1 for text in texts.values())


def test_sections_and_defaults() -> None:
    parser = FlagParser()
    titles = [group.title for group in parser._action_groups][2:]
    methods = [f"--method {name}" for name in METHODS]
    assert titles == [
        "what to build",
        "limits",
        "cache",
        *methods,
        "--runtime tensorrt",
        "--prefill_attention block_sparse",
        "calibrate",
        "plan",
        "inspect, verify and check",
    ]
    groups: dict[str | None, list[argparse.Action]] = {g.title: g._group_actions for g in parser._action_groups}
    for name in METHODS:
        fields = dataclasses.fields(get_method(name).config_class)
        flags = [action.option_strings[0] for action in groups[f"--method {name}"]]
        assert flags == [f"--{name}.{field.name}" for field in fields]
        assert all("(default: " in str(action.help) for action in groups[f"--method {name}"])
    calibrate = [(action.option_strings[0], str(action.help)) for action in groups["calibrate"]]
    assert [flag for flag, _ in calibrate] == ["--calibrate", "--calibrate_tokens", "--calibrate_window"]
    assert all("(default: 2048" in text for _, text in calibrate[1:])
    assert {flag for action in groups["plan"] for flag in action.option_strings} == {
        "--plan",
        "--gpu_memory",
        "--host_memory",
        "--json",
    }


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        build.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--ctkvr.centroid_divisor N A prompt of n retrieval tokens" in text
    assert "Section 4.1: 16. (default: 16)" in text
    assert "kvseek build --plan --model MODEL --method METHOD --gpu_memory SIZE --host_memory SIZE" in text
    assert '--tensorrt.form TEXT "engine": one plan, in which attention is a plugin\'s layers' in text
    assert "--method full: no options of its own" in text
    assert "First tokens of a request, which every step attends to. (default: 64)" in text

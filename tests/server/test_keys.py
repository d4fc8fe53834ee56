"""API keys: the file, and what a header must have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.door_processes import write_keys

from kvseek.core.request import MAX_SALT
from kvseek.server.errors import ServerError
from kvseek.server.requests.keys import Keys, read_keys
from kvseek.server.settings import ServeSettings


def test_a_file_has_a_key_a_line(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", "the-first-key-of-all", "", "  the-second-key-of-all ")
    assert read_keys(path) == ("the-first-key-of-all", "the-second-key-of-all")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 keys, must be in"),
        (b"a b\n", "line 1 must be"),
        (b"the-first-key-of-all\n\xc3\xa9\n", "line 2"),
        (b"\xff", "not UTF-8"),
        (b"x\n", "the key in line 1 has 1 characters, must have at least 16"),
        (b"the-first-key-of-all\nfifteen-letters\n", "the key in line 2 has 15 characters"),
    ],
)
def test_faulty_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ServerError, match=message) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot be read"):
        read_keys(tmp_path / "none")


@pytest.mark.parametrize("header", ["Bearer two", "bearer two", "Bearer  two "])
def test_one_of_the_keys_is_enough(header: str) -> None:
    assert Keys(("one", "two")).tenant(header) is not None


@pytest.mark.parametrize(
    "header", ["", "two", "Bearer", "Bearer ", "Bearer tw", "Bearer twoo", "Basic two", "Bearer é"]
)
def test_anything_else_is_not(header: str) -> None:
    assert Keys(("one", "two")).tenant(header) is None


def test_without_keys_everyone_may_ask_and_share() -> None:
    tenant = Keys(()).tenant("")
    assert (tenant.salt(None), tenant.salt("own"), tenant.owner) == (None, "own", "")


def test_each_key_has_salts_of_its_own() -> None:
    keys = Keys(("one", "two"))
    found = []
    for key in ("one", "two", "one"):
        tenant = keys.tenant(f"Bearer {key}")
        assert tenant is not None
        found.append([tenant.salt(salt) for salt in (None, "own", "a" * MAX_SALT)])
    assert found[0] == found[2]
    salts = {*found[0], *found[1]}
    assert len(salts) == 6
    assert all(salt is not None and len(salt) <= MAX_SALT for salt in salts), "the engine takes them"


def test_keys_may_share(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", "the-first-key-of-all", "the-second-key-of-all")
    keys = ServeSettings(api_key_file=str(path), share_prefixes="all").keys
    one, two, three = (keys.tenant(f"Bearer the-{name}-key-of-all") for name in ("first", "second", "third"))
    assert [tenant.salt(salt) for tenant in (one, two) for salt in (None, "own")] == [None, "own"] * 2
    assert one.owner != two.owner, "but they cannot stop each other's requests"
    assert three is None

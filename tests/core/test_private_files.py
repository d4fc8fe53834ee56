"""Files of keys and folders of users: what others may read, replace or have planted is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvseek.core.private_files import PrivateFileError, open_own_file, open_private_folder, read_key_file
from kvseek.server.processes import APPEND

OTHER = 4242  # a user that is neither this one nor root
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def write(path: Path, mode: int, owner: int | None = None) -> Path:
    path.write_text("a key of some length\n")
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, -1)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_read_also_through_a_link(mode: int, tmp_path: Path) -> None:
    """Kubernetes mounts secrets as links."""
    path, link = write(tmp_path / "key", mode), tmp_path / "link"
    link.symlink_to(path)
    assert read_key_file(path) == read_key_file(link) == "a key of some length\n"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (0o644, "mode 0644, so others may read it: must be 0600; chmod 600 it"),
        (0o604, "mode 0604, so others may read it"),
        (0o602, "mode 0602, so others may change it"),
        (0o620, "mode 0620, so others may change it"),
        (0o666, "mode 0666"),
    ],
)
def test_a_file_that_others_may_read_or_change_is_refused(mode: int, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "key", mode)
    with pytest.raises(PrivateFileError, match=message) as refused:
        read_key_file(path)
    assert "length" not in str(refused.value), "nothing of the file"


def test_what_is_no_file_of_text_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)  # reading it would wait for ever
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "bytes").chmod(0o600)
    for name, message in (("pipe", "is no file"), ("none", "cannot be read"), ("bytes", "not UTF-8")):
        with pytest.raises(PrivateFileError, match=message):
            read_key_file(tmp_path / name)


@as_root
def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "key", 0o600, OTHER)
    with pytest.raises(PrivateFileError, match=f"belongs to user {OTHER}"):
        read_key_file(path)
    with pytest.raises(PrivateFileError, match=f"belongs to user {OTHER}"):
        open_own_file(path)


def test_no_link_is_followed_to_a_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write(tmp_path / "key", 0o600))
    for flags in (os.O_RDONLY, APPEND):
        with pytest.raises(PrivateFileError, match="link is a symbolic link; name the file that it leads to"):
            open_own_file(tmp_path / "link", flags)
    os.close(open_own_file(Path("/dev/null"), APPEND))
    os.close(open_own_file(tmp_path / "key"))


def test_folders_are_made_for_their_user_alone(tmp_path: Path) -> None:
    os.close(open_private_folder(tmp_path / "new" / "inner"))
    for path in (tmp_path / "new", tmp_path / "new" / "inner"):
        assert path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    os.close(open_private_folder(tmp_path / "open"))
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileNotFoundError):
        open_private_folder(tmp_path / "none", make=False)


def linked(folder: Path) -> Path:
    (folder / "elsewhere" / "inner").mkdir(parents=True)
    (folder / "above").symlink_to(folder / "elsewhere")
    return folder / "above" / "inner"


def itself_a_link(folder: Path) -> Path:
    (folder / "elsewhere").mkdir()
    (folder / "link").symlink_to(folder / "elsewhere")
    return folder / "link"


def below_a_folder_of_all(folder: Path) -> Path:
    (folder / "all").mkdir()
    (folder / "all").chmod(0o777)
    return folder / "all" / "inner"


def itself_of_all(folder: Path) -> Path:
    return below_a_folder_of_all(folder).parent


def of_another(folder: Path) -> Path:
    (folder / "theirs").mkdir(mode=0o755)
    os.chown(folder / "theirs", OTHER, -1)
    return folder / "theirs"


def below_one_of_another(folder: Path) -> Path:
    (of_another(folder) / "inner").mkdir()
    return folder / "theirs" / "inner"


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (linked, "above is a symbolic link"),
        (itself_a_link, "link is a symbolic link; name the folder that it leads to"),
        (below_a_folder_of_all, "all has the mode 0777, so other users may replace"),
        (itself_of_all, "all has the mode 0777"),
        pytest.param(of_another, f"theirs belongs to user {OTHER}: must be this user's;", marks=as_root),
        pytest.param(below_one_of_another, f"theirs belongs to user {OTHER}: must be this user's or", marks=as_root),
    ],
)
def test_folders_in_which_others_have_a_hand_are_refused(
    plant: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    path = plant(tmp_path)
    with pytest.raises(PrivateFileError, match=message):
        open_private_folder(path)


def test_a_folder_for_temporary_files_may_be_above(tmp_path: Path) -> None:
    """Others may write there, but replace nothing of this user's."""
    shared = below_a_folder_of_all(tmp_path).parent
    shared.chmod(0o1777)
    os.close(open_private_folder(shared / "own"))

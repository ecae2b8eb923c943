from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier import paths
from kvtier.errors import ConfigError


def test_the_longest_path_that_a_socket_can_have() -> None:
    directory = Path("/" + "x" * (107 - len("/") - len("/s")))
    assert len(str(paths.socket_path(directory, "s"))) == 107
    with pytest.raises(ConfigError, match=r"108 bytes and the kernel takes 107: choose a shorter runtime_dir"):
        paths.socket_path(Path(f"{directory}x"), "s")
    with pytest.raises(ConfigError, match="bytes"):
        paths.socket_path(Path("/" + "é" * 60), "s")


def test_where_a_client_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_ENDPOINT", raising=False)
    own = tmp_path / "kvtier"
    monkeypatch.setattr(paths, "user_dir", lambda: own)
    assert paths.find_endpoint() == paths.SYSTEM_DIR
    own.mkdir()
    (own / paths.ATTACH_SOCKET).touch()
    assert paths.find_endpoint() == own
    monkeypatch.setenv("KVTIER_ENDPOINT", "/a")
    assert paths.find_endpoint() == Path("/a")
    assert paths.find_endpoint("/b/attach.sock") == Path("/b")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's socket")
def test_another_users_socket_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_ENDPOINT", raising=False)
    monkeypatch.setattr(paths, "user_dir", lambda: tmp_path)
    (tmp_path / paths.ATTACH_SOCKET).touch()
    os.chown(tmp_path / paths.ATTACH_SOCKET, 12345, 12345)
    assert paths.find_endpoint() == paths.SYSTEM_DIR


def test_an_ordinary_user_needs_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert (paths.user_dir(), paths.state_dir()) == (Path("/run/user/1000/kvtier"), Path("/cache/kvtier"))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert paths.user_dir() == Path("/tmp/kvtier-1000")

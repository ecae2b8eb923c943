"""Starting: what refuses to, what it says, and what it must not take over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from kvtier_client import Client
from tests.system.conftest import PATIENCE, ROOT, Daemon, MakeDaemon, eventually
from tests.system.pages import chain, put, read


def refusal(daemon: Daemon, *flags: str) -> str:
    """Start it in vain; what it says."""
    for flag in flags:
        key, _, value = flag.partition("=")
        daemon.settings[key] = value
    process = daemon.spawn()
    try:
        assert process.wait() == 2, process.log()
    finally:
        process.close()
    said = process.log()
    assert said.startswith("kvtierd: ") or "\nkvtierd: " in said
    assert "Traceback" not in said
    return said


def test_a_second_daemon_in_the_same_place_is_refused(daemon: Daemon, make: MakeDaemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 20)
    put(space, keys)
    assert daemon.process is not None
    second = daemon.spawn()
    assert second.wait() == 2
    second.close()
    assert f"belongs to a running kvtierd (pid {daemon.process.pid})" in daemon.log
    other = make(ssd="64MiB")
    assert "tiers.ssd.path" in refusal(other, f"tiers.ssd.path={daemon.ssd}")
    assert read(space, keys) == 20
    assert read(daemon.space(), keys) == 20


def test_a_live_socket_is_not_taken_over_though_the_lock_file_is_gone(daemon: Daemon) -> None:
    (daemon.runtime / "lock").unlink()
    del daemon.settings["tiers.ssd.path"], daemon.settings["tiers.ssd.medium"]
    for name in ("tiers.ssd.capacity", "tiers.ssd.slab"):
        del daemon.settings[name]
    second = daemon.spawn()
    assert second.wait() == 2
    second.close()
    assert "someone listens there" in daemon.log
    assert Client(daemon.endpoint).ping() < PATIENCE


def test_stale_sockets_are_replaced(daemon: Daemon) -> None:
    daemon.kill()
    assert (daemon.runtime / "attach.sock").exists(), "a killed daemon leaves its sockets"
    daemon.start()
    assert daemon.client().ping() < PATIENCE


@pytest.mark.parametrize("name", ["attach.sock", "verbs.sock"])
def test_what_is_no_socket_stays(make: MakeDaemon, name: str) -> None:
    daemon = make()
    daemon.runtime.mkdir()
    (daemon.runtime / name).write_text("precious")
    assert "is not a socket" in refusal(daemon)
    assert (daemon.runtime / name).read_text() == "precious"


def test_a_path_too_long_for_a_socket_is_said_so(make: MakeDaemon) -> None:
    daemon = make()
    short = len(str(daemon.directory)) + len("/attach.sock") + 1
    daemon.runtime = daemon.directory / ("x" * (108 - short))
    assert len(str(daemon.runtime / "attach.sock")) == 108
    said = refusal(daemon)
    assert "108 bytes" in said and "107" in said and "runtime_dir" in said
    daemon.runtime = daemon.directory / ("x" * (107 - short))
    daemon.start()
    assert daemon.client().ping() < PATIENCE


def test_configuration_errors_name_what_to_change(make: MakeDaemon, place: Path) -> None:
    assert "did you mean tiers.host.capacity?" in refusal(make(), "tiers.host.capactiy=1GiB")
    file = place / "kvtier.toml"
    file.write_text('[tiers.host]\nmedium = "host"\ncapacity = "lots"\n')
    done = _kvtierd("--config", str(file), "--check-config")
    assert done.returncode == 2
    for part in (str(file), "tiers.host.capacity", '"4GiB"'):
        assert part in done.stderr
    done = _kvtierd("--config", str(place / "none.toml"))
    assert (done.returncode, "none.toml" in done.stderr) == (2, True)


def test_checking_a_configuration_starts_nothing(place: Path) -> None:
    file = place / "kvtier.toml"
    file.write_text(f'runtime_dir = "{place}/r"\n[tiers.host]\nmedium = "host"\ncapacity = "1GiB"\n')
    done = _kvtierd("--config", str(file), "--check-config")
    assert done.returncode == 0 and "tier host: host, 1.0 GiB" in done.stdout
    assert not (place / "r").exists()


def _kvtierd(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "daemon", "client", "kernels"))
    return subprocess.run(
        [sys.executable, "-m", "kvtier_daemon.main", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=PATIENCE,
        check=False,
    )


def test_only_its_user_and_group_reach_the_sockets(daemon: Daemon) -> None:
    assert daemon.runtime.stat().st_mode & 0o777 == 0o750
    assert daemon.ssd.stat().st_mode & 0o777 == 0o700
    for name in ("attach.sock", "verbs.sock"):
        assert (daemon.runtime / name).stat().st_mode & 0o777 == 0o660
    for path in daemon.ssd.rglob("*"):
        assert not path.stat().st_mode & 0o077, path


def test_a_directory_that_holds_other_things_is_not_made_private(make: MakeDaemon, place: Path) -> None:
    shared = place / "mount"
    shared.mkdir(mode=0o755)
    (shared / "homework").write_text("precious")
    daemon = make(ssd="64MiB")
    daemon.settings["tiers.ssd.path"] = shared
    said = refusal(daemon)
    assert "tiers.ssd.path" in said and str(shared / "kvtier") in said
    assert shared.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in shared.iterdir()] == ["homework"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
def test_another_users_runtime_directory_is_refused(make: MakeDaemon) -> None:
    daemon = make()
    daemon.runtime.mkdir(mode=0o777)
    os.chown(daemon.runtime, 12345, 12345)
    assert "belongs to uid 12345" in refusal(daemon)


def test_a_missing_mount_closes_the_tier_and_no_other(make: MakeDaemon) -> None:
    daemon = make(ssd="64MiB")
    daemon.ssd.write_text("a file where a directory should be")
    daemon.start()
    assert "it is closed, the others serve" in daemon.log
    space = daemon.space()
    keys = chain(space, 1, 40)
    put(space, keys)
    assert read(space, keys) == 40
    tiers = {tier["name"]: tier for tier in space.client.stats()["tiers"]}
    assert tiers["ssd"]["closed"] and not tiers["host"]["closed"]


def test_an_index_of_another_version_is_left_alone(daemon: Daemon) -> None:
    space = daemon.space()
    put(space, chain(space, 1, 20))
    daemon.stop()
    with lmdb.open(str(daemon.ssd / "index"), max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"version", (99).to_bytes(4, "big"), db=env.open_db(b"meta", txn))
    files = {
        path: path.read_bytes() for path in daemon.ssd.rglob("*") if path.name == "data.mdb" or path.suffix == ".kv"
    }
    daemon.start()
    assert "has format 99" in daemon.log
    space = daemon.space()
    keys = chain(space, 2, 20)
    put(space, keys)
    assert read(space, keys) == 20, "the other tiers serve"
    daemon.stop()
    assert all(path.read_bytes() == data for path, data in files.items())


def test_a_garbage_index_is_left_alone(make: MakeDaemon) -> None:
    daemon = make(ssd="64MiB")
    (daemon.ssd / "index").mkdir(parents=True, mode=0o700)
    daemon.ssd.chmod(0o700)
    (daemon.ssd / "index" / "data.mdb").write_bytes(os.urandom(1 << 16))
    daemon.start()
    assert "the tier is closed" in daemon.log
    assert daemon.client().ping() < PATIENCE


def test_a_stop_between_its_first_words_and_its_first_request_is_in_order(place: Path) -> None:
    code = """
import sys, time
from kvtier_daemon import main
from kvtier_daemon.daemon import Daemon
run = Daemon.run
Daemon.run = lambda self: (time.sleep(0.5), run(self))
sys.exit(main.main(sys.argv[1:]))
"""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "daemon", "client", "kernels"))
    flags = [
        "--runtime-dir",
        str(place / "run"),
        "--set",
        "tiers.host.medium=host",
        "--set",
        "tiers.host.capacity=64MiB",
    ]
    daemon = subprocess.Popen(
        [sys.executable, "-c", code, *flags, "--set", "http_port=off"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert daemon.stdout is not None
    assert b"workers attach" in daemon.stdout.readline() + daemon.stdout.readline()
    daemon.terminate()
    assert daemon.wait(PATIENCE) == 0
    daemon.stdout.close()


def test_the_daemon_ends_with_its_parent(place: Path) -> None:
    code = """
import sys, time
from kvtier_client import local
daemon = local(host="32MiB", directory=sys.argv[1])
print(daemon.process.pid, flush=True)
time.sleep(60)
"""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "daemon", "client", "kernels"))
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(place / "l")], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Client(place / "l" / "run").ping() < PATIENCE
    process = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not Path(f"/proc/{pid}/cmdline").exists() or _ended(process), "it ends with its parent")
    os.close(process)
    with pytest.raises(OSError, match=r"refused|No such file"), socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(place / "l" / "run" / "attach.sock"))


def _ended(process: int) -> bool:
    import select

    return bool(select.select([process], [], [], 0)[0])

"""What an administrator installs: the unit, the example settings, the Debian package and what is in it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import msgspec
import pytest

from kvtier.config import Config, TenantConfig, TierConfig, load

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLE = (DEPLOY / "kvtierd.toml").read_text()
UNIT = (DEPLOY / "kvtierd.service").read_text()


def _uncommented() -> str:
    return re.sub(r"^#(?=[\[a-z])", "", EXAMPLE, flags=re.MULTILINE)


@pytest.mark.parametrize("text", [EXAMPLE, _uncommented()], ids=["as installed", "with all that is commented out"])
def test_the_example_settings_load(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvtierd.toml"
    file.write_text(text)
    config = load(file, environment={})
    assert [tier.medium for tier in config.tiers.values()][-2:] == ["host", "file"]


def test_the_example_settings_explain_every_key(tmp_path: Path) -> None:
    text = _uncommented()
    sections = {"": Config, "tiers.hbm": TierConfig, "tenants.research": TenantConfig}
    missing = []
    for kind in sections.values():
        for key in kind.__struct_fields__:
            if key in ("tiers", "tenants"):
                continue
            found = re.search(rf"^((?:#.*\n)*)(?:\[.*\]\n)?(?:[a-z_]+ = .*\n)*{key} = ", text, re.MULTILINE)
            if found is None or not found[1].strip():
                missing.append(f"{kind.__name__}.{key}")
    assert not missing, f"deploy/kvtierd.toml does not explain {missing}"


def test_commented_settings_show_the_defaults() -> None:
    shown = dict(re.findall(r"^#([a-z_]+) = (.+)$", EXAMPLE, re.MULTILINE))
    keys = ("log_format", "slow_request", "stop_timeout", "http_port")
    given = load(None, environment={}, flags=[f"{key}={shown[key]}" for key in keys])
    plain = load(None, environment={})
    assert [getattr(given, key) for key in keys] == [getattr(plain, key) for key in keys]
    tier = msgspec.convert({"medium": "host", "capacity": 1}, TierConfig, dec_hook=lambda kind, value: kind(value))
    for key in ("slab", "queue_depth", "admission", "write_queue", "peers", "device"):
        flags = ["tiers.a.medium=host", "tiers.a.capacity=2GiB", f"tiers.a.{key}={shown[key]}"]
        assert getattr(load(None, environment={}, flags=flags).tiers["a"], key) == getattr(tier, key), key


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    unit = tmp_path / "kvtierd.service"
    unit.write_text(UNIT.replace("/usr/bin/kvtierd", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    said = [line for line in done.stderr.splitlines() if "kvtierd" in line]
    assert done.returncode == 0 and not said, done.stderr


def test_the_unit_fits_the_daemon() -> None:
    """What no checker knows: that the unit's numbers go together with the settings'."""
    options = dict(re.findall(r"^([A-Za-z]+)=(.*)$", UNIT, re.MULTILINE))
    assert options["Type"] == "notify" and float(options["WatchdogSec"]) >= 10
    assert float(options["TimeoutStopSec"]) > Config().stop_timeout + 10
    assert options["RuntimeDirectoryPreserve"] == "yes", "containers have /run/kvtier mounted"
    for forbidden in ("PrivateDevices", "MemoryDenyWriteExecute", "PrivateTmp", "PrivateUsers", "PrivateIPC"):
        assert forbidden not in options


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("deb"))


def _build(directory: Path) -> Path:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "build-deb"), str(directory)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def _fields(package: Path) -> dict[str, str]:
    text = subprocess.check_output(["dpkg-deb", "--field", str(package)], text=True)
    return dict(re.findall(r"^([A-Z][\w-]+): (.*)$", text, re.MULTILINE))


def _dpkg(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["dpkg", f"--root={root}", "--force-script-chrootless", "--force-depends", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin:" + os.environ.get("PATH", "")},
    )


def test_the_package_is_what_debian_expects(package: Path, tmp_path: Path) -> None:
    fields = _fields(package)
    assert fields["Package"] == "kvtier" and fields["Version"] in package.name
    assert f"python{sys.version_info.major}.{sys.version_info.minor}" in fields["Depends"]
    subprocess.run(["dpkg-deb", "-R", str(package), str(tmp_path)], check=True, timeout=60)
    for path in (
        *("usr/bin/kvtierd", "usr/bin/kvtier", "etc/kvtier/kvtierd.toml"),
        *("usr/lib/systemd/system/kvtierd.service", "usr/lib/sysusers.d/kvtier.conf", "usr/lib/tmpfiles.d/kvtier.conf"),
        *("usr/share/doc/kvtier/copyright", "usr/share/doc/kvtier/changelog.gz"),
        *("usr/share/man/man8/kvtierd.8.gz", "usr/share/man/man1/kvtier.1.gz"),
    ):
        assert (tmp_path / path).is_file(), path
    assert (tmp_path / "DEBIAN/conffiles").read_text() == "/etc/kvtier/kvtierd.toml\n"
    assert list(tmp_path.glob("usr/lib/kvtier/kvtier_daemon/store.*.so")), "compiled"
    assert not list(tmp_path.rglob("__pycache__"))
    assert not list(tmp_path.glob("usr/local")) and not list(tmp_path.glob("usr/lib/python3*"))
    for script in ("postinst", "prerm", "postrm"):
        assert os.access(tmp_path / "DEBIAN" / script, os.X_OK)
        subprocess.run(["sh", "-n", str(tmp_path / "DEBIAN" / script)], check=True, timeout=10)
    done = subprocess.run(
        ["md5sum", "--check", "--quiet", "DEBIAN/md5sums"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_building_again_gives_the_same_bytes(package: Path, tmp_path: Path) -> None:
    assert _build(tmp_path).read_bytes() == package.read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [("always advise [never] deny", "advise"), ("[always] advise never deny", "[always] advise never deny")],
)
def test_the_unit_allows_huge_pages_where_they_are_off(tmp_path: Path, before: str, after: str) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(before + "\n")
    (command,) = re.findall(r"^ExecStartPre=-\+(.*)$", UNIT, re.MULTILINE)
    command = command.replace("/sys/kernel/mm/transparent_hugepage/shmem_enabled", str(setting))
    subprocess.run(["sh", "-c", command], check=False, timeout=10)
    assert setting.read_text() == after + "\n"


def test_the_package_installs_serves_and_goes(package: Path, tmp_path: Path) -> None:
    """Into a root of its own, by dpkg, maintainer scripts and all; what it installed runs, and nothing is left of it."""
    if os.geteuid() != 0:
        pytest.skip("dpkg wants root")
    root = tmp_path / "r"
    for directory in ("var/lib/dpkg/info", "var/lib/dpkg/updates", "etc", "run"):
        (root / directory).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    done = _dpkg(root, "--install", str(package))
    assert done.returncode == 0, done.stdout + done.stderr
    entry = re.search(r"^kvtier:[^:]*:(\d+):", (root / "etc/passwd").read_text(), re.MULTILINE)
    assert entry is not None
    pages = root / "var/lib/kvtier"
    assert pages.stat().st_uid == int(entry[1]) and pages.stat().st_mode & 0o777 == 0o700

    runtime = tmp_path / "run"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    config = str(root / "etc/kvtier/kvtierd.toml")
    daemon = subprocess.Popen(
        [
            *(sys.executable, "-I", str(root / "usr/bin/kvtierd"), "--config", config, "--runtime-dir", str(runtime)),
            *("--set", f"tiers.ssd.path={pages}", "--set", "tiers.host.capacity=64MiB"),
            *("--set", "http_port=off"),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert daemon.stdout is not None and "kvtierd" in daemon.stdout.readline()
        deadline = time.monotonic() + 30
        while not (runtime / "verbs.sock").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        shown = subprocess.run(
            [sys.executable, "-I", str(root / "usr/bin/kvtier"), "ping", "--endpoint", str(runtime)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert shown.returncode == 0 and "kvtierd answers" in shown.stdout, shown.stderr
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(30) == 0
    finally:
        daemon.kill()
        daemon.wait()
        if daemon.stdout is not None:
            daemon.stdout.close()

    done = _dpkg(root, "--remove", "kvtier")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (root / "usr/lib/kvtier").exists() and not (root / "usr/bin/kvtierd").exists()
    assert (root / "etc/kvtier/kvtierd.toml").exists() and pages.exists(), "settings and pages stay until a purge"
    done = _dpkg(root, "--purge", "kvtier")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (root / "etc/kvtier").exists() and not pages.exists()


@pytest.mark.parametrize("name", ["Containerfile.daemon", "Containerfile.worker"])
def test_container_files_copy_what_there_is_and_all_that_the_build_needs(name: str) -> None:
    text = (DEPLOY / name).read_text()
    lines = re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
    copied = {source for line in lines for source in line.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied), copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["path"]
    packages = {"kvtier", "daemon", "client", "kernels", "pyproject.toml", "README.md", "LICENSE", hook}
    assert packages <= copied, "the wheel is built from these"


def test_the_units_filter_lets_the_daemons_system_calls_through() -> None:
    """What kvtierd and its libraries call by number or need on purpose, where a refusal would only show much later."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    (group,) = re.findall(r"^SystemCallFilter=(@\S+)$", UNIT, re.MULTILINE)
    allowed, todo = set[str](), [group]
    while todo:
        name = todo.pop()
        listed = subprocess.check_output(["systemd-analyze", "syscall-filter", name], text=True, timeout=30)
        entries = re.findall(r"^ {4}(\S+)$", listed, re.MULTILINE)
        allowed |= set(entries)
        todo += [entry for entry in entries if entry.startswith("@")]
    for call in (
        *("memfd_create", "fallocate", "mmap", "madvise", "mlock", "mbind", "set_mempolicy", "prlimit64"),
        *("pidfd_open", "kill", "eventfd2", "epoll_wait", "recvmsg", "sendmsg", "ioctl", "getrandom"),
        *("preadv2", "pwritev2", "pread64", "pwrite64", "fdatasync", "flock", "fchmod", "ftruncate"),
    ):
        assert call in allowed, call


def test_the_unit_is_as_closed_as_cuda_allows() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(DEPLOY / "kvtierd.service")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze judges running services only")
    assert done.returncode == 0, done.stdout[-600:]

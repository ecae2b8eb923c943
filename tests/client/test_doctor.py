"""Each check of `kvtier doctor`, on hosts that are made up."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtier_client
from kvtier.config import Config, load
from kvtier.device import CudaUnavailable, Device
from kvtier_client import doctor
from kvtier_client.doctor import FATAL, OK, WARNING, Finding, Host

GIB = 1 << 30


class Made(Host):
    """A healthy host, of which a test changes what it is about."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self.runtime = Path("/nowhere")
        self.files: dict[str, str] = {}
        self.facts: dict[str, Any] = {
            "memlock": 1 << 62,
            "euid": 990,
            "cgroup_limit": 1 << 62,
            "memfd": "",
            "shm": 64 << 20,
            "pidfd": (True, True),
            "kernel": "6.12",
            "now": 1e9,
            "writable": Path("/"),
            "usage": (100 * GIB, 0),
            "direct": "",
            "newest": 1e9 - 5,
            "holder": 0,
            "nvidia": False,
            "gpus": CudaUnavailable("cupy is not installed"),
            "peers": True,
            "cuda_versions": (12080, 12080),
            "driver_versions": ("", ""),
            "apart": False,
            **facts,
        }
        for name, value in self.facts.items():
            setattr(self, name, self._fact(value))

    @staticmethod
    def _fact(value: Any) -> Any:
        def answer(*_: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return answer

    def read(self, path: str) -> str:
        meminfo = f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n"
        return self.files.get(path, meminfo if path == "/proc/meminfo" else "")


def settings(*flags: str, gpu: bool = False) -> Config:
    plain = [
        *("tiers.host.medium=host", "tiers.host.capacity=4GiB"),
        *("tiers.ssd.medium=file", "tiers.ssd.capacity=20GiB", "tiers.ssd.path=/pages"),
    ]
    tiers = ["tiers.hbm.medium=cuda", "tiers.hbm.capacity=1GiB"] if gpu else []
    return load(None, environment={}, flags=[*tiers, *plain, *flags])


def gpu(ordinal: int, node: int = -1, total: int = 80 * GIB) -> Device:
    return Device(ordinal, f"GPU-{ordinal}", "H200", total, node)


def worst(found: Iterator[Finding]) -> Finding:
    every = list(found)
    assert all(bool(finding.mend) == (finding.level != OK) for finding in every), (
        "what is wrong has a mend, and only that"
    )
    return max(every, key=lambda finding: [OK, WARNING, FATAL].index(finding.level))


def test_a_healthy_host_has_no_findings() -> None:
    found = doctor.examine(Made(), settings())
    assert {finding.level for finding in found} == {OK}
    found = doctor.examine(Made(gpus=[gpu(0), gpu(1)], nvidia=True), settings(gpu=True))
    assert {finding.level for finding in found} == {OK}


@pytest.mark.parametrize(
    ("facts", "flags", "level", "words"),
    [
        ({"cgroup_limit": 2 * GIB}, [], FATAL, "cgroup 2.0 GiB"),
        ({}, ["tiers.host.capacity=100GiB"], FATAL, "the machine has 64.0 GiB"),
        ({}, ["tiers.host.capacity=40GiB"], WARNING, "32.0 GiB are free"),
        ({"cgroup_limit": 8 * GIB}, [], OK, "fit"),
    ],
)
def test_memory(facts: dict[str, Any], flags: list[str], level: str, words: str) -> None:
    found = worst(doctor.check_memory(Made(**facts), settings(*flags)))
    assert found.level == level and words in found.text


def test_memlock_matters_with_a_gpu_tier_only() -> None:
    limited = Made(memlock=64 << 10)
    assert worst(doctor.check_memlock(limited, settings())).level == OK
    found = worst(doctor.check_memlock(limited, settings(gpu=True)))
    assert found.level == WARNING and "64.0 KiB" in found.text and "LimitMEMLOCK" in found.mend
    assert worst(doctor.check_memlock(Made(memlock=64 << 10, euid=0), settings(gpu=True))).level == OK


def test_limits_are_read_as_the_kernel_writes_them() -> None:
    host = Host()
    host.read = lambda path: {  # type: ignore[method-assign]
        "/proc/self/limits": "Max locked memory         8388608              8388608              bytes",
        "/proc/self/status": "Uid:\t990\t990\t990\t990\nCpus_allowed_list:\t0-3,8\nMems_allowed_list:\t1\n",
        "/proc/self/cgroup": "0::/system.slice/kvtierd.service\n",
        "/sys/fs/cgroup/system.slice/kvtierd.service/memory.max": "max\n",
        "/sys/fs/cgroup/system.slice/memory.max": "1024\n",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release",
    }.get(path, "")
    assert (host.memlock(), host.euid(), host.cgroup_limit()) == (8 << 20, 990, 1024)
    assert (host.allowed("Cpus"), host.allowed("Mems")) == ({0, 1, 2, 3, 8}, {1})
    assert host.driver_versions()[0] == "570.86.15"


def test_small_shared_memory_is_no_matter_and_no_memfd_is() -> None:
    found = worst(doctor.check_shared_memory(Made(), settings()))
    assert found.level == OK and "64.0 MiB" in found.text and "not needed" in found.text
    found = worst(doctor.check_shared_memory(Made(memfd="Operation not permitted"), settings()))
    assert found.level == FATAL and "seccomp" in found.mend


def test_small_pages_are_told_and_no_warning() -> None:
    made = Made()
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    made.files[path] = "always within_size advise [never] deny force\n"
    found = worst(doctor.check_huge_pages(made, settings()))
    assert found.level == OK and "echo advise" in found.text
    made.files[path] = "always within_size [advise] never deny force\n"
    assert "huge pages where" in worst(doctor.check_huge_pages(made, settings())).text
    assert not list(doctor.check_huge_pages(Made(), settings()))


def test_kernels_without_pidfd() -> None:
    found = worst(doctor.check_pidfd(Made(pidfd=(False, False), kernel="5.2.0"), settings()))
    assert found.level == WARNING and "5.2.0" in found.text
    assert "6.5" in worst(doctor.check_pidfd(Made(pidfd=(True, False)), settings())).mend


def test_another_daemon_on_the_directory() -> None:
    found = worst(doctor.check_directories(Made(holder=77), settings()))
    assert found.level == FATAL and "77" in found.text
    host = Made(holder=77)
    host.pid = 77
    assert worst(doctor.check_directories(host, settings())).level == OK


def test_a_held_lock_is_seen_without_taking_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as handle:
        assert Host().holder(str(tmp_path)) == 0
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert Host().holder(str(tmp_path)) in (
            os.getpid(),
            0,
        )  # 0: a file system whose device /proc/locks tells otherwise
    assert Host().holder(str(tmp_path / "none")) == 0


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        ({"usage": (5 * GIB, 2 * GIB)}, WARNING, "has 7.0 GiB"),
        ({"usage": (5 * GIB, 15 * GIB)}, OK, "fit"),
        ({"usage": (1 << 20, 0)}, FATAL, "less than one slab"),
        ({"direct": os.strerror(errno.EINVAL)}, WARNING, "O_DIRECT"),
        ({"writable": None}, WARNING, "may not write"),
    ],
)
def test_disks(facts: dict[str, Any], level: str, words: str) -> None:
    found = worst(doctor.check_disk(Made(**facts), settings()))
    assert found.level == level and words in found.text


def test_a_clock_that_was_set_back() -> None:
    found = worst(doctor.check_clock(Made(newest=1e9 + 3600), settings()))
    assert found.level == WARNING and "3600 s in the future" in found.text


def test_gpus() -> None:
    missing = CudaUnavailable("no GPU can be used: cudaErrorNoDevice")
    assert worst(doctor.check_gpus(Made(gpus=missing), settings(gpu=True))).level == FATAL
    assert worst(doctor.check_gpus(Made(gpus=missing, nvidia=True), settings())).level == WARNING
    assert worst(doctor.check_gpus(Made(gpus=missing), settings())).level == OK
    small = Made(gpus=[gpu(0, total=GIB // 2)])
    assert worst(doctor.check_gpus(small, settings(gpu=True))).level == FATAL


def test_gpus_without_access_to_each_other() -> None:
    host = Made(gpus=[gpu(0), gpu(1)], peers=False)
    found = worst(doctor.check_gpus(host, settings(gpu=True)))
    assert found.level == WARNING and "0-1" in found.text and "topo" in found.mend
    assert worst(doctor.check_gpus(host, settings("tiers.hbm.peers=false", gpu=True))).level == OK


def test_driver_and_runtime_that_do_not_fit() -> None:
    host = Made(gpus=[gpu(0)], cuda_versions=(12040, 13000))
    found = worst(doctor.check_gpus(host, settings(gpu=True)))
    assert found.level == FATAL and "12.4" in found.text and "kvtier[cuda12]" in found.mend
    host = Made(gpus=[gpu(0)], driver_versions=("570.86.15", "575.51.03"))
    found = worst(doctor.check_gpus(host, settings(gpu=True)))
    assert found.level == FATAL and "reboot" in found.mend


def test_a_daemon_kept_off_the_gpus_numa_node() -> None:
    host = Made(gpus=[gpu(0, node=1)])
    host.files |= {
        "/sys/devices/system/node/node1/cpulist": "4-7\n",
        "/proc/self/status": "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0-1\n",
    }
    found = worst(doctor.check_numa(host, settings(gpu=True)))
    assert found.level == WARNING and "CPUs" in found.text
    host.files["/proc/self/status"] = "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0\n"
    assert "memory" in worst(doctor.check_numa(host, settings(gpu=True))).text
    host.files["/proc/self/status"] = "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0-1\n"
    assert worst(doctor.check_numa(host, settings(gpu=True))).level == OK


def test_versions_and_namespaces_of_a_running_daemon() -> None:
    host = Made()
    host.pid, host.version = 5, "0.0.1"
    found = worst(doctor.check_daemon(host, settings()))
    assert found.level == WARNING and "0.0.1" in found.text and kvtier_client.__version__ in found.text
    host.version = kvtier_client.__version__
    assert worst(doctor.check_daemon(host, settings())).level == OK
    host.compiled = False
    assert worst(doctor.check_daemon(host, settings())).level == OK
    assert "KVTIER_COMPILE=1" in worst(doctor.check_daemon(host, settings(gpu=True))).mend
    host.compiled = True
    host.pid, host.foreign = 0, True
    assert worst(doctor.check_daemon(host, settings())).level == OK
    assert worst(doctor.check_daemon(host, settings(gpu=True))).level == FATAL
    host = Made(apart=True)
    host.pid, host.version = 5, kvtier_client.__version__
    assert "IPC namespace" in worst(doctor.check_daemon(host, settings(gpu=True))).text
    host.denied = True
    assert "usermod" in worst(doctor.check_daemon(host, settings())).mend
    host.problem = "this daemon speaks version 2"
    assert worst(doctor.check_daemon(host, settings())).level == FATAL


def test_speed_is_measured_and_judged(tmp_path: Path) -> None:
    shares: list[float] = []
    config = settings(f"tiers.ssd.path={tmp_path}")
    (found,) = doctor.check_speed(Made(speed=doctor.Speed(1e8, 1e9)), config, lambda *_: None)
    assert found.level == WARNING and "reads 0.10 GB/s" in found.text and found.mend
    speed = Host().speed(tmp_path, 64 << 20, shares.append)
    assert speed.read > 0 and speed.write > 0 and shares[-1] == 1.0 and shares == sorted(shares)
    assert not list(tmp_path.iterdir())


def test_a_check_that_fails_is_a_finding() -> None:
    found = doctor.examine(Made(usage=OSError(5, "Input/output error")), settings())
    (bad,) = [finding for finding in found if finding.level != OK]
    assert bad.check == "disk" and "Input/output error" in bad.text
    assert {finding.check for finding in found} > {"gpus", "clock"}


def test_settings_of_a_command_line() -> None:
    words = [
        "python3",
        "/usr/bin/kvtierd",
        "--config",
        "/etc/k.toml",
        "--set",
        "a=1",
        "--set=b=2",
        "--runtime-dir",
        "/r",
    ]
    assert doctor._of_command(words) == ("/etc/k.toml", ["a=1", "b=2", "runtime_dir=/r"])


def test_exit_status_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kvtierd.toml"
    common = {"probe": False, "as_json": True}
    file.write_text('[tiers.host]\nmedium = "host"\ncapacity = "64MiB"\n')
    status = doctor.run(str(tmp_path), str(file), [], **common)
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == status < 2, report
    assert set(report["findings"][0]) == {"check", "level", "text", "mend"}
    assert doctor.run(str(tmp_path), str(file), ["tiers.host.capacity=900TiB"], **common) == 2
    file.write_text("tiers = 5\n")
    capsys.readouterr()
    assert doctor.run(str(tmp_path), str(file), [], probe=False, as_json=False) == 2
    assert "-> kvtierd --check-config" in capsys.readouterr().out

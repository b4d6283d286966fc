# SPDX-License-Identifier: Apache-2.0
"""Limits of memory and cores, in trees of files like those of Linux."""

import os

import pytest

from pblasmp import resources

KIB = 1024
MEMINFO = "MemTotal:  2000 kB\nMemFree:  100 kB\nMemAvailable:  1000 kB\n"
V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 {root} /sys/fs/cgroup/cpu\\040set rw - cgroup cgroup rw,cpuset\n"
)
NO_LIMIT = str(0x7FFFFFFFFFFFF000)
OF_SLURM = "/slurm/uid_7/job_5"


def v2(folder, memory=None, used="0", stat="", cpu=None, cpus=None):
    """The files of a group of version 2."""
    files = {"memory.max": memory, "memory.current": used, "memory.stat": stat, "cpu.max": cpu}
    return named(f"sys/fs/cgroup{folder}", {**files, "cpuset.cpus.effective": cpus})


def v1(folder, memory=NO_LIMIT, used="0", stat="", quota="-1", cpus=None):
    """The files of a group of version 1."""
    files = {"memory.limit_in_bytes": memory, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {
        **named(f"sys/fs/cgroup/memory{folder}", files),
        **named(
            f"sys/fs/cgroup/cpu,cpuacct{folder}", {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000"}
        ),
        **named(f"sys/fs/cgroup/cpu set{folder}", {"cpuset.effective_cpus": cpus}),
    }


def named(folder, files):
    return {f"{folder}/{name}": text for name, text in files.items() if text is not None}


def own(text, mounts, root="/"):
    return {
        "proc/self/cgroup": text,
        "proc/self/mountinfo": mounts.format(root=root),
        "proc/meminfo": MEMINFO,
    }


IN_V1 = f"5:memory:{OF_SLURM}\n4:cpu,cpuacct:{OF_SLURM}\n3:cpuset:{OF_SLURM}\n1:name=systemd:/\n"
CASES = {  # files, what is available, what there is in all (None: all of the machine), the quota, the machine's cores
    "nothing is limited": (own("0::/\n", V2), 1000 * KIB, None, None, 64),
    "max": (
        {**own("0::/a\n", V2), **v2("/a", "max", "5", cpu="max 100000", cpus="0-63")}, 1000 * KIB, None, None, 64,
    ),
    "a container that sees its own group": (
        {**own("0::/\n", V2), **v2("", "500000", "200000", cpu="250000 100000")}, 300_000, 500_000, 2.5, 2,
    ),
    "what gives way is available": (
        {**own("0::/\n", V2), **v2("", "500000", "200000", "anon 1\ninactive_file 50000\nactive_file 7\n")},
        350_000, 500_000, None, 64,
    ),
    "more is used than is allowed": ({**own("0::/\n", V2), **v2("", "100", "200")}, 0, 100, None, 64),
    "a job's group, limited above": (
        {
            **own(f"0::{OF_SLURM}/step_0/task_1\n", V2),
            **v2(f"{OF_SLURM}/step_0/task_1", "max", "100", cpu="max 100000"),
            **v2(f"{OF_SLURM}/step_0", "600000", "100"),
            **v2(OF_SLURM, "500000", "300000", cpu="400000 100000", cpus="0-3,8,10-11"),
            **v2("/slurm", "max", "900000", cpu="800000 100000"),
            **v2("/other", "1", "0", cpu="1 100000"),
        },
        200_000, 500_000, 4.0, 4,
    ),
    "version 1": (
        {
            **own(IN_V1, V1),
            **v1(OF_SLURM, used="100", quota="150000", cpus="0-2"),
            **v1("/slurm/uid_7", "500000", "200000", "inactive_file 9\ntotal_inactive_file 50000\n", "300000"),
            **v1("/slurm"),
        },
        350_000, 500_000, 1.5, 1,
    ),
    "a container of version 1, whose group has the host's path": (
        {**own(IN_V1.replace("/slurm", "/docker"), V1, "/docker"), **v1("", "400000", "0", quota="300000")},
        400_000, 400_000, 3.0, 3,
    ),
    "the same where the mount is the group": (
        {**own(IN_V1, V1, OF_SLURM), **v1("", "400000", "0", quota="50000")}, 400_000, 400_000, 0.5, 1,
    ),
    "a group outside of its namespace": (
        {**own("0::/../../other\n", V2, "/.."), **v2("", "400000", "0", cpu="300000 100000")},
        400_000, 400_000, 3.0, 3,
    ),
    "hybrid: version 2 without controllers": (
        {
            **own(f"{IN_V1}0::/init\n", V1 + V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")),
            **named("sys/fs/cgroup/unified/init", {"cgroup.procs": "1"}),
            **v1(OF_SLURM, "300000", "0"),
        },
        300_000, 300_000, None, 64,
    ),
    "hybrid: processors in version 2": (
        {
            **own(f"5:memory:{OF_SLURM}\n0::/init\n", V1 + V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")),
            **named("sys/fs/cgroup/unified/init", {"cpu.max": "200000 100000"}),
            **v1(OF_SLURM, "300000", "0"),
        },
        300_000, 300_000, 2.0, 2,
    ),
    "only files of version 2": (v2("", "400000", "0", cpu="100000 100000"), 400_000, 400_000, 1.0, 1),
    "files with something else": (
        {
            **own("what\n0::/\n", V2 + "what\n1 2 - cgroup2\n"),
            **v2("", "much", "some", "inactive_file", "100000", "all"),
        },
        1000 * KIB, None, None, 64,
    ),
    "nothing": ({}, 1 << 62, None, None, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_limits(name, tmp_path, monkeypatch):
    files, available, most, quota, cores = CASES[name]
    for path, text in files.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(resources, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sysconf", lambda _: 1 << 20)
    assert resources.available_bytes() == available
    assert resources.memory_bytes() == (1 << 40 if most is None else most)
    assert resources.core_quota() == quota
    assert resources.machine_cores() == cores
    assert resources.usable_cores() == (8 if quota is None else min(8, max(1, int(quota))))


def test_the_part_of_a_rank(monkeypatch):
    assert [resources.rank_share(100, 1000, ranks) for ranks in (1, 10, 20, 2000)] == [100, 100, 50, 1]
    monkeypatch.setattr(resources, "ranks_here", lambda: 50)
    assert resources.rank_share(100, 1000) == 20
    monkeypatch.setattr(resources, "ranks_here", lambda: None)
    assert resources.rank_share(100, 1000) == 100


def test_here():
    assert 0 < resources.available_bytes() <= resources.memory_bytes() < 1 << 50
    assert 1 <= resources.usable_cores() <= len(resources.own_cores())
    assert 1 <= resources.machine_cores() <= os.cpu_count()

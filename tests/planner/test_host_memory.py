"""How much memory is free, from files as the kernel writes them."""

from pathlib import Path

from lightning_3d.app.planner.host_memory import available_memory

MEMORY = {
    "proc/meminfo": (
        "MemTotal:       24000000 kB\nMemAvailable:   20000000 kB\nHugePages_Total:   0\n"
    )
}


def machine(root: Path, files: dict[str, str]) -> float | None:
    for name, text in (MEMORY | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return available_memory(root)


def test_of_a_machine_without_limits(tmp_path: Path) -> None:
    assert machine(tmp_path, {}) == 20_480_000_000


def test_of_a_group_and_of_the_groups_around_it(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/slurm/job_7"
    files = {
        "proc/self/cgroup": "0::/slurm/job_7\n",
        f"{group}/memory.max": "8000000000\n",
        f"{group}/memory.current": "3000000000\n",
        f"{group}/memory.stat": "anon 1\ninactive_file 1000000000\n",
    }
    assert machine(tmp_path, files) == 6_000_000_000
    outer = {
        "sys/fs/cgroup/slurm/memory.max": "5000000000\n",
        "sys/fs/cgroup/slurm/memory.current": "4000000000\n",
    }
    assert machine(tmp_path, outer) == 1_000_000_000
    assert (
        machine(
            tmp_path,
            dict.fromkeys((f"{group}/memory.max", "sys/fs/cgroup/slurm/memory.max"), "max\n"),
        )
        == 20_480_000_000
    )


def test_of_a_group_of_the_first_kind(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    files = {
        # abc is not to be seen in the container
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
        f"{group}/memory.limit_in_bytes": "2000000000\n",
        f"{group}/memory.usage_in_bytes": "1500000000\n",
        f"{group}/memory.stat": "total_inactive_file 500000000\n",
    }
    assert machine(tmp_path, files) == 1_000_000_000
    assert (
        machine(tmp_path, {f"{group}/memory.limit_in_bytes": "9223372036854771712\n"})
        == 20_480_000_000
    )


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None

"""The pool of ranks: results, failures, time-outs, and what must not leak from one call to the
next."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankDied, RankTimeout


def all_ranks_sum(value: float) -> tuple[float, int, str]:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return total.item(), os.getpid(), os.environ["RANK"]


def fails_on(rank: int) -> None:
    print("a line before the failure")
    if dist.get_rank() == rank:
        raise KeyError(f"rank {rank} does not like this")
    dist.barrier()


def hangs_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leaves_state_behind() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    dist.new_group([0])


def state() -> tuple[torch.dtype, bool, bool, str, float, int]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        "LEFT_BEHIND" in os.environ,
        os.getcwd(),
        torch.rand(()).item(),
        torch.get_num_threads(),
    )


def launched_world() -> tuple[str, int, int, int]:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    environment = TorchElasticEnvironment()
    assert TorchElasticEnvironment.detect()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")  # from RANK, WORLD_SIZE, MASTER_*
    return (
        environment.main_address,
        environment.world_size(),
        environment.global_rank(),
        dist.get_world_size(),
    )


def test_results_in_rank_order_from_the_same_processes(ranks) -> None:
    first = ranks(all_ranks_sum, 2, 1.0)
    second = ranks(all_ranks_sum, 2, value=2.0)
    assert [result[0] for result in first + second] == [3.0, 3.0, 5.0, 5.0]
    assert [result[2] for result in first] == ["0", "1"]
    assert [result[1] for result in first] == [result[1] for result in second]
    assert len({result[1] for result in first}) == 2


def test_the_first_failure_is_raised_with_its_traceback_and_output(ranks) -> None:
    with pytest.raises(KeyError, match="rank 1 does not like this") as caught:
        ranks(fails_on, 2, 1)
    notes = "\n".join(caught.value.__notes__)
    assert "in fails_on" in notes and "a line before the failure" in notes
    assert ranks(all_ranks_sum, 2, 1.0)[0][0] == 3.0  # a new pool


@pytest.mark.slow
def test_a_hang_ends_with_the_stack_of_every_rank(ranks) -> None:
    with pytest.raises(RankTimeout, match="have not finished after 2 s") as caught:
        ranks(hangs_on, 2, 0, timeout=2)
    assert "in hangs_on" in "\n".join(caught.value.__notes__)


def test_a_killed_rank_is_named(ranks) -> None:
    with pytest.raises(RankDied, match="rank 1 ended with exit code -9"):
        ranks(dies_on, 2, 1)


def test_nothing_leaks_into_the_next_call(ranks) -> None:
    before = ranks(state, 2)
    ranks(leaves_state_behind, 2)
    assert ranks(state, 2) == before
    assert before[0][0] is torch.float32 and before[0][5] == 1


def test_a_rank_looks_launched_by_torchrun(ranks) -> None:
    for _ in range(3):  # a group made by a call must not find the addresses of the one before
        assert ranks(launched_world, 2, process_group=False) == [
            ("127.0.0.1", 2, 0, 2),
            ("127.0.0.1", 2, 1, 2),
        ]


def test_a_local_function_is_refused_in_the_test(ranks) -> None:
    with pytest.raises(Exception, match="pickle"):
        ranks(lambda: None, 2)


@pytest.mark.full
def test_no_rank_outlives_a_killed_session(tmp_path: Path) -> None:
    """The parent is killed while its ranks wait in a barrier that never completes."""
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys
            sys.path[:0] = {[str(Path(__file__).parent), str(Path(sys.modules["ranks"].__file__).parent)]!r}
            import ranks
            ranks.PRELOAD = ("torch",)
            from ranks import run_ranks
            from test_ranks import all_ranks_sum, hangs_on
            if __name__ == "__main__":
                print(*[result[1] for result in run_ranks(all_ranks_sum, 2, 1.0)], flush=True)
                run_ranks(hangs_on, 2, 0)
            """)  # noqa: E501
    )
    session = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    pids = [int(pid) for pid in session.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)
    session.kill()
    session.wait()
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some are still running"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

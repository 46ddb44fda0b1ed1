"""An interrupted `lightning-3d plan --validate` ends at once, with all processes of the run that it
measures."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from processes import is_running, wait_until

from lightning_3d.app.cli.plan_validation import _finished

RUN = """
import os, signal, sys, time
from lightning_3d.ranks.process_ties import belong_to
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a run does that finishes a step first
parent = os.getpid()
rank = os.fork()
if rank == 0:
    belong_to(parent)
    open(sys.argv[1], "w").write(f"{parent} {os.getpid()}\\n")
time.sleep(600)
"""


def test_an_interruption_kills_a_run_on_one_node_with_its_ranks(tmp_path: Path) -> None:
    marker = tmp_path / "processes"

    def interrupt() -> None:
        wait_until(lambda: marker.exists() and marker.read_text().endswith("\n"))
        os.kill(os.getpid(), signal.SIGINT)

    # what a shell starts in the background ignores Ctrl-C
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _finished([sys.executable, "-c", RUN, str(marker)], alone=True)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    processes = [int(word) for word in marker.read_text().split()]
    assert len(processes) == 2
    # a process closes its output just before it has ended
    assert wait_until(lambda: not any(map(is_running, processes)))

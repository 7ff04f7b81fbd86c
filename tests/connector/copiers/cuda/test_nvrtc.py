"""The kernel compiles for the devices that there are, none of which is needed for it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cuda_python import cuda_bindings

from connector.copiers.cuda.kernel_plan import WORDS_BYTES
from connector.copiers.cuda.nvrtc import OPTIONS, SOURCE, NoKernelError, compiled

KERNELS = {f"{way}{width}" for way in ("gather", "scatter") for width in WORDS_BYTES}
IN_FLIGHT = 4
"""`kInFlight` of the kernel: so many words are loaded before the first is stored."""
REGISTERS_MAX = 64
"""With more, less than four blocks of 256 threads fit on a multiprocessor."""
LOOP_INSTRUCTIONS_MAX = 130
"""Of machine code for `IN_FLIGHT` words of a thread: 90 to 109 where this was written."""
DISASSEMBLY_TIMEOUT_S = 60
LABEL = re.compile(r"\s*(\.L_x_\d+|\$L\w+):")
INSTRUCTION = re.compile(r"\s*(?:/\*[0-9a-f]{4,}\*/)?\s*([@a-zA-Z][^;]*);")
BRANCH = re.compile(r"\b(?:BRA|bra)\b.*?(\.L_x_\d+|\$L\w+)")
FUNCTION = re.compile(
    r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


class Use(NamedTuple):
    """What one kernel takes of a device, as ptxas says it."""

    stack_bytes: int
    spilled_bytes: int
    reloaded_bytes: int
    registers: int


@pytest.fixture
def nvrtc() -> Any:
    bindings = cuda_bindings("nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as e:
        pytest.skip(
            f"NVRTC is not installed (scripts/setup does, pip install nvidia-cuda-nvrtc): {e}"
        )
    return bindings


def compile_for(nvrtc: Any, target: str) -> tuple[str, str]:
    """The kernel as PTX and what ptxas says about it, with the options that `compiled` gives."""

    def values(answer: tuple[Any, ...]) -> tuple[Any, ...]:
        assert int(answer[0]) == 0, answer
        return answer[1:]

    (program,) = values(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"", 0, [], []))
    options = [f"--gpu-architecture={target}".encode(), *OPTIONS, b"--ptxas-options=-v"]
    try:
        values(nvrtc.nvrtcCompileProgram(program, len(options), options))
        texts = []
        for size, get in (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX),
            (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog),
        ):
            text = bytearray(*values(size(program)))
            values(get(program, text))
            texts.append(text.decode())
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return texts[0], texts[1]


def body_of(ptx: str, kernel: str) -> str:
    return ptx.partition(f".entry {kernel}(")[2].partition("\n}")[0]


def long(*between: Any) -> list[Any]:
    """Inputs between the oldest and the newest device, for which a commit's run has no time."""
    return [pytest.param(one, marks=pytest.mark.long) for one in between]


@pytest.mark.parametrize("arch", [75, *long(80, 86, 89, 90, 100), 120])
def test_no_kernel_spills_and_the_widest_one_moves_128_bits_at_once(nvrtc: Any, arch: int) -> None:
    ptx, log = compile_for(nvrtc, f"sm_{arch}")
    uses = {name: Use(*map(int, numbers)) for name, *numbers in FUNCTION.findall(log)}
    assert set(uses) == KERNELS, log
    for name, use in uses.items():
        assert use[:3] == (0, 0, 0), (name, use)
        assert use.registers <= REGISTERS_MAX, (name, use)
    for kernel in ("gather16", "scatter16"):
        body = body_of(ptx, kernel)
        assert len(re.findall(r"\bld(?:\.global)?\.v4\.[bu]32\b", body)) == IN_FLIGHT, body
        assert len(re.findall(r"\bst(?:\.global)?\.v4\.[bu]32\b", body)) == IN_FLIGHT, body


def loop_of(code: str, load: str) -> list[str]:
    """Instructions of the innermost loop of PTX or machine code that has `load`."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    for line in code.splitlines():
        if found := LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            instructions.append(found[1])
            if (target := BRANCH.search(found[1])) and target[1] in labels:
                loops.append(instructions[labels[target[1]] :])
    return min((one for one in loops if any(load in i for i in one)), key=len)


@pytest.mark.parametrize("kernel", ["gather16", "scatter16", "gather4", "scatter4"])
def test_the_loop_over_words_divides_nothing_and_loads_no_stride_again(
    nvrtc: Any, kernel: str
) -> None:
    ptx, _ = compile_for(nvrtc, "sm_90")
    loop = loop_of(body_of(ptx, kernel), "ld.global")
    assert not [one for one in loop if re.search(r"\b(div|rem)\.", one)]
    assert len([one for one in loop if re.search(r"\bld\.", one)]) == IN_FLIGHT, loop
    assert len([one for one in loop if re.search(r"\bst\.", one)]) == IN_FLIGHT, loop


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("capability", [(7, 5), *long((8, 0), (9, 0), (10, 0)), (12, 0)])
def test_few_instructions_copy_four_words(tmp_path: Path, capability: tuple[int, int]) -> None:
    code = tmp_path / "kernel.cubin"
    code.write_bytes(compiled(capability))
    text = subprocess.run(
        [disassembler(), "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=DISASSEMBLY_TIMEOUT_S,
    ).stdout
    for kernel in ("gather16", "scatter16"):
        body = text.partition(f".section\t.text.{kernel},")[2].partition(".section\t")[0]
        loop = loop_of(body, ".128")
        assert len([one for one in loop if re.search(r"\bLDG?\.", one)]) == IN_FLIGHT, loop
        assert 2 * IN_FLIGHT < len(loop) <= LOOP_INSTRUCTIONS_MAX, (kernel, len(loop))


def disassembler() -> str | Path:
    """NVIDIA's nvdisasm, which comes with a CUDA toolkit and with Triton, and so with vLLM."""
    if found := shutil.which("nvdisasm"):
        return found
    triton = util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        brought = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"
        if brought.exists():
            return brought
    pytest.skip("there is no nvdisasm to read machine code with")


@pytest.mark.usefixtures("nvrtc")
class TestCompiled:
    def test_every_kernel_is_in_the_code_for_a_known_device(self) -> None:
        code = compiled((9, 0))
        assert code.startswith(b"\x7fELF")
        for kernel in KERNELS:
            assert kernel.encode() + b"\0" in code

    def test_a_device_of_the_future_gets_code_that_its_driver_translates(self) -> None:
        code = compiled((99, 0))
        assert b".target sm_" in code
        assert b".entry gather16" in code

    def test_a_device_that_is_too_old_is_told_apart(self) -> None:
        with pytest.raises(NoKernelError):
            compiled((3, 0))


def test_without_nvrtc_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NoKernelError, match="NVRTC"):
        compiled((7, 7))

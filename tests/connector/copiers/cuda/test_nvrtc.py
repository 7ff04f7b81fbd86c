"""The kernel compiles for the devices that there are, none of which is needed for it."""

from __future__ import annotations

import sys

import pytest

from connector.copiers.cuda.kernel_plan import WORDS_BYTES
from connector.copiers.cuda.nvrtc import NoKernelError, compiled


@pytest.fixture
def nvrtc() -> None:
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as e:
        pytest.skip(f"NVRTC is not installed: {e}")


@pytest.mark.usefixtures("nvrtc")
class TestCompiled:
    @pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
    def test_every_kernel_is_in_the_code_for_known_devices(
        self, capability: tuple[int, int]
    ) -> None:
        code = compiled(capability)
        assert code.startswith(b"\x7fELF")
        for width in WORDS_BYTES:
            assert b"gather%d\0" % width in code
            assert b"scatter%d\0" % width in code

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

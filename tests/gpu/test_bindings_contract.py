"""The contract suite of CUDA devices over cuda-python and a real one."""

import pytest
from contract.cuda import CudaContract
from cuda_python import cuda_bindings

cuda_bindings("runtime")
pytestmark = pytest.mark.gpu


class TestBindings(CudaContract):
    @pytest.fixture
    def device(self):
        from kvstore.cuda.bindings import open_device

        return open_device(0)

    @pytest.fixture
    def recipe(self):
        return ("bindings", 0)

"""What runs on a device, through the real cuda-python, over a stand-in for the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.long
def test_copies_through_cuda_python_keep_the_contract(fake_driver: Any) -> None:
    fake_driver.run(Path(__file__).with_name("on_fake_driver.py"))


def test_payloads_in_the_order_of_tokens_go_by_dma_alone(fake_driver: Any) -> None:
    fake_driver.run(Path(__file__).with_name("on_fake_driver_tokens.py"))

"""Hand a tensor to another process, by name, through shared memory. Needs torch."""

import multiprocessing

import torch

from kvstore import Client


def consumer(key: str) -> None:
    with Client() as store:
        tensor = store.get(key)
        assert isinstance(tensor, torch.Tensor)
        print(tensor.dtype, tuple(tensor.shape), tensor.sum().item())


if __name__ == "__main__":
    with Client() as store:
        store.put("batch 7", torch.ones(256, 256))
        process = multiprocessing.get_context("spawn").Process(target=consumer, args=("batch 7",))
        process.start()
        process.join()

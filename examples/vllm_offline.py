"""Run it twice: the second engine loads what the first has computed.

kvstore up &
KVSTORE_URL=... python examples/vllm_offline.py MODEL
"""

import sys

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

if __name__ == "__main__":  # the engine is a process of its own, which imports this file
    store = KVTransferConfig(
        kv_connector="KVStoreConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
    )
    llm = LLM(sys.argv[1], enforce_eager=True, kv_transfer_config=store)
    prompt = "All that you need to know about the matter. " * 100
    (answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
    print("tokens not computed:", answer.num_cached_tokens)
    print("answer:", answer.outputs[0].text)

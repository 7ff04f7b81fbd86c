"""Says what a KV cache group of vLLM is: its kind, heads, shapes of its layers, its states."""

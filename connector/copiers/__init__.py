"""Engine blocks gathered into store blocks and scattered back, wherever the KV lies."""

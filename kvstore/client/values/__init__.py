"""Turns what `Client` stores under a key (bytes, tensors, arrays) into payloads and back."""

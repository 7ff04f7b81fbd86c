"""What `Client` stores under a key: bytes, tensors and arrays, and where a get puts them."""

"""Memory that a node owns: payload bytes and the slot headers beside them."""

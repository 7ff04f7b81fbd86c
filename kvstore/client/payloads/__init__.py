"""Says what a value is made of: dtype and shape, its bytes, and what memory may take them."""

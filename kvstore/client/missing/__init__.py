"""Says why a block is missing: what is asked, who is asked, and what came of it."""

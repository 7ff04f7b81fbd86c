"""The worker side: transfers between engine blocks and the store, beside the forward."""

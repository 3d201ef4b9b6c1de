"""Other engines on the same shape of model, run beside ours."""

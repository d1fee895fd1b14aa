"""The loss's kernel for Hopper GPUs: exponentials of logits, computed within the head's matmul."""

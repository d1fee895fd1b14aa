"""The training step: optimizer, loss, sharding, and the functions made of them."""

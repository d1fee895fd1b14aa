"""The training step: mesh, optimizer, loss, and the functions made of them."""

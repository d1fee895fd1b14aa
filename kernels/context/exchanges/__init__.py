"""How ranks get at the keys that their queries attend to: one module for each exchange.

Each module has the same functions:

- `unsupported_reason(call, split)`: why the exchange can't serve a rank's call.
- `kernel_call(call, split)`: the call of a rank's kernel, after keys are exchanged.
- `bring(rank)`: the function that brings the kernel's inputs before the custom gradient begins; None if nothing is
  brought. Its result is kept for the backward pass, and JAX's transpose brings the gradients home.
- `fwd(inputs, rank)`: output and lse, with the keys that move during the forward pass.
- `bwd(inputs, rank, cotangent)`: the gradients, with the keys that move during the backward pass, and the gradients
  that come home.
"""

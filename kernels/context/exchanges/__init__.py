"""How ranks get at the keys that their queries attend to: one module for each way."""

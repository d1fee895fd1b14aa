"""The observers of a run: console, record, metrics, TensorBoard, Weights & Biases. `listeners.py` makes the list."""

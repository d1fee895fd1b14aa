"""The observers of a run: console, record, metrics, TensorBoard, Weights & Biases. `make_observers.py` makes the list."""

"""The observers of a run: console, record, metrics, TensorBoard and Weights & Biases.

The list is made in `make_observers.py`.
"""

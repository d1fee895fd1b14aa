"""Who listens to a run: console, record, metrics, TensorBoard."""

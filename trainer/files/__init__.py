"""Files that are written whole, or grow by whole entries."""

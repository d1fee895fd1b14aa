"""Compile time of attention against the sequence's length."""

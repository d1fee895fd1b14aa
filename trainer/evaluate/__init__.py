"""Evaluation of a model at length."""

"""`python -m trainer.evaluate`: losses by position and by length, and retrieval from long contexts."""

"""`python -m trainer.show`: the first sequences that a run trains on, for people to read."""

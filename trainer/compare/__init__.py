"""`python -m trainer.compare`: runs side by side, as a table and a picture."""

"""`python -m trainer.export`: the model of a run as a Hugging Face folder."""

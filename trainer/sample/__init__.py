"""`python -m trainer.sample`: texts from a trained model."""

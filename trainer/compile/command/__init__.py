"""`python -m trainer.compile`: what is compiled in a process of its own, compared, searched and reported."""

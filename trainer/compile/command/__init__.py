"""`python -m trainer.compile`: compiles a step in a fresh process, compares, searches and reports."""

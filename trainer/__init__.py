"""Trains the GPT of `layers` from one config: `python -m trainer --config experiments/gpt_32k.py`.

`train.py` shows a whole run from top to bottom; read it first.
"""

"""Trains the GPT of `layers` from one config: `python -m trainer --config experiments/gpt_32k.py`. Read `train.py` first."""

"""The steps of a run, and all around them: resuming, log windows, evaluations, saves. See `trainer/train.py`."""

"""What a run needs around its steps: resuming, progress, log windows, evaluations, saves. See `trainer/train.py`."""

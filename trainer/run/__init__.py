"""What a run needs around its steps: resuming, progress, windows, saves. `trainer/train.py` shows the whole."""

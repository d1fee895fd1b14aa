"""The exception that `trainer.data` raises."""

from trainer.errors import UserMistake


class DataError(UserMistake):
    """Data that cannot be trained on; the message names the file, the place in it, and the remedy."""

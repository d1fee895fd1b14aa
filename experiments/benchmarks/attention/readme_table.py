"""The old name of `experiments.benchmarks.attention.speed_table`, under which the documentation of 0.1 had it."""

from experiments.benchmarks.attention.speed_table import SpeedTableArguments, main
from experiments.benchmarks.command_line import read_arguments
from trainer.process.broken_pipe import reader_may_leave

if __name__ == "__main__":
    with reader_may_leave():
        main(read_arguments(SpeedTableArguments))

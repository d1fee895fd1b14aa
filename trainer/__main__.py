"""`python -m trainer --config FILE [--workdir DIR] [--distributed …] [--section.field value ...]`.

Exit status: 0 completed; 1 failed; 2 a mistake in the command, the config or the data, in one message; 69 another
process of the run is gone; 70 the watchdog ended a run that hung; 75 stopped by SIGTERM, Ctrl-C or a closed terminal
after saving; 130 stopped by a second Ctrl-C, without saving. After 69, 70 and 75 the same command goes on from the
newest checkpoint. Everything that can be checked without a device is checked before JAX starts one.

Only the standard library is imported up here: the signals are watched before the seconds that the rest takes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

from flax_longcontext import ForeignPackage, require_ours
from trainer.errors import TrainingFailed, UserMistake, name_flags
from trainer.launch.process_exit import COMPLETED, FAILED, MISTAKE, PREEMPTED
from trainer.launch.signals import StopRequest
from trainer.terminal.streams import outlive_readers


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""
    started = time.perf_counter()
    ending = threading.Event()

    def leave(signal: str, _: str | None) -> None:
        """Answers a stop signal before the run does, when nothing needs saving, and after the run's end."""
        if ending.is_set():
            print(f"{signal}: the run is ending already", flush=True)
            return
        print(f"{signal}: stopped before the first step; run the same command again", flush=True)
        os._exit(PREEMPTED)

    with outlive_readers(), StopRequest(leave):
        try:
            require_ours("trainer", importer=__name__)
            from trainer.cli.train_command import parse_command_line
            from trainer.config.extension import describe_phases
            from trainer.config.resume_changes import field_values
            from trainer.config.written_page import write_page
            from trainer.launch.launcher import find_launch
            from trainer.launch.membership import ALONE, Membership
            from trainer.workdir import claim_together

            command = parse_command_line(arguments)
            config, traced = command.train, command.traced
            line = ["python", "-m", "trainer", *arguments]
            has_lengths = any(argument.partition("=")[0] == "--phases" for argument in arguments)
            recipe = describe_phases(config) if has_lengths and config.phases else []
            if command.write_page is not None:
                print("\n".join([*recipe, write_page(config, command.write_page, line, recipe[:1])]))
                return COMPLETED

            def run(membership: Membership) -> int:
                if recipe and membership.peers.is_first:
                    print("\n".join(recipe), flush=True)
                with claim_together(command.workdir, config, membership.peers) as workdir:
                    from trainer.train import train  # JAX, Flax and Orbax: seconds that a mistyped flag shouldn't cost

                    return train(
                        config,
                        workdir,
                        command=line,
                        started=started,
                        ending=ending,
                        membership=membership,
                        traced=traced,
                    )

            launch = find_launch(command.distributed, os.environ)
            if launch is None:
                return run(ALONE)
            from trainer.launch.together import run_together

            values = field_values(config) | {"--profile-steps": command.profile_steps}
            return run_together(launch, values, run, line=line)
        except (ForeignPackage, UserMistake) as mistake:
            print(f"error: {name_flags(str(mistake), arguments)}", file=sys.stderr)
            return MISTAKE
        except TrainingFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

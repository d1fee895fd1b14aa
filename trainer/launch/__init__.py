"""The launch of a run: its processes, stop signals, watchdog and exit status.

    launcher.py      reads `--distributed` and the launcher's environment: one process, or several
    together.py      runs several processes as one run, from their meeting to their end
    peers.py         exchanges values between the processes, and refuses those that run another experiment
    membership.py    hears that another process has stopped, ended or is silent, and tells how this one ends
    signals.py       takes SIGTERM, SIGHUP and Ctrl-C as a request to stop, which all processes obey at the same step
    watchdog.py      ends a run that hangs
    process_exit.py  names the exit statuses, and ends a process from any thread

Nothing here runs on a device. So a thread may exchange values while the main thread runs steps.
"""

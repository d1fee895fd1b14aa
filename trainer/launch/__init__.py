"""The launch of a run: its processes, stop signals, watchdog and exit status.

    launcher.py      reads `--distributed` and the launcher's environment: one process, or several
    together.py      runs several processes as one run, from their meeting to their end
    connect.py       starts JAX's coordination service
    peers.py         exchanges values between the processes, by way of that service
    peer_watch.py    hears that another process has to stop, has ended, or is silent
    membership.py    tells the others how this process ends, and ends it when another one does
    agreement.py     refuses processes that don't run the same experiment
    signals.py       takes SIGTERM, SIGHUP and Ctrl-C as a request to stop
    shared_stop.py   has all processes obey that request at the same step
    watchdog.py      ends a run that hangs
    process_exit.py  names the exit statuses, and ends a process from any thread

Nothing here runs on a device. So a thread may exchange values while the main thread runs steps.
"""

"""Several processes that train together: how they find each other, agree, stop together, and notice that one is gone.

    launch.py      whether there are several, by `--distributed` and the launcher's environment
    connect.py     starts JAX's coordination service
    peers.py       the other processes: what all of them have to say, exchanged by way of that service
    watch.py       hears that another process is told to stop, has ended, or is silent
    agreement.py   refuses processes that don't run the same experiment
    stop.py        stop signals that all processes obey at the same place

Nothing here runs on a device. So a thread may exchange words while the main thread runs steps.
"""

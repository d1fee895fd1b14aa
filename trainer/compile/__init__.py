"""Compiles functions ahead of their first use, and tells what that costs and whether it fits.

stages.py           compiles one function in timed stages; sets up the persistent cache
kernels.py          compiles a program's Mosaic GPU kernels side by side, ahead of it
recompilation.py    compiles a function again when its arguments change, and finds out which changed
programs.py         compiles the programs of a run: init_state, train_step, eval_step
history.py          collects what a run compiled, for the record

fit.py              judges whether a program fits in the devices' memory
fit_search.py       searches for the smallest change of the config that makes it fit
longest_context.py  searches for the longest context that fits
out_of_memory.py    explains an error about memory in one message

topology/           TPUs and GPUs that aren't there, to compile for
step_profile.py     compiles a config's step and gathers what is known without running it
slow.py             says why a step compiles slowly, and what to compare
hlo.py, collectives.py
                    read the optimized program: its loops and its collectives
command/            `python -m trainer.compile`, which reports a step profile
"""

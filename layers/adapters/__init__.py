"""Our kernels under other packages' models, one module for each package.

Each module has one function with the signature of the package's own attention. It refuses calls that the kernels can't
serve, and gives the others to `shards.attend_in_shards`. The user replaces the package's function by ours. No module
imports the package before its function is called. `docs/adapters` has a page for each package, and recipes for packages
whose attention isn't one function.
"""

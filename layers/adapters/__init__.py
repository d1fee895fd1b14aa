"""Our kernels under other packages' models, one module a package; `docs/adapters` has a page for each.

No module here imports the package that it adapts to until one of its functions is called.
"""

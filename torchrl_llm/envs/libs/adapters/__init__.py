"""Programs for other packages, each run under a Python that has the package; none is imported.

The folder holds no other modules, because such a Python searches it for modules first.
"""

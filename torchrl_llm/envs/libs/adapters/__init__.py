"""Programs for other packages, each run under a Python that has the package; none is imported.

The folder holds no other modules, because a Python that runs a program searches modules there
first.
"""

"""Programs for packages of others, each run under a Python that has the package; none is imported.

Nothing else is in this folder, which is the first where such a Python looks for modules.
"""

"""TorchRL's surface of classes that are not in ``compat``: what they take and need not be read for.

A mixin imports nothing of this package but the errors. It says in its docstring what the class that
takes it has to have.
"""

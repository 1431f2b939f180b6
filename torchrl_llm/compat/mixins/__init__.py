"""Mixins with TorchRL's interface for classes outside ``compat``, which can be read without them.

From this package, a mixin imports only the errors. Its docstring lists the requirements for the
class that uses it.
"""

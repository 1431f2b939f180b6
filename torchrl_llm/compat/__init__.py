"""Names that exist because TorchRL has them: older data classes, environments and helpers.

The rooms that TorchRL keeps them in (``data``, ``envs``, ``collectors``) re-export them when they
are asked for. Nothing else in this package uses them.
"""

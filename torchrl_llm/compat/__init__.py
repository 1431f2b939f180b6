"""Names kept for compatibility with TorchRL: older data classes, environments and helpers.

The subpackages that contain them in TorchRL (``data``, ``envs``, ``collectors``) re-export them at
first access. Nothing else in this package uses them.
"""

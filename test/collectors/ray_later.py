"""Keeps Ray from being imported with what imports it where it is installed.

Ray reads when it is imported which job it serves, and so has to be imported after the fork.
"""

import sys

sys.modules["ray"] = None

"""PyYAML reads with its parser in C from here on, wherever it was built with it.

Hydra and OmegaConf, which name the slow one, take most of the time of a short run to read files.
"""

import yaml

yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

"""The exception hierarchy of the library.

Every error that this package raises on purpose is a :class:`TorchRLLLMError`; each also derives
from the built-in exception that a caller would expect, so ``except ValueError`` keeps working.

.. code-block:: text

    TorchRLLLMError
    |-- ConfigError          (ValueError)    a setting that is unknown, impossible or has no effect
    |-- TemplateError        (ValueError)    no template, or one that cannot express a chat
    |   `-- AmbiguousTextError               text that could be parsed into more than one chat
    |-- TokenizerError (ValueError) a tokenizer that lacks a feature, ids out of range
    |-- OverlongError        (ValueError)    a prompt or row longer than it may be
    |-- DataError            (ValueError)    a data file missing, malformed or without a column
    |-- BackendError         (RuntimeError)  a model call that failed
    |   `-- WorkerError                      a remote process died or did not answer in time
    |-- ResourceError (RuntimeError) fewer CPUs, GPUs or bytes than the request needs
    |-- WeightUpdateError    (RuntimeError)  weights that did not arrive, or not as they were sent
    |-- RewardError          (RuntimeError)  a reward function that raised or returned no number
    |   `-- RewardTimeoutError   (TimeoutError)  or did not return in time
    |-- CheckpointError      (RuntimeError)  a checkpoint that cannot be written or read
    |   `-- DamagedCheckpointError           its file is missing, cut short or altered
    `-- MissingExtraError    (ImportError)   an optional package that is not installed
"""

from __future__ import annotations


class TorchRLLLMError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(TorchRLLLMError, ValueError):
    """A setting is unknown, impossible, or would have no effect."""


class TemplateError(TorchRLLLMError, ValueError):
    """No chat template, or one that cannot express a message."""


class AmbiguousTextError(TemplateError):
    """A text can be parsed into more than one conversation."""


class TokenizerError(TorchRLLLMError, ValueError):
    """A tokenizer lacks a needed feature, or token ids are outside its vocabulary."""


class OverlongError(TorchRLLLMError, ValueError):
    """A prompt does not fit into the model's context, or a row is too long for training."""


class DataError(TorchRLLLMError, ValueError):
    """A data file is missing, malformed, or lacks a column."""


class BackendError(TorchRLLLMError, RuntimeError):
    """A call of a model backend failed."""


class WorkerError(BackendError):
    """A remote process (an actor, a server, a replica) died or did not answer in time."""


class ResourceError(TorchRLLLMError, RuntimeError):
    """The machine or cluster has fewer CPUs, GPUs or bytes than the request needs."""


class WeightUpdateError(TorchRLLLMError, RuntimeError):
    """Weights did not arrive at a sampler, or arrived changed."""


class RewardError(TorchRLLLMError, RuntimeError):
    """A reward function raised or did not return a finite number."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function did not return in time."""


class CheckpointError(TorchRLLLMError, RuntimeError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file is missing, cut short, or differs from the written one."""


class MissingExtraError(TorchRLLLMError, ImportError):
    """A required optional package is not installed."""

"""The errors that eaglet raises on purpose: each message is written for the person who has to mend something.

A message names the file, the line or key, what was found, what was expected and what to do.  Anything that is
not an `EagletError` is a fault of eaglet's own and keeps its traceback.
"""


class EagletError(Exception):
    """Something that the user can mend.  `exit_status` is what the program ends with."""

    exit_status = 1


class ConfigError(EagletError):
    """A key of the config is unknown, missing, or holds a value that cannot work."""

    exit_status = 2


class SourceError(EagletError):
    """A prompt source cannot be read, or is not the file that the config pinned."""


class TargetError(EagletError):
    """The target model, its tokenizer or its chat template cannot be used as configured."""


class TurnFormatError(TargetError):
    """The boundaries of a turn cannot be inferred, or contradict the config."""


class ServerError(EagletError):
    """The inference server cannot be started or reached, or was lost for good."""


class GuardError(EagletError):
    """The server is not what the run needs: it would change or hide the tokens."""


class CaptureError(EagletError):
    """Generation could not be completed; what was captured is in the journal."""


class ValidationFailed(EagletError):
    """Too many rows broke a rule, or a row broke a rule whose severity is `stop`."""


class StoreError(EagletError):
    """A file of the store is damaged, or the disk has not got the room."""


class RecordError(EagletError):
    """A record file has not got the columns, types or metadata of its kind."""


class TrainingFailed(EagletError):
    """The drafter cannot be trained further: its gradient is not a number."""


class EvaluationFailed(EagletError):
    """The drafter changed the target's output, or missed the configured gate."""


class AuditFailed(EagletError):
    """The chain of digests does not hold."""

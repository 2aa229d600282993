"""Every error that Coterie raises on purpose.

    CoterieError
    ├── ConfigError            a run file or an option is wrong: names the key, the value and the remedy
    ├── DataError              a data set cannot be fetched, verified or read
    ├── TaskError              a task cannot be imported or built, or returns something else than a Task
    ├── ModelError             a model's state does not fit the run: names, shapes, dtypes
    ├── RunError               a run cannot start or go on
    │   ├── RunInUseError      another process holds the run's directory
    │   ├── RunNotFoundError   no run of that name in the store
    │   ├── StorageError       a checkpoint or an event could not be written (disk full, no permission)
    │   └── QuorumError        too many rounds in a row without a usable reply
    └── PreconditionError      a rule's mathematics does not hold for these inputs (also a ValueError)

The command line prints the message of any CoterieError without a traceback: it names the thing, the value and the
remedy. RunInterrupted is none of them: it is Ctrl-C, with the id of the run that it stopped.
"""


class CoterieError(Exception):
    """Base of all errors that Coterie raises on purpose; its text is meant for the user."""


class ConfigError(CoterieError):
    """A run file or an option is wrong."""


class DataError(CoterieError):
    """A data set cannot be fetched, verified or read."""


class TaskError(CoterieError):
    """A task cannot be imported or built."""


class ModelError(CoterieError):
    """A model's state does not fit."""


class RunError(CoterieError):
    """A run cannot start or go on."""


class RunInUseError(RunError):
    """Another process holds the run's directory."""


class RunNotFoundError(RunError):
    """The store has no such run."""


class StorageError(RunError):
    """A checkpoint or an event could not be written."""


class QuorumError(RunError):
    """Too many rounds in a row without enough usable replies."""


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM in a run: `run_id` is safe on disk and can be resumed."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id


class PreconditionError(CoterieError, ValueError):
    """A rule's mathematics does not hold for these inputs; the message names the inequality."""

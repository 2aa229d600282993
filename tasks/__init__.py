"""Models, data sets and metrics by field, and how a task of one's own plugs in."""

from coterie.tasks.registry import TASKS, load_task
from coterie.tasks.task import Records, Task

__all__ = ["TASKS", "Records", "Task", "load_task"]

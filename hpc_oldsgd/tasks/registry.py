"""The tasks by name."""

from ..registry import Registry
from .base import Task

_tasks: Registry[Task] = Registry("task", "hpc_oldsgd.tasks")
register, registry = _tasks.register, _tasks.registry
names, get = _tasks.names, _tasks.get

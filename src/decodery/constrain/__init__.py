"""What may be written: constraints, one per file."""

from .base import Language
from .checker import Checker
from .choice import Choice
from .grammar import Grammar
from .json_schema import JSONSchema
from .monitor import Monitor
from .python_type import PythonType
from .regex import Regex

__all__ = ["Checker", "Choice", "Grammar", "JSONSchema", "Language", "Monitor", "PythonType", "Regex"]

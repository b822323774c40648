# Written by tools/method_index.py.
from .checker import Checker as Checker
from .choice import Choice as Choice
from .base import Constraint as Constraint
from .base import ConstraintSpec as ConstraintSpec
from .tool_calls import FunctionCall as FunctionCall
from .grammar import Grammar as Grammar
from .json_schema import JSONSchema as JSONSchema
from .monitor import Monitor as Monitor
from .python_type import PythonType as PythonType
from .reasoning import Reasoning as Reasoning
from .regex import Regex as Regex
from .tool_calls import ToolCalls as ToolCalls
from .tool_calls import read_calls as read_calls

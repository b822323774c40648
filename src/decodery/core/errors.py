"""Every error a user can cause, each with one sentence that names what is wrong and what to do."""

from __future__ import annotations

import shlex

_PLACEHOLDER = "-m MODEL"
"""How commands that messages advise name a model, where whoever raises the error does not know its name."""


class DecoderyError(Exception):
    """Base of all errors this package raises on purpose; the command line prints it without a stack trace."""

    def name_model(self, model: str) -> None:
        """Name the user's own model in the commands that the message advises.

        Args:
            model: what the model was loaded as; "" leaves the message as it is.
        """
        self.args = tuple(naming_model(str(each), model) for each in self.args)


def naming_model(message: str, model: str) -> str:
    """A message whose commands name the user's own model.

    Args:
        message: what an error, or a method that is not ready, says.
        model: what the model was loaded as; "" leaves the message as it is.

    Returns:
        The message.
    """
    return message.replace(_PLACEHOLDER, f"-m {shlex.quote(model)}") if model else message


class ModelNotFound(DecoderyError):
    """The model name is not an embedded model, a folder, a GGUF file or a reachable Hub id."""


class CorruptFile(DecoderyError):
    """A model file is truncated, damaged or of an unknown kind."""


class UnsupportedModel(DecoderyError):
    """The file is sound, but describes a model this package cannot run faithfully."""


class PromptError(DecoderyError):
    """The prompt is empty, too long for the model's context, or not what the model's template accepts."""


class ContextFull(PromptError):
    """A prompt leaves no room in the model's context for a single token after it."""


class VocabularyMismatch(DecoderyError):
    """Draft and target model do not share one space of token ids."""


class UnknownMethod(DecoderyError):
    """No method is registered under that name."""


class SettingsError(DecoderyError):
    """A setting is out of range or contradicts another one."""


class SettingMissing(SettingsError):
    """A method was named without a setting that it needs; with it, the method can be named."""


class NotTrusted(SettingsError):
    """A stranger asks for what reads files, fetches models or runs programs."""


class ConstraintError(DecoderyError):
    """What may be written is described wrongly, cannot be enforced exactly, or goes beyond the limits."""


class MonitorFailed(DecoderyError):
    """A monitor raised an error of its own while it watched a text; that text ends with it."""


class Unsolved(DecoderyError):
    """A search did not find what it was to find; the best it found is given all the same."""


class NumericalError(DecoderyError):
    """The model produced logits that are not a distribution (NaN, or no finite value)."""


class OutOfMemory(DecoderyError):
    """There is no memory for a larger cache."""


class ServerError(DecoderyError):
    """A server that was asked for texts is not there, went away, or does not answer as such servers do."""


class ServerRefused(ServerError):
    """A server refuses a request for what it says, and would refuse it again."""

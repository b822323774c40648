"""How much a model reasons before its answer: the fields that OpenAI, vLLM and Anthropic have for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field

from .errors import invalid
from .sampler_fields import WHOLE

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(strict=True, ge=0), WHOLE]
BUDGETS: dict[str, int | None] = {"none": 0, "minimal": 128, "low": 1024, "medium": 4096}
"""Tokens of reasoning at most, by effort, where the chat template knows no effort; others have no bound."""


class Thinking(BaseModel):
    """Whether the model reasons first, and for how many tokens at most.

    Attributes:
        type: "adaptive" leaves it to the model.
        display: "omitted" leaves the reasoning part out of the answer.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None
    display: Literal["summarized", "omitted"] | None = None


class ReasoningFields(BaseModel):
    """The fields of a chat.

    Attributes:
        reasoning_effort: A variable of the chat template, or a budget where that has none.
        thinking_token_budget: Maximum number of tokens of reasoning.
        thinking: As Anthropic has it.
    """

    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[
        Budget | None, Field(validation_alias=AliasChoices("thinking_token_budget", "max_reasoning_tokens"))
    ] = None
    thinking: Thinking | None = None


def reasoning_of(body: Any, template: str) -> tuple[dict[str, Any], int | None, bool]:
    """What a request says of reasoning.

    Args:
        body: Has `ReasoningFields` and `chat_template_kwargs`.
        template: The source of the chat template.

    Returns:
        The variables of the chat template, the most tokens of reasoning, and whether reasoning was asked for.

    Raises:
        ApiError: For two budgets.
    """
    variables: dict[str, Any] = {}
    thinking, effort, budget = body.thinking, body.reasoning_effort, body.thinking_token_budget
    if thinking is not None and thinking.budget_tokens is not None:
        if budget is not None:
            raise invalid("thinking.budget_tokens and thinking_token_budget are one budget: leave one out", "thinking")
        budget = thinking.budget_tokens
    off = effort == "none" or (thinking is not None and thinking.type == "disabled")
    if off or (thinking is not None and thinking.type == "enabled"):
        variables["enable_thinking"] = not off
    if effort is not None:
        if "reasoning_effort" in template:
            variables["reasoning_effort"] = effort
        elif budget is None and not (off and "enable_thinking" in template):
            budget = BUDGETS.get(effort)
    asked = not off and (effort is not None or budget is not None or "enable_thinking" in variables)
    return variables | (body.chat_template_kwargs or {}), budget, asked

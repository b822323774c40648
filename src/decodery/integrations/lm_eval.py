"""A model class for lm-evaluation-harness, which is imported here alone.

    python -m decodery.integrations.lm_eval run --model decodery --model_args model=smollm2,drafter=auto \
        --tasks gsm8k --limit 20

is `lm_eval` with the model `decodery` beside those that it knows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from decodery import load
from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.speculative.drafters.follower import shared

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ModuleNotFoundError as error:
    absent = "decodery.integrations.lm_eval needs lm-evaluation-harness: run `pip install lm_eval`"
    if __name__ == "__main__":
        sys.exit(absent)
    raise ModuleNotFoundError(absent, name=error.name) from error

__all__ = ["Harness"]

_KNOWN = {"until", "do_sample", "temperature", "top_p", "top_k", "max_gen_toks", "max_tokens"}


@register_model("decodery")
class Harness(TemplateLM):
    """A model of this package, whose texts are the same with any drafter and batch.

    Args:
        model, dtype: What `decodery.load` takes.
        drafter, acceptance_rule, cache_policy: As in `generate`; drafter=none for plain decoding.
        batch_size: Texts at a time.
        max_gen_toks: Tokens of a text at most, where a task does not say.
        seed: Of drawn texts.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        dtype: str = "auto",
        drafter: str | None = "auto",
        acceptance_rule: str = "coupled",
        cache_policy: str | None = None,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        device: str | None = None,
    ) -> None:
        super().__init__()
        # The harness requests a GPU where no device is given.
        named = device is not None and (torch.cuda.is_available() or not device.startswith("cuda"))
        self.lm = load(model, dtype=dtype, device=device if named and device else "auto")
        self._settings: dict[str, Any] = {
            "drafter": None if drafter == "none" else drafter,
            "acceptance_rule": acceptance_rule,
            "cache_policy": cache_policy,
            "seed": seed,
        }
        self._most = max_gen_toks
        self._together = 16 if batch_size == "auto" else int(batch_size)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; scored texts stand after it."""
        return next(iter(self.lm.tokenizer.eos_ids), 0)

    @property
    def max_length(self) -> int:
        """Tokens of the model's context."""
        return self.lm.model.config.max_positions

    @property
    def tokenizer_name(self) -> str:
        """What caches of requests go by."""
        return self.lm.model.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text."""
        return self.lm.tokenizer.encode(string, special=bool(add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt for these messages."""
        if self.lm.chat_template is None:
            raise SettingsError("this model has no chat template: leave --apply_chat_template out")
        return self.lm.chat_template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """What the harness notes of the template: nothing but that there is one."""
        return "the model's own" if chat_template and self.lm.chat_template is not None else None

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's context."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm):
            windows = [
                make_disjoint_window(each)
                for each in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.eot_token_id, self.max_length, 1
                )
            ]
            pairs = [(("", ""), list(context), list(following)) for context, following in windows]
            found.append(sum(score for score, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
        return found

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each: the log-probability of the continuation, and whether it is the greedy one."""
        model, found = self.lm.model, list[tuple[float, bool]]()
        cache, read = model.new_cache(), list[int]()
        for _, context, following in tqdm(requests, disable=disable_tqdm):
            # Where a text is too long its beginning is left out.
            tokens = [*context, *following][-(self.max_length + 1) :]
            if len(following) >= len(tokens):
                raise SettingsError(f"an answer of {len(following)} tokens is longer than the model's context")
            begin, laws = len(tokens) - len(following) - 1, list[torch.Tensor]()
            # Several answers to one question have its beginning in common.
            kept = min(shared(read, tokens), begin)
            cache.truncate(kept)
            read = tokens[:-1]
            # The rest is read in parts, so that no pass is larger than one of decoding.
            for start in range(kept, len(tokens) - 1, 512):
                chunk = tokens[start : min(start + 512, len(tokens) - 1)]
                rows = [row for row in range(len(chunk)) if start + row >= begin]
                scores = model.forward(Batch([Segment.chunk(chunk, cache, logit_rows=rows)]))
                cache.keep(range(len(chunk)))
                laws.append(scores.logits.float().log_softmax(dim=-1))
            law, chosen = torch.cat(laws), torch.tensor(following, dtype=torch.int64, device="cpu")
            greedy = bool((law.argmax(dim=-1).cpu() == chosen).all())
            found.append((float(law.cpu().gather(1, chosen[:, None]).double().sum()), greedy))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to where they are to stop."""
        texts = list[str]()
        with tqdm(total=len(requests), disable=disable_tqdm) as progress:
            for begin in range(0, len(requests), self._together):
                engine = self.lm.engine()
                part = [engine.submit(self._request(*each.args)) for each in requests[begin : begin + self._together]]
                engine.run(part)
                texts += [self.lm.output(seq).text for seq in part]
                progress.update(len(part))
        return texts

    def _request(self, context: str, told: dict[str, Any]) -> Any:
        if unknown := told.keys() - _KNOWN:
            raise SettingsError(f"{', '.join(sorted(unknown))}: no setting that texts are generated by here")
        until = told.get("until") or []
        most = int(told.get("max_gen_toks", told.get("max_tokens", self._most)))
        drawn = {name: told[name] for name in ("temperature", "top_p", "top_k") if told.get(name) is not None}
        if not told.get("do_sample", drawn.get("temperature", 0.0) > 0):
            drawn = {"temperature": 0.0}
        room = self.max_length - most
        if room < 1:
            raise SettingsError(
                f"texts of {most} tokens leave no room for a prompt: give max_gen_toks up to {room - 1}"
            )
        tokens = self.tok_encode(context)[-room:]
        stop = (until,) if isinstance(until, str) else tuple(until)
        return self.lm.request(tokens, max_new_tokens=most, stop=stop, **drawn, **self._settings)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

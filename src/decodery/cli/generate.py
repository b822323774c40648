"""`decodery generate`: one prompt in, its text out."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import command
from .given import given, read_prompt
from .options import chat_template_option, loading_options, model_options, option_under, output_option
from .starting import starting
from .text_options import check_diffuse, constraint_options, decoding_options, diffuse_option, search_option

if TYPE_CHECKING:
    from decodery.diffusion.base import DiffusionDecoder
    from decodery.engine.request import Request
    from decodery.llm.llm import LLM, Output
    from decodery.search.base import Search


@command(example='generate "Explain tides in one sentence." --temperature 0.7 --seed 7')
@click.argument("prompt", required=False)
@model_options
@loading_options
@decoding_options
@constraint_options
@search_option
@option_under(
    "Search",
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keep what the search writes and scores, one JSON object a line. The same command goes on from there after an "
    "interruption, to the same result.",
)
@diffuse_option
@output_option(
    "--n",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Write N texts, with different seeds. With --search: the N best texts.",
)
@chat_template_option("Continue the prompt as plain text, without the chat template.", heading="Output")
@output_option("--allow-special", is_flag=True, help="Read special tokens in the prompt as such, not as text.")
@output_option(
    "--json", "as_json", is_flag=True, help="Print one JSON object, or a list for --n above 1, and nothing else."
)
@output_option(
    "--logprobs",
    type=int,
    metavar="K",
    help="Add the log-probabilities of the tokens and of the K most likely ones. Needs --json.",
)
def generate(
    prompt: str | None,
    model: str,
    dtype: str,
    kv_dtype: str,
    masking: str | None,
    n: int,
    apply_chat_template: bool,
    allow_special: bool,
    as_json: bool,
    logprobs: int | None,
    search: str | None,
    record: Path | None,
    diffuse: str | None,
    **settings: Any,
) -> None:
    """Answer PROMPT.

    PROMPT is read from standard input if it is "-" or missing. Ctrl-C stops the generation and keeps the text. SIGTERM
    does so too, with exit status 143.
    """
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    if record is not None and search is None:
        raise click.UsageError("--record keeps what a search does: give --search, or leave it out")
    with starting():
        text, settings = read_prompt(prompt), given(settings)
        from decodery import load
        from decodery.core.errors import Unsolved
        from decodery.core.noise import nth_seed
        from decodery.core.registry import resolve

        from .decode import Screen, decode, figures, leave_if_terminated, note, note_full

        method = None if search is None else resolve("search", search)
        if diffuse is not None:
            check_diffuse({"search": search, "logprobs": logprobs, **settings})
        filling = None if diffuse is None else resolve("diffusion", diffuse)
        lm = load(model, dtype=dtype, kv_dtype=kv_dtype, masking=masking)
    if filling is not None:
        tokens = lm.encode(text, apply_chat_template=apply_chat_template, allow_special=allow_special)
        _print_canvases(lm, filling, tokens, n, as_json, settings)
        leave_if_terminated()
        return
    if method is not None:
        read: dict[str, Any] = {"apply_chat_template": apply_chat_template, "allow_special": allow_special}
        found = _search(lm, method, text, logprobs=logprobs, record=record, **read, **settings)[:n]
        if as_json:
            objects = [output.to_dict() for output in found]
            click.echo(json.dumps(objects if n > 1 else objects[0], ensure_ascii=False))
        else:
            _print_all(found)
            note_full(found)
            if len(found) < n:
                note(f"the search found {len(found)} of {n} texts: a wider one, as in beam:width={n}, finds more")
        if found[0].score is not None and (lacking := method.shortcoming(found[0].score)) is not None:
            raise Unsolved(lacking)
        return
    again: dict[str, Any] = {
        "apply_chat_template": apply_chat_template,
        "allow_special": allow_special,
        "logprobs": logprobs,
    }
    again["tokens"] = lm.encode(text, apply_chat_template=apply_chat_template, allow_special=allow_special)
    first = lm.request_for(text, **again, **settings)
    seeds = [nth_seed(first.seed, number) for number in range(1, n)]
    requests = [first, *(lm.request_for(text, **again, **settings | {"seed": seed}) for seed in seeds)]
    if as_json:
        outputs = [output.to_dict() for output in decode(lm, requests)]
        click.echo(json.dumps(outputs if n > 1 else outputs[0], ensure_ascii=False))
    elif n == 1:
        with Screen() as screen:
            (output,) = decode(lm, requests, screen.write)
        if sys.stdout.isatty() and sys.stderr.isatty():
            note(figures(output))
        elif not note_full([output]) and output.finish_reason != "stop" and _needs_end(first):
            note("the text is incomplete: give a larger --max-new-tokens")
    else:
        _print_all(written := decode(lm, requests))
        note_full(written)
    leave_if_terminated()


def _print_canvases(
    lm: LLM, method: DiffusionDecoder, tokens: list[int], n: int, as_json: bool, settings: dict[str, Any]
) -> None:
    """Fill n canvases; the only one is shown as far as it cannot change any more."""
    from decodery.core.noise import nth_seed

    from .decode import Screen, fill, note

    length, seed = settings.pop("max_new_tokens", 256), settings.pop("seed", 0)
    wanted = lm.fill(tokens, method, length, **settings)
    fills = [dataclasses.replace(wanted, seed=nth_seed(seed, number)) for number in range(n)]
    if as_json:
        objects = [output.to_dict() for output in fill(lm, fills)]
        click.echo(json.dumps(objects if n > 1 else objects[0], ensure_ascii=False))
        return
    if n == 1:
        with Screen() as screen:
            outputs = fill(lm, fills, screen.write)
    else:
        _print_all(outputs := fill(lm, fills))
    if any(output.finish_reason == "cancelled" for output in outputs):
        note("stopped: the text shows the final part of the canvas")


def _needs_end(request: Request) -> bool:
    """Whether a text that is cut is not what was asked for."""
    from decodery.sampling.constraint import constrained

    found = constrained(request.sampler.processors)
    return found is not None and found[1].requirements.ends


def _search(lm: LLM, method: Search, prompt: str, **settings: Any) -> list[Output]:
    from decodery.models.loaders.store import terminal_progress

    with terminal_progress(counts=True) as progress:
        return lm.search(prompt, method, progress=progress, **settings)


def _print_all(outputs: list[Output]) -> None:
    from .decode import Screen

    for number, output in enumerate(outputs):
        name = f"seed {output.seed}" if output.score is None else f"score {output.score:.4f}"
        if len(outputs) > 1:
            click.echo(f"{'' if number == 0 else chr(10)}--- {name}")
        screen = Screen()
        screen.write(output.text)
        screen.end()

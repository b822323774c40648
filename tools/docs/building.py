"""The generated parts of the documentation about models that are built or trained otherwise, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable

from figures import load, table

_SHOWN = 7


def _points(curve: dict[str, float]) -> str:
    """At most so many, evenly apart, the last one among them."""
    every = -(-(len(curve) - 1) // (_SHOWN - 1)) or 1
    values = list(curve.values())[::-1][::every][::-1]
    return ", ".join(f"{value:.3f}" for value in values)


def attention_entropy() -> str:
    """How even heads attend, five layers to a row."""
    found = load("attention-entropy")
    layers = found["rows"]
    rows = []
    for first in range(0, len(layers), 5):
        some = layers[first : first + 5]
        mean = sum(each["mean"] for each in some) / len(some)
        ends = f"{min(each['least'] for each in some):.3f}", f"{max(each['most'] for each in some):.3f}"
        counts = [str(sum(each[name] for each in some)) for name in ("overloaded", "collapsed")]
        rows.append([f"{first} to {first + len(some) - 1}", f"{mean:.3f}", *ends, *counts])
    head = ["layers", "mean", "least", "most", "overloaded", "collapsed"]
    about = f"`{found['command']}` ({found['texts']} texts of {found['length']} tokens)"
    parts = [about, table(head, rows)]
    if drafts := found.get("drafts"):
        parts.append(
            f"Rank correlation of accepted drafts ({drafts['accepted']:.2f} in the mean of {drafts['steps']} steps) "
            f"with the mean share at the row before: {drafts['before']:.2f}; over the rows of the step: "
            f"{drafts['within']:.2f}."
        )
    return "\n\n".join(parts)


def attention_training() -> str:
    """What small models learn with penalties on attention and without."""
    found = load("attention-training")
    rows = [
        [
            name,
            *(f"{each[key]:.3f}" for key in ("loss", "evenness", "outside")),
            f"{each['overloaded']}",
            f"{each['collapsed']}",
            _points(each["curve"]),
        ]
        for name, each in found["rows"].items()
    ]
    head = ["", "loss", "share of the largest entropy", "to other blocks", "overloaded", "collapsed", "loss by step"]
    about = f"`{found['command']}` ({found['steps']} steps, {found['heads']} heads, blocks of {found['block']})"
    return f"{about}\n\n{table(head, rows)}"


def surplus() -> str:
    """What probes of one size make of a token, and of a token and a state."""
    found = load("surplus")
    columns = ("kl", "gain", "floor", "acceptance", "entropy", "entropy of the model")
    rows = [[name, *(f"{each[column]:.3f}" for column in columns)] for name, each in found["rows"].items()]
    about = f"`{found['command']}` ({found['learned']:,} places learned from, {found['held out']:,} held out)"
    return f"{about}\n\n{table(['reads', *columns], rows)}"


def pairs() -> str:
    """What two stacks and one make of as many weights, and what a teacher brings."""
    found = load("pairs")
    rows = []
    for name, each in found["rows"].items():
        curve = each["curve"] if isinstance(each["curve"], dict) else each["curve"][0]
        counts = [f"{each[key]:,}" for key in ("weights", "macs of the source", "macs per token")]
        rates = each.get("tokens per pass, copying", [])
        right = ", ".join(f"{value:.3f}" for value in each["right"])
        rows.append([name, *counts, right, _points(curve), ", ".join(f"{value:.2f}" for value in rates)])
    head = ["", "weights", "multiply-adds, source", "per token", "right", "as training went on", "tokens per pass"]
    run = f"{found['command']} --steps {found['steps']} --seeds {len(found['rows']['pair']['right'])}"
    about = f"`{run}` ({found['held out']} held-out sources)"
    return f"{about}\n\n{table(head, rows)}"


def power_law() -> str:
    """How far operators of texts are apart, and what keeping them changes."""
    found = load("power-law")
    distance = [[name, *(f"{each:.4f}" for each in layers)] for name, layers in found["distance"].items()]
    head = ["largest distance", *(f"layer {number}" for number in range(len(distance[0]) - 1))]
    steps = [[step, *(f"{each[key]:.4f}" for key in ("loss", "frozen"))] for step, each in found["curve"].items()]
    rates = "; ".join(f"with {name} {each:.2f}" for name, each in found["tokens per pass"].items())
    return "\n\n".join(
        [
            f"`{found['command']} --steps {found['steps']}` ({found['texts']} held-out texts)",
            table(head, distance),
            table(["step", "loss, operators of each text", "loss, mean operators"], steps),
            f"Tokens per pass: {rates}.",
        ]
    )


def keys() -> str:
    """Tokens guessed along a stream of two kinds of text."""
    found = load("keys")
    rows = [
        [name, f"{each['lr']:g}", *(_points(dict(enumerate(each[part]))) for part in ("code", "prose", "code again"))]
        for name, each in found["rows"].items()
    ]
    about = f"`{found['command']}` ({found['tokens']:,} tokens of each part, shares by {found['part']})"
    return f"{about}\n\n{table(['', 'lr', 'code', 'prose', 'code again'], rows)}"


def hmm() -> str:
    """What a hidden Markov model knows of texts, and what it is worth as a drafter."""
    found = load("hmm")
    facts = f"{found['states']} states, {found['columns']:,} tokens of their own, {found['learned']:,} tokens learned"
    commands = "\n\n".join(f"`{each}`" for each in found["commands"])
    laws = [
        [name, *(f"{each[key]:.{digits}f}" if key in each else "" for key, digits in _KNOWN)]
        for name, each in found["laws"].items()
    ]
    about = f"{commands} ({facts}; of {found['tokens']:,} tokens of answers)"
    drafts = [
        [name, *(f"{each[f'tokens per pass, {temperature}']:.2f}" for temperature in (0, 1))]
        for name, each in found["drafts"].items()
    ]
    tables = table(["", "bits", "top-1", "overlap"], laws), table(["", "greedy", "temperature 1"], drafts)
    return "\n\n".join([about, *tables])


_KNOWN = (("bits", 2), ("top-1", 3), ("overlap", 3))


def short_conv() -> str:
    """Values recalled as training goes on."""
    found = load("short-conv")
    rows = [[kind, f"{each['parameters']:,}", _points(each["recalled"])] for kind, each in found["rows"].items()]
    steps = list(next(iter(found["rows"].values()))["recalled"])
    about = f"`{found['command']} --steps {steps[-1]}` ({found['pairs']} pairs a text, shares every {steps[1]} steps)"
    return f"{about}\n\n{table(['convolutions', 'parameters', 'recalled'], rows)}"


def localist() -> str:
    """Tokens per pass of a model that drafts for itself under each dial, and the keys that drafts read."""
    found = load("localist")
    rows = [[name, f"{each['tokens per pass']:.2f}", f"{each['read']:.3f}"] for name, each in found["rows"].items()]
    about = f"`{found['command']}` ({found['texts']} text of {found['prompt']} tokens, {found['new']} written)"
    return f"{about}\n\n{table(['', 'tokens per pass', 'keys read'], rows)}"


def hyperfit() -> str:
    """What a model that knows a few texts writes, and what became less likely."""
    found = load("hyperfit")
    before, after = (found["scores"][name] for name in ("before", "after"))
    about = f"`{found['command']}` ({found['pieces']} pieces of {found['length']} tokens, {found['held out']} held out)"
    held = [
        [name, *(f"{each[key]:.3f}" for key in ("loss", "entropy"))]
        for name, each in (("untouched", before), ("hyperfitted", after))
    ]
    rows = [
        [name, f"{each['ttr']:.3f}", f"{each['citations']:,} of {each['runs']:,}"]
        for name, each in found["rows"].items()
    ]
    curve = [[step, *(f"{each[key]:.2f}" for key in ("known", "held out"))] for step, each in found["curve"].items()]
    return "\n\n".join(
        [
            about,
            table(["step", "loss, learned", "held out"], curve),
            table(["", "loss, held out", "entropy"], held),
            table(["", "distinct of the last 96", "runs of five that were learned"], rows),
        ]
    )


def dynamic_tokens() -> str:
    """What shorter prompts cost, beside prompts that are cut."""
    found = load("dynamic-tokens")
    keys = {"nats": "mean", "nats, trained": "trained", "nats, cut": "cut"}
    keys = {key: name for key, name in keys.items() if key in found["rows"]["none"]}
    rows = [
        [name, f"{each['shorter']:.3f}", *(f"{each[key]:.3f}" for key in keys)] for name, each in found["rows"].items()
    ]
    about = (
        f"`{found['command']}` ({found['texts']} prompts of {found['prompt']} tokens, nats a token of the "
        f"{found['scored']} after)"
    )
    made = [f"The network: `{found['net']['command']}`"] if "net" in found else []
    return "\n\n".join([about, *made, table(["merged", "shorter by", *keys.values()], rows)])


SECTIONS: dict[str, Callable[[], str]] = {
    "attention-entropy": attention_entropy,
    "attention-training": attention_training,
    "surplus": surplus,
    "pairs": pairs,
    "power-law": power_law,
    "hmm": hmm,
    "keys": keys,
    "short-conv": short_conv,
    "localist": localist,
    "hyperfit": hyperfit,
    "dynamic-tokens": dynamic_tokens,
}

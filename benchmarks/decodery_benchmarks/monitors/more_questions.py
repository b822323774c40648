"""Further questions whose answers can be checked, beside the built-in ones: opposites of words, continents."""

from __future__ import annotations

from decodery.training.checkable import CheckableQuestion, question

MORE = ("opposites", "continents")
_OPPOSITES = (
    "hot/cold big/small tall/short fast/slow happy/sad open/closed light/dark young/old rich/poor hard/soft wet/dry "
    "full/empty clean/dirty strong/weak high/low near/far early/late good/bad loud/quiet sweet/sour thick/thin "
    "wide/narrow deep/shallow rough/smooth sharp/blunt true/false alive/dead awake/asleep "
    "brave/cowardly cheap/expensive easy/difficult safe/dangerous same/different simple/complex public/private "
    "polite/rude guilty/innocent ancient/modern artificial/natural permanent/temporary generous/stingy "
    "increase/decrease arrive/depart buy/sell push/pull win/lose remember/forget laugh/cry accept/reject begin/end "
    "build/destroy attack/defend borrow/lend create/destroy expand/contract float/sink ascend/descend "
    "import/export include/exclude inhale/exhale love/hate praise/criticize raise/lower succeed/fail "
    "teach/learn victory/defeat friend/enemy day/night summer/winter north/south east/west left/right up/down "
    "inside/outside above/below before/after always/never everything/nothing king/queen man/woman boy/girl "
    "maximum/minimum optimist/pessimist question/answer profit/loss entrance/exit birth/death peace/war "
    "success/failure major/minor positive/negative visible/invisible vertical/horizontal concave/convex"
)
_CONTINENTS = {
    "Africa": "Algeria Chad Egypt Ethiopia Ghana Kenya Mali Morocco Namibia Niger Nigeria Rwanda Senegal Somalia Sudan "
    "Tanzania Tunisia Uganda Zambia Zimbabwe Angola Botswana Gabon Malawi Togo",
    "Asia": "Afghanistan Bangladesh Cambodia China India Indonesia Iran Iraq Japan Jordan Kuwait Laos Malaysia "
    "Mongolia Nepal Oman Pakistan Qatar Thailand Vietnam Yemen Bhutan Syria Lebanon Philippines",
    "Europe": "Albania Austria Belgium Bulgaria Croatia Denmark Estonia Finland France Germany Greece Hungary Iceland "
    "Ireland Italy Latvia Lithuania Malta Norway Poland Portugal Romania Serbia Slovakia Slovenia Spain Sweden "
    "Switzerland Ukraine",
    "South America": "Argentina Bolivia Brazil Chile Colombia Ecuador Guyana Paraguay Peru Suriname Uruguay Venezuela",
    "North America": "Canada Cuba Guatemala Haiti Honduras Jamaica Mexico Nicaragua Panama Belize",
}


def more_questions() -> list[CheckableQuestion]:
    """All of them, each a group of its own, after examples that show what an answer is."""
    pairs = [("opposites", f"opposite {word}", f"What is the opposite of {word}?", opposite)
             for word, opposite in (pair.split("/") for pair in _OPPOSITES.split())]  # fmt: skip
    # What is known of a country may help with its capital.
    pairs += [("continents", f"continent {country}", f"On which continent is {country}?", continent)
              for continent, some in _CONTINENTS.items() for country in some.split()]  # fmt: skip
    return [CheckableQuestion(question(text, False), answer, group, kind, kind) for kind, group, text, answer in pairs]

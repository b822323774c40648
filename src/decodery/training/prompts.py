"""Prompts to make training text from: instructions of many kinds, put together at random from the parts below.

They were written for this purpose and come from no data set. Passages, names and figures in them are made up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Choose = Callable[..., str]

SUBJECTS = """
ocean tides; photosynthesis; the water cycle; black holes; volcanoes; earthquakes; vaccines; the human heart; DNA;
gravity; electric motors; solar panels; wind power; batteries; the Roman Empire; the French Revolution; the Silk Road;
the printing press; the Renaissance; the Industrial Revolution; ancient Egypt; the Olympic Games; chess; jazz; opera;
Impressionism; haiku; the novel; classical ballet; photography; inflation; interest rates; supply and demand; taxes;
budgeting; stock markets; small businesses; marketing; negotiation; leadership; teamwork; time management; sleep;
nutrition; vitamins; exercise; meditation; stress; friendship; honesty; courage; gratitude; happiness; justice;
democracy; human rights; freedom of speech; ethics; free will; the scientific method; statistics; probability; prime
numbers; geometry; algebra; calculus; algorithms; databases; the internet; cloud computing; encryption; machine
learning; neural networks; robots; open source software; version control; operating systems; climate change;
biodiversity; rainforests; coral reefs; whales; bees; wolves; elephants; penguins; dinosaurs; the Moon; Mars; comets;
telescopes; rockets; bicycles; trains; airplanes; bridges; skyscrapers; cities; farming; gardening; bread; cheese;
coffee; tea; chocolate; pasta; curry; Paris; Tokyo; Cairo; New York; Brazil; Kenya; India; Norway; the Alps; the
Amazon river; the Sahara; the Pacific Ocean; languages; grammar; translation; dictionaries; libraries; museums;
schools; universities; public transport; recycling; plastic waste; clean water; electricity; magnets; sound; light;
color; mirrors; lenses; glass; steel; gold; diamonds; salt; the weather; hurricanes; snow; deserts; islands; maps
"""
ASKS = """
Explain {}.; What is {}?; What should everyone know about {}?; Explain {} to a ten year old.; Why is {} important?;
Write a short essay about {}.; Give me five interesting facts about {}.; Summarize the history of {} in one
paragraph.; List the advantages and disadvantages of {}.; Write a poem about {}.; Write a short story in which {}
plays a part.; What are common misconceptions about {}?; How has {} changed over the last hundred years?; Compare {}
and {}.; Write three quiz questions about {} with their answers.; Give a beginner a plan to learn about {}.; Describe
{} vividly.; Write the introduction of a blog post about {}.; Write a dialogue between two friends about {}.; Tell me
more about {}; Imagine you are an expert on {}. What would you tell an audience?; What are the main ideas behind {}?;
Define {}.; What questions should I ask about {}?; Write a letter to an editor about {}.; How would you teach {}?; Who
discovered {}?; Write a product description related to {}.; What is the connection between {} and {}?; Give ten words
related to {}.; Write a speech about {}.; Outline an article about {}.; How do {} and {} influence each other?; When
and where did {} begin?; Write a tweet about {}.; Make a table of facts about {}.; Pretend to be a journalist and
report on {}.
"""
DEEDS = """
adds two numbers; reverses a string; checks whether a number is prime; computes the factorial of n; sorts a list;
finds the largest element of a list; counts the vowels of a string; removes duplicates from a list; merges two sorted
lists; returns the n-th Fibonacci number; checks whether a string is a palindrome; computes the mean of a list;
flattens a list; converts Celsius to Fahrenheit; counts how often each word occurs; finds the greatest common divisor;
reads a file line by line; performs a binary search; transposes a matrix; validates an email address; rotates a list
by k places; splits a sentence into words; computes the sum of digits; checks whether two words are anagrams; finds
the second largest number; converts a number to binary; removes all spaces; generates a random password; finds the
missing number from 1 to n; groups words by their first letter
"""
LANGUAGES = "Python; Python; Python; JavaScript; Java; C; C++; Go; Rust; SQL; Bash"
TONGUES = "French; German; Spanish; Italian; Portuguese"
NAMES = """
Anna; Bruno; Carla; David; Elena; Farid; Grace; Hugo; Ines; Jonas; Keiko; Liam; Maria; Nadia; Oscar; Priya; Quentin;
Rosa; Samuel; Tara; Umar; Vera; Walter; Yara; Zoe
"""
PLACES = "Lisbon; Oslo; Lima; Nairobi; Kyoto; Boston; Prague; Dublin; Mumbai; Toronto; Vienna; Seville; Hanoi; Perth"
THINGS = (
    "apples; pencils; books; marbles; tickets; cookies; stamps; bottles; flowers; coins; eggs; chairs; shirts; toys"
)
SHOPS = "bakery; bookshop; workshop; small hotel; music school; bicycle shop; restaurant; garden center; design studio"
NEWS = """
The number of visitors grew by {n} percent last year; The owner plans to open a second branch in {place} soon; It
employs {n} people, most of them part time; The city council of {place} supports the project with {n} thousand euros;
Local residents say that the street has become livelier; Critics point out that rents have risen by {n} percent;
{name} learned the trade from a grandparent; In winter it stays open until nine in the evening; A fire destroyed part
of the building in {year}, but it was repaired within {n} weeks; The most popular product costs {n} dollars; Every
Saturday there is a free course for children; {name} joined as a partner in {year}
"""
MATTERS = """
a delayed delivery; a meeting next Tuesday; a job application; a day off; a broken heater; thanks for a gift; a
birthday party; a price increase; a lost suitcase; feedback on a report; a volunteer project; a schedule change; a
missed deadline; a refund
"""
ROLES = (
    "a colleague; my manager; a customer; a neighbor; my landlord; a teacher; a friend; a new team member; a supplier"
)
PARTS = "kind; quick; old; small; bright; quiet; heavy; careful; young; famous; tired; green"
BEINGS = "teacher; dog; river; child; train; doctor; garden; painter; ship; cat; engineer; house; student; bird; king"
ACTS = """
is waiting near the station; was seen in the park yesterday; will arrive tomorrow morning; has never been so
beautiful; needs a new home; stands behind the old church; reminds me of my childhood; can be found in every village;
likes warm weather; makes a lot of noise at night; was painted by a friend of mine; is larger than we had expected
"""
GERMAN_BEINGS = (
    "Der Lehrer; Die Katze; Das Kind; Der Zug; Die Stadt; Das Haus; Die Regierung; Der Arzt; Die Schule; Mein Bruder"
)
GERMAN_ACTS = """
kommt morgen früh an; war gestern im Park; braucht mehr Zeit für diese Arbeit; liegt in der Nähe des Flusses; hat im
letzten Jahr viel erreicht; wird im Sommer geschlossen; erinnert mich an meine Kindheit; ist größer als erwartet; hat
die Frage nicht verstanden; sucht seit drei Wochen eine Lösung; muss heute leider warten; gefällt allen Besuchern sehr
"""
JOBS = "a pirate; a doctor; a detective; a chef; a travel guide; a history professor; a fitness coach; a wise old tree"


def instructions(count: int, seed: int = 0) -> list[str]:
    """`count` instructions as a user might type them; number i depends on the seed and on i alone."""
    return [_instruction(np.random.default_rng([seed, number])) for number in range(count)]


def _instruction(random: np.random.Generator) -> str:
    def choose(parts: str) -> str:
        options = [part.strip() for part in parts.replace("\n", " ").split(";")]
        return options[int(random.integers(len(options)))]

    def figure(low: int, high: int) -> int:
        return int(random.integers(low, high))

    kinds = (
        _subject,
        _subject,
        _subject,
        _code,
        _code,
        _sums,
        _sums,
        _translation,
        _passage,
        _passage,
        _letter,
        _short,
    )
    return kinds[int(random.integers(len(kinds)))](choose, figure)


def _subject(choose: Choose, figure: Callable[[int, int], int]) -> str:
    text = choose(ASKS)
    while "{}" in text:
        text = text.replace("{}", choose(SUBJECTS), 1)
    return text


def _code(choose: Choose, figure: Callable[[int, int], int]) -> str:
    language, deed = choose(LANGUAGES), choose(DEEDS)
    return choose(
        f"Write a {language} function that {deed}.; Write {language} code that {deed} and explain it step by step.;"
        f"How do I write a program in {language} that {deed}?; Give me a {language} example that {deed}, with tests."
    )


def _sums(choose: Choose, figure: Callable[[int, int], int]) -> str:
    one, two, things = choose(NAMES), choose(NAMES), choose(THINGS)
    a, b, c, price = figure(3, 60), figure(2, 20), figure(2, 9), figure(2, 30)
    return choose(
        f"{one} has {a} {things} and buys {b} more. {two} has {c} times as many. How many does {two} have?;"
        f"A box holds {a} {things}. How many {things} are in {b} boxes if {c} of them are lost?;"
        f"{one} sells {a} {things} for {price} dollars each and pays {b} dollars for rent. How much is left?;"
        f"What is {a} times {b} plus {c}? Show your work.; Solve for x: {c}x + {b} = {a + b}.;"
        f"A train travels {a * 5} kilometers in {c} hours. What is its average speed?;"
        f"{one} reads {a} pages a day. How many days does a book of {a * b} pages take?;"
        f"{one} and {two} share {a * 2} {things} equally and then {one} gives away {c}. How many does {one} keep?;"
        f"The price of a ticket is {price} dollars and rises by {c * 5} percent. What does it cost now?"
    )


def _translation(choose: Choose, figure: Callable[[int, int], int]) -> str:
    english = f"The {choose(PARTS)} {choose(BEINGS)} {choose(ACTS)}."
    german = f"{choose(GERMAN_BEINGS)} {choose(GERMAN_ACTS)}."
    return choose(
        f"Translate into {choose(TONGUES)}: {english}; Translate German to English: {german};"
        f"Translate German to English: {german} {choose(GERMAN_BEINGS)} {choose(GERMAN_ACTS)}.;"
        f"How do you say this in {choose(TONGUES)}? {english}; Rewrite this sentence in other words: {english}"
    )


def _passage(choose: Choose, figure: Callable[[int, int], int]) -> str:
    name, place, shop, year = choose(NAMES), choose(PLACES), choose(SHOPS), figure(1950, 2020)
    sentences = [f"{name} opened a {shop} in {place} in {year}."]
    for _ in range(figure(3, 7)):
        facts = {"n": figure(2, 60), "place": choose(PLACES), "name": choose(NAMES), "year": figure(year, 2024)}
        sentence = choose(NEWS).format(**facts) + "."
        if sentence not in sentences:
            sentences.append(sentence)
    text = " ".join(sentences)
    ask = choose(
        f"Summarize the text above.; Summarize this in one sentence.; Who opened the {shop}, and when?; "
        f"List all names in the text.;"
        f"Extract the figures from the text as a list.; What do we learn about {name}?; Write a headline for it.;"
        f"Rewrite it as a news report.; Answer with the text alone: where is the {shop}?; What could happen next?"
    )
    if choose("before; behind") == "before":
        return f"{ask.replace('above', 'below')}\n\n{text}"
    return f"{text}\n\n{ask}"


def _letter(choose: Choose, figure: Callable[[int, int], int]) -> str:
    role, matter = choose(ROLES), choose(MATTERS)
    return choose(
        f"Write an email to {role} about {matter}.; Write a polite letter to {role} about {matter}.;"
        f"Help me tell {role} about {matter} in three sentences.; Draft a short message to {role} concerning {matter}."
    )


def _short(choose: Choose, figure: Callable[[int, int], int]) -> str:
    subject, job, place, n = choose(SUBJECTS), choose(JOBS), choose(PLACES), figure(2, 8)
    return choose(
        f"Act as {job} and talk about {subject}.; Plan a trip of {n} days to {place}.; "
        f"Suggest {n} names for a {choose(SHOPS)}.;"
        f"What would {job} say about {subject}?; Recommend {n} things to do in {place}.; "
        f"Give me {n} tips about {subject}.;"
        f"Write {n} sentences about {place}.; Is {subject} more useful than {choose(SUBJECTS)}? Give reasons.; hello;"
        f"Write a recipe with {choose(THINGS)} and {choose(THINGS)}.; Write a JSON object that describes {subject}.;"
        f"Sort these words: {choose(BEINGS)}, {choose(BEINGS)}, {choose(BEINGS)}, {choose(BEINGS)}."
    )

"""Draw the demo corpus from the grammar, and write it.

    python data/demo/generator/demo_corpus.py DIR

Read it from top to bottom: noun phrases at random, then clauses, then a recipe for each kind of
sentence; then the corpus, which is the same for the same seed. This module decides what is said and
how often; how it is put into words is for `grammar`. It knows nothing of training.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import lexicon
from grammar import (
    ALTHOUGH,
    AND,
    BECAUSE,
    BUT,
    IF,
    NONE,
    THAT,
    WHEN,
    Argument,
    Clause,
    Nominal,
    NounPhrase,
    Pair,
    Relative,
    agreement,
    clear_tense,
    column,
    english_nominal,
    finish,
    fronted,
    german_nominal,
    join,
    main_then_infinitive,
    main_then_main,
    main_then_sub,
    prepositional,
    pronoun_for,
    question,
    statement,
    sub_then_main,
)
from lexicon import (
    Adjective,
    Determiner,
    Kinds,
    Noun,
    Phrase,
    Pronoun,
    Slot,
    Tense,
    Verb,
)

T = TypeVar("T")

SPLITS: dict[str, int] = {"train": 20000, "valid": 500, "test": 500}
SEED: int = 1706

# ---------------------------------------------------------------------------------------------
# Random sentences
# ---------------------------------------------------------------------------------------------

TWO_TENSES: tuple[Tense, ...] = ("present", "past")
JOBS = tuple(n for n in lexicon.PEOPLE if n.en in ("teacher", "farmer", "doctor", "student"))
# People whom one calls "the", not "my".
NOBODYS = ("man", "woman", "boy", "girl", "farmer", "student")
# Members of a family, who are "my" or "the" but rarely "a".
KIN = ("mother", "father", "daughter", "son", "sister", "brother", "aunt")
# What is so or not, and neither "very" nor "too".
ABSOLUTE = ("red", "green", "black", "white", "fresh")
YOUNG = ("child", "boy", "girl")
# What is done under a roof.
INDOORS = ("cook", "watch", "sleep", "repair", "work", "wash")
# Verbs that nobody does on purpose: no modal verb, no "likes to", no "tries to".
STATES = (
    "like", "know", "need", "have", "belong to", "lie", "stand",
    "forget", "lose", "find", "see", "dream", "fall", "arrive",
)  # fmt: skip


def chance(rng: random.Random, probability: float) -> bool:
    """Return True with a probability."""
    return rng.random() < probability


def weighted(rng: random.Random, choices: Sequence[tuple[int, T]]) -> T:
    """Return one of the choices, each as likely as its weight says."""
    mark = rng.randrange(sum(weight for weight, _ in choices))
    for weight, choice in choices:
        mark -= weight
        if mark < 0:
            return choice
    raise AssertionError("the weights add up to more than their sum")


# Noun phrases at random -------------------------------------------------------------------------


def some_noun(rng: random.Random, kinds: Kinds) -> Noun:
    """Return a noun of one of the kinds."""
    return rng.choice([noun for noun in lexicon.NOUNS if noun.kind in kinds])


def fits(adjective: Adjective, noun: Noun) -> bool:
    """Return whether an adjective can be said of a noun."""
    odd = adjective.en == "old" and noun.en in YOUNG
    return noun.kind in adjective.kinds and not odd


def some_adjective(rng: random.Random, noun: Noun) -> Adjective | None:
    """Return an adjective that can be said of a noun, if there is one."""
    fitting = [adjective for adjective in lexicon.ADJECTIVES if fits(adjective, noun)]
    return rng.choice(fitting) if fitting else None


def known_determiner(rng: random.Random, noun: Noun) -> Determiner:
    """Return a determiner for what the hearer knows."""
    own = rng.choice(lexicon.POSSESSIVES)
    if noun.en in NOBODYS:
        return weighted(rng, [(5, lexicon.THE), (1, lexicon.THIS)])
    this = lexicon.THE if noun.en in KIN else lexicon.THIS
    return weighted(rng, [(5, lexicon.THE), (1, this), (4, own)])


def new_determiner(rng: random.Random, noun: Noun, plural: bool, counted: bool) -> Determiner:
    """Return a determiner for what is new to the hearer; only the plural is `counted`."""
    if not noun.en_plural:
        return lexicon.BARE
    if not plural:
        return lexicon.A
    if counted and chance(rng, 0.6):
        return rng.choice((*lexicon.NUMBERS, lexicon.MANY))
    return lexicon.BARE


def some_phrase(
    rng: random.Random, kinds: Kinds, new: float = 0.0, counted: bool = True
) -> NounPhrase:
    """Return a noun phrase; `new` is the probability that it is indefinite."""
    noun = some_noun(rng, kinds)
    adjective = some_adjective(rng, noun) if chance(rng, 0.45) else None
    plural = bool(noun.en_plural) and chance(rng, 0.3)
    always_known = noun.kind == "room" or (noun.en in KIN and not plural)
    if chance(rng, new) and not always_known:
        determiner = new_determiner(rng, noun, plural, counted)
    else:
        determiner = known_determiner(rng, noun)
    return NounPhrase(noun, determiner, adjective, plural)


def some_subject(rng: random.Random, kinds: Kinds) -> Nominal:
    """Return a subject: a pronoun at times where a person can be meant."""
    if "person" in kinds and chance(rng, 0.4):
        speakers = [(5, lexicon.I), (2, lexicon.WE), (2, lexicon.HE), (2, lexicon.SHE)]
        return weighted(rng, [*speakers, (2, lexicon.THEY)])
    phrase = some_phrase(rng, kinds, new=0.15)
    # "Milk is ..." and "Dogs sleep" speak of all milk and all dogs; the corpus does not.
    return replace(phrase, determiner=lexicon.THE) if not phrase.determiner.de else phrase


def person_pronoun(rng: random.Random, subject: Nominal) -> Pronoun:
    """Return a pronoun for a person other than the subject."""
    others = [lexicon.I, lexicon.WE, lexicon.HE, lexicon.SHE, lexicon.THEY]
    speaking = (lexicon.I, lexicon.WE)
    if subject in speaking:
        others = others[2:]
    return rng.choice([pronoun for pronoun in others if pronoun != subject])


def some_argument(rng: random.Random, slot: Slot, subject: Nominal, negated: bool) -> Argument:
    """Return an object for a slot."""
    if slot.kinds == ("person",) and chance(rng, 0.25):
        return Argument(person_pronoun(rng, subject), slot)
    direct = slot.case == "acc" and not slot.preposition.de
    # "does not help a man" and "does not buy three hats" are rarely said.
    new = 0.5 if direct else 0.0 if negated else 0.15
    phrase = some_phrase(rng, slot.kinds, new, counted=direct and not negated)
    if slot.case == "dat" and phrase.noun.kind != "person":
        phrase = singular(rng, phrase)
    return Argument(phrase, slot)


def singular(rng: random.Random, phrase: NounPhrase) -> NounPhrase:
    """Return a definite noun phrase in the singular, for nouns whose plural would be rare."""
    determiner = known_determiner(rng, phrase.noun) if phrase.plural else phrase.determiner
    return replace(phrase, plural=False, determiner=determiner)


# Places and times -------------------------------------------------------------------------------


def place_phrase(rng: random.Random, kinds: Kinds) -> NounPhrase:
    """Return a noun phrase for a place or a piece of furniture."""
    return singular(rng, some_phrase(rng, kinds))


def location(rng: random.Random, kinds: Kinds = ("room", "place")) -> Phrase:
    """Return where something happens: the dative."""
    site = rng.choice([site for site in lexicon.SITES if site.noun.kind in kinds])
    return prepositional(site.at, place_at(rng, site.noun), "dat")


def direction(rng: random.Random, verb: Verb) -> Phrase:
    """Return where somebody goes: "in" with the accusative, "zu" with the dative."""
    # One goes into a kitchen, but does not drive there.
    sites = [site for site in lexicon.SITES if verb.en != "drive" or site.to.en == "to"]
    site = rng.choice(sites)
    return prepositional(site.to, place_at(rng, site.noun), site.to_case)


def place_at(rng: random.Random, noun: Noun) -> NounPhrase:
    """Return a noun phrase for a given place."""
    adjective = some_adjective(rng, noun) if chance(rng, 0.3) else None
    town = lexicon.A if chance(rng, 0.2) else lexicon.THE
    determiner = known_determiner(rng, noun) if noun.kind == "room" else town
    return NounPhrase(noun, determiner, adjective)


def position(rng: random.Random, verb: Verb) -> Phrase:
    """Return where something sits, lies or stands."""
    if verb.en == "stand":
        return prepositional(rng.choice(lexicon.BESIDE[1:]), place_phrase(rng, ("room",)), "dat")
    preposition = rng.choice((lexicon.ON, *lexicon.BESIDE[: 2 if verb.en == "lie" else 0]))
    return prepositional(preposition, place_phrase(rng, ("surface",)), "dat")


def some_time(rng: random.Random, tense: Tense) -> Phrase:
    """Return a time that goes with a tense."""
    if chance(rng, 0.1):
        hour = str(rng.randrange(6, 12))
        return Phrase(f"at {hour} o'clock", f"um {hour} Uhr")
    fitting = [setting for setting in lexicon.SETTINGS if tense in setting.tenses]
    setting = rng.choice(fitting)
    return Phrase(setting.en, setting.de)


def company(rng: random.Random) -> Phrase:
    """Return with whom somebody goes."""
    return prepositional(Phrase("with", "mit"), some_phrase(rng, ("person",)), "dat")


def beneficiary(rng: random.Random) -> Phrase:
    """Return for whom something is done."""
    return prepositional(Phrase("for", "für"), some_phrase(rng, ("person",)), "acc")


# Clauses at random ------------------------------------------------------------------------------


def is_action(verb: Verb) -> bool:
    """Return whether a person can want to do something."""
    return "person" in verb.subject and verb.en not in STATES


def with_setting(rng: random.Random, clause: Clause) -> Clause:
    """Add places, companions and times to a clause."""
    verb = clause.verb
    if verb.site == "direction":
        clause = replace(clause, complement=direction(rng, verb))
        if chance(rng, 0.3):
            clause = replace(clause, adjunct=company(rng))
    elif verb.site == "surface":
        clause = replace(clause, complement=position(rng, verb))
    elif verb.en in ("buy", "cook", "look for") and chance(rng, 0.25):
        clause = replace(clause, adjunct=beneficiary(rng))
    elif verb.site == "location" and (verb.en == "arrive" or chance(rng, 0.35)):
        kinds: Kinds = ("room",) if verb.en in INDOORS else ("room", "place")
        clause = replace(clause, adjunct=location(rng, kinds))
    return with_time(rng, clause)


def with_time(rng: random.Random, clause: Clause) -> Clause:
    """Add a time or a frequency to some clauses."""
    timeless = clause.verb.en in ("like", "know", "belong to")
    if not timeless and chance(rng, 0.35):
        return replace(clause, time=some_time(rng, clause.tense))
    plain = clause.tense == "present" and not (clause.modal or clause.gladly or clause.negated)
    if plain and not timeless and not is_counted(clause) and chance(rng, 0.25):
        return replace(clause, frequency=rng.choice(lexicon.FREQUENCIES))
    return clause


def is_counted(clause: Clause) -> bool:
    """Return whether an object is counted: "never buys six hats" is rarely said."""
    counts = (*lexicon.NUMBERS, lexicon.MANY)
    nominals = [argument.nominal for argument in clause.arguments]
    return any(isinstance(n, NounPhrase) and n.determiner in counts for n in nominals)


def with_mood(rng: random.Random, clause: Clause) -> Clause:
    """Give some clauses a modal verb or "likes to"."""
    if clause.tense == "future" or not is_action(clause.verb):
        return clause
    if not isinstance(clause.subject, Pronoun) and clause.subject.noun.kind != "person":
        return clause
    if chance(rng, 0.3):
        fitting = [m for m in lexicon.MODALS if clause.tense == "present" or m.preterite]
        return replace(clause, modal=rng.choice(fitting))
    gladly = clause.tense == "present" and chance(rng, 0.15)
    return replace(clause, gladly=gladly)


def some_tense(rng: random.Random) -> Tense:
    """Return a tense."""
    choices: list[tuple[int, Tense]] = [(11, "present"), (6, "past"), (3, "future")]
    return weighted(rng, choices)


def action(
    rng: random.Random,
    tense: Tense,
    subject: Nominal | None = None,
    verb: Verb | None = None,
    negation: float = 0.25,
    plain: bool = False,
) -> Clause:
    """Return a clause about somebody who does something; a `plain` one has no modal verb."""
    if verb is None:
        kind = subject_kind(subject)
        verb = rng.choice([verb for verb in lexicon.VERBS if kind is None or kind in verb.subject])
    subject = subject or some_subject(rng, verb.subject)
    negated = chance(rng, negation)
    arguments = tuple(some_argument(rng, slot, subject, negated) for slot in verb.slots)
    clause = Clause(subject, verb, arguments, tense=tense, negated=negated)
    clause = clause if plain else with_mood(rng, clause)
    if not clause.modal:
        clause = replace(clause, tense=clear_tense(verb, subject, tense))
    return with_setting(rng, clause)


def subject_kind(subject: Nominal | None) -> str | None:
    """Return the kind of a subject, None if there is none yet."""
    if subject is None:
        return None
    return "person" if isinstance(subject, Pronoun) else subject.noun.kind


def quality(
    rng: random.Random, tense: Tense, subject: Nominal, noun: Noun, negation: float = 0.2
) -> Clause:
    """Return a clause that says what a noun is like; `subject` may be a pronoun for it."""
    adjective = some_adjective(rng, noun)
    assert adjective is not None, f"no adjective fits {noun.en}"
    negated = chance(rng, negation)
    degree = rng.choice(lexicon.DEGREES[: 4 if negated else 5])
    if adjective.en in ABSOLUTE:
        degree = NONE
    predicate = Phrase(join(degree.en, adjective.en), join(degree.de, adjective.de))
    return Clause(subject, lexicon.BE, complement=predicate, tense=tense, negated=negated)


# Sentences at random ----------------------------------------------------------------------------


def simple_sentence(rng: random.Random) -> Pair:
    """Return a main clause."""
    clause = action(rng, some_tense(rng))
    if clause.time.en and chance(rng, 0.5):
        return fronted(clause)
    return statement(clause)


def quality_sentence(rng: random.Random) -> Pair:
    """Return "The car is too expensive today."."""
    phrase = some_phrase(rng, ("person", "animal", *lexicon.EDIBLE, *lexicon.OBJECTS, "transport"))
    tense = rng.choice(TWO_TENSES)
    return statement(quality(rng, tense, phrase, phrase.noun))


def naming(rng: random.Random) -> Pair:
    """Return "This is a white hat": after "ein", the adjective shows the gender."""
    adjective, gender = rng.choice(lexicon.ADJECTIVES), rng.choice(("m", "n", "m", "n", "f"))
    fitting = [n for n in lexicon.NOUNS if n.gender == gender and fits(adjective, n)]
    fitting = [noun for noun in fitting if noun.en_plural and noun.en not in KIN]
    if not fitting:
        return quality_sentence(rng)
    noun = rng.choice(fitting)
    own = noun.en not in NOBODYS and chance(rng, 0.3)
    determiner = rng.choice(lexicon.POSSESSIVES) if own else lexicon.A
    phrase = NounPhrase(noun, determiner, adjective)
    negated = chance(rng, 0.25)
    kein = replace(phrase, determiner=lexicon.NO) if negated and not own else phrase
    german = join("nicht" if negated and own else "", german_nominal(kein, "nom"))
    predicate = Phrase(join("not" if negated else "", english_nominal(phrase)), german)
    words = rng.choice((Phrase("this", "das"), Phrase("it", "es")))
    this = Pronoun(words.en, "", words.de, "", "", "3sg")
    return statement(Clause(this, lexicon.BE, complement=predicate, tense=rng.choice(TWO_TENSES)))


def first_person_sentence(rng: random.Random) -> Pair:
    """Return what the speaker does, so that no verb lacks its first person."""
    verbs = [verb for verb in lexicon.VERBS if "person" in verb.subject]
    clause = action(rng, "present", lexicon.I, rng.choice(verbs), plain=True)
    return fronted(clause) if clause.time.en and chance(rng, 0.5) else statement(clause)


def separable_sentence(rng: random.Random) -> Pair:
    """Return a separable verb whole in a subordinate clause, or in two in a main clause."""
    verb = rng.choice([verb for verb in lexicon.VERBS if verb.prefix])
    subject = lexicon.I if chance(rng, 0.35) else None
    clause = action(rng, "present", subject, verb, plain=True)
    if chance(rng, 0.3):
        return statement(clause)
    link = rng.choice((BECAUSE, ALTHOUGH, IF))
    return joined(rng, link, action(rng, "present"), clause)


def comparison(rng: random.Random) -> Pair:
    """Return "The dog is older than the cat" or "... as old as ...", both in the nominative."""
    fitting = [adjective for adjective in lexicon.ADJECTIVES if adjective.en_comparative]
    adjective = rng.choice(fitting)
    kinds: Kinds = (rng.choice(adjective.kinds),)
    first = replace(some_phrase(rng, kinds), adjective=None)
    second = some_phrase(rng, kinds)
    if first.noun.kind in lexicon.BUILT:
        first, second = singular(rng, first), singular(rng, second)
    english, german = english_nominal(second), german_nominal(second, "nom")
    if chance(rng, 0.6):
        words = Phrase(adjective.en_comparative + " than", adjective.de_comparative + " als")
    else:
        words = Phrase(f"as {adjective.en} as", f"so {adjective.de} wie")
    predicate = Phrase(join(words.en, english), join(words.de, german))
    return statement(Clause(first, lexicon.BE, complement=predicate, negated=chance(rng, 0.25)))


def profession(rng: random.Random) -> Pair:
    """Return "My brother is not a good doctor": a noun phrase in the nominative."""
    # A woman would be "eine Ärztin": only men are said to be something here.
    men = [n for n in lexicon.PEOPLE if n.gender == "m" and n not in JOBS]
    man = rng.choice(men)
    person = NounPhrase(man, known_determiner(rng, man), some_adjective(rng, man))
    person = person if chance(rng, 0.5) else replace(person, adjective=None)
    noun = rng.choice(JOBS)
    negated = chance(rng, 0.3)
    fitting = [
        a for a in lexicon.ADJECTIVES if a.en in ("good", "young", "clever", "friendly", "poor")
    ]
    phrase = NounPhrase(noun, lexicon.A, rng.choice(fitting) if chance(rng, 0.7) else None)
    determiner = lexicon.NO if negated else lexicon.A
    german = german_nominal(replace(phrase, determiner=determiner), "nom")
    predicate = Phrase(join("not" if negated else "", english_nominal(phrase)), german)
    tense = rng.choice(TWO_TENSES)
    return statement(Clause(person, lexicon.BE, complement=predicate, tense=tense))


def existence(rng: random.Random) -> Pair:
    """Return "There is a dog in the garden": German begins with the place."""
    indoors = chance(rng, 0.5)
    kinds: Kinds = (
        ("device", "surface", "opening") if indoors else ("animal", "vehicle", "transport")
    )
    phrase, tense = some_phrase(rng, kinds, new=1.0), rng.choice(TWO_TENSES)
    place = location(rng, ("room",) if indoors else ("place",))
    if chance(rng, 0.25):
        phrase = replace(phrase, determiner=lexicon.NO)
    be = lexicon.be_form(agreement(phrase), tense)
    finite_verb = "gibt" if tense == "present" else "gab"
    german = join(place.de, finite_verb, "es", german_nominal(phrase, "acc"))
    return Pair(finish(join("there", be, english_nominal(phrase), place.en)), finish(german))


def price(rng: random.Random) -> Pair:
    """Return "The new bicycle costs 250 euros."."""
    subject = some_phrase(rng, lexicon.COST.subject)
    number = rng.choice(lexicon.NUMBERS)
    digits = str(rng.choice(lexicon.PRICES))
    amount = rng.choice((Phrase(digits, digits), Phrase(number.en_plural, number.de)))
    complement = Phrase(f"{amount.en} euros", f"{amount.de} Euro")
    tense: Tense = rng.choice(("present", "future"))
    return statement(Clause(subject, lexicon.COST, complement=complement, tense=tense))


def asked(rng: random.Random, subject: Nominal | None = None, verb: Verb | None = None) -> Clause:
    """Return a clause to be asked: not negated, and without "never"."""
    clause = action(rng, some_tense(rng), subject, verb, negation=0.0)
    return replace(clause, frequency=NONE)


def yes_no_question(rng: random.Random) -> Pair:
    """Return a question for yes or no."""
    return question(asked(rng))


def why_question(rng: random.Random) -> Pair:
    """Return a question that begins with "why"."""
    return question(asked(rng), Phrase("why", "warum"))


def where_question(rng: random.Random) -> Pair:
    """Return a question for the place."""
    verbs = [verb for verb in lexicon.VERBS if verb.site in ("location", "surface")]
    clause = asked(rng, verb=rng.choice(verbs))
    clause = replace(clause, adjunct=NONE, complement=NONE)
    return question(clause, Phrase("where", "wo"))


def who_question(rng: random.Random) -> Pair:
    """Return a question for the subject."""
    who = Pronoun("who", "", "wer", "", "", "3sg")
    return statement(asked(rng, who), "?")


def object_question(rng: random.Random) -> Pair:
    """Return a question for the object: "wen", "wem" or "was"."""
    verbs = [verb for verb in lexicon.VERBS if len(verb.slots) == 1]
    verb = rng.choice([verb for verb in verbs if not verb.slots[0].preposition.de])
    slot = verb.slots[0]
    clause = replace(asked(rng, verb=verb), arguments=())
    if "person" not in slot.kinds:
        return question(clause, Phrase("what", "was"))
    return question(clause, Phrase("who", "wem" if slot.case == "dat" else "wen"))


def reason_sentence(rng: random.Random) -> Pair:
    """Return two clauses joined by "because" or "although"."""
    link, tense = rng.choice((BECAUSE, ALTHOUGH)), rng.choice(TWO_TENSES)
    return joined(rng, link, action(rng, tense), action(rng, tense, negation=0.15))


def condition_sentence(rng: random.Random) -> Pair:
    """Return a condition in the present and what follows from it."""
    later: Tense = rng.choice(("present", "future"))
    return joined(rng, IF, action(rng, later), action(rng, "present"))


def when_sentence(rng: random.Random) -> Pair:
    """Return two clauses in the past joined by "when"."""
    return joined(rng, WHEN, action(rng, "past", negation=0.1), action(rng, "past", negation=0.0))


def joined(rng: random.Random, link: Phrase, main: Clause, sub: Clause) -> Pair:
    """Return a main and a subordinate clause in either order."""
    if chance(rng, 0.5):
        return sub_then_main(link, sub, main)
    return main_then_sub(main, link, sub)


def that_sentence(rng: random.Random) -> Pair:
    """Return what somebody says or thinks."""
    tense = rng.choice(TWO_TENSES)
    speaker = lexicon.I if chance(rng, 0.1) else some_subject(rng, ("person",))
    main = Clause(speaker, rng.choice(lexicon.SPEECH), tense=tense)
    sub = action(rng, "past" if tense == "past" else some_tense(rng))
    return main_then_sub(main, THAT, sub)


def effort_sentence(rng: random.Random) -> Pair:
    """Return what somebody tries, hopes or forgets to do."""
    verb, person = rng.choice(lexicon.EFFORT), some_subject(rng, ("person",))
    main = Clause(person, verb, tense=rng.choice(TWO_TENSES))
    return main_then_infinitive(
        main, NONE, goal(rng, person, "sein" if chance(rng, 0.1) else "haben")
    )


def purpose_sentence(rng: random.Random) -> Pair:
    """Return why somebody goes somewhere."""
    motion = [verb for verb in lexicon.VERBS if verb.site == "direction"]
    person = some_subject(rng, ("person",))
    main = action(rng, some_tense(rng), person, rng.choice(motion), negation=0.0)
    main = replace(main, adjunct=NONE, modal=None, gladly=False)
    aim = replace(goal(rng, person, "haben"), adjunct=NONE)
    return main_then_infinitive(main, Phrase("in order", "um"), aim)


def goal(rng: random.Random, person: Nominal, sort: str) -> Clause:
    """Return a clause for an infinitive; `sort` is the auxiliary of its verb."""
    fitting = [v for v in lexicon.VERBS if is_action(v) and v.perfect_with == sort]
    verb = rng.choice([verb for verb in fitting if verb.site not in ("direction", "surface")])
    clause = action(rng, "present", person, verb, negation=0.0)
    return replace(clause, time=NONE, frequency=NONE, modal=None, gladly=False)


def same_person_sentence(rng: random.Random) -> Pair | None:
    """Return "Because the farmer is tired, he ...": a pronoun for the subject."""
    phrase, tense = some_phrase(rng, lexicon.LIVING), rng.choice(TWO_TENSES)
    pronoun = pronoun_for(phrase)
    if pronoun is None:
        return None
    link = rng.choice((BECAUSE, ALTHOUGH))
    reason = quality(rng, tense, replace(phrase, adjective=None), phrase.noun)
    verbs = [verb for verb in lexicon.VERBS if phrase.noun.kind in verb.subject]
    main = action(rng, tense, phrase, rng.choice(verbs))
    if chance(rng, 0.5):
        return sub_then_main(link, reason, replace(main, subject=pronoun))
    return main_then_sub(main, link, replace(reason, subject=pronoun))


def same_thing_sentence(rng: random.Random) -> Pair:
    """Return "Because the car is expensive, we do not buy it": a pronoun for the object."""
    tense = rng.choice(TWO_TENSES)
    main = action(rng, tense, some_subject(rng, ("person",)), rng.choice(handling_verbs()))
    argument = main.arguments[0]
    thing = replace(some_phrase(rng, argument.slot.kinds), adjective=None)
    pronoun = pronoun_for(thing)
    assert pronoun is not None
    link = rng.choice((BECAUSE, ALTHOUGH))
    if chance(rng, 0.5):
        reason = quality(rng, tense, thing, thing.noun)
        main = replace(main, arguments=(argument._replace(nominal=pronoun),))
        return sub_then_main(link, reason, main)
    reason = quality(rng, tense, pronoun, thing.noun)
    return main_then_sub(replace(main, arguments=(argument._replace(nominal=thing),)), link, reason)


def handling_verbs() -> list[Verb]:
    """Return the verbs that do something with one thing."""
    direct = [v for v in lexicon.VERBS if len(v.slots) == 1 and v.slots[0].case == "acc"]
    return [v for v in direct if not {"person", "room"} & set(v.slots[0].kinds)]


def two_acts_sentence(rng: random.Random) -> Pair:
    """Return two main clauses about one thing: "We buy the apples, but she does not eat them."."""
    first_verb = rng.choice(handling_verbs())
    thing = some_phrase(rng, first_verb.slots[0].kinds)
    kind = thing.noun.kind
    second_verb = rng.choice([v for v in handling_verbs() if kind in v.slots[0].kinds])
    pronoun, tense = pronoun_for(thing), rng.choice(TWO_TENSES)
    assert pronoun is not None
    first = action(rng, tense, some_subject(rng, ("person",)), first_verb, negation=0.0)
    second = action(rng, tense, some_subject(rng, ("person",)), second_verb)
    return main_then_main(
        replace(first, arguments=(Argument(thing, first_verb.slots[0]),)),
        BUT if second.negated else AND,
        replace(second, arguments=(Argument(pronoun, second_verb.slots[0]),)),
    )


def subject_relative(rng: random.Random, phrase: NounPhrase) -> Relative:
    """Return a relative clause in which the noun is the subject."""
    english = "who" if phrase.noun.kind == "person" else "that"
    german = lexicon.RELATIVE_FORMS["nom"][column(phrase)]
    pronoun = Pronoun(english, "", german, "", "", agreement(phrase))
    verbs = [verb for verb in lexicon.VERBS if phrase.noun.kind in verb.subject]
    clause = action(rng, rng.choice(TWO_TENSES), pronoun, rng.choice(verbs), negation=0.15)
    return Relative(NONE, clause)


def object_relative(rng: random.Random, phrase: NounPhrase) -> Relative | None:
    """Return a relative clause in which the noun is the object, if a verb fits."""
    verbs = [
        verb
        for verb in lexicon.VERBS
        if len(verb.slots) == 1
        and phrase.noun.kind in verb.slots[0].kinds
        and not verb.slots[0].preposition.de
        # "denen" would be too rare to be learned
        and not (phrase.plural and verb.slots[0].case == "dat")
    ]
    if not verbs:
        return None
    verb = rng.choice(verbs)
    opener = Phrase("that", lexicon.RELATIVE_FORMS[verb.slots[0].case][column(phrase)])
    clause = action(rng, rng.choice(TWO_TENSES), verb=verb, negation=0.0)
    return Relative(opener, replace(clause, arguments=()))


def relative_sentence(rng: random.Random) -> Pair | None:
    """Return a sentence whose subject has a relative clause."""
    kinds: Kinds = ("person", "person", "animal", "text", "vehicle", "clothes", "thing")
    phrase = some_phrase(rng, (rng.choice(kinds),))
    phrase = replace(phrase, determiner=lexicon.THE)
    by_subject = phrase.noun.kind in lexicon.LIVING and chance(rng, 0.6)
    relative = subject_relative(rng, phrase) if by_subject else object_relative(rng, phrase)
    if relative is None:
        return None
    subject = replace(phrase, relative=relative)
    tense = rng.choice(TWO_TENSES)
    if phrase.noun.kind in lexicon.LIVING and chance(rng, 0.5):
        verbs = [verb for verb in lexicon.VERBS if phrase.noun.kind in verb.subject]
        return statement(action(rng, tense, subject, rng.choice(verbs)))
    subject = replace(subject, adjective=None)
    return statement(quality(rng, tense, subject, phrase.noun))


Recipe = Callable[[random.Random], Pair | None]
RECIPES: tuple[tuple[int, Recipe], ...] = (
    (24, simple_sentence),
    (8, first_person_sentence),
    (7, separable_sentence),
    (11, naming),
    (4, quality_sentence),
    (6, comparison),
    (3, profession),
    (3, existence),
    (4, price),
    (5, yes_no_question),
    (2, why_question),
    (2, where_question),
    (2, who_question),
    (3, object_question),
    (7, reason_sentence),
    (5, condition_sentence),
    (3, when_sentence),
    (7, that_sentence),
    (5, effort_sentence),
    (4, purpose_sentence),
    (5, same_person_sentence),
    (6, same_thing_sentence),
    (4, two_acts_sentence),
    (7, relative_sentence),
)

# ---------------------------------------------------------------------------------------------
# The corpus
# ---------------------------------------------------------------------------------------------

MIN_WORDS, MAX_WORDS = 4, 18
CONTENT = frozenset(
    word for noun in lexicon.NOUNS for word in (noun.en, noun.en_plural) if word
) | frozenset(adjective.en for adjective in lexicon.ADJECTIVES)


def is_good(pair: Pair) -> bool:
    """Return whether a sentence has a fit length and says no noun or adjective twice."""
    words = [word.strip(".,?") for word in pair.src.split()]
    content = [word for word in words if word in CONTENT]
    return MIN_WORDS <= len(words) <= MAX_WORDS and len(set(content)) == len(content)


def sentences(seed: int, count: int) -> list[Pair]:
    """Return `count` sentence pairs with distinct sources, the same for the same seed."""
    rng = random.Random(seed)
    targets: dict[str, str] = {}
    while len(targets) < count:
        pair = weighted(rng, RECIPES)(rng)
        if pair is None or not is_good(pair):
            continue
        assert targets.get(pair.src, pair.tgt) == pair.tgt, f"two translations: {pair}"
        targets[pair.src] = pair.tgt
    return [Pair(src, tgt) for src, tgt in targets.items()]


def corpus() -> dict[str, list[Pair]]:
    """Return the splits of the demo corpus; no source is in two of them."""
    pairs = sentences(SEED, sum(SPLITS.values()))
    splits, start = {}, 0
    for split, count in SPLITS.items():
        splits[split] = pairs[start : start + count]
        start += count
    return splits


def write_corpus(directory: Path) -> None:
    """Write the splits and a README into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, pairs in corpus().items():
        write_lines(directory / f"{split}.en", [pair.src for pair in pairs])
        write_lines(directory / f"{split}.de", [pair.tgt for pair in pairs])
    write_lines(directory / "README.md", readme().splitlines())


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write lines of UTF-8, each ended by a line feed on every system."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def readme() -> str:
    """Return the text that goes with the corpus."""
    counts = ", ".join(f"`{split}` {count}" for split, count in SPLITS.items())
    return f"""# The demo corpus

English and German sentences for a first training run: {counts}
lines, in `*.en` and `*.de`, one sentence per line, UTF-8. It was written for mtrain, is part of
it, and has its licence (MIT).

No line was collected anywhere: `generator/demo_corpus.py` draws all of them from the seed {SEED},
and a test holds that these files equal what it generates. From the root of the repository,
`python data/demo/generator/demo_corpus.py data/demo` writes them again. The package carries the
same files, compressed, under `mtrain/demo/corpus/`. No English sentence is in two splits, none
occurs twice, and each has one translation: the grammar is made so that the English determines the
German.

What a model has to learn here:

- gender, case and number: articles, possessives, `kein`, weak nouns (`der Junge`, `den Jungen`)
- adjective endings: definite, mixed and strong; predicates, comparatives, `so alt wie`
- the verb second in main clauses, after a time or a subordinate clause too
- the verb last after `weil`, `obwohl`, `wenn`, `als`, `dass` and in relative clauses
- separable verbs: `ruft ... an`, `anruft`, `angerufen`, `anzurufen`
- modal verbs, `werden` and the perfect with `haben` or `sein`, each with the verb at the end
- infinitives with `zu` and `um ... zu`
- `nicht` or `kein`, and where `nicht` stands; `gern` for "likes to"
- pronouns that agree with their noun: "it" is `er`, `sie` or `es`, `ihn`, `sie` or `es`
- places with the dative, directions with the accusative or `zu`; `im`, `ins`, `zum`, `zur`
- questions: yes or no, `wer`, `wen`, `wem`, `was`, `wo`, `warum`
- numbers in words and digits

The vocabulary is small, and the sentences are grammatical rather than sensible. A score on this
corpus says that the training works, and nothing about the translation of real text.
"""


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))

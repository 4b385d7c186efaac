"""Hold the rules of a small synchronous grammar of English and German.

Read it from top to bottom: noun phrases, then clauses with their verbs, then whole sentences, each
spelled out once for English and once for German. A sentence is built as a tree of meanings, and
both languages are read off the same tree. The words are in `lexicon`. This module knows
nothing of chance: which sentences are said, and how often, is not for it to know. Nor does it know
of files or of training.
"""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import lexicon
from lexicon import (
    Adjective,
    Agreement,
    Case,
    Determiner,
    Forms,
    Modal,
    Noun,
    Phrase,
    Pronoun,
    Slot,
    Tense,
    Verb,
)


class Pair(NamedTuple):
    """A sentence and its translation."""

    src: str
    tgt: str


NONE = Phrase("", "")

# ---------------------------------------------------------------------------------------------
# Noun phrases
# ---------------------------------------------------------------------------------------------

CONTRACTIONS: dict[str, str] = {
    "in dem": "im",
    "in das": "ins",
    "an dem": "am",
    "zu dem": "zum",
    "zu der": "zur",
    "von dem": "vom",
}


@dataclass(frozen=True)
class Relative:
    """A relative clause: its pronoun, and a clause in which that pronoun's place is empty."""

    opener: Phrase
    clause: "Clause"


@dataclass(frozen=True)
class NounPhrase:
    """A noun with what belongs to it."""

    noun: Noun
    determiner: Determiner = lexicon.THE
    adjective: Adjective | None = None
    plural: bool = False
    relative: Relative | None = None


Nominal = NounPhrase | Pronoun


def agreement(nominal: Nominal) -> Agreement:
    """Return the verb form that a subject calls for."""
    if isinstance(nominal, Pronoun):
        return nominal.agreement
    return "plural" if nominal.plural else "3sg"


def column(phrase: NounPhrase) -> str:
    """Return the column of the declension tables in which a noun phrase is found."""
    return "pl" if phrase.plural else phrase.noun.gender


def pronoun_for(phrase: NounPhrase) -> Pronoun | None:
    """Return the pronoun for a noun phrase; None where languages differ on a girl or a child."""
    if phrase.plural:
        return lexicon.THEY
    if phrase.noun.kind != "person":
        return lexicon.IT[phrase.noun.gender]
    return {"m": lexicon.HE, "f": lexicon.SHE, "n": None}[phrase.noun.gender]


def german_nominal(nominal: Nominal, case: Case) -> str:
    """Return a noun phrase or pronoun in German."""
    if isinstance(nominal, Pronoun):
        return {"nom": nominal.nom, "acc": nominal.acc, "dat": nominal.dat}[case]
    determiner, where = nominal.determiner, column(nominal)
    words = [lexicon.decline_determiner(determiner, case, where)]
    if nominal.adjective:
        words.append(
            lexicon.decline_adjective(nominal.adjective, determiner.declension, case, where)
        )
    words.append(lexicon.decline_noun(nominal.noun, case, nominal.plural))
    return join(*words) + german_relative(nominal.relative)


def german_relative(relative: Relative | None) -> str:
    """Return a relative clause between its two commas; `finish` drops the second at the end."""
    if relative is None:
        return ""
    return f", {join(relative.opener.de, german_subordinate(relative.clause))},"


def english_nominal(nominal: Nominal, subject: bool = False) -> str:
    """Return a noun phrase or pronoun in English."""
    if isinstance(nominal, Pronoun):
        return nominal.en if subject else nominal.en_object
    determiner, noun = nominal.determiner, nominal.noun
    adjective = nominal.adjective.en if nominal.adjective else ""
    text = join(adjective, noun.en_plural if nominal.plural else noun.en)
    article = determiner.en_plural if nominal.plural else determiner.en
    if article == "a" and text[0] in "aeiou":
        article = "an"
    relative = nominal.relative
    tail = [relative.opener.en, english_statement(relative.clause)] if relative else []
    return join(article, text, *tail)


def prepositional(preposition: Phrase, phrase: Nominal, case: Case) -> Phrase:
    """Put a preposition before a noun phrase in both languages."""
    german = join(preposition.de, german_nominal(phrase, case))
    for apart, together in CONTRACTIONS.items():
        german = re.sub(f"^{apart} ", f"{together} ", german)
    return Phrase(join(preposition.en, english_nominal(phrase)), german)


def join(*parts: str) -> str:
    """Join the parts that are not empty by single spaces."""
    return " ".join(part for part in parts if part)


# ---------------------------------------------------------------------------------------------
# Clauses
# ---------------------------------------------------------------------------------------------


class Argument(NamedTuple):
    """An object of a verb and the slot of the verb's frame that it fills."""

    nominal: Nominal
    slot: Slot


@dataclass(frozen=True)
class Clause:
    """A clause before it is put into words.

    `complement` is a predicate or a direction, `adjunct` a place or a companion, `frequency` an
    adverb such as "often". `gladly` is "likes to" in English and "gern" in German.
    """

    subject: Nominal
    verb: Verb
    arguments: tuple[Argument, ...] = ()
    complement: Phrase = NONE
    adjunct: Phrase = NONE
    time: Phrase = NONE
    frequency: Phrase = NONE
    tense: Tense = "present"
    modal: Modal | None = None
    gladly: bool = False
    negated: bool = False


NOBODY = Pronoun("", "", "", "", "", "3sg")


# English: auxiliaries and do-support -----------------------------------------------------------


class VerbGroup(NamedTuple):
    """The English words before "not", and those after it."""

    auxiliary: str
    main: str


def full_group(forms: Forms, rest: str, clause: Clause, inverted: bool) -> VerbGroup:
    """Return the words of a full verb, with "do" where English asks for it."""
    who, tense = agreement(clause.subject), clause.tense
    if not (clause.negated or inverted):
        return VerbGroup("", join(lexicon.finite(forms, who, tense), forms.link, rest))
    do = lexicon.finite(Forms("do", "does", "did"), who, tense)
    return VerbGroup(do, join(forms.base, forms.link, rest))


def verb_group(clause: Clause, inverted: bool = False) -> VerbGroup:
    """Return the English verbs of a clause, split where "not" or a subject may stand."""
    verb, modal, past = clause.verb, clause.modal, clause.tense == "past"
    if clause.tense == "future":
        return VerbGroup("will", verb.en)
    if modal and modal.style == "auxiliary":
        return VerbGroup(modal.en_past if past else modal.en, verb.en)
    if modal and modal.style == "be":
        be = lexicon.be_form(agreement(clause.subject), clause.tense)
        return VerbGroup(be, join(modal.link, verb.en))
    if modal:
        forms = Forms(modal.en, modal.en_third, modal.en_past, modal.link)
        return full_group(forms, verb.en, clause, inverted)
    if clause.gladly:
        return full_group(Forms("like", "likes", "liked", "to"), verb.en, clause, inverted)
    if verb.en == "be":
        return VerbGroup(lexicon.be_form(agreement(clause.subject), clause.tense), "")
    return full_group(Forms(verb.en, verb.en_third, verb.en_past), "", clause, inverted)


def clear_tense(verb: Verb, subject: Nominal, tense: Tense) -> Tense:
    """Return a tense that the English shows: "they read" would be present and past at once."""
    hidden = verb.en == verb.en_past and agreement(subject) != "3sg"
    return "present" if tense == "past" and hidden else tense


def english_objects(clause: Clause) -> str:
    """Return the English objects; a particle stands behind a pronoun and before a noun."""
    words = [
        join(argument.slot.preposition.en, english_nominal(argument.nominal))
        for argument in clause.arguments
    ]
    first_is_pronoun = bool(clause.arguments) and isinstance(clause.arguments[0].nominal, Pronoun)
    words.insert(1 if first_is_pronoun else 0, clause.verb.particle)
    return join(*words)


def english_rest(clause: Clause) -> str:
    """Return what follows the English verbs: objects, complement, place, time."""
    return join(english_objects(clause), clause.complement.en, clause.adjunct.en, clause.time.en)


def english_statement(clause: Clause) -> str:
    """Return a statement in English, without capital and full stop."""
    group = verb_group(clause)
    subject = english_nominal(clause.subject, subject=True)
    negation = "not" if clause.negated else ""
    words = join(subject, group.auxiliary, negation, clause.frequency.en, group.main)
    return join(words, english_rest(clause)).replace("can not ", "cannot ")


def english_question(clause: Clause) -> str:
    """Return a question in English: the auxiliary before the subject."""
    group = verb_group(clause, inverted=True)
    subject = english_nominal(clause.subject, subject=True)
    return join(group.auxiliary, subject, clause.frequency.en, group.main, english_rest(clause))


def english_infinitive(clause: Clause) -> str:
    """Return "to" and the rest of a clause that has no subject of its own."""
    return join("to", clause.verb.en, english_rest(clause))


# German: the sentence bracket -------------------------------------------------------------------


class Bracket(NamedTuple):
    """A German clause in its fields.

    Main clause:  front | finite | subject | middle | prefix or end
    Subordinate:  subject | middle | end | prefix + finite
    """

    subject: str
    finite: str
    middle: str
    end: str
    prefix: str


def bracket(clause: Clause) -> Bracket:
    """Put a clause into the fields of a German sentence."""
    verb, who = clause.verb, agreement(clause.subject)
    subject, middle = german_nominal(clause.subject, "nom"), german_middle(clause)
    if clause.tense == "future":
        werden = {"1sg": "werde", "3sg": "wird", "plural": "werden"}[who]
        return Bracket(subject, werden, middle, verb.infinitive, "")
    if clause.modal:
        modal = lexicon.modal_form(clause.modal, who, clause.tense)
        return Bracket(subject, modal, middle, verb.infinitive, "")
    if clause.tense == "present":
        return Bracket(subject, lexicon.present(verb, who), middle, "", verb.prefix)
    if verb.preterite:
        return Bracket(subject, lexicon.preterite(verb.preterite, who), middle, "", "")
    return Bracket(subject, lexicon.auxiliary(verb, who), middle, verb.participle, "")


def is_indefinite(argument: Argument) -> bool:
    """Return whether an object is new to the hearer: such a one stands late in German."""
    nominal, slot = argument.nominal, argument.slot
    if isinstance(nominal, Pronoun) or slot.preposition.de or slot.case != "acc":
        return False
    return nominal.determiner == lexicon.A or nominal.determiner.declension == "strong"


def says_kein(clause: Clause) -> bool:
    """Return whether the negation goes into the object: "kein Buch", not "nicht ein Buch"."""
    return clause.negated and not clause.gladly and any(map(is_indefinite, clause.arguments))


def german_argument(argument: Argument, negated: bool = False) -> str:
    """Return an object in German, with "kein" for its article if it carries the negation."""
    nominal, slot = argument.nominal, argument.slot
    if negated and isinstance(nominal, NounPhrase):
        nominal = replace(nominal, determiner=lexicon.NO)
    return prepositional(slot.preposition, nominal, slot.case).de


def german_middle(clause: Clause) -> str:
    """Return the middle field: pronouns, time, known objects, "nicht", place, new objects."""
    kein = says_kein(clause)
    nicht = "nicht" if clause.negated and not kein else ""
    pronouns, known, new, late = [], [], [], []
    for argument in clause.arguments:
        if argument.slot.preposition.de:
            late.append(german_argument(argument))
        elif isinstance(argument.nominal, Pronoun):
            pronouns.append(german_argument(argument))
        elif is_indefinite(argument):
            new.append(german_argument(argument, negated=kein))
        else:
            known.append(german_argument(argument))
    time = [clause.time.de, clause.frequency.de]
    # What "nicht" does not deny stands before it: "Er liest das Buch heute nicht."
    opening = [*known, *time, nicht] if nicht else [*time, *known]
    gern = "gern" if clause.gladly else ""
    return join(*pronouns, *opening, gern, clause.adjunct.de, *new, *late, clause.complement.de)


def german_statement(clause: Clause, front: str = "") -> str:
    """Return a main clause in German: the finite verb is second, whatever stands first."""
    subject, finite_verb, middle, end, prefix = bracket(clause)
    first, third = (front, subject) if front else (subject, "")
    return join(first, finite_verb, third, middle, end, prefix)


def german_question(clause: Clause, opener: str = "") -> str:
    """Return a question in German: the finite verb before the subject."""
    subject, finite_verb, middle, end, prefix = bracket(clause)
    return join(opener, finite_verb, subject, middle, end, prefix)


def german_subordinate(clause: Clause) -> str:
    """Return a subordinate clause in German: the finite verb is last, its prefix joined to it."""
    subject, finite_verb, middle, end, prefix = bracket(clause)
    return join(subject, middle, end, prefix + finite_verb)


def german_infinitive(clause: Clause) -> str:
    """Return the infinitive with "zu", which goes between a prefix and its verb."""
    verb = clause.verb
    stem = verb.infinitive.removeprefix(verb.prefix)
    zu = f"{verb.prefix}zu{stem}" if verb.prefix else f"zu {stem}"
    return join(german_middle(clause), zu)


# Whole sentences --------------------------------------------------------------------------------

BECAUSE, ALTHOUGH = Phrase("because", "weil"), Phrase("although", "obwohl")
IF, WHEN = Phrase("if", "wenn"), Phrase("when", "als")
AND, BUT, THAT = Phrase("and", "und"), Phrase("but", "aber"), Phrase("that", "dass")


def finish(text: str, mark: str = ".") -> str:
    """Tidy the commas, begin with a capital and end with a mark."""
    text = text.rstrip(",").replace(",,", ",")
    return text[0].upper() + text[1:] + mark


def statement(clause: Clause, mark: str = ".") -> Pair:
    """Return a main clause as a sentence; with "who" for its subject it is a question."""
    return Pair(finish(english_statement(clause), mark), finish(german_statement(clause), mark))


def fronted(clause: Clause) -> Pair:
    """Return a sentence that begins with its time; German then puts the subject third."""
    time, rest = clause.time, replace(clause, time=Phrase("", ""))
    english = join(time.en, english_statement(rest))
    return Pair(finish(english), finish(german_statement(rest, time.de)))


def question(clause: Clause, opener: Phrase = NONE) -> Pair:
    """Return a question, after a question word if there is one."""
    english = join(opener.en, english_question(clause))
    return Pair(finish(english, "?"), finish(german_question(clause, opener.de), "?"))


def main_then_sub(main: Clause, link: Phrase, sub: Clause) -> Pair:
    """Return a main clause followed by a subordinate clause."""
    comma = "," if link.en == "although" else ""
    english = f"{english_statement(main)}{comma} {link.en} {english_statement(sub)}"
    german = f"{german_statement(main)}, {link.de} {german_subordinate(sub)}"
    return Pair(finish(english), finish(german))


def sub_then_main(link: Phrase, sub: Clause, main: Clause) -> Pair:
    """Return a subordinate clause that takes the first place of the main clause."""
    english = f"{link.en} {english_statement(sub)}, {english_statement(main)}"
    front = f"{link.de} {german_subordinate(sub)},"
    return Pair(finish(english), finish(german_statement(main, front)))


def main_then_main(first: Clause, link: Phrase, second: Clause) -> Pair:
    """Return two main clauses; "und" and "aber" leave the word order alone."""
    comma = "" if link.de == "und" else ","
    english = f"{english_statement(first)}, {link.en} {english_statement(second)}"
    german = f"{german_statement(first)}{comma} {link.de} {german_statement(second)}"
    return Pair(finish(english), finish(german))


def main_then_infinitive(main: Clause, link: Phrase, goal: Clause) -> Pair:
    """Return a main clause followed by an infinitive, after "in order" and "um" or nothing."""
    english = join(english_statement(main), link.en, english_infinitive(goal))
    german = f"{german_statement(main)}, {join(link.de, german_infinitive(goal))}"
    return Pair(finish(english), finish(german))

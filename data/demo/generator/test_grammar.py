"""Hold the words and the rules of the grammar to English and German."""

import grammar
import lexicon
import pytest
from grammar import NONE, Argument, Clause, NounPhrase, Pair, Relative
from lexicon import Case, Determiner, Modal, Phrase, Pronoun

CASES: tuple[Case, ...] = ("nom", "acc", "dat")
NOUNS = {noun.en: noun for noun in lexicon.NOUNS}
ADJECTIVES = {adjective.en: adjective for adjective in lexicon.ADJECTIVES}
VERBS = {verb.infinitive: verb for verb in (*lexicon.VERBS, *lexicon.SPEECH, *lexicon.EFFORT)}
VERBS |= {verb.infinitive: verb for verb in lexicon.VERBS}
MODALS = {modal.plural: modal for modal in lexicon.MODALS}
MY, HIS, HER, OUR, THEIR = lexicon.POSSESSIVES
NUMBERS = {number.de: number for number in lexicon.NUMBERS}


def np(
    noun: str, determiner: Determiner = lexicon.THE, adjective: str = "", plural: bool = False
) -> NounPhrase:
    return NounPhrase(NOUNS[noun], determiner, ADJECTIVES.get(adjective), plural)


def act(subject: NounPhrase | Pronoun, verb: str, *objects: NounPhrase | Pronoun) -> Clause:
    slots = VERBS[verb].slots
    assert len(objects) == len(slots)
    arguments = tuple(Argument(nominal, slot) for nominal, slot in zip(objects, slots, strict=True))
    return Clause(subject, VERBS[verb], arguments)


def but(
    clause: Clause,
    *,
    tense: lexicon.Tense = "present",
    modal: Modal | None = None,
    negated: bool = False,
    gladly: bool = False,
    time: Phrase = NONE,
    frequency: Phrase = NONE,
    adjunct: Phrase = NONE,
    complement: Phrase = NONE,
) -> Clause:
    return Clause(
        clause.subject,
        clause.verb,
        clause.arguments,
        complement,
        adjunct,
        time,
        frequency,
        tense,
        modal,
        gladly,
        negated,
    )


# The words --------------------------------------------------------------------------------------

PARADIGMS = [
    ("man", lexicon.THE, "old", "der alte Mann, den alten Mann, dem alten Mann"),
    ("man", lexicon.A, "old", "ein alter Mann, einen alten Mann, einem alten Mann"),
    ("woman", lexicon.THE, "young", "die junge Frau, die junge Frau, der jungen Frau"),
    ("woman", lexicon.A, "young", "eine junge Frau, eine junge Frau, einer jungen Frau"),
    ("child", lexicon.THIS, "small", "dieses kleine Kind, dieses kleine Kind, diesem kleinen Kind"),
    ("child", MY, "small", "mein kleines Kind, mein kleines Kind, meinem kleinen Kind"),
    ("boy", lexicon.THE, "sad", "der traurige Junge, den traurigen Jungen, dem traurigen Jungen"),
    ("farmer", OUR, "rich", "unser reicher Bauer, unseren reichen Bauern, unserem reichen Bauern"),
    ("student", lexicon.NO, "", "kein Student, keinen Studenten, keinem Studenten"),
    ("neighbour", HER, "", "ihr Nachbar, ihren Nachbarn, ihrem Nachbarn"),
    ("girl", lexicon.A, "tired", "ein müdes Mädchen, ein müdes Mädchen, einem müden Mädchen"),
    ("car", lexicon.THE, "expensive", "das teure Auto, das teure Auto, dem teuren Auto"),
    ("car", lexicon.A, "expensive", "ein teures Auto, ein teures Auto, einem teuren Auto"),
    ("coffee", lexicon.BARE, "hot", "heißer Kaffee, heißen Kaffee, heißem Kaffee"),
    ("milk", lexicon.BARE, "cold", "kalte Milch, kalte Milch, kalter Milch"),
    ("water", lexicon.BARE, "cold", "kaltes Wasser, kaltes Wasser, kaltem Wasser"),
]
PLURAL_PARADIGMS = [
    ("man", lexicon.THE, "old", "die alten Männer, die alten Männer, den alten Männern"),
    ("woman", MY, "", "meine Frauen, meine Frauen, meinen Frauen"),
    ("mother", lexicon.THIS, "", "diese Mütter, diese Mütter, diesen Müttern"),
    ("boy", lexicon.THE, "sad", "die traurigen Jungen, die traurigen Jungen, den traurigen Jungen"),
    ("car", lexicon.NO, "red", "keine roten Autos, keine roten Autos, keinen roten Autos"),
    ("book", lexicon.BARE, "new", "neue Bücher, neue Bücher, neuen Büchern"),
    ("dog", NUMBERS["drei"], "big", "drei große Hunde, drei große Hunde, drei großen Hunden"),
    (
        "friend",
        lexicon.MANY,
        "good",
        "viele gute Freunde, viele gute Freunde, vielen guten Freunden",
    ),
    ("teacher", THEIR, "", "ihre Lehrer, ihre Lehrer, ihren Lehrern"),
    ("key", HIS, "", "seine Schlüssel, seine Schlüssel, seinen Schlüsseln"),
]


@pytest.mark.parametrize(("noun", "determiner", "adjective", "forms"), PARADIGMS)
def test_singular_noun_phrases_decline_as_in_a_german_grammar(
    noun: str, determiner: Determiner, adjective: str, forms: str
) -> None:
    phrase = np(noun, determiner, adjective)
    assert ", ".join(grammar.german_nominal(phrase, case) for case in CASES) == forms


@pytest.mark.parametrize(("noun", "determiner", "adjective", "forms"), PLURAL_PARADIGMS)
def test_plural_noun_phrases_decline_as_in_a_german_grammar(
    noun: str, determiner: Determiner, adjective: str, forms: str
) -> None:
    phrase = np(noun, determiner, adjective, plural=True)
    assert ", ".join(grammar.german_nominal(phrase, case) for case in CASES) == forms


PRESENT = {
    "sein": "bin, ist, sind",
    "haben": "habe, hat, haben",
    "mögen": "mag, mag, mögen",
    "wissen": "weiß, weiß, wissen",
    "lesen": "lese, liest, lesen",
    "warten": "warte, wartet, warten",
    "öffnen": "öffne, öffnet, öffnen",
    "füttern": "füttere, füttert, füttern",
    "wegwerfen": "werfe, wirft, werfen",
    "anrufen": "rufe, ruft, rufen",
    "einladen": "lade, lädt, laden",
    "zurückkommen": "komme, kommt, kommen",
}


@pytest.mark.parametrize(("infinitive", "forms"), PRESENT.items())
def test_verbs_conjugate_as_in_a_german_grammar(infinitive: str, forms: str) -> None:
    verb = lexicon.BE if infinitive == "sein" else VERBS[infinitive]
    people: tuple[lexicon.Agreement, ...] = ("1sg", "3sg", "plural")
    assert ", ".join(lexicon.present(verb, who) for who in people) == forms


def test_prefix_stands_at_the_head_of_infinitive_and_participle() -> None:
    separable = [verb for verb in lexicon.VERBS if verb.prefix]
    assert len(separable) > 10
    for verb in separable:
        assert verb.infinitive.startswith(verb.prefix)
        assert verb.participle.startswith(verb.prefix + "ge")


def test_verbs_of_motion_form_their_perfect_with_sein() -> None:
    with_sein = {verb.infinitive for verb in lexicon.VERBS if verb.perfect_with == "sein"}
    motion = {"gehen", "laufen", "fahren", "aufstehen", "einschlafen", "zurückkommen", "ankommen"}
    assert with_sein == motion


def test_no_english_noun_or_adjective_has_two_translations() -> None:
    for table in (lexicon.NOUNS, lexicon.ADJECTIVES, lexicon.FREQUENCIES, lexicon.SETTINGS):
        assert len({entry.en for entry in table}) == len(table)


@pytest.mark.parametrize(
    ("preposition", "noun", "case", "en", "de"),
    [
        (Phrase("in", "in"), "garden", "dat", "in the garden", "im Garten"),
        (Phrase("into", "in"), "garden", "acc", "into the garden", "in den Garten"),
        (Phrase("into", "in"), "house", "acc", "into the house", "ins Haus"),
        (Phrase("in", "in"), "city", "dat", "in the city", "in der Stadt"),
        (Phrase("to", "zu"), "station", "dat", "to the station", "zum Bahnhof"),
        (Phrase("to", "zu"), "school", "dat", "to the school", "zur Schule"),
        (Phrase("of", "von"), "dog", "dat", "of the dog", "vom Hund"),
        (Phrase("for", "für"), "boy", "acc", "for the boy", "für den Jungen"),
    ],
)
def test_prepositions_take_their_case_and_contract(
    preposition: Phrase, noun: str, case: Case, en: str, de: str
) -> None:
    assert grammar.prepositional(preposition, np(noun), case) == Phrase(en, de)


def test_article_a_is_an_before_a_vowel() -> None:
    assert grammar.english_nominal(np("apple", lexicon.A)) == "an apple"
    assert grammar.english_nominal(np("apple", lexicon.A, "red")) == "a red apple"
    assert grammar.english_nominal(np("dog", lexicon.A, "old")) == "an old dog"


# The sentences ----------------------------------------------------------------------------------

FARMER, WINDOW = np("farmer", adjective="old"), np("window")
OPENS = act(FARMER, "öffnen", WINDOW)
CALLS = act(np("man"), "anrufen", np("woman"))
READS = act(lexicon.SHE, "lesen", np("book", lexicon.A, "new"))
GOES = act(lexicon.WE, "gehen")
TODAY, YESTERDAY, TOMORROW = (
    Phrase("today", "heute"),
    Phrase("yesterday", "gestern"),
    Phrase("tomorrow", "morgen"),
)
TO_PARK = Phrase("to the park", "in den Park")
IN_GARDEN = Phrase("in the garden", "im Garten")
TIRED = Clause(FARMER, lexicon.BE, complement=Phrase("tired", "müde"))

STATEMENTS = [
    # two objects, three cases
    (
        act(np("man"), "geben", np("boy"), np("apple", lexicon.A)),
        "The man gives the boy an apple.",
        "Der Mann gibt dem Jungen einen Apfel.",
    ),
    (
        act(lexicon.I, "helfen", np("student", adjective="sick")),
        "I help the sick student.",
        "Ich helfe dem kranken Studenten.",
    ),
    (
        act(np("woman", plural=True), "danken", lexicon.I),
        "The women thank me.",
        "Die Frauen danken mir.",
    ),
    (
        act(lexicon.WE, "legen", np("key"), np("table")),
        "We lay the key on the table.",
        "Wir legen den Schlüssel auf den Tisch.",
    ),
    (
        act(lexicon.THEY, "warten", np("bus")),
        "They wait for the bus.",
        "Sie warten auf den Bus.",
    ),
    # the perfect, with "haben" and with "sein"
    (
        but(READS, tense="past", time=YESTERDAY),
        "She read a new book yesterday.",
        "Sie hat gestern ein neues Buch gelesen.",
    ),
    (
        but(GOES, tense="past", time=YESTERDAY, complement=TO_PARK),
        "We went to the park yesterday.",
        "Wir sind gestern in den Park gegangen.",
    ),
    # the future and the modal verbs
    (
        but(GOES, tense="future", time=TOMORROW, complement=TO_PARK),
        "We will go to the park tomorrow.",
        "Wir werden morgen in den Park gehen.",
    ),
    (
        but(CALLS, modal=MODALS["können"]),
        "The man can call the woman.",
        "Der Mann kann die Frau anrufen.",
    ),
    (
        but(CALLS, modal=MODALS["müssen"], tense="past"),
        "The man had to call the woman.",
        "Der Mann musste die Frau anrufen.",
    ),
    (
        but(CALLS, modal=MODALS["wollen"], negated=True),
        "The man does not want to call the woman.",
        "Der Mann will die Frau nicht anrufen.",
    ),
    (
        but(CALLS, modal=MODALS["dürfen"]),
        "The man is allowed to call the woman.",
        "Der Mann darf die Frau anrufen.",
    ),
    (
        but(CALLS, modal=MODALS["können"], negated=True),
        "The man cannot call the woman.",
        "Der Mann kann die Frau nicht anrufen.",
    ),
    # separable verbs, and where the English particle stands
    (CALLS, "The man calls the woman.", "Der Mann ruft die Frau an."),
    (
        but(CALLS, tense="past"),
        "The man called the woman.",
        "Der Mann hat die Frau angerufen.",
    ),
    (
        act(lexicon.I, "abholen", np("child")),
        "I pick up the child.",
        "Ich hole das Kind ab.",
    ),
    (act(lexicon.I, "abholen", lexicon.THEY), "I pick them up.", "Ich hole sie ab."),
    (
        act(lexicon.HE, "einschalten", lexicon.IT["f"]),
        "He turns it on.",
        "Er schaltet sie ein.",
    ),
    # "nicht" and "kein"
    (
        but(OPENS, negated=True),
        "The old farmer does not open the window.",
        "Der alte Bauer öffnet das Fenster nicht.",
    ),
    (
        but(OPENS, negated=True, time=TODAY),
        "The old farmer does not open the window today.",
        "Der alte Bauer öffnet das Fenster heute nicht.",
    ),
    (
        but(READS, negated=True),
        "She does not read a new book.",
        "Sie liest kein neues Buch.",
    ),
    (
        but(act(lexicon.I, "trinken", np("milk", lexicon.BARE, "cold")), negated=True),
        "I do not drink cold milk.",
        "Ich trinke keine kalte Milch.",
    ),
    (
        but(act(lexicon.I, "warten", np("train")), negated=True),
        "I do not wait for the train.",
        "Ich warte nicht auf den Zug.",
    ),
    (
        but(GOES, negated=True, complement=TO_PARK),
        "We do not go to the park.",
        "Wir gehen nicht in den Park.",
    ),
    # "gern"
    (
        but(READS, gladly=True),
        "She likes to read a new book.",
        "Sie liest gern ein neues Buch.",
    ),
    (
        but(act(lexicon.WE, "tanzen"), gladly=True, negated=True, adjunct=IN_GARDEN),
        "We do not like to dance in the garden.",
        "Wir tanzen nicht gern im Garten.",
    ),
    # the order of the middle field
    (
        but(OPENS, time=TODAY),
        "The old farmer opens the window today.",
        "Der alte Bauer öffnet heute das Fenster.",
    ),
    (
        but(READS, adjunct=IN_GARDEN, time=TODAY),
        "She reads a new book in the garden today.",
        "Sie liest heute im Garten ein neues Buch.",
    ),
    (
        but(act(lexicon.SHE, "sehen", lexicon.HE), frequency=Phrase("often", "oft")),
        "She often sees him.",
        "Sie sieht ihn oft.",
    ),
    (
        Clause(lexicon.I, lexicon.BE, complement=Phrase("tired", "müde"), negated=True),
        "I am not tired.",
        "Ich bin nicht müde.",
    ),
    (
        Clause(lexicon.WE, lexicon.BE, complement=Phrase("tired", "müde"), tense="past"),
        "We were tired.",
        "Wir waren müde.",
    ),
]


@pytest.mark.parametrize(("clause", "en", "de"), STATEMENTS)
def test_statements_are_as_written_by_hand(clause: Clause, en: str, de: str) -> None:
    assert grammar.statement(clause) == Pair(en, de)


WHO = Pronoun("who", "", "wer", "", "", "3sg")
SENTENCES = [
    # the verb second after a time, and after a subordinate clause
    (
        grammar.fronted(but(OPENS, tense="past", time=YESTERDAY)),
        "Yesterday the old farmer opened the window.",
        "Gestern hat der alte Bauer das Fenster geöffnet.",
    ),
    (
        grammar.fronted(but(CALLS, time=TODAY)),
        "Today the man calls the woman.",
        "Heute ruft der Mann die Frau an.",
    ),
    (
        grammar.sub_then_main(
            grammar.BECAUSE, TIRED, but(act(lexicon.HE, "öffnen", WINDOW), negated=True)
        ),
        "Because the old farmer is tired, he does not open the window.",
        "Weil der alte Bauer müde ist, öffnet er das Fenster nicht.",
    ),
    # the verb last
    (
        grammar.main_then_sub(READS, grammar.ALTHOUGH, TIRED),
        "She reads a new book, although the old farmer is tired.",
        "Sie liest ein neues Buch, obwohl der alte Bauer müde ist.",
    ),
    (
        grammar.main_then_sub(READS, grammar.BECAUSE, CALLS),
        "She reads a new book because the man calls the woman.",
        "Sie liest ein neues Buch, weil der Mann die Frau anruft.",
    ),
    (
        grammar.sub_then_main(grammar.WHEN, but(CALLS, tense="past"), but(READS, tense="past")),
        "When the man called the woman, she read a new book.",
        "Als der Mann die Frau angerufen hat, hat sie ein neues Buch gelesen.",
    ),
    (
        grammar.sub_then_main(grammar.IF, but(CALLS, modal=MODALS["wollen"]), READS),
        "If the man wants to call the woman, she reads a new book.",
        "Wenn der Mann die Frau anrufen will, liest sie ein neues Buch.",
    ),
    (
        grammar.main_then_sub(act(lexicon.I, "wissen"), grammar.THAT, but(CALLS, negated=True)),
        "I know that the man does not call the woman.",
        "Ich weiß, dass der Mann die Frau nicht anruft.",
    ),
    # infinitives
    (
        grammar.main_then_infinitive(act(lexicon.I, "versuchen"), NONE, OPENS),
        "I try to open the window.",
        "Ich versuche, das Fenster zu öffnen.",
    ),
    (
        grammar.main_then_infinitive(
            but(GOES, complement=TO_PARK), Phrase("in order", "um"), CALLS
        ),
        "We go to the park in order to call the woman.",
        "Wir gehen in den Park, um die Frau anzurufen.",
    ),
    # two main clauses
    (
        grammar.main_then_main(CALLS, grammar.BUT, but(act(lexicon.SHE, "schlafen"))),
        "The man calls the woman, but she sleeps.",
        "Der Mann ruft die Frau an, aber sie schläft.",
    ),
    (
        grammar.main_then_main(CALLS, grammar.AND, READS),
        "The man calls the woman, and she reads a new book.",
        "Der Mann ruft die Frau an und sie liest ein neues Buch.",
    ),
    # questions
    (
        grammar.question(OPENS),
        "Does the old farmer open the window?",
        "Öffnet der alte Bauer das Fenster?",
    ),
    (
        grammar.question(but(CALLS, tense="past"), Phrase("why", "warum")),
        "Why did the man call the woman?",
        "Warum hat der Mann die Frau angerufen?",
    ),
    (
        grammar.question(but(CALLS, modal=MODALS["sollten"])),
        "Should the man call the woman?",
        "Sollte der Mann die Frau anrufen?",
    ),
    (
        grammar.statement(act(WHO, "helfen", np("child")), "?"),
        "Who helps the child?",
        "Wer hilft dem Kind?",
    ),
    # relative clauses
    (
        grammar.statement(
            Clause(
                NounPhrase(
                    NOUNS["boy"],
                    relative=Relative(
                        NONE,
                        act(
                            Pronoun("who", "", "der", "", "", "3sg"),
                            "einladen",
                            np("aunt", MY),
                        ),
                    ),
                ),
                lexicon.BE,
                complement=Phrase("sad", "traurig"),
            )
        ),
        "The boy who invites my aunt is sad.",
        "Der Junge, der meine Tante einlädt, ist traurig.",
    ),
    (
        grammar.statement(
            Clause(
                NounPhrase(
                    NOUNS["hat"],
                    relative=Relative(
                        Phrase("that", "den"),
                        Clause(lexicon.SHE, VERBS["kaufen"], tense="past"),
                    ),
                ),
                lexicon.BE,
                complement=Phrase("too big", "zu groß"),
            )
        ),
        "The hat that she bought is too big.",
        "Der Hut, den sie gekauft hat, ist zu groß.",
    ),
]


@pytest.mark.parametrize(("pair", "en", "de"), SENTENCES)
def test_sentences_are_as_written_by_hand(pair: Pair, en: str, de: str) -> None:
    assert pair == Pair(en, de)


@pytest.mark.parametrize(
    ("noun", "plural", "nominative", "accusative"),
    [
        ("apple", False, "er", "ihn"),
        ("lamp", False, "sie", "sie"),
        ("book", False, "es", "es"),
        ("book", True, "sie", "sie"),
        ("farmer", False, "er", "ihn"),
        ("woman", False, "sie", "sie"),
    ],
)
def test_a_pronoun_has_the_gender_of_its_noun(
    noun: str, plural: bool, nominative: str, accusative: str
) -> None:
    pronoun = grammar.pronoun_for(np(noun, plural=plural))
    assert pronoun is not None
    assert (pronoun.nom, pronoun.acc) == (nominative, accusative)


def test_no_pronoun_stands_for_a_girl_or_a_child() -> None:
    assert grammar.pronoun_for(np("girl")) is None
    assert grammar.pronoun_for(np("child")) is None


def test_a_past_that_english_does_not_show_becomes_the_present() -> None:
    lesen = VERBS["lesen"]
    assert grammar.clear_tense(lesen, lexicon.THEY, "past") == "present"
    assert grammar.clear_tense(lesen, lexicon.SHE, "past") == "past"
    assert grammar.clear_tense(VERBS["kaufen"], lexicon.THEY, "past") == "past"

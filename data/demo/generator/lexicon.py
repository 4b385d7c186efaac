"""Hold the words of the demo corpus, English and German side by side, and how they change.

Every English word in its frame has exactly one German counterpart, so that an English sentence
determines its translation. The rules that join the words are in `grammar`.
"""

from typing import Literal, NamedTuple

Gender = Literal["m", "f", "n"]
Case = Literal["nom", "acc", "dat"]
Tense = Literal["present", "past", "future"]
Agreement = Literal["1sg", "3sg", "plural"]
Declension = Literal["definite", "mixed", "strong"]
Kind = Literal[
    "person", "animal", "food", "meal", "drink", "text", "press", "device", "vehicle",
    "transport", "thing", "clothes", "opening", "room", "place", "surface",
]  # fmt: skip
Kinds = tuple[Kind, ...]


class Phrase(NamedTuple):
    """A piece of text in both languages."""

    en: str
    de: str


class Noun(NamedTuple):
    """A noun; a weak noun takes its plural form everywhere but in the nominative singular."""

    en: str
    en_plural: str
    gender: Gender
    de: str
    de_plural: str
    kind: Kind
    weak: bool = False


class Determiner(NamedTuple):
    """A determiner: the German word or stem, and which adjective endings follow it."""

    en: str
    en_plural: str
    de: str
    declension: Declension


class Adjective(NamedTuple):
    """An adjective; `stem` is the form before endings where it is not the word itself."""

    en: str
    de: str
    kinds: Kinds
    en_comparative: str = ""
    de_comparative: str = ""
    stem: str = ""


class Pronoun(NamedTuple):
    """A pronoun in the forms of both languages."""

    en: str
    en_object: str
    nom: str
    acc: str
    dat: str
    agreement: Agreement


class Slot(NamedTuple):
    """A place for an object: which nouns fit, the German case, and the prepositions if any."""

    kinds: Kinds
    case: Case = "acc"
    preposition: Phrase = Phrase("", "")


class Verb(NamedTuple):
    """A verb with its forms and its valency.

    `de_third` is without the separable prefix, `infinitive` and `participle` are with it. A verb
    with a `preterite` uses it for the past; every other verb uses the perfect.
    """

    en: str
    en_third: str
    en_past: str
    infinitive: str
    de_third: str
    participle: str
    slots: tuple[Slot, ...] = ()
    subject: Kinds = ("person",)
    site: Literal["", "location", "direction", "surface"] = ""
    perfect_with: Literal["haben", "sein"] = "haben"
    prefix: str = ""
    particle: str = ""
    preterite: str = ""
    de_first: str = ""


class Modal(NamedTuple):
    """A modal verb: in English an auxiliary, a form of "be", or a full verb before "to"."""

    style: Literal["auxiliary", "be", "full"]
    en: str
    en_third: str
    en_past: str
    link: str
    singular: str
    plural: str
    preterite: str


class Setting(NamedTuple):
    """A time expression and the tenses that it goes with."""

    en: str
    de: str
    tenses: tuple[Tense, ...]


class Site(NamedTuple):
    """A noun that names a place, with the prepositions for being there and for going there."""

    noun: Noun
    at: Phrase
    to: Phrase
    to_case: Case


# fmt: off
PEOPLE: tuple[Noun, ...] = (
    Noun("man", "men", "m", "Mann", "Männer", "person"),
    Noun("woman", "women", "f", "Frau", "Frauen", "person"),
    Noun("child", "children", "n", "Kind", "Kinder", "person"),
    Noun("boy", "boys", "m", "Junge", "Jungen", "person", weak=True),
    Noun("girl", "girls", "n", "Mädchen", "Mädchen", "person"),
    Noun("teacher", "teachers", "m", "Lehrer", "Lehrer", "person"),
    Noun("farmer", "farmers", "m", "Bauer", "Bauern", "person", weak=True),
    Noun("doctor", "doctors", "m", "Arzt", "Ärzte", "person"),
    Noun("student", "students", "m", "Student", "Studenten", "person", weak=True),
    Noun("neighbour", "neighbours", "m", "Nachbar", "Nachbarn", "person", weak=True),
    Noun("mother", "mothers", "f", "Mutter", "Mütter", "person"),
    Noun("father", "fathers", "m", "Vater", "Väter", "person"),
    Noun("daughter", "daughters", "f", "Tochter", "Töchter", "person"),
    Noun("son", "sons", "m", "Sohn", "Söhne", "person"),
    Noun("sister", "sisters", "f", "Schwester", "Schwestern", "person"),
    Noun("brother", "brothers", "m", "Bruder", "Brüder", "person"),
    Noun("aunt", "aunts", "f", "Tante", "Tanten", "person"),
    Noun("friend", "friends", "m", "Freund", "Freunde", "person"),
)

ANIMALS: tuple[Noun, ...] = (
    Noun("dog", "dogs", "m", "Hund", "Hunde", "animal"),
    Noun("cat", "cats", "f", "Katze", "Katzen", "animal"),
    Noun("horse", "horses", "n", "Pferd", "Pferde", "animal"),
    Noun("cow", "cows", "f", "Kuh", "Kühe", "animal"),
    Noun("bird", "birds", "m", "Vogel", "Vögel", "animal"),
)

GOODS: tuple[Noun, ...] = (
    Noun("apple", "apples", "m", "Apfel", "Äpfel", "food"),
    Noun("pear", "pears", "f", "Birne", "Birnen", "food"),
    Noun("cake", "cakes", "m", "Kuchen", "Kuchen", "food"),
    Noun("egg", "eggs", "n", "Ei", "Eier", "meal"),
    Noun("potato", "potatoes", "f", "Kartoffel", "Kartoffeln", "meal"),
    Noun("soup", "soups", "f", "Suppe", "Suppen", "meal"),
    Noun("milk", "", "f", "Milch", "", "drink"),
    Noun("water", "", "n", "Wasser", "", "drink"),
    Noun("coffee", "", "m", "Kaffee", "", "drink"),
    Noun("tea", "", "m", "Tee", "", "drink"),
    Noun("book", "books", "n", "Buch", "Bücher", "text"),
    Noun("letter", "letters", "m", "Brief", "Briefe", "text"),
    Noun("story", "stories", "f", "Geschichte", "Geschichten", "text"),
    Noun("poem", "poems", "n", "Gedicht", "Gedichte", "text"),
    Noun("newspaper", "newspapers", "f", "Zeitung", "Zeitungen", "press"),
    Noun("lamp", "lamps", "f", "Lampe", "Lampen", "device"),
    Noun("computer", "computers", "m", "Computer", "Computer", "device"),
    Noun("radio", "radios", "n", "Radio", "Radios", "device"),
    Noun("machine", "machines", "f", "Maschine", "Maschinen", "device"),
    Noun("car", "cars", "n", "Auto", "Autos", "vehicle"),
    Noun("bicycle", "bicycles", "n", "Fahrrad", "Fahrräder", "vehicle"),
    Noun("bus", "buses", "m", "Bus", "Busse", "transport"),
    Noun("train", "trains", "m", "Zug", "Züge", "transport"),
    Noun("key", "keys", "m", "Schlüssel", "Schlüssel", "thing"),
    Noun("ball", "balls", "m", "Ball", "Bälle", "thing"),
    Noun("bag", "bags", "f", "Tasche", "Taschen", "thing"),
    Noun("picture", "pictures", "n", "Bild", "Bilder", "thing"),
    Noun("flower", "flowers", "f", "Blume", "Blumen", "thing"),
    Noun("gift", "gifts", "n", "Geschenk", "Geschenke", "thing"),
    Noun("hat", "hats", "m", "Hut", "Hüte", "clothes"),
    Noun("coat", "coats", "m", "Mantel", "Mäntel", "clothes"),
    Noun("shirt", "shirts", "n", "Hemd", "Hemden", "clothes"),
    Noun("jacket", "jackets", "f", "Jacke", "Jacken", "clothes"),
    Noun("door", "doors", "f", "Tür", "Türen", "opening"),
    Noun("window", "windows", "n", "Fenster", "Fenster", "opening"),
    Noun("bottle", "bottles", "f", "Flasche", "Flaschen", "opening"),
    Noun("table", "tables", "m", "Tisch", "Tische", "surface"),
    Noun("chair", "chairs", "m", "Stuhl", "Stühle", "surface"),
    Noun("bed", "beds", "n", "Bett", "Betten", "surface"),
)

IN, INTO = Phrase("in", "in"), Phrase("into", "in")
ON, TO = Phrase("on", "auf"), Phrase("to", "zu")
SITES: tuple[Site, ...] = (
    Site(Noun("kitchen", "kitchens", "f", "Küche", "Küchen", "room"), IN, INTO, "acc"),
    Site(Noun("house", "houses", "n", "Haus", "Häuser", "room"), IN, INTO, "acc"),
    Site(Noun("office", "offices", "n", "Büro", "Büros", "room"), IN, INTO, "acc"),
    Site(Noun("garden", "gardens", "m", "Garten", "Gärten", "place"), IN, INTO, "acc"),
    Site(Noun("city", "cities", "f", "Stadt", "Städte", "place"), IN, INTO, "acc"),
    Site(Noun("forest", "forests", "m", "Wald", "Wälder", "place"), IN, INTO, "acc"),
    Site(Noun("park", "parks", "m", "Park", "Parks", "place"), IN, Phrase("to", "in"), "acc"),
    Site(Noun("hotel", "hotels", "n", "Hotel", "Hotels", "place"), IN, TO, "dat"),
    Site(Noun("museum", "museums", "n", "Museum", "Museen", "place"),
         IN, Phrase("to", "in"), "acc"),
    Site(Noun("school", "schools", "f", "Schule", "Schulen", "place"),
         Phrase("at", "in"), TO, "dat"),
    Site(Noun("station", "stations", "m", "Bahnhof", "Bahnhöfe", "place"),
         Phrase("at", "an"), TO, "dat"),
    Site(Noun("market", "markets", "m", "Markt", "Märkte", "place"),
         Phrase("at", "auf"), TO, "dat"),
    Site(Noun("bridge", "bridges", "f", "Brücke", "Brücken", "place"), ON, TO, "dat"),
)
NOUNS: tuple[Noun, ...] = PEOPLE + ANIMALS + GOODS + tuple(site.noun for site in SITES)

# Places beside something, with the dative: where a thing is.
BESIDE: tuple[Phrase, ...] = (
    Phrase("under", "unter"), Phrase("next to", "neben"), Phrase("behind", "hinter"),
    Phrase("in front of", "vor"),
)

THE = Determiner("the", "the", "d", "definite")
THIS = Determiner("this", "these", "dies", "definite")
A = Determiner("a", "", "ein", "mixed")
BARE = Determiner("", "", "", "strong")
MANY = Determiner("", "many", "viele", "strong")
NO = Determiner("no", "no", "kein", "mixed")
POSSESSIVES: tuple[Determiner, ...] = (
    Determiner("my", "my", "mein", "mixed"),
    Determiner("his", "his", "sein", "mixed"),
    Determiner("her", "her", "ihr", "mixed"),
    Determiner("our", "our", "unser", "mixed"),
    Determiner("their", "their", "ihr", "mixed"),
)
NUMBERS: tuple[Determiner, ...] = (
    Determiner("", "two", "zwei", "strong"), Determiner("", "three", "drei", "strong"),
    Determiner("", "four", "vier", "strong"), Determiner("", "five", "fünf", "strong"),
    Determiner("", "six", "sechs", "strong"), Determiner("", "seven", "sieben", "strong"),
    Determiner("", "eight", "acht", "strong"), Determiner("", "ten", "zehn", "strong"),
    Determiner("", "twelve", "zwölf", "strong"), Determiner("", "twenty", "zwanzig", "strong"),
)
PRICES: tuple[int, ...] = (15, 20, 25, 30, 40, 50, 80, 100, 120, 250)

I = Pronoun("I", "me", "ich", "mich", "mir", "1sg")  # noqa: E741
WE = Pronoun("we", "us", "wir", "uns", "uns", "plural")
HE = Pronoun("he", "him", "er", "ihn", "ihm", "3sg")
SHE = Pronoun("she", "her", "sie", "sie", "ihr", "3sg")
THEY = Pronoun("they", "them", "sie", "sie", "ihnen", "plural")
# "it" in German has the gender of the noun that it stands for.
IT: dict[Gender, Pronoun] = {
    "m": Pronoun("it", "it", "er", "ihn", "ihm", "3sg"),
    "f": Pronoun("it", "it", "sie", "sie", "ihr", "3sg"),
    "n": Pronoun("it", "it", "es", "es", "ihm", "3sg"),
}

LIVING: Kinds = ("person", "animal")
OBJECTS: Kinds = ("text", "press", "device", "vehicle", "thing", "clothes")
EDIBLE: Kinds = ("food", "meal")
BUILT: Kinds = ("room", "place")
SOLID: Kinds = ("device", "vehicle", "thing", "clothes", "opening", "surface")
ADJECTIVES: tuple[Adjective, ...] = (
    Adjective("old", "alt", (*LIVING, *OBJECTS, *BUILT, "surface"), "older", "älter"),
    Adjective("young", "jung", LIVING, "younger", "jünger"),
    Adjective("small", "klein", (*LIVING, *SOLID, *BUILT), "smaller", "kleiner"),
    Adjective("big", "groß", ("animal", *SOLID, *BUILT, *EDIBLE), "bigger", "größer"),
    Adjective("strong", "stark", LIVING, "stronger", "stärker"),
    Adjective("clever", "klug", LIVING, "cleverer", "klüger"),
    Adjective("poor", "arm", ("person",), "poorer", "ärmer"),
    Adjective("rich", "reich", ("person",), "richer", "reicher"),
    Adjective("tired", "müde", LIVING),
    Adjective("hungry", "hungrig", LIVING),
    Adjective("sick", "krank", LIVING),
    Adjective("sad", "traurig", ("person",), "sadder", "trauriger"),
    Adjective("happy", "glücklich", ("person",), "happier", "glücklicher"),
    Adjective("friendly", "freundlich", ("person",), "friendlier", "freundlicher"),
    Adjective("quiet", "ruhig", (*LIVING, *BUILT), "quieter", "ruhiger"),
    Adjective("new", "neu", (*OBJECTS, *BUILT, "transport", "surface"), "newer", "neuer"),
    Adjective("expensive", "teuer", (*OBJECTS, "food", "transport"),
              "more expensive", "teurer", "teur"),
    Adjective("cheap", "billig", (*OBJECTS, *EDIBLE, "surface"), "cheaper", "billiger"),
    Adjective("heavy", "schwer", SOLID, "heavier", "schwerer"),
    Adjective("beautiful", "schön", ("thing", "clothes", *BUILT, "animal"),
              "more beautiful", "schöner"),
    Adjective("long", "lang", ("text", "transport"), "longer", "länger"),
    Adjective("interesting", "interessant", ("text", "press"),
              "more interesting", "interessanter"),
    Adjective("boring", "langweilig", ("text", "press"), "more boring", "langweiliger"),
    Adjective("fast", "schnell", ("vehicle", "transport", "animal"),
              "faster", "schneller"),
    Adjective("red", "rot", (*SOLID, "food")),
    Adjective("green", "grün", (*SOLID, "food")),
    Adjective("black", "schwarz", ("animal", *SOLID)),
    Adjective("white", "weiß", ("animal", *SOLID)),
    Adjective("fresh", "frisch", ("food", "meal")),
    Adjective("cold", "kalt", ("drink", "meal")),
    Adjective("hot", "heiß", ("drink", "meal")),
    Adjective("good", "gut", (*EDIBLE, "drink", "text", "person")),
)

WARES: Kinds = (*EDIBLE, "text", "press", "device", "vehicle", "thing", "clothes", "surface")
PORTABLE: Kinds = ("text", "press", "thing", "clothes")
PERSON = Slot(("person",))
TO_PERSON = Slot(("person",), "dat")


def _with(kinds: Kinds, case: Case, en: str, de: str) -> tuple[Slot, ...]:
    """Return the frame of a verb whose one object stands behind a preposition."""
    return (Slot(kinds, case, Phrase(en, de)),)


BE = Verb("be", "is", "was", "sein", "ist", "gewesen", perfect_with="sein",
          preterite="war", de_first="bin")
VERBS: tuple[Verb, ...] = (
    # one object in the accusative
    Verb("eat", "eats", "ate", "essen", "isst", "gegessen", (Slot(EDIBLE),),
         LIVING, site="location"),
    Verb("drink", "drinks", "drank", "trinken", "trinkt", "getrunken", (Slot(("drink",)),),
         site="location"),
    Verb("cook", "cooks", "cooked", "kochen", "kocht", "gekocht", (Slot(("meal",)),),
         site="location"),
    Verb("buy", "buys", "bought", "kaufen", "kauft", "gekauft", (Slot((*WARES, "drink")),),
         site="location"),
    Verb("sell", "sells", "sold", "verkaufen", "verkauft", "verkauft", (Slot(WARES),),
         site="location"),
    Verb("read", "reads", "read", "lesen", "liest", "gelesen", (Slot(("text", "press")),),
         site="location"),
    Verb("write", "writes", "wrote", "schreiben", "schreibt", "geschrieben", (Slot(("text",)),),
         site="location"),
    Verb("find", "finds", "found", "finden", "findet", "gefunden",
         (Slot(("thing", "clothes", "animal")),), site="location"),
    Verb("look for", "looks for", "looked for", "suchen", "sucht", "gesucht",
         (Slot((*LIVING, "thing", "clothes")),), site="location"),
    Verb("see", "sees", "saw", "sehen", "sieht", "gesehen", (Slot(LIVING),), site="location"),
    Verb("visit", "visits", "visited", "besuchen", "besucht", "besucht", (PERSON,)),
    Verb("know", "knows", "knew", "kennen", "kennt", "gekannt", (PERSON,), preterite="kannte"),
    Verb("repair", "repairs", "repaired", "reparieren", "repariert", "repariert",
         (Slot(("device", "vehicle")),), site="location"),
    Verb("wash", "washes", "washed", "waschen", "wäscht", "gewaschen",
         (Slot(("clothes", "vehicle")),)),
    Verb("open", "opens", "opened", "öffnen", "öffnet", "geöffnet", (Slot(("opening",)),)),
    Verb("close", "closes", "closed", "schließen", "schließt", "geschlossen",
         (Slot(("opening",)),)),
    Verb("wear", "wears", "wore", "tragen", "trägt", "getragen", (Slot(("clothes",)),)),
    Verb("need", "needs", "needed", "brauchen", "braucht", "gebraucht", (Slot(SOLID),)),
    Verb("forget", "forgets", "forgot", "vergessen", "vergisst", "vergessen",
         (Slot(PORTABLE),)),
    Verb("lose", "loses", "lost", "verlieren", "verliert", "verloren",
         (Slot(("thing", "clothes")),), site="location"),
    Verb("feed", "feeds", "fed", "füttern", "füttert", "gefüttert", (Slot(("animal",)),),
         site="location"),
    Verb("have", "has", "had", "haben", "hat", "gehabt",
         (Slot((*SOLID, "animal")),), preterite="hatte"),
    Verb("like", "likes", "liked", "mögen", "mag", "gemocht",
         (Slot((*LIVING, *EDIBLE, "text", "clothes")),), preterite="mochte", de_first="mag"),
    # one object in the dative
    Verb("help", "helps", "helped", "helfen", "hilft", "geholfen", (TO_PERSON,),
         site="location"),
    Verb("thank", "thanks", "thanked", "danken", "dankt", "gedankt", (TO_PERSON,)),
    Verb("answer", "answers", "answered", "antworten", "antwortet", "geantwortet",
         (TO_PERSON,)),
    Verb("belong to", "belongs to", "belonged to", "gehören", "gehört", "gehört", (TO_PERSON,),
         (*OBJECTS, "surface", "animal")),
    # two objects
    Verb("give", "gives", "gave", "geben", "gibt", "gegeben",
         (TO_PERSON, Slot((*PORTABLE, *EDIBLE)))),
    Verb("show", "shows", "showed", "zeigen", "zeigt", "gezeigt", (TO_PERSON, Slot(OBJECTS))),
    Verb("send", "sends", "sent", "schicken", "schickt", "geschickt",
         (TO_PERSON, Slot(("text", "thing", "clothes")))),
    Verb("lay", "lays", "laid", "legen", "legt", "gelegt",
         (Slot(("press", "thing", "clothes")),
          Slot(("surface",), "acc", Phrase("on", "auf")))),
    # an object behind a preposition
    Verb("wait", "waits", "waited", "warten", "wartet", "gewartet",
         _with(("person", "transport"), "acc", "for", "auf"), site="location"),
    Verb("talk", "talks", "talked", "sprechen", "spricht", "gesprochen",
         _with((*LIVING, "text"), "acc", "about", "über")),
    Verb("dream", "dreams", "dreamed", "träumen", "träumt", "geträumt",
         _with((*LIVING, *OBJECTS), "dat", "of", "von")),
    Verb("play", "plays", "played", "spielen", "spielt", "gespielt",
         _with((*LIVING,), "dat", "with", "mit"), site="location"),
    # no object
    Verb("sleep", "sleeps", "slept", "schlafen", "schläft", "geschlafen", (), LIVING,
         site="location"),
    Verb("work", "works", "worked", "arbeiten", "arbeitet", "gearbeitet", site="location"),
    Verb("sing", "sings", "sang", "singen", "singt", "gesungen", site="location"),
    Verb("dance", "dances", "danced", "tanzen", "tanzt", "getanzt", site="location"),
    Verb("sit", "sits", "sat", "sitzen", "sitzt", "gesessen", (), LIVING, site="surface",
         preterite="saß"),
    Verb("lie", "lies", "lay", "liegen", "liegt", "gelegen", (),
         ("press", "thing", "clothes"), site="surface",
         preterite="lag"),
    Verb("stand", "stands", "stood", "stehen", "steht", "gestanden", (),
         ("vehicle", "surface", "device"), site="surface", preterite="stand"),
    # motion
    Verb("go", "goes", "went", "gehen", "geht", "gegangen", (), site="direction",
         perfect_with="sein"),
    Verb("run", "runs", "ran", "laufen", "läuft", "gelaufen", (), LIVING, site="direction",
         perfect_with="sein"),
    Verb("drive", "drives", "drove", "fahren", "fährt", "gefahren", (), site="direction",
         perfect_with="sein"),
    # separable verbs
    Verb("get", "gets", "got", "aufstehen", "steht", "aufgestanden", (),
         perfect_with="sein", prefix="auf", particle="up"),
    Verb("fall", "falls", "fell", "einschlafen", "schläft", "eingeschlafen", (), LIVING,
         perfect_with="sein", prefix="ein", particle="asleep"),
    Verb("come", "comes", "came", "zurückkommen", "kommt", "zurückgekommen", (),
         LIVING, perfect_with="sein", prefix="zurück", particle="back"),
    Verb("arrive", "arrives", "arrived", "ankommen", "kommt", "angekommen", (),
         ("person", "transport"), site="location", perfect_with="sein", prefix="an"),
    Verb("watch", "watches", "watched", "fernsehen", "sieht", "ferngesehen", (),
         site="location", prefix="fern", particle="television"),
    Verb("call", "calls", "called", "anrufen", "ruft", "angerufen", (PERSON,), prefix="an"),
    Verb("invite", "invites", "invited", "einladen", "lädt", "eingeladen", (PERSON,),
         prefix="ein"),
    Verb("pick", "picks", "picked", "abholen", "holt", "abgeholt", (PERSON,),
         site="location", prefix="ab", particle="up"),
    Verb("tidy", "tidies", "tidied", "aufräumen", "räumt", "aufgeräumt", (Slot(("room",)),),
         prefix="auf", particle="up"),
    Verb("throw", "throws", "threw", "wegwerfen", "wirft", "weggeworfen", (Slot(PORTABLE),),
         prefix="weg", particle="away"),
    Verb("turn", "turns", "turned", "einschalten", "schaltet", "eingeschaltet",
         (Slot(("device",)),), prefix="ein", particle="on"),
    Verb("turn", "turns", "turned", "ausschalten", "schaltet", "ausgeschaltet",
         (Slot(("device",)),), prefix="aus", particle="off"),
    Verb("put", "puts", "put", "anziehen", "zieht", "angezogen", (Slot(("clothes",)),),
         prefix="an", particle="on"),
    Verb("listen to", "listens to", "listened to", "zuhören", "hört", "zugehört", (TO_PERSON,),
         prefix="zu"),
)
COST = Verb("cost", "costs", "cost", "kosten", "kostet", "gekostet", (),
            (*OBJECTS, *EDIBLE, "surface"))
THERE_IS = Verb("be", "is", "was", "geben", "gibt", "gegeben", preterite="gab")

# Verbs with a clause as their object: "says that ...", "tries to ...".
SPEECH: tuple[Verb, ...] = (
    Verb("say", "says", "said", "sagen", "sagt", "gesagt"),
    Verb("think", "thinks", "thought", "denken", "denkt", "gedacht"),
    Verb("believe", "believes", "believed", "glauben", "glaubt", "geglaubt"),
    Verb("know", "knows", "knew", "wissen", "weiß", "gewusst", preterite="wusste",
         de_first="weiß"),
    Verb("hope", "hopes", "hoped", "hoffen", "hofft", "gehofft"),
)
EFFORT: tuple[Verb, ...] = (
    Verb("try", "tries", "tried", "versuchen", "versucht", "versucht"),
    Verb("forget", "forgets", "forgot", "vergessen", "vergisst", "vergessen"),
    Verb("hope", "hopes", "hoped", "hoffen", "hofft", "gehofft"),
)

MODALS: tuple[Modal, ...] = (
    Modal("auxiliary", "can", "can", "could", "", "kann", "können", "konnte"),
    Modal("auxiliary", "should", "should", "", "", "sollte", "sollten", ""),
    Modal("full", "have", "has", "had", "to", "muss", "müssen", "musste"),
    Modal("full", "want", "wants", "wanted", "to", "will", "wollen", "wollte"),
    Modal("be", "be", "is", "was", "allowed to", "darf", "dürfen", "durfte"),
)

SETTINGS: tuple[Setting, ...] = (
    Setting("every day", "jeden Tag", ("present",)),
    Setting("in the evening", "am Abend", ("present",)),
    Setting("in the morning", "am Morgen", ("present",)),
    Setting("in winter", "im Winter", ("present",)),
    Setting("today", "heute", ("present", "past", "future")),
    Setting("yesterday", "gestern", ("past",)),
    Setting("last week", "letzte Woche", ("past",)),
    Setting("last year", "letztes Jahr", ("past",)),
    Setting("on Monday", "am Montag", ("past", "future")),
    Setting("on Sunday", "am Sonntag", ("past", "future")),
    Setting("tomorrow", "morgen", ("future",)),
    Setting("next week", "nächste Woche", ("future",)),
    Setting("soon", "bald", ("future",)),
)
FREQUENCIES: tuple[Phrase, ...] = (
    Phrase("often", "oft"), Phrase("always", "immer"), Phrase("sometimes", "manchmal"),
    Phrase("never", "nie"), Phrase("rarely", "selten"),
)
DEGREES: tuple[Phrase, ...] = (
    Phrase("", ""), Phrase("", ""), Phrase("very", "sehr"), Phrase("too", "zu"),
    Phrase("still", "noch"),
)
# fmt: on

# How words change: German nouns, determiners and adjectives -------------------------------------

# What a determiner of each declension adds to its stem, by case: m, f, n, pl.
DEFINITE_ARTICLE: dict[Case, dict[str, str]] = {
    "nom": {"m": "der", "f": "die", "n": "das", "pl": "die"},
    "acc": {"m": "den", "f": "die", "n": "das", "pl": "die"},
    "dat": {"m": "dem", "f": "der", "n": "dem", "pl": "den"},
}
DEFINITE_ENDINGS: dict[Case, dict[str, str]] = {
    "nom": {"m": "er", "f": "e", "n": "es", "pl": "e"},
    "acc": {"m": "en", "f": "e", "n": "es", "pl": "e"},
    "dat": {"m": "em", "f": "er", "n": "em", "pl": "en"},
}
MIXED_ENDINGS: dict[Case, dict[str, str]] = {
    "nom": {"m": "", "f": "e", "n": "", "pl": "e"},
    "acc": {"m": "en", "f": "e", "n": "", "pl": "e"},
    "dat": {"m": "em", "f": "er", "n": "em", "pl": "en"},
}
# The endings of an adjective after each kind of determiner.
ADJECTIVE_ENDINGS: dict[Declension, dict[Case, dict[str, str]]] = {
    "definite": {
        "nom": {"m": "e", "f": "e", "n": "e", "pl": "en"},
        "acc": {"m": "en", "f": "e", "n": "e", "pl": "en"},
        "dat": {"m": "en", "f": "en", "n": "en", "pl": "en"},
    },
    "mixed": {
        "nom": {"m": "er", "f": "e", "n": "es", "pl": "en"},
        "acc": {"m": "en", "f": "e", "n": "es", "pl": "en"},
        "dat": {"m": "en", "f": "en", "n": "en", "pl": "en"},
    },
    "strong": DEFINITE_ENDINGS,
}
# The relative pronoun is the article but for one form.
RELATIVE_FORMS: dict[Case, dict[str, str]] = {
    **DEFINITE_ARTICLE,
    "dat": DEFINITE_ARTICLE["dat"] | {"pl": "denen"},
}


def decline_noun(noun: Noun, case: Case, plural: bool) -> str:
    """Return a German noun in a case."""
    if plural:
        needs_n = case == "dat" and not noun.de_plural.endswith(("n", "s"))
        return noun.de_plural + "n" * needs_n
    return noun.de_plural if noun.weak and case != "nom" else noun.de


def decline_determiner(determiner: Determiner, case: Case, where: str) -> str:
    """Return a German determiner in a case, for a column of the tables."""
    if determiner == THE:
        return DEFINITE_ARTICLE[case][where]
    if determiner.declension == "strong":
        return determiner.de + "n" * (determiner == MANY and case == "dat")
    endings = DEFINITE_ENDINGS if determiner.declension == "definite" else MIXED_ENDINGS
    return determiner.de + endings[case][where]


def decline_adjective(adjective: Adjective, declension: Declension, case: Case, where: str) -> str:
    """Return a German adjective before a noun."""
    stem = adjective.stem or adjective.de.removesuffix("e")
    return stem + ADJECTIVE_ENDINGS[declension][case][where]


# How words change: German verbs -----------------------------------------------------------------


def present(verb: Verb, who: Agreement) -> str:
    """Return a German verb in the present tense, without its prefix."""
    infinitive = verb.infinitive.removeprefix(verb.prefix)
    if who == "plural":
        return {"sein": "sind"}.get(infinitive, infinitive)
    first = verb.de_first or infinitive.removesuffix("n").removesuffix("e") + "e"
    return first if who == "1sg" else verb.de_third


def preterite(singular: str, who: Agreement) -> str:
    """Return a German verb in the simple past."""
    if who != "plural":
        return singular
    return singular + ("n" if singular.endswith("e") else "en")


def auxiliary(verb: Verb, who: Agreement) -> str:
    """Return the "haben" or "sein" that forms the perfect of a verb."""
    haben = {"1sg": "habe", "3sg": "hat", "plural": "haben"}
    sein = {"1sg": "bin", "3sg": "ist", "plural": "sind"}
    return (haben if verb.perfect_with == "haben" else sein)[who]


def modal_form(modal: Modal, who: Agreement, tense: Tense) -> str:
    """Return a German modal verb that agrees with its subject."""
    if tense == "past":
        return preterite(modal.preterite, who)
    return modal.plural if who == "plural" else modal.singular


# How words change: English verbs ----------------------------------------------------------------


class Forms(NamedTuple):
    """The forms of an English verb, and the words that always follow it."""

    base: str
    third: str
    past: str
    link: str = ""


def be_form(who: Agreement, tense: Tense) -> str:
    """Return the English "be" for a subject."""
    if tense == "past":
        return "were" if who == "plural" else "was"
    return {"1sg": "am", "3sg": "is", "plural": "are"}[who]


def finite(forms: Forms, who: Agreement, tense: Tense) -> str:
    """Return a full English verb that agrees with its subject."""
    if tense == "past":
        return forms.past
    return forms.third if who == "3sg" else forms.base

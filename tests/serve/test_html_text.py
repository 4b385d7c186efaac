"""HTML: only text is translated, tags stay with their words, and no text becomes markup."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtrain.decode.formats import Link, Translation
from mtrain.serve.html_text import HtmlText
from mtrain.serve.words import cut_words

Words = list[str]


def translated(text: str, order: Callable[[Words], Words] = list, **options: bool) -> str:
    """Translate to upper case in the given word order, each word aligned to its source."""

    def translate(line: str) -> Translation:
        numbered = list(enumerate(word.strip() for word in cut_words(line)))
        links = [Link(src, tgt) for tgt, (src, _) in enumerate(order(numbered))]
        words = (word for _, word in order(numbered))
        return Translation(" ".join(words).upper(), alignment=tuple(links))

    document = HtmlText(text, **options)
    return document.join([translate(line) for line in document.lines])


def backwards(words: Words) -> Words:
    return words[::-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text", "PLAIN TEXT"),
        ("<p>one two</p>\n<p>three</p>", "<p>ONE TWO</p>\n<p>THREE</p>"),
        ("<p>one <b>two</b> three</p>", "<p>ONE <b>TWO</b> THREE</p>"),
        ("<p>one<br>two</p>", "<p>ONE<br>TWO</p>"),
        ('<a href="x>y">one</a> two', '<a href="x>y">ONE</a> TWO'),
        ("<p>a &lt; b &amp; c</p>", "<p>A &lt; B &amp; C</p>"),
        ("<p>caf&eacute;&nbsp;au lait</p>", "<p>CAFÉ AU LAIT</p>"),
        (f"<p>one &#{'9' * 4301}; two</p>", "<p>ONE \ufffd TWO</p>"),
        ("<p>\n  one\n  two\n</p>", "<p> ONE TWO </p>"),
        ("<p>&nbsp;</p><p>12 &copy;</p>", "<p>&nbsp;</p><p>12 &copy;</p>"),
        ("one <code>x = y</code> two", "ONE <code>x = y</code> TWO"),
        ("<pre>one\n two</pre>three", "<pre>one\n two</pre>THREE"),
        ("<script>if (a<b) one</script>two", "<script>if (a<b) one</script>TWO"),
        ("<style>p > a {}</style>two", "<style>p > a {}</style>TWO"),
        ('<p translate="no">one <b>two</b></p>three', '<p translate="no">one <b>two</b></p>THREE'),
        ("one <b translate=no>two</b> three", "ONE <b translate=no>two</b> THREE"),
        ('<p class="a notranslate">one</p>two', '<p class="a notranslate">one</p>TWO'),
        ("<p class=notranslate>one</p>two", "<p class=notranslate>one</p>TWO"),
        ("<p class='a' translate = 'NO' >one</p>two", "<p class='a' translate = 'NO' >one</p>TWO"),
        ('<p title="x translate=no">one</p>two', '<p title="x translate=no">ONE</p>TWO'),
        ('one <svg width="1"/> two<p>three</p>', 'ONE <svg width="1"/> TWO<p>THREE</p>'),
        ("<svg>one<svg/>two</svg>three", "<svg>one<svg/>two</svg>THREE"),
        ("<!-- one --><p>two</p>", "<!-- one --><p>TWO</p>"),
        ("<!-- one --!> <p>two</p>", "<!-- one --!> <p>TWO</p>"),
        ("<!--!>one--!>two", "<!--!>one--!>TWO"),
        ("<!-->one", "<!-->ONE"),
        ("<p translate=no>one<p>two", "<p translate=no>one<p>TWO"),
        ("<div><p translate=no>one</div>two", "<div><p translate=no>one</div>TWO"),
        (
            "<ul><li translate=no>a<ul><li>b</li><li>c</ul></li><li>d",
            "<ul><li translate=no>a<ul><li>b</li><li>c</ul></li><li>D",
        ),
        ("<li translate=no>a<ul><li>b</ul>c<li>d", "<li translate=no>a<ul><li>b</ul>c<li>D"),
        ("<dl><dt translate=no>one<dd>two</dl>", "<dl><dt translate=no>one<dd>TWO</dl>"),
        (
            "<table><tr><td translate=no>a<td>b<tr translate=no><td>c<tr><td>d</table>",
            "<table><tr><td translate=no>a<td>B<tr translate=no><td>c<tr><td>D</table>",
        ),
        ("<li translate=no>a<div>b</div>c</li>d", "<li translate=no>a<div>b</div>c</li>D"),
        ("<li translate=no>a<div>b</li>c", "<li translate=no>a<div>b</li>C"),
        ("<p translate=no>a<div>b</p>c", "<p translate=no>a<div>b</p>C"),
        ("<b translate=no>one<p>two", "<b translate=no>one<p>two"),
        ("<div translate=no><div>a</div>b</div>c", "<div translate=no><div>a</div>b</div>C"),
        ("one <img alt='x'> two", "ONE <img alt='x'> TWO"),
        ("one <b></b>two", "ONE <b></b>TWO"),
        ("one <kbd>x</kbd><kbd>y</kbd> two", "ONE <kbd>x</kbd><kbd>y</kbd> TWO"),
        ("one <kbd>x</kbd> <kbd>y</kbd> two", "ONE <kbd>x</kbd> <kbd>y</kbd> TWO"),
        ("one <img><!-- c --><b></b><img> two", "ONE <img><!-- c --><b></b><img> TWO"),
        ("one <img><b><img></b> two", "ONE <img><b><img></b> TWO"),
        ("one <img><img>two", "ONE <img><img>TWO"),
        ("<ul><li>one<li>two</ul>", "<ul><li>ONE<li>TWO</ul>"),
        ("<b>one<p>two</b>three</p>", "<b>ONE<p>TWO</b>THREE</p>"),
        ("<i><b>one</b> two</i> three.", "<i><b>ONE</b> TWO</i> THREE."),
        ("5 < 6 and a<3", "5 &lt; 6 AND A&lt;3"),
        ("one <b", "ONE <b"),
        ("<!doctype html><html lang=en>one", "<!doctype html><html lang=en>ONE"),
        ("", ""),
    ],
)
def test_tags_stay_where_they_are_and_text_is_translated(text: str, expected: str) -> None:
    assert translated(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<b>one</b> two three", "THREE TWO <b>ONE</b>"),
        ("<a href=x>one two</a> three", "THREE <a href=x>TWO ONE</a>"),
        ("<i>one <b>two</b></i> three", "THREE <i><b>TWO</b> ONE</i>"),
        ("<b>one</b> <i>two</i>", "<i>TWO</i> <b>ONE</b>"),
        ("one <img> two", "TWO ONE <img>"),
        ("one <img><img>two", "TWO ONE <img><img>"),
        ("<b>all of it</b>", "<b>IT OF ALL</b>"),
    ],
)
def test_tags_move_with_their_aligned_words(text: str, expected: str) -> None:
    assert translated(text, backwards) == expected


@pytest.mark.parametrize("mark", ["।", "۔", "؛", "։", "።", "។", "။", "」", "；", "）", "｡"])
def test_added_punctuation_of_other_scripts_stays_outside_an_element(mark: str) -> None:
    links = (Link(0, 1), Link(1, 0))
    translation = Translation(f"Eins zwei{mark}", alignment=links)
    assert HtmlText("<b>two</b> one").join([translation]) == f"Eins <b>zwei</b>{mark}"


def test_added_punctuation_stays_outside_an_element_without_punctuation() -> None:
    def moved(words: Words) -> Words:
        return [words[1], words[0]]

    document = HtmlText("<b>two</b> one")
    links = (Link(0, 1), Link(1, 0))
    assert document.join([Translation("Eins zwei.", alignment=links)]) == "Eins <b>zwei</b>."
    assert translated("<b>two</b> one", moved) == "ONE <b>TWO</b>"


def test_without_alignments_each_text_segment_is_translated_alone() -> None:
    text = "<p>one <b>two</b> three</p>"
    assert HtmlText(text, has_alignment=False).lines == ["one", "two", "three"]
    assert translated(text, backwards, has_alignment=False) == "<p>ONE <b>TWO</b> THREE</p>"


def test_signs_that_begin_no_tag_do_not_cut_a_text_segment() -> None:
    text = "one < two and three < four"
    assert HtmlText(text, has_alignment=False).lines == [text]


def test_an_element_without_aligned_words_still_encloses_a_word() -> None:
    document = HtmlText("one <a href=x>two</a> three")
    assert document.join([Translation("eins zwei drei", alignment=())]) == (
        "eins <a href=x>zwei</a> drei"
    )


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("one <img> two<br>", "eins zwei", "<img>eins zwei<br>"),
        ("<b>one</b>", "", "<b></b>"),
        ("<pre>a<pre>b</pre>c</pre>one", "eins", "<pre>a<pre>b</pre>c</pre>eins"),
    ],
    ids=["no alignment", "no words", "nested"],
)
def test_no_markup_is_lost_without_words_to_align_it_with(
    source: str, text: str, expected: str
) -> None:
    assert HtmlText(source).join([Translation(text, alignment=())]) == expected


def test_markup_in_the_model_output_is_escaped() -> None:
    document = HtmlText("<p>one</p>")
    written = "<script>alert(1)</script> & &lt;"
    assert document.join([Translation(written, alignment=())]) == (
        "<p>&lt;script&gt;alert(1)&lt;/script&gt; &amp; &amp;lt;</p>"
    )


TAGS = re.compile(r"<!--.*?-->|</?[a-zA-Z][^>]*>|</[^>]*>", re.DOTALL)  # `</<!-- >` is a comment
PIECES = [
    *("<b>", "</b>", "<i>", "</i>", '<a href="x">', "</a>", "<p>", "</p>", "<br>", "<img>"),
    *("<code>", "</code>", "<script>", "</script>", "<!-- c -->", "<!--", "-->", "<", ">", "&lt;"),
    *("&amp;", "&nbsp;", "&#0;", "&", " ", "\n", "one", "two.", "é", "日本", "<3", '"', "'", "="),
    *("<b translate=no>", "</", "<!", "<?x?>", "<a title='", "\x00", "\ufffd", "</script"),
    "&#" + "1" * 5000,
]


@given(st.lists(st.sampled_from(PIECES), max_size=25), st.booleans(), st.booleans())
@example(["<script>", "</script", ">", "one", "</script>"], False, True)
@example(["</", "<!--", "<b>", "-->", "one"], False, True)
@example(["<b>"] * 2000 + ["one"] + ["</b>"] * 2000, True, True)
def test_hostile_markup_keeps_exactly_its_tags(
    pieces: list[str], is_backwards: bool, has_alignment: bool
) -> None:
    text = "".join(pieces)
    order = backwards if is_backwards else list
    result = translated(text, order, has_alignment=has_alignment)
    assert Counter(TAGS.findall(result.lower())) == Counter(TAGS.findall(text.lower()))


@given(st.text(max_size=60))
def test_escaped_text_is_returned_without_markup(text: str) -> None:
    result = translated(html.escape(text))
    assert "<" not in result and ">" not in result

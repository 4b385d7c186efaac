"""LibreTranslate's HTTP interface, as LibreTranslate's tests and clients use it."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest
from libretranslatepy import LibreTranslateAPI
from serving import FORM, JSON, Client, running, with_languages

import mtrain
from mtrain.decode.formats import Translation
from mtrain.run.run_dir import RunDir
from mtrain.serve.languages import LanguageDetector
from mtrain.serve.rate_limit import RateLimit
from mtrain.serve.settings import ServerSettings

TEXT = "ba ce di"


def test_a_url_encoded_form_is_translated(client: Client) -> None:
    answer = client.post_form("/translate", {"q": TEXT, "source": "en", "target": "de"})
    assert answer.status == 200
    assert answer.tree == {"translatedText": TEXT}


def test_a_json_request_is_translated(client: Client) -> None:
    answer = client.post("/translate", {"q": TEXT, "source": "en", "target": "de"})
    assert (answer.status, answer.tree) == (200, {"translatedText": TEXT})


def test_fields_in_the_query_of_a_post_are_read(client: Client) -> None:
    """As deep-translator sends them, without a body."""
    fields = {"q": "ba, ü & ce", "source": "en", "target": "de", "format": "text"}
    expected = client.post("/translate", fields).tree
    answer = client.send("POST", f"/translate?{urlencode(fields)}")
    assert (answer.status, answer.tree) == (200, expected)
    text = {"q": fields.pop("q")}
    assert client.post_form(f"/translate?{urlencode(fields)}", text).tree == expected
    detected = client.send("POST", f"/detect?{urlencode(text)}")
    assert detected.tree == client.post("/detect", text).tree


def test_an_unescaped_form_is_read_as_utf_8(client: Client) -> None:
    """As `curl -d q=...` sends it."""
    for path, fields in (("/translate", "&source=en&target=de"), ("/detect", "")):
        raw = client.send("POST", path, f"q=האיש רואה, ба{fields}".encode(), {"Content-Type": FORM})
        escaped = dict(field.split("=") for field in f"q=האיש רואה, ба{fields}".split("&"))
        assert raw.status == 200
        assert raw.tree == client.post_form(path, escaped).tree


def test_a_multipart_form_is_translated(client: Client) -> None:
    part = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    fields = {"q": TEXT, "source": "en", "target": "de"}
    body = "".join(part.format(*field) for field in fields.items()) + "--x--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    answer = client.send("POST", "/translate", body.encode(), headers)
    assert answer.tree == {"translatedText": TEXT}


@pytest.mark.parametrize("field", ["q", "prefix"])
def test_a_form_with_several_texts_gets_400_rather_than_a_translation_of_one(
    client: Client, field: str
) -> None:
    """As HTTP clients encode a list."""
    form = f"q=ba&source=en&target=de&prefix=ba&{field}=ce"
    answer = client.send("POST", "/translate", form.encode(), {"Content-Type": FORM})
    error = f"Invalid request: a form has one {field}; send a list as JSON"
    assert (answer.status, answer.tree) == (400, {"error": error})
    part = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    body = "".join(part.format(*pair.split("=")) for pair in form.split("&")) + "--x--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert client.send("POST", "/translate", body.encode(), headers).tree == {"error": error}


def test_a_batch_gets_one_translation_for_each_text_in_order(client: Client) -> None:
    texts = ["ba ce", "", "di fo\ngu", TEXT]
    answer = client.post("/translate", {"q": texts, "source": "en", "target": "de"})
    assert answer.status == 200
    assert answer.tree == {"translatedText": texts}


@pytest.mark.parametrize("field", ["q", "source", "target"])
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_missing_or_empty_field_is_named_in_the_error(
    client: Client, field: str, is_empty: bool
) -> None:
    fields = {"q": TEXT, "source": "en", "target": "de"}
    if is_empty:
        fields[field] = ""
    else:
        del fields[field]
    for answer in (client.post("/translate", fields), client.post_form("/translate", fields)):
        assert answer.status == 400
        assert answer.tree == {"error": f"Invalid request: missing {field} parameter"}


@pytest.mark.parametrize("field", ["source", "target"])
def test_an_unsupported_language_is_named_in_the_error(client: Client, field: str) -> None:
    fields = {"q": TEXT, "source": "en", "target": "de"} | {field: "zz"}
    answer = client.post("/translate", fields)
    assert (answer.status, answer.tree) == (400, {"error": "zz is not supported"})


def test_an_unavailable_language_pair_is_named_in_the_error(client: Client) -> None:
    answer = client.post("/translate", {"q": TEXT, "source": "fr", "target": "en"})
    text = "English (en) is not available as a target language from French (fr)"
    assert (answer.status, answer.tree) == (400, {"error": text})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"alternatives": "many"}, "Invalid request: alternatives parameter is not a number"),
        ({"alternatives": 3}, "Invalid request: alternatives parameter must be <= 2"),
        ({"alternatives": -1}, "Invalid request: alternatives parameter must be >= 0"),
        ({"alternatives": {}}, "Invalid request: alternatives parameter is not a number"),
        ({"alternatives": False}, "Invalid request: alternatives parameter is not a number"),
        ({"format": []}, "a list format is not supported"),
        ({"prefix": {}}, "Invalid request: prefix must be a text or a list of texts"),
        ({"prefix": []}, "Invalid request: prefix must be given for each text (1, not 0)"),
        ({"details": "AAA"}, "Invalid request: details parameter is not true or false"),
        ({"details": 2}, "Invalid request: details parameter is not true or false"),
        ({"details": []}, "Invalid request: details parameter is not true or false"),
        ({"format": "xml"}, "xml format is not supported"),
        ({"q": "a" * 10_001}, "Invalid request: request (10001) exceeds text limit (10000)"),
        ({"q": ["a"] * 101}, "Invalid request: request (101) exceeds text limit (100)"),
        ({"q": ["a", 1]}, "Invalid request: q must be a text or a list of texts"),
        ({"q": 7}, "Invalid request: q must be a text or a list of texts"),
        ({"source": 7}, "7 is not supported"),
        ({"prefix": 7}, "Invalid request: prefix must be a text or a list of texts"),
        ({"prefix": "ba", "format": "html"}, "Invalid request: prefix is for the text format"),
        (
            {"prefix": ["ba", "ce"]},
            "Invalid request: prefix must be given for each text (1, not 2)",
        ),
        ({"prefix": "ba\nce"}, "Invalid request: prefix must not be longer than its text"),
    ],
)
def test_an_invalid_field_value_gets_400_and_an_error_message(
    client: Client, change: dict[str, object], text: str
) -> None:
    fields = {"q": TEXT, "source": "en", "target": "de"} | change
    answer = client.post("/translate", fields)
    assert (answer.status, answer.tree) == (400, {"error": text})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"q": ' + b"9" * 9999]
)
def test_a_body_that_is_not_a_json_object_gets_400(client: Client, body: bytes) -> None:
    answer = client.send("POST", "/translate", body, {"Content-Type": JSON})
    assert (answer.status, answer.tree) == (400, {"error": "Invalid JSON format"})


def test_detected_languages_are_ranked_by_confidence(client: Client) -> None:
    answer = client.post_form("/detect", {"q": "The old farmer is tired."})
    assert answer.status == 200
    ranked = answer.tree
    assert ranked[0]["language"] == "en"
    assert len(ranked) == 3
    assert 90 < ranked[0]["confidence"] <= 100
    assert ranked == sorted(ranked, key=lambda each: -each["confidence"])


@pytest.mark.parametrize("code", ["pt", "pb", "pt-BR", "pt_BR"])
def test_a_language_with_a_region_is_detected(code: str) -> None:
    best, *_ = LanguageDetector(["en", code]).rank("Eu gosto muito de comer frutas e legumes.")
    assert best.code == code


@pytest.mark.parametrize("code", ["no", "nb", "nb-NO", "nb_NO"])
def test_norwegian_is_detected_by_each_of_its_codes(code: str) -> None:
    """The detector names it `no`."""
    best, *_ = LanguageDetector(["en", code]).rank("Jeg vet ikke hva du mener.")
    assert best.code == code


def test_detection_without_text_gets_400(client: Client) -> None:
    answer = client.post("/detect", {})
    assert answer.tree == {"error": "Invalid request: missing q parameter"}
    assert answer.status == 400


def test_the_source_language_auto_is_detected_for_each_text(client: Client) -> None:
    fields = {"q": "The old farmer is tired.", "source": "auto", "target": "de"}
    tree = client.post("/translate", fields).tree
    assert tree["detectedLanguage"]["language"] == "en"
    batch = fields | {"q": ["The old farmer is tired.", "Der alte Bauer ist müde."]}
    tree = client.post("/translate", batch).tree
    assert [each["language"] for each in tree["detectedLanguage"]] == ["en", "de"]
    assert tree["translatedText"][1] == "Der alte Bauer ist müde."  # it is in the target language


def test_detection_prefers_languages_that_can_be_translated_to_the_target(
    pair_models: list[mtrain.Model], trained: RunDir, tmp_path: Path
) -> None:
    other = mtrain.load(with_languages(trained, tmp_path / "run", "en", "fr"), beam=3)
    with running([pair_models[0], other]) as client:
        fields = {"q": ["Conclusion", "fo"], "source": "auto", "target": "de"}
        assert client.post("/detect", {"q": "Conclusion"}).tree[0]["language"] == "fr"
        answer = client.post("/translate", fields)
        assert answer.status == 200
        assert answer.tree["detectedLanguage"][0]["language"] == "en"
        answer = client.post("/translate", fields | {"target": "en"})
        text = "English (en) is not available as a target language from French (fr)"
        assert (answer.status, answer.tree) == (400, {"error": text})


def test_auto_is_refused_where_no_source_language_can_be_detected(
    pair_models: list[mtrain.Model], trained: RunDir, tmp_path: Path
) -> None:
    """py3langid knows no Upper Sorbian; all text would be detected as the target language."""
    sorbian = mtrain.load(with_languages(trained, tmp_path / "run", "hsb", "de"), beam=3)
    fields = {"q": TEXT, "source": "auto", "target": "de"}
    with running([sorbian]) as client:
        answer = client.post("/translate", fields)
        text = "Invalid request: the source language cannot be detected; name it instead of auto"
        assert (answer.status, answer.tree) == (400, {"error": text})
        assert client.post("/translate", fields | {"source": "hsb"}).status == 200
        assert client.get("/frontend/settings").tree["detectedLanguages"] == ["de"]
    with running([sorbian, pair_models[0]]) as client:
        tree = client.post("/translate", fields | {"q": "The old farmer is tired."}).tree
        assert tree["detectedLanguage"]["language"] == "en"


def test_text_without_letters_is_detected_with_confidence_zero(client: Client) -> None:
    answer = client.post("/translate", {"q": "😂 😅", "source": "auto", "target": "de"})
    assert answer.tree == {
        "translatedText": "😂 😅",
        "detectedLanguage": {"confidence": 0.0, "language": "en"},
    }


def test_languages_are_listed_with_their_targets_and_pivots(client: Client) -> None:
    answer = client.get("/languages")
    assert answer.status == 200
    assert answer.tree == [
        {"code": "en", "name": "English", "targets": ["en", "de", "fr"], "pivots": {"fr": "de"}},
        {"code": "de", "name": "German", "targets": ["de", "fr"]},
        {"code": "fr", "name": "French", "targets": ["fr"]},
    ]


def test_a_pair_without_its_own_run_is_translated_through_a_pivot_that_is_named(
    client: Client,
) -> None:
    answer = client.post("/translate", {"q": TEXT, "source": "en", "target": "fr"})
    assert answer.tree == {"translatedText": TEXT, "pivot": "de"}


def test_details_equal_model_translate_for_each_line_including_blank_lines(
    client: Client, pair_models: list[mtrain.Model]
) -> None:
    fields = {"q": f"{TEXT}\n\n  fo", "source": "en", "target": "de", "details": True}
    tree = client.post("/translate", fields).tree
    assert tree["translatedText"] == f"{TEXT}\n\n  fo"
    options = replace(pair_models[0].options, with_alignment=True)
    alone = pair_models[0].translate([TEXT, "", "  fo"], options, details=True)
    for line, expected, words in zip(
        tree["details"], alone, [["ba ", "ce ", "di"], [], ["fo"]], strict=True
    ):
        assert line["translation"] == expected.text
        assert line["source_words"] == line["words"] == words
        assert line["tokens"] == list(expected.tokens)
        assert line["token_log_probs"] == pytest.approx(expected.token_log_probs, abs=1e-5)
        assert line["alignment"] == [list(link) for link in expected.alignment or ()]
        assert line["flags"] == list(expected.flags)
        whole = math.exp(sum(expected.token_log_probs[:-1]))
        assert math.prod(line["word_probs"]) == pytest.approx(whole, abs=1e-3)


def test_a_translation_begins_with_its_prefix(client: Client) -> None:
    fields = {"q": TEXT, "source": "en", "target": "de", "prefix": "gu"}
    assert client.post("/translate", fields).tree["translatedText"].startswith("gu")
    fields = {"q": [TEXT, "fo"], "source": "en", "target": "fr", "prefix": ["gu", ""]}
    first, second = client.post("/translate", fields).tree["translatedText"]
    assert (first[:2], second) == ("gu", "fo")


def test_alternatives_are_the_distinct_other_hypotheses_best_first(
    client: Client, pair_models: list[mtrain.Model]
) -> None:
    fields = {"q": [TEXT, "fo"], "source": "en", "target": "de", "alternatives": 2}
    tree = client.post("/translate", fields).tree
    options = replace(pair_models[0].options, num_best=3)
    for best, others, line in zip(
        tree["translatedText"], tree["alternatives"], [TEXT, "fo"], strict=True
    ):
        (expected,) = pair_models[0].translate([line], options, details=True)
        assert best == expected.text
        texts = [other.text for other in expected.alternatives]
        assert others == list(dict.fromkeys(text for text in texts if text != best))


def test_an_empty_hypothesis_is_no_alternative(
    client: Client, pair_models: list[mtrain.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"ba": ["", "ce"], "di": ["fo", ""], "gu": [""]}

    def translate(lines: list[str], *_: object, **__: object) -> list[Translation]:
        return [
            Translation(line, alternatives=tuple(map(Translation, others[line]))) for line in lines
        ]

    monkeypatch.setattr(pair_models[0], "translate", translate)
    fields = {"q": ["ba", "di", "gu", "ba\ndi"], "source": "en", "target": "de", "alternatives": 2}
    tree = client.post("/translate", fields).tree
    assert tree["alternatives"] == [["ce"], ["fo"], [], ["ce\nfo"]]


def test_blank_text_has_no_alternatives(client: Client) -> None:
    fields = {"q": " \n", "source": "en", "target": "de", "alternatives": 2}
    answer = client.post("/translate", fields)
    assert answer.tree == {"translatedText": " \n", "alternatives": []}


def test_health_returns_status_ok(client: Client) -> None:
    answer = client.get("/health")
    assert (answer.status, answer.tree) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/languages", "/health", "/spec", "/frontend/settings"])
def test_read_only_paths_refuse_post_with_405(client: Client, path: str) -> None:
    assert client.get(path).status == 200
    answer = client.post(path, {})
    assert (answer.status, answer.tree) == (405, {"error": "Method Not Allowed"})


@pytest.mark.parametrize("path", ["/translate", "/detect"])
def test_translate_and_detect_refuse_get_with_405(client: Client, path: str) -> None:
    assert client.get(path).status == 405


@pytest.mark.parametrize("path", ["/translate_file", "/suggest"])
def test_file_translation_and_suggestions_are_refused_as_disabled(
    client: Client, path: str
) -> None:
    answer = client.post(path, {})
    assert answer.status == 403
    assert answer.tree["error"].endswith("disabled on this server.")


def test_an_unknown_path_gets_404_in_json(client: Client) -> None:
    answer = client.get("/absent")
    assert (answer.status, answer.tree) == (404, {"error": "Not Found"})


def test_frontend_settings_have_the_fields_and_limits_that_clients_read(client: Client) -> None:
    tree = client.get("/frontend/settings").tree
    assert tree == {
        "charLimit": 10_000,
        "frontendTimeout": 500,
        "apiKeys": False,
        "keyRequired": False,
        "suggestions": False,
        "filesTranslation": False,
        "supportedFilesFormat": [],
        "language": {
            "source": {"code": "en", "name": "English"},
            "target": {"code": "de", "name": "German"},
        },
        "maxTexts": 100,
        "maxBody": 262_144,
        "maxAlternatives": 2,
        "detectedLanguages": ["en", "de", "fr"],
    }


def test_cors_headers_allow_any_origin(client: Client) -> None:
    headers = client.send("OPTIONS", "/translate").headers
    assert headers["access-control-allow-origin"] == "*"
    assert headers["access-control-allow-methods"] == "GET, POST"
    assert client.get("/absent").headers["access-control-allow-origin"] == "*"


def test_language_codes_are_case_insensitive(client: Client) -> None:
    answer = client.post("/translate", {"q": TEXT, "source": "EN", "target": "De"})
    assert answer.tree == {"translatedText": TEXT}


def test_libretranslatepy_translates_detects_and_lists_languages(client: Client) -> None:
    api = LibreTranslateAPI(client.url, api_key="unused")
    assert api.translate(TEXT, "en", "de") == TEXT
    assert api.detect("The old farmer is tired.")[0]["language"] == "en"
    assert [each["code"] for each in api.languages()] == ["en", "de", "fr"]


def test_a_request_in_the_form_of_mastodon_is_translated(client: Client) -> None:
    """A list of HTML texts, an automatic source language, and an empty API key."""
    body = {
        "q": ["<p>The old <br>farmer is tired.</p>", "Is one &lt; two?"],
        "source": "auto",
        "target": "de",
        "format": "html",
        "api_key": "",
    }
    headers = {"Content-Type": "application/json"}
    answer = client.send("POST", "/translate", json.dumps(body).encode(), headers)
    tree = answer.tree
    assert answer.status == 200
    assert len(tree["translatedText"]) == len(tree["detectedLanguage"]) == 2
    assert re.fullmatch("<p>[^<]+ <br>[^<]+</p>", tree["translatedText"][0])
    assert {each["language"] for each in tree["detectedLanguage"]} == {"en"}
    assert "<" not in tree["translatedText"][1]


def test_requests_in_the_form_of_weblate_are_answered(client: Client) -> None:
    codes = [each["code"] for each in client.get("/languages").tree]
    assert codes == ["en", "de", "fr"]
    fields = {"q": TEXT, "source": "en", "target": "de", "api_key": ""}
    assert client.post_form("/translate", fields).tree["translatedText"] == TEXT


def test_a_server_with_api_keys_refuses_translations_without_a_valid_key(
    pair_models: list[mtrain.Model],
) -> None:
    settings = ServerSettings(port=0, api_keys=("one-of-two", "two-of-two"))
    fields = {"q": TEXT, "source": "en", "target": "de"}
    with running(pair_models, settings) as client:
        assert client.get("/frontend/settings").tree["keyRequired"]
        for key in ({}, {"api_key": ""}, {"api_key": "another"}, {"api_key": ["one-of-two"]}):
            answer = client.post("/translate", fields | key)
            assert (answer.status, answer.tree) == (403, {"error": "Invalid API key"})
        assert client.post("/translate", fields | {"api_key": "two-of-two"}).status == 200
        headers = {"Content-Type": JSON, "Authorization": "Bearer one-of-two"}
        answer = client.send("POST", "/translate", json.dumps(fields).encode(), headers)
        assert answer.status == 200
        assert client.post("/detect", {"q": TEXT}).status == 403
        assert client.get("/languages").status == 200


def test_a_client_over_its_rate_limit_gets_429_with_retry_after(
    pair_models: list[mtrain.Model],
) -> None:
    with running(pair_models, ServerSettings(port=0, requests_per_minute=2)) as client:
        answers = [client.post("/detect", {"q": TEXT}) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[2].tree == {"error": "Slowdown: 2 per 1 minute"}
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert client.get("/health").status == 200


def test_clients_with_long_names_take_little_memory_in_the_rate_limit() -> None:
    limit = RateLimit(1)
    tracemalloc.start()
    try:
        for number in range(100):
            name = "a" * 60_000 + str(number)
            assert limit.seconds_to_wait(name) == 0
            assert limit.seconds_to_wait(name) > 0
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_paths_are_served_under_the_url_prefix(pair_models: list[mtrain.Model]) -> None:
    with running(pair_models, ServerSettings(port=0, url_prefix="/mt")) as client:
        assert client.url.endswith("/mt")
        assert client.get("/mt/health").tree == {"status": "ok"}
        assert client.get("/health").status == 404
        assert client.get("/mt").headers["location"] == "/mt/"
        assert client.get("/mt/health/").status == 404  # no redirect, which would name a host
        assert client.get("/mt/").headers["content-type"].startswith("text/html")

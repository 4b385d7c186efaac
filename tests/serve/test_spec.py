"""Requests that schemathesis generates from the server's own OpenAPI specification.

They run where `schemathesis` is on the PATH, or MTRAIN_SCHEMATHESIS names it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import Client

SCHEMATHESIS = os.environ.get("MTRAIN_SCHEMATHESIS") or shutil.which("schemathesis")
MAX_EXAMPLES = 100 * int(os.environ.get("MTRAIN_FUZZ", "1"))  # of an operation
# A schema cannot say that a prefix is not longer than its text, and the server accepts some values
# that the schema does not list, such as 0 for false.
NOT_IN_THE_SCHEMA = "positive_data_acceptance,negative_data_rejection"


@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not installed")
def test_schemathesis_finds_no_answer_that_violates_the_openapi_specification(
    client: Client, tmp_path: Path
) -> None:
    assert SCHEMATHESIS is not None
    command = [SCHEMATHESIS, "run", f"{client.url}/spec", "--checks", "all", "--no-color"]
    command += ["--exclude-checks", NOT_IN_THE_SCHEMA, "--continue-on-failure"]
    command += ["--max-examples", str(MAX_EXAMPLES), "--request-timeout", "60", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 selected / 6 total" in result.stdout


def test_the_openapi_schema_of_translate_has_the_languages_and_limits_of_the_server(
    client: Client,
) -> None:
    content = client.get("/spec").tree["paths"]["/translate"]["post"]["requestBody"]["content"]
    for media_type, q in (
        ("application/json", {"type": "array", "items": {"type": "string"}}),
        ("application/x-www-form-urlencoded", None),
    ):
        properties = content[media_type]["schema"]["properties"]
        assert properties["source"]["enum"] == ["auto", "en", "de", "fr"]
        assert properties["target"]["enum"] == ["en", "de", "fr"]
        if q is None:
            assert properties["q"] == {"type": "string", "minLength": 1}
        else:
            assert properties["q"]["oneOf"][1] == q | {"minItems": 1, "maxItems": 100}

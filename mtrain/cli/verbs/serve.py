"""The verb `mtrain serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtrain import api
from mtrain.cli import options
from mtrain.errors import ConfigError, RunError, require_package
from mtrain.serve.settings import ServerSettings, read_api_keys

_DEMO = Path("runs/demo")
_PACKAGES = ("starlette", "uvicorn", "httptools", "python_multipart", "py3langid")


def serve(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN...", help="Run folders, each of another pair of languages."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free one.")] = 5000,
    url_prefix: Annotated[
        str, typer.Option(metavar="/PATH", help="Serve everything below this path.")
    ] = "",
    beam: options.BeamOption = None,
    device: options.DeviceOption = "auto",
    precision: options.PrecisionOption = "auto",
    shortlist: options.ShortlistOption = None,
    engine: options.EngineOption = "mtrain",
    max_chars: Annotated[
        int, typer.Option(min=1, help="Maximum characters of a request.")
    ] = 10_000,
    max_texts: Annotated[int, typer.Option(min=1, help="Maximum texts of a request.")] = 100,
    max_requests: Annotated[
        int, typer.Option(min=1, max=4096, help="Translations at the same time; more get 503.")
    ] = 128,
    timeout: Annotated[float, typer.Option(min=0.1, help="Maximum time, in seconds.")] = 60.0,
    max_body: Annotated[int, typer.Option(min=1, help="Maximum bytes of a request.")] = 262_144,
    rate: Annotated[
        int, typer.Option(min=0, help="Requests a minute of one client; 0 is no limit.")
    ] = 0,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A key a line; requests must have one.")
    ] = None,
    trust_proxy: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Trust X-Forwarded-For of this reverse proxy."),
    ] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Serve the page.")] = True,
    log_text: Annotated[bool, typer.Option("--log-text", help="Log the texts too.")] = False,
    demo: Annotated[bool, typer.Option("--demo", help="Serve runs/demo.")] = False,
) -> None:
    """Serve a web page and LibreTranslate's HTTP interface.

    Example: mtrain serve runs/en-de runs/de-en
    """
    paths = list(runs or [])
    if demo:
        if paths:
            raise ConfigError("`--demo` must stand without a run folder: it serves runs/demo.")
        if not (_DEMO / "config.yaml").is_file():
            raise RunError(f"{_DEMO}: there is no demo yet; `mtrain demo` trains it, in minutes.")
        paths = [_DEMO]
    if not paths:
        raise ConfigError("`mtrain serve` must have a run folder, or `--demo`.")
    for package in _PACKAGES:
        require_package(package, "mtrain serve", "'mtrain[serve]'")
    settings = ServerSettings(
        host=host,
        port=port,
        url_prefix=url_prefix,
        max_chars=max_chars,
        max_texts=max_texts,
        max_requests=max_requests,
        timeout_s=timeout,
        max_body=max_body,
        requests_per_minute=rate,
        api_keys=read_api_keys(api_keys) if api_keys is not None else (),
        trust_proxy=trust_proxy,
        with_page=page,
        log_text=log_text,
    )
    if engine == "ctranslate2":
        _check_ctranslate2(device, precision, shortlist)
    from mtrain.serve.server import serve as serving

    models = [
        api.load(
            path, beam=beam, device=device, precision=precision, shortlist=shortlist, engine=engine
        )
        for path in paths
    ]
    serving(models, settings, engine == "ctranslate2")


def _check_ctranslate2(device: str, precision: str, shortlist: str | None) -> None:
    """Refuse the options that CTranslate2 does not honour."""
    unsupported = {
        "device": None if device in ("auto", "cpu") else device,
        "precision": None if precision == "auto" else precision,
        "shortlist": shortlist,
    }
    options.refuse("--engine ctranslate2", unsupported)

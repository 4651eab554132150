"""What of the settings can be refused before an engine is started: that takes minutes, and a wrong name should not cost them."""

from __future__ import annotations

from urllib.parse import urlsplit

from agentserve.canonical.canonicaliser import choose
from agentserve.capture import check_folder
from agentserve.errors import SetupError
from agentserve.policies import chosen
from agentserve.settings import Settings
from agentserve.state.link import check_url
from model.chat.formats import UnknownChatFormat, check_name


def check_settings(settings: Settings) -> None:
    """Raise SetupError for names that there are not, a folder that cannot be written, and URLs that are none."""
    chosen(settings.admission.policy, settings.admission.parameters)
    choose(settings.canonicalise.mode, settings.canonicalise.on, settings.canonicalise.off)
    try:
        check_name(settings.engine.chat_format)
    except UnknownChatFormat as error:
        raise SetupError(f"--engine-chat-format: {error}") from error
    if settings.engine.url is not None:
        _check_engine_urls(settings.engine.url.replace(",", " ").split())
    if settings.state.url is not None:
        check_url(settings.state.url.get_secret_value())
    if settings.capture is not None:
        check_folder(settings.capture)


def _check_engine_urls(urls: list[str]) -> None:
    if not urls:
        raise SetupError("--engine-url names no engine; leave it out for the embedded one")
    for url in urls:
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number, or brackets that do not close
            is_url = False
        if not is_url:
            raise SetupError(f"--engine-url: {url!r} is no URL of a vLLM; write it as http://127.0.0.1:8100")

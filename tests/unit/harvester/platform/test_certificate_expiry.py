"""Certificates in use: when they expire, as a gauge and as a warning."""

import logging
import math
import ssl
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from harvester.contracts.clock import wall_seconds
from harvester.platform import certificate_expiry
from harvester.platform.certificate_expiry import chain_expiry_s, show_expiries
from harvester.platform.tls import Credentials, ServerTls
from tests.certificates import Authority, Signed

DAY_S = 86400.0
# Each side of the turn of the year 2050, from which RFC 5280 writes years with four digits.
FAR_DAYS = 40 * 365


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def shown(file: Path) -> float | None:
    registry = CollectorRegistry()
    gauge = Gauge("expiry", "When.", ["file"], registry=registry)
    gauge.labels("/left/over.pem").set(1)
    show_expiries(gauge)
    assert registry.get_sample_value("expiry", {"file": "/left/over.pem"}) is None
    return registry.get_sample_value("expiry", {"file": str(file)})


def by_openssl(file: Path) -> float:
    command = ["openssl", "x509", "-noout", "-enddate", "-dateopt", "iso_8601", "-in", str(file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return datetime.fromisoformat(said.strip().removeprefix("notAfter=")).timestamp()


def server(made: Signed) -> ServerTls:
    return ServerTls(cert_file=made.cert_file, key_file=made.key_file)


@pytest.mark.parametrize("days", [1, 400, FAR_DAYS])
def test_it_is_what_openssl_says(authority: Authority, days: int) -> None:
    file = authority.signs("server", days=days).cert_file
    assert chain_expiry_s(file.read_text()) == by_openssl(file)


def test_a_chain_expires_with_its_first_certificate_to_end(authority: Authority) -> None:
    long, short = (authority.signs(f"for{days}", days=days).cert_file for days in (90, 30))
    assert chain_expiry_s(long.read_text() + short.read_text()) == by_openssl(short)
    assert math.isnan(chain_expiry_s("no certificate"))
    with pytest.raises(ValueError, match="cut"):
        chain_expiry_s(ssl.DER_cert_to_PEM_cert(b"\x30\x00"))


def test_an_end_that_cannot_be_read_stops_nothing(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = authority.signs("server")
    monkeypatch.setattr(certificate_expiry, "_VALIDITY", 5)  # The key is there.
    context = server(made).context()
    assert context.sni_callback is not None
    assert "its end cannot be read" in caplog.text
    assert math.isnan(shown(made.cert_file) or 0.0)


def test_the_newest_certificate_of_a_file_is_shown_while_it_is_in_use(authority: Authority) -> None:
    made = authority.signs("server", days=60)
    listening = server(made).context()
    assert shown(made.cert_file) == pytest.approx(wall_seconds() + 60 * DAY_S, abs=600)
    authority.signs("server", days=90)
    handshake = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO())
    assert listening.sni_callback is not None
    listening.sni_callback(handshake, "", listening)
    assert shown(made.cert_file) == by_openssl(made.cert_file)
    del listening, handshake
    assert shown(made.cert_file) is None


def test_a_client_s_certificate_is_shown_too(authority: Authority) -> None:
    made = authority.signs("client", days=60)
    credentials = Credentials(cert_file=made.cert_file, key_file=made.key_file)
    credentials.check()
    assert shown(made.cert_file) == by_openssl(made.cert_file)


def test_one_with_less_than_two_weeks_is_warned_of_at_each_new_one(
    authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    kept = [server(authority.signs("server", days=15)).context()]
    assert not caplog.records
    made = authority.signs("server", days=13)
    kept += [server(made).context() for _ in range(2)]
    (first,) = caplog.messages
    assert f"{authority.folder}/server.pem expires in 13.0 days, at 20" in first
    monkeypatch.setattr(certificate_expiry, "wall_seconds", lambda: wall_seconds() + 14 * DAY_S)
    kept.append(server(authority.signs("server", days=12)).context())
    assert "server.pem expires already" in caplog.messages[-1]

"""Makes the certificates by which the daemons of a fleet know each other."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from libsym.errors import Exists, Invalid, SymError
from symphony.fleet.link import AUTHORITY, CERTIFICATE, KEY, private
from symphony.settings.kinds import MACHINE_NAME

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")

AUTHORITY_KEY = "ca.key"
VALID_DAYS = 3650


def make_keys(directory: Path, names: list[str]) -> None:
    """Make a directory of keys for each daemon, below `directory`. The first call makes the authority as well.

    The certificate of `NAME=HOST` is also for that host: a member of etcd needs it. Exists: there are such keys.
    """
    hosts = dict(each.partition("=")[::2] for each in names)
    for name in hosts:
        if not MACHINE_NAME.fullmatch(name):
            raise Invalid(f"{name!r} is no name for a daemon: use small letters, digits and dashes, a letter first")
    if len(hosts) < len(names):
        raise Invalid(f"{', '.join(names)}: a daemon is named twice")
    try:
        for name in hosts:
            if (directory / name).exists():
                raise Exists(f"{directory / name} exists: remove it, or choose another name")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority, authority_key = _authority(directory)
        for name, host in hosts.items():
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _certificate(name, key, authority.subject, authority_key, host)
            place = directory / name
            place.mkdir(mode=0o700)
            shutil.copy(directory / AUTHORITY, place)
            _write(place / KEY, _pem(key))
            _write(place / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))
    except SymError:
        raise
    except OSError as error:
        raise SymError(f"can't make keys: {error.filename}: {error.strerror}", error.errno) from None


def make_keys_of_token(directory: Path, token: bytes, host: str) -> None:
    """Make the keys of a host, or replace them. The authority's key and the host's come from the token, so machines
    that have the token know each other. Processes may read the files meanwhile, since only certificates change.
    """
    authority_key, key = _derived(token, "authority"), _derived(token, "machine")
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Symphony token")])
    authority = _certificate("Symphony token", authority_key, own, authority_key)
    certificate = _certificate("machine", key, own, authority_key, host)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in (
        (AUTHORITY, authority.public_bytes(serialization.Encoding.PEM)),
        (CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM)),
        (KEY, _pem(key)),
    ):
        new = directory / f".{secrets.token_hex(8)}"
        _write(new, content)
        new.rename(directory / name)


def _derived(token: bytes, use: str) -> ec.EllipticCurvePrivateKey:
    digest = hashlib.sha512(token + use.encode()).digest()  # so long that each key is about as likely
    curve = ec.SECP256R1()
    return ec.derive_private_key(int.from_bytes(digest, "big") % (curve.group_order - 1) + 1, curve)


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the authority of a directory. If there is none, make it."""
    if not (directory / AUTHORITY_KEY).exists():
        key = ec.generate_private_key(ec.SECP256R1())
        _write(directory / AUTHORITY_KEY, _pem(key))
        own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Symphony fleet")])
        certificate = _certificate("Symphony fleet", key, own, key)
        _write(directory / AUTHORITY, certificate.public_bytes(serialization.Encoding.PEM))
    try:
        key_of_file = serialization.load_pem_private_key((directory / AUTHORITY_KEY).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((directory / AUTHORITY).read_bytes())
    except (ValueError, TypeError) as error:
        raise Invalid(f"{directory / AUTHORITY_KEY} or {AUTHORITY} is damaged: {error}") from None
    if not isinstance(key_of_file, ec.EllipticCurvePrivateKey):
        raise Invalid(f"{directory / AUTHORITY_KEY} holds a key of another kind")
    return certificate, key_of_file


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    host: str = "",
) -> x509.Certificate:
    """Sign a certificate. If `key` signs for itself, the certificate is that of an authority."""
    is_authority = key is issuer_key
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of machines differ
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    if not is_authority:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name), *_host(host)]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _host(host: str) -> list[x509.GeneralName]:
    if not host:
        return []
    try:
        return [x509.IPAddress(ipaddress.ip_address(host))]
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(host):
        raise Invalid(f"{host!r} is no host: write its address or its name in ASCII")
    return [x509.DNSName(host)]


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb", opener=private) as file:
        file.write(data)
